"""The page of bench.replan: what is measured anew takes its place, the rest stays; what it says of orders holds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from msgspec import structs

from bench import replan
from tests.instances import quick, uniform

PAGE = Path(__file__).parent.parent / "docs" / "REPLAN.md"


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Run the bench on a copy of the page, with nothing measured; return the page's lines before and after."""
    monkeypatch.setattr(replan, "measure", lambda options, progress: uniform(2, 3))
    monkeypatch.setattr(replan, "story", lambda name, *_, keeps: f"{replan.row_key(name, keeps=keeps)}new |")
    path, text = tmp_path / "page.md", PAGE.read_text()
    path.write_text(text)
    said = next(line for line in text.splitlines() if "--only training" in line)
    monkeypatch.setattr(replan, "machine", lambda: said.removesuffix(".").rpartition(" processes on ")[2])

    def run(*words: str) -> tuple[list[str], list[str]]:
        before = path.read_text().splitlines()
        monkeypatch.setattr(sys, "argv", ["bench.replan", *words, "-o", str(path)])
        replan.main()
        return before, path.read_text().splitlines()

    return run


@pytest.mark.runtime
def test_a_row_that_is_measured_anew_takes_its_place_and_all_else_stays(measured):
    for row in replan.ROWS:
        before, after = measured("--only", "training", "--row", row)
        key = replan.row_key(*replan.ROWS[row][:1], keeps=replan.ROWS[row][1])
        assert [line for line in after if not line.startswith(key)] == [x for x in before if not x.startswith(key)]
        assert [line for line in after if line.startswith(key)] == [f"{key}new |"]
    assert [line for line in after if line.endswith("new |")] == [
        f"{replan.row_key(name, keeps=keeps)}new |" for name, keeps in replan.ROWS.values()
    ]


@pytest.mark.runtime
def test_rows_that_were_measured_in_another_way_do_not_stay(measured):
    _, after = measured("--only", "training", "--row", "gpipe, kept", "--steps", "7")
    assert sum(line.startswith("| gpipe") or line.startswith("| costs wrong") for line in after) == 1


@pytest.mark.runtime
def test_weight_gradients_are_added_in_order_unless_one_waits_for_its_second_half():
    plan = quick(uniform(2, 2), 10**12, method="zb-h1", microbatches=4).schedule
    assert replan.adds_in_order(plan)
    first = plan.devices[0]
    moved = [op for op in first.compute if op.id == "backward_weight:0:0"]
    others = [op for op in first.compute if op.id != "backward_weight:0:0"]
    late = structs.replace(plan, devices=[structs.replace(first, compute=others + moved), *plan.devices[1:]])
    assert not replan.adds_in_order(late)
