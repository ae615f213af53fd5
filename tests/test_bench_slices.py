"""bench.slices: rows are measured once per commit; a section of the page is written when all of its rows are there."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

from bench import slices

PLAN = {"idle": 0.1, "makespan_ns": 10**7, "bound_ns": 10**7, "method": "x", "slices": 8}


def test_parts_run_one_by_one_are_merged_and_other_sections_stay(tmp_path, monkeypatch):
    measured = []

    def measure(row, seconds):
        measured.append(row)
        return {"plan": PLAN}

    links = replace(slices.PARTS["no-links"], measure=measure)
    late = replace(slices.PARTS["soon"], measure=lambda row, _: {"first_s": 0.5, "processor_s": 9.0, "plan": PLAN})
    monkeypatch.setattr(slices, "PARTS", {"no-links": links, "soon": late})
    path, rows = tmp_path / "page.md", tmp_path / "rows.json"
    path.write_text(
        f"# Old\n\n## With attention\n\nkept\n\n## Without host links, at P/4\n\nold\n\n{slices.MEASURED}\n\nruns\n"
    )

    def run(part, commit):
        monkeypatch.setattr(slices, "commit", lambda: commit)
        words = ["slices", "--seconds", "3", "--parts", part, "--results", str(rows), "-o", str(path)]
        monkeypatch.setattr(sys, "argv", words)
        slices.main()
        return path.read_text()

    first = run("no-links", "abc")
    assert measured == ["1", "auto"]
    assert "old" not in first
    assert "| auto | 10.0% | `x` | 8 |" in first
    assert "`python -m bench.slices --parts no-links --seconds 3` at abc; " in first
    both = run("soon", "abc")
    titles = [line for line in both.splitlines() if line.startswith("## ")]
    assert titles == ["## With attention", "## Without host links, at P/4", "## How soon", slices.MEASURED]
    assert both.endswith("\n\nruns\n")
    assert run("no-links", "abc") == both
    assert measured == ["1", "auto"]
    known = json.loads(rows.read_text())
    known["no-links"]["1"]["commit"] = "before"
    rows.write_text(json.dumps(known))
    assert "at before, abc, row by row; " in run("soon", "abc")
    run("no-links", "abc")
    assert measured == ["1", "auto", "1"]
