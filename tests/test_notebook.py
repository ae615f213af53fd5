"""The notebook in examples/: every cell runs, and what it ends with shows itself."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from optpipe_compiler import published
from optpipe_compiler.documents import ir
from optpipe_compiler.verify import verify

NOTEBOOK = Path(__file__).parent.parent / "examples" / "start.ipynb"
LONG, SHORT = "SECONDS = 10 ", "SECONDS = 0 "


def run_cell(source: str, names: dict[str, object]) -> object:
    """Run a cell as a notebook does; return the value of the expression that it ends with."""
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), str(NOTEBOOK), "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names)


@pytest.fixture
def registry():
    before = dict(published.METHODS)
    yield
    published.METHODS.clear()
    published.METHODS.update(before)


def test_every_cell_runs_and_shows_what_it_says(monkeypatch, tmp_path, capsys, registry):
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], {cell["cell_type"] for cell in notebook["cells"]}) == (4, {"markdown", "code"})
    sources = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in notebook["cells"] if cell["cell_type"] == "code")
    assert sum(LONG in source for source in sources) == 1
    names: dict[str, object] = {}
    shown = [run_cell(source.replace(LONG, SHORT), names) for source in sources]
    pictures = [one._repr_html_() for one in shown if hasattr(one, "_repr_html_")]
    assert sum("<svg" in picture for picture in pictures) == 2
    assert len(pictures) == 7
    assert shown[-1] is True
    assert "never above " in capsys.readouterr().out
    assert verify(ir.load("schedule.json"), names["profile"]) == []
