"""The independent judge: docs/IR.md restated from the two files alone, one function per rule.

It shares no code with planning, lowering or running, and imports neither ortools nor torch. A schedule in which it
finds no violation is complete, free of deadlock, within its memory promises in *every* execution that its order and
waits allow, and its forecast is one of them at its own costs.

Rules build on one another: where the tables are broken nothing that reads them is checked, where ops are missing
neither events nor times are, and where no execution exists there is no memory to judge.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from optpipe_compiler.documents import ir
from optpipe_compiler.documents.files import uncollected
from optpipe_compiler.verify import against_profile, causality, deliveries, forecast, memory, structure, tables
from optpipe_compiler.verify.placed import PlacedOps
from optpipe_compiler.verify.report import Violated, Violation

if TYPE_CHECKING:
    from collections.abc import Iterable

    from optpipe_compiler.documents.profile import Profile

__all__ = ["Violated", "Violation", "check", "not_proved", "rejects", "verify"]

CLAIMED = {
    "$.forecast.lower_bound_ns": "the bound",
    "$.forecast.outcome": "the outcome",
    "$.forecast.baselines": "the baselines' times",
    "$.provenance": "the provenance",
}
"""What no rule can prove from the files: by JSON path, and in words."""
CLAIMED_WITHOUT_PROFILE = {
    "$.stages": "all sizes",
    "$.forecast.stages": "times",
    "$.forecast.links": "bandwidths",
}
"""What is compared with the profile, and is but the file's word without it."""


QUICK_OPS = 10_000
"""With more ops than these `show` would take noticeably longer."""


def not_proved(profile: Profile | None = None) -> dict[str, str]:
    """Return what `verify` takes from the file without proving it: JSON paths, and the words for people.

    That bound and outcome agree is checked; that no faster schedule exists is not.
    """
    return CLAIMED if profile is not None else CLAIMED | CLAIMED_WITHOUT_PROFILE


def check(schedule: ir.Schedule, profile: Profile | None = None) -> ir.Checked:
    """Return the schedule as one that was checked; raise Violated where `verify` finds anything."""
    if violations := verify(schedule, profile):
        raise Violated(violations)
    return ir.Checked(schedule)


def rejects(schedule: ir.Schedule) -> str | None:
    """Return in words what is wrong first with a schedule that is shown all the same; None: nothing that was found.

    A schedule with very many ops, which takes long to verify, is not looked at.
    """
    ops = sum(len(lane) for device in schedule.devices for lane in (device.compute, device.d2h, device.h2d))
    found = verify(schedule) if ops <= QUICK_OPS else []
    return f"verify rejects this file: {found[0].message}" if found else None


@uncollected()
def verify(schedule: ir.Schedule, profile: Profile | None = None) -> list[Violation]:
    """Return all violations of docs/IR.md that can be found; with the profile, also of its last section."""
    found = [*tables.caps(schedule), *tables.digest(schedule)]
    broken = _tables(schedule)
    if broken:
        return found + broken
    placed = PlacedOps(schedule)
    broken = _structure(placed)
    found += broken + list(structure.order(placed)) + list(forecast.bound(placed))
    if not broken:
        found += _executions(placed)
    found += _forecast(placed, complete=not broken)
    return found + (_profile(placed, profile) if profile is not None else [])


def _tables(schedule: ir.Schedule) -> list[Violation]:
    """Return what is wrong with the tables, which every other rule reads."""
    found = list(tables.numbers(schedule))
    if not found:
        found = [*tables.devices(schedule), *tables.stages(schedule), *tables.units(schedule)]
        found += tables.hosts(schedule)
    if not found:
        found = [*tables.layer_lists(schedule), *tables.selective(schedule)]
    if not found:
        found = [*tables.stage_bytes(schedule), *tables.carries(schedule), *tables.fixed(schedule)]
        found += tables.boundaries(schedule)
    return found


def _structure(placed: PlacedOps) -> list[Violation]:
    """Return what is wrong with the set of ops; without any the events of an execution are defined."""
    rules = (
        structure.belongs,
        structure.unique,
        structure.complete,
        structure.split,
        structure.peers,
        structure.ranges,
        structure.pairs_of_copies,
        structure.one_state,
        structure.waits,
    )
    found = _all(rule(placed) for rule in rules)
    messages_broken = any(violation.rule in ("completeness", "peer") for violation in found)
    return found if messages_broken else found + list(structure.pair_order(placed))


def _executions(placed: PlacedOps) -> list[Violation]:
    """Return what is wrong in some execution that order and waits allow."""
    clocks = causality.happens_before(placed)
    if isinstance(clocks, Violation):
        return [clocks]
    stated = list(deliveries.names(placed)) or list(deliveries.moments(placed, clocks))
    return [*causality.data(placed, clocks), *stated, *memory.memory(placed, clocks)]


def _forecast(placed: PlacedOps, *, complete: bool) -> list[Violation]:
    """Return what is wrong with the forecast's records and, where they and the ops are complete, with its times."""
    found = _all((forecast.cost_records(placed), forecast.links(placed), forecast.timetable(placed)))
    if found or not complete:
        return found
    timed = forecast.ForecastTimes(placed)
    rules = (
        forecast.costs,
        forecast.lane_times,
        forecast.copy_times,
        forecast.wait_times,
        forecast.message_times,
        forecast.receive_times,
        forecast.arrivals,
        forecast.link_times,
        forecast.makespan,
        forecast.bubble,
    )
    return list(forecast.message_costs(placed)) + _all(rule(timed) for rule in rules)


def _profile(placed: PlacedOps, profile: Profile) -> list[Violation]:
    """Return where the schedule differs from its profile; the tables of the schedule are in order."""
    found = [*against_profile.numbers(profile), *against_profile.layers(placed.schedule, profile)]
    found += against_profile.devices(placed.schedule, profile)
    if found:
        return found
    layers = profile.expanded_layers()
    found = [*against_profile.setup(placed.schedule, profile), *against_profile.stage_bytes(placed, layers)]
    found += against_profile.units(placed.schedule, profile, layers)
    found += against_profile.links(placed, profile.machine)
    found += against_profile.hosts(placed.schedule, profile.machine)
    if not list(forecast.cost_records(placed)):
        found += against_profile.stage_times(placed, profile, layers)
        found += against_profile.message_times(placed, profile.machine)
    return found


def _all(rules: Iterable[Iterable[Violation]]) -> list[Violation]:
    return list(chain.from_iterable(rules))
