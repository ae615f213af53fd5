# Set-up is part of every target: `make demo` and `make test` work in a fresh clone.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
# An environment of its own for each torch that the runtime is tested with: make test-torch TORCH=torch==2.11.0
TORCH_VENV := .venv-$(subst =,,$(TORCH))
RUNTIME_TESTS := $(shell grep -lE 'importorskip."(optpipe_|runtime_)?torch[."]' tests/*.py)
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO := demo
# As many tests at a time as there are cores, those of a file mostly in one process; make test PARALLEL= has one.
PARALLEL ?= -n logical --dist worksteal

# The tests of the report's page drive a browser; playwright's own goes into the environment.
export PLAYWRIGHT_BROWSERS_PATH = 0

# Bytecode is written as modules are imported. pip would compile all of torch and transformers, which takes longer than to
# unpack them; and where none may be written, every process compiles what it imports anew.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := pip install --quiet --no-compile

.PHONY: help demo test coverage browser docs test-torch check format lint type golden schemas methods bench estimates gpu clean

help: ## Show this help
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/$(INSTALL) --upgrade pip
	$(BIN)/$(INSTALL) "$(TORCH)"
	$(BIN)/$(INSTALL) --editable ".[runtime,dev]"
	touch $(READY)

demo: $(READY) ## Profile this machine, plan under two caps, verify and train on real text (about 4 minutes)
	mkdir -p $(DEMO)
	cd $(DEMO) && PATH="$(abspath $(BIN)):$$PATH" sh ../examples/demo.sh

test: $(READY) browser ## Run all tests, as many at a time as there are cores
	$(BIN)/python -m pytest $(PARALLEL)

coverage: $(READY) browser ## Run all tests and say which lines none of them runs (coverage.xml); not those of child processes
	$(BIN)/python -m pytest $(PARALLEL) --cov --cov-report=xml --cov-report=term:skip-covered

browser: $(READY) ## Install a browser for the tests of the report's page, unless there is one
	@sh tests/install_browser.sh $(BIN) || true

test-torch: ## Run the runtime's tests with another torch: make test-torch TORCH=torch==2.11.0
	$(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/$(INSTALL) --upgrade pip
	$(TORCH_VENV)/bin/$(INSTALL) "$(TORCH)" --editable ".[runtime,dev]"
	$(TORCH_VENV)/bin/python -m pytest $(RUNTIME_TESTS)

check: lint type ## Lint and types

format: $(READY) ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(READY)
	$(BIN)/mypy

golden: $(READY) ## Rewrite golden files after a deliberate change of output
	$(BIN)/python -m pytest tests/test_golden.py --update-golden

schemas: $(READY) ## Write schemas/ from the records
	$(BIN)/python -m optpipe_compiler.documents.schema schemas

methods: $(READY) ## Write docs/METHODS.md from the descriptions beside the schedules
	$(BIN)/python -m optpipe_compiler.published.listing docs/METHODS.md

bench: $(READY) ## Measure the planner on all cases (hours; see bench/planner.py)
	$(BIN)/python -m bench.planner

docs: $(READY) ## Write the pages of docs/ as a site, site/index.html; links are checked
	$(BIN)/$(INSTALL) --editable ".[docs]"
	$(BIN)/sphinx-build -W --keep-going -q docs site

estimates: $(READY) ## Compare estimated profiles with published measurements (docs/ESTIMATES.md)
	$(BIN)/python -m bench.estimates

gpu: ## Show all that this machine's GPUs can, with the torch that python3 has (docs/GPU.md)
	sh bench/gpu.sh

clean: ## Remove the environment, the demo's files and the site
	rm -rf $(VENV) .venv-* $(DEMO) site
