"""What the published schedules share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optpipe_compiler.problem import Problem


class NotDefined(Exception):
    """The published schedule is not defined for this instance; the text says why."""


def one_stage_per_device(problem: Problem, name: str) -> None:
    """Refuse placements other than stage s on device s."""
    if [stage.device for stage in problem.stages] != list(range(problem.devices)):
        raise NotDefined(f"{name} is defined for one stage per device")


def needs_split(problem: Problem, name: str) -> None:
    """Refuse instances whose backward may not be split."""
    if not problem.freedom.split:
        raise NotDefined(f"{name} splits the backward, which --no-split forbids")
