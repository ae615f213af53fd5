"""What bench/ablation.py leaves out and changes is there; what was varied says beside it what came of it."""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path

import pytest

from bench.ablation import PARTS, ROOM, runs_in
from bench.tight import FOR_LITTLE
from optpipe_compiler.plan import instances

BENCH = Path(__file__).parent.parent / "bench"
MEASURED = {run.part for run in runs_in(BENCH / "ablation.json")}
EDITS = [edit for part in PARTS.values() for edit in part.edits]


def constants() -> dict[str, list[str]]:
    """Return what stands beside each constant of what plans, by its name."""
    found: dict[str, list[str]] = {}
    for path in [*ROOM.glob("plan/*.py"), *ROOM.glob("machine/*.py")]:
        for one, following in pairwise(ast.parse(path.read_text(encoding="utf-8")).body):
            targets = one.targets if isinstance(one, ast.Assign) else []
            text = following.value if isinstance(following, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                for target in targets:
                    found.setdefault(ast.unparse(target), []).append(text.value)
    return found


def varied() -> set[str]:
    """Return the names of the constants that have been varied."""
    parts = [part for name, part in PARTS.items() if name in MEASURED]
    patched = {one.attribute for part in parts for one in part.patches if hasattr(one, "attribute")}
    edited = {before.split(" = ")[0].strip() for part in parts for _, before, _ in part.edits}
    return {name for name in patched | edited if re.fullmatch("[A-Z_]+", name)}


@pytest.mark.parametrize(("file", "before"), [edit[:2] for edit in EDITS])
def test_what_is_edited_in_compiled_code_is_there_once(file, before):
    assert (ROOM / file).read_text(encoding="utf-8").count(before) == 1


def test_what_is_left_out_or_changed_is_there():
    every = [one for part in PARTS.values() for one in part.patches if hasattr(one, "getter")]
    patches = [(one.getter(), one.attribute) for one in every]
    patches += [(instances, name) for _, name, _, _ in FOR_LITTLE]
    assert len(patches) > 50
    assert [(room, name) for room, name in patches if not hasattr(room, name)] == []


def test_every_constant_that_was_varied_has_the_measurement_beside_it():
    beside, names = constants(), varied()
    assert len(names) > 15
    missing = {name for name in names if not any("ABLATION" in text for text in beside.get(name, []))}
    assert missing == set()
