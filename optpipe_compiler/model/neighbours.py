"""Stages that follow each other on one device: nothing is sent between them, and published orders take them as one."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from optpipe_compiler.model.problem import DURATIONS, Problem, Stage

ADDED = (*DURATIONS, "saved", "residue", "captured", "staying", "staying_layers", "accumulators", "gradient")
LARGEST = ("forward_extra", "backward_input_extra", "backward_weight_extra", "backward_extra")


def is_linear(problem: Problem) -> bool:
    """Whether the model passes every device once, and some device owns several stages (which then are neighbours)."""
    return 1 < problem.devices == len(runs(problem)) < len(problem.stages)


def runs(problem: Problem) -> list[range]:
    """Return the stages in runs, as long as can be, that one device owns."""
    firsts = [s for s, stage in enumerate(problem.stages) if not s or problem.stages[s - 1].device != stage.device]
    return [range(first, after) for first, after in pairwise([*firsts, len(problem.stages)])]


def joined(problem: Problem) -> Problem:
    """Return the problem with each run as one stage."""
    return problem.changed(lambda stages: tuple(_joined([stages[s] for s in run]) for run in runs(problem)))


def _joined(run: list[Stage]) -> Stage:
    both = {name: sum(getattr(stage, name) for stage in run) for name in ADDED}
    both |= {name: max(getattr(stage, name) for stage in run) for name in LARGEST}
    last = run[-1]
    both |= {"send_activation": last.send_activation, "send_gradient": run[0].send_gradient, "outgoing": last.outgoing}
    return replace(run[0], **both)
