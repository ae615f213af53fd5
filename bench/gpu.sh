#!/bin/sh
# Everything that a machine with GPUs can show, in one command without network; see docs/GPU.md.
# PYTHON: the interpreter that has torch [python3]. WHEELS: a folder of wheels of packages that it lacks; they go into an
# environment of their own, which sees all that the interpreter has. Options and parts: sh bench/gpu.sh --help.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}

if [ -n "${WHEELS:-}" ]; then
    wheels=$(cd "$WHEELS" && pwd)
    environment=${VENV:-$root/build/gpu-venv}
    "$python" -m venv --without-pip --system-site-packages "$environment"
    # An interpreter that is in an environment itself does not pass that one's packages on.
    "$python" - "$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" <<'PTH'
import pathlib, site, sys
folders = "".join(f"import site; site.addsitedir({folder!r})\n" for folder in site.getsitepackages())
pathlib.Path(sys.argv[1], "machine.pth").write_text(folders)
PTH
    python=$environment/bin/python
    # One by one: a wheel that is missing costs its own package only. What is there and recent enough stays as it is.
    "$python" - "$root/pyproject.toml" <<'NAMES' | while IFS= read -r requirement; do
import sys, tomllib
project = tomllib.load(open(sys.argv[1], "rb"))["project"]
wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
print("\n".join(name for name in wanted if not name.startswith(("mypy", "ruff"))))
NAMES
        "$python" -m pip install --quiet --disable-pip-version-check --no-index --find-links "$wheels" "$requirement" ||
            echo "bench/gpu.sh: $requirement is not among the wheels" >&2
    done
fi

PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH
exec "$python" -m bench.gpu "$@"
