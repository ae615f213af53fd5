"""What `optpipe run` says at its end of a profile that does not hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from optpipe_compiler.cli import cli
from optpipe_compiler.documents import ir
from optpipe_compiler.documents.files import canonical
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
        "optpipe run s.json --trace run.json, then optpipe profile --from-run run.json --profile PROFILE"
    )
    traced = note(report({"forward": (40, 30)}), Path("s.json"), Path("t.json"), "my costs.json")
    assert traced.endswith("for costs as in this run: optpipe profile --from-run t.json --profile 'my costs.json'")


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


@pytest.fixture
def replay(tmp_path, monkeypatch):
    """Run `optpipe run` where ops are slow, in a folder with a schedule; return what it says on stderr."""
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    Path("schedule.json").write_text(ir.to_text(quick(uniform(2, 2), 10**12).schedule))
    monkeypatch.setattr("optpipe_torch.launch.run.run", lambda schedule, **options: report({"forward": (40, 30)}))

    def command(*arguments: str) -> str:
        done = CliRunner().invoke(cli, ["run", *arguments], catch_exceptions=False)
        assert done.exit_code == 0
        return done.stderr

    return command


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_the_command_says_it_on_stderr_unless_it_shall_be_quiet(replay, options):
    said = "optpipe: compute ops took 1.33 x what the profile says; for costs as in this run: optpipe run schedule.json"
    assert said in replay(*options)
    assert replay("-q", *options) == ""


@pytest.mark.parametrize(
    ("costs", "option"), [(None, " --profile PROFILE"), (uniform(3, 1), " --profile PROFILE"), (uniform(2, 2), "")]
)
def test_the_hint_names_the_profile_unless_it_is_the_one_that_is_taken_by_default(replay, costs, option):
    if costs is not None:
        Path("profile.json").write_text(canonical(costs))
    assert replay().endswith(f"optpipe profile --from-run run.json{option}\n")
