"""optpipe run: replay a schedule."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from optpipe_compiler.cli.common import (
    PROFILE,
    SCHEDULE,
    Output,
    Positive,
    check_outputs,
    console,
    is_stdout,
    json_option,
    note,
    say_json,
    silence_torch,
)
from optpipe_compiler.errors import BadInput, MissingDependency, Rejected, RunFailed

if TYPE_CHECKING:
    from collections.abc import Mapping


@click.command(short_help="Replay a schedule: real processes, messages and gradients.")
@click.argument("schedule_path", metavar="[SCHEDULE]", type=click.Path(path_type=Path), default=SCHEDULE)
@click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True, help="Training steps.")
@click.option("--data", type=click.Path(path_type=Path), multiple=True, help="Text files to train on.")
@click.option("--check", is_flag=True, help="Compare loss and gradients with the unpipelined model first.")
@click.option(
    "--time-scale",
    type=Positive(),
    metavar="FACTOR",
    help="Rehearsals, emulated peers: how much slower than forecast.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=Positive(),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long a rank may wait for another, and the run for a step.",
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--trace",
    "trace_path",
    type=Output(),
    help="Write a Chrome trace of all ranks, forecast beside measured (Perfetto, optpipe report --trace).",
)
@click.option("--rank", type=click.IntRange(min=0), help="With --emulate-peers: the device to replay.")
@click.option(
    "--emulate-peers",
    is_flag=True,
    help="Replay one device alone; its neighbours' messages arrive at their forecast times.",
)
@click.option(
    "--model",
    metavar="FUNCTION",
    help="The schedule's package.module:function; needed where it lies outside of the current folder.",
)
@click.option("--replan", is_flag=True, help="Measure, plan beside training, and swap better plans in between steps.")
@click.option("--profile", "profile_path", type=click.Path(path_type=Path), default=PROFILE, show_default=True)
@click.option("--keep-placement", is_flag=True, help="With --replan: swap orders only, so that no weight moves.")
@click.option(
    "--threshold",
    type=click.FloatRange(min=0, max=1, max_open=True),
    default=0.02,
    show_default=True,
    help="With --replan: the share of a step that a swap must save.",
)
@click.option(
    "--plan-time",
    type=Positive(),
    default=20.0,
    show_default=True,
    metavar="SECONDS",
    help="With --replan: the time limit of a search; those that find nothing double it.",
)
@click.option(
    "--save",
    "save_path",
    type=Output(replaces=["schedule_path"]),
    help="With --replan: where the last schedule goes, after each swap and at the end.",
)
@click.option(
    "--save-profile",
    "save_costs_path",
    type=Output(replaces=["profile_path"]),
    help="With --replan: where the profile of that schedule goes; the next run with --replan needs both.",
)
@json_option
def run(
    schedule_path: Path,
    as_json: bool,
    data: tuple[Path, ...],
    trace_path: Path | None,
    model: str | None,
    save_path: Path | None,
    save_costs_path: Path | None,
    **options: Any,
) -> None:
    """Replay a schedule: one process per device, real messages, real gradients.

    A schedule of a measured profile trains its model; one of a hand-written profile is rehearsed with emulated layers.

    Example: optpipe run schedule.json --steps 20 --check
    """
    import importlib.util

    import msgspec

    if importlib.util.find_spec("torch") is None:
        raise MissingDependency("run needs torch: pip install 'optpipe[runtime]'")
    from optpipe_compiler.documents import ir
    from optpipe_compiler.documents.files import write_atomically
    from optpipe_compiler.view.replay import ReplayBar, render
    from optpipe_compiler.view.replay import note as hint
    from optpipe_torch.launch.run import run as replay
    from optpipe_torch.models.text import default_path

    emulated, rank = options.pop("emulate_peers"), options.pop("rank")
    if emulated != (rank is not None):
        raise BadInput("--rank and --emulate-peers are given together: which device, and that it runs alone")
    if emulated and options["check"]:
        raise BadInput("--check needs all ranks, expected no --emulate-peers")
    schedule = ir.load(schedule_path)
    _may_build(schedule, schedule_path, model)
    _judged(schedule, schedule_path)
    saved = {"text": save_path, "profile_text": save_costs_path}
    if any(saved.values()) and not options["replan"]:
        raise BadInput("--save and --save-profile write what --replan ends with, expected --replan")
    _only_with_replan(options["replan"])
    check_outputs(trace_path, *saved.values(), as_json=as_json)
    planned_with = _planned_with(schedule, options["profile_path"])
    replanning = _replanning(schedule, schedule_path, emulated, **{name: options.pop(name) for name in REPLANNING})
    outputs = _Saved(saved)
    with outputs, ReplayBar(console(stderr=True), schedule, options["steps"]) as bar:

        def take(event: dict[str, Any]) -> None:
            if event["event"] == "trace" and trace_path is not None:
                write_atomically(trace_path, event["text"])
            elif event["event"] == "schedule":
                outputs.take(event)
            else:
                bar.update(event)

        options |= {"trace": trace_path is not None}
        if emulated:
            _alone(schedule, rank, list(data) or [default_path()], take, as_json=as_json, **options)
            return
        report = replay(schedule, data_paths=data, on_event=take, model=model, replanning=replanning, **options)
    if report is None:  # a rank of a group that torchrun started: rank 0 prints
        return
    if as_json:
        say_json({**msgspec.to_builtins(report), "losses": report.losses})
    else:
        is_printed = any(map(is_stdout, (trace_path, *saved.values())))
        console(stderr=is_printed).print(render(report))
    if (slow := hint(report, schedule_path, trace_path, planned_with)) is not None:
        note(f"optpipe: {slow}")
    if report.check is not None and not report.check.ok:
        raise Rejected("run --check: loss or gradients differ from the unpipelined model")


class _Saved:
    """The files of `--save` and `--save-profile`: written at each swap, so that a run that is cut short has them."""

    def __init__(self, paths: Mapping[str, Path | None]) -> None:
        self._paths = {name: path for name, path in paths.items() if path is not None}
        self._swapped = False

    def __enter__(self) -> None:
        """Nothing is written before the first swap."""

    def take(self, event: Mapping[str, Any]) -> None:
        """Write what runs now; what is printed, and what cannot be written, waits for the end of the run."""
        from optpipe_compiler.documents.files import is_special, write_atomically

        is_last = event["is_last"]
        self._swapped = self._swapped or not is_last
        for name, path in self._paths.items():
            if is_last or not is_special(path):
                with nullcontext() if is_last else suppress(BadInput):
                    write_atomically(path, event[name])

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Say what the files have where the run has not come to its end."""
        if self._paths and isinstance(error, KeyboardInterrupt | RunFailed):
            names = " and ".join(map(str, self._paths.values()))
            note(
                f"optpipe: {names}: " + ("as of the last swap" if self._swapped else "not written, nothing was swapped")
            )


REPLANNING = ("replan", "profile_path", "keep_placement", "threshold", "plan_time")
"""The options that only matter with --replan."""


def _only_with_replan(replan: bool) -> None:
    """Refuse options of --replan on a command line without it."""
    context = click.get_current_context()
    for name in REPLANNING[1:]:
        if not replan and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = f"--{name.removesuffix('_path').replace('_', '-')}"
            raise BadInput(f"{option} says how --replan plans, expected --replan")


def _planned_with(schedule: Any, profile_path: Path) -> str | None:
    """Return what `optpipe profile --profile` shall name: None for its default, PROFILE where it is not known here."""
    from optpipe_compiler.documents import profile as profiles

    try:
        is_it = profiles.load(profile_path).digest() == schedule.provenance.profile_digest
    except BadInput:
        is_it = False
    return "PROFILE" if not is_it else None if profile_path == PROFILE else str(profile_path)


def _replanning(
    schedule: Any,
    schedule_path: Path,
    emulated: bool,
    *,
    replan: bool,
    profile_path: Path,
    keep_placement: bool,
    threshold: float,
    plan_time: float,
) -> Any:
    """Return how the plan is improved; None where it is not."""
    from optpipe_compiler.documents import profile as profiles
    from optpipe_compiler.documents.files import canonical, check_digest
    from optpipe_torch.launch.job import Replanning

    if not replan:
        return None
    if emulated:
        raise BadInput("--replan needs all ranks, expected no --emulate-peers")
    costs = profiles.load(profile_path)
    planned = f"{profile_path}: is not the profile that {schedule_path} was planned with (--profile)"
    check_digest(costs.digest(), schedule.provenance.profile_digest, planned)
    return Replanning(canonical(costs), keep_placement, threshold, plan_time)


def _alone(
    schedule: Any,
    rank: int,
    paths: list[Path],
    take: Any,
    *,
    as_json: bool,
    time_scale: float | None,
    check: bool,
    timeout_s: float,
    **options: Any,
) -> None:
    """Replay one device with emulated neighbours."""
    silence_torch()
    from optpipe_compiler.view.emulated import render
    from optpipe_torch.emulate.alone import emulate
    from optpipe_torch.launch.job import check_torch
    from optpipe_torch.models.text import read

    check_torch()
    scale = 1.0 if time_scale is None else time_scale
    report = emulate(schedule, rank, data=read(paths), time_scale=scale, on_event=take, **options)
    if as_json:
        say_json(report)
    else:
        console().print(render(report))


def _may_build(schedule: Any, path: Path, model: str | None) -> None:
    """Refuse to call a function that the file names, unless it is the project's or `--model` names it, too."""
    from optpipe_torch.models.user_functions import allow, refuse_foreign

    builder = None if schedule.model is None else schedule.model.builder
    if model is not None:
        if model != builder:
            raise BadInput(f"--model is {model}, expected the schedule's own: {path}: $.model.builder is {builder!r}")
        allow(model)
    if builder is not None:
        refuse_foreign(builder, f"{path}: ")


def _judged(schedule: Any, path: Path) -> None:
    """Refuse to run what `verify` rejects."""
    from optpipe_compiler.verify import verify as judge

    violations = judge(schedule)
    if violations:
        raise Rejected(f"{path}: not run, verify rejects it: {violations[0].message} (optpipe verify {path})")
