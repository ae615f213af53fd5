"""What contributors and CI rely on: notes of a release, workflows that name what exists."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
notes = runpy.run_path(str(ROOT / ".ci" / "notes"))["notes"]
CHANGELOG = (
    "# Changelog\n\n## Unreleased\n\nNew.\n\n## 0.2.0 (2026-12-01)\n\n- Sweeps.\n\n## 0.1.0\n\n## 0.0.1\n- Old.\n"
)


def test_the_notes_of_a_release_are_its_section():
    assert notes("v0.2.0", CHANGELOG, "0.2.0") == "- Sweeps.\n"


@pytest.mark.parametrize(
    ("tag", "version", "message"),
    [
        ("v0.2.0", "0.1.0", "the tag is v0.2.0, pyproject.toml has version 0.1.0: expected v0.1.0"),
        ("v0.3.0", "0.3.0", "no section '## 0.3.0'"),
        ("v0.1.0", "0.1.0", "nothing below '## 0.1.0'"),
    ],
)
def test_a_tag_that_nothing_agrees_with_is_refused(tag, version, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        notes(tag, CHANGELOG, version)


def test_workflows_run_the_oldest_python_that_is_promised_and_targets_that_exist():
    promised = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    workflows = {path.name: path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")}
    assert set(workflows) == {"check.yml", "newest.yml", "release.yml"}
    assert f'python: ["{promised}", "' in workflows["check.yml"]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    texts = [*workflows.values(), (ROOT / "CONTRIBUTING.md").read_text()]
    assert {name for text in texts for name in re.findall(r"make ([a-z-]+)", text)} <= targets
    for name in {name for text in texts for name in re.findall(r"(\.ci/\w+|\.github/workflows/\w+\.yml)", text)}:
        assert (ROOT / name).exists(), name
