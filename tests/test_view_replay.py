"""What `optpipe run` says at its end of a profile that does not hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from optpipe_compiler.cli import cli
from optpipe_compiler.documents import ir
from optpipe_compiler.view.replay import SLOW, note
from optpipe_torch.launch.report import KindTime, RankReport, RunReport, StepRecord
from tests.instances import quick, uniform


def report(*ranks: dict[str, tuple[float, float]], steps: int = 3, mode: str = "train") -> RunReport:
    """A run in which each rank's kinds of ops took so long, measured and forecast."""
    return RunReport(
        mode=mode,
        backend="gloo",
        pinned=True,
        time_scale=1.0,
        steps=[StepRecord(1.0, 100.0, 0.1)] * steps,
        forecast_makespan_ns=90.0,
        forecast_bubble=0.1,
        ranks=[
            RankReport(rank, [rank], 1, 1, 0, 0, 1.0, {name: KindTime(*times) for name, times in kinds.items()})
            for rank, kinds in enumerate(ranks)
        ],
    )


def test_the_ratio_is_of_all_compute_ops_together_and_of_no_copies():
    found = report({"forward": (20, 10), "offload": (900, 10)}, {"backward": (40, 30)})
    assert found.compute_ratio == 1.5
    assert report({"offload": (9, 1)}).compute_ratio is None


def test_slow_ops_are_said_in_one_line_with_what_to_do():
    said = note(report({"forward": (40, 30)}), Path("s.json"), None)
    assert said == (
        "compute ops took 1.33 x what the profile says; for costs as in this run: "
        "optpipe run s.json --trace run.json, then optpipe profile --from-run run.json"
    )
    traced = note(report({"forward": (40, 30)}), Path("s.json"), Path("t.json"))
    assert traced.endswith("for costs as in this run: optpipe profile --from-run t.json")


@pytest.mark.parametrize(
    "quiet",
    [
        report({"forward": (SLOW * 100, 100)}),
        report({"forward": (50, 100)}),
        report({"forward": (900, 100)}, steps=1),  # the first step warms up
        report({"forward": (900, 100)}, mode="rehearsal"),
        report({}),
    ],
)
def test_nothing_is_said_of_runs_that_are_as_forecast_or_tell_nothing(quiet):
    assert note(quiet, Path("s.json"), None) is None


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_says_it_on_stderr(tmp_path, monkeypatch, as_json):
    pytest.importorskip("torch")
    path = tmp_path / "schedule.json"
    path.write_text(ir.to_text(quick(uniform(2, 2), 10**12).schedule))
    monkeypatch.setattr("optpipe_torch.launch.run.run", lambda schedule, **options: report({"forward": (40, 30)}))
    done = CliRunner().invoke(cli, ["run", str(path), *["--json"] * as_json], catch_exceptions=False)
    assert done.exit_code == 0
    assert f"optpipe: compute ops took 1.33 x what the profile says; for costs as in this run: optpipe run {path}" in (
        done.stderr
    )
