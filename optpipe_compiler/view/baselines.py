"""The schedules that a file compares itself with: which are best, whose they are, how much faster this one is."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from optpipe_compiler.documents.ir import NOT_IN_FULL, NOT_TRIED

if TYPE_CHECKING:
    from optpipe_compiler.documents.ir import Baseline, BaselineKind, Schedule

OTHERS: tuple[BaselineKind, ...] = ("paper", "stock")
"""Kinds that somebody else has defined or runs as they are."""
WORDS = {"paper": "a paper's", "stock": "stock", "composition": "a composition", "own": "your own"}


def kind(schedule: Schedule, name: str) -> str:
    """Return "paper", "stock", "composition", or "own" where a user has registered it; "-" where the file is of
    revision 0 and does not say it."""
    told = schedule.forecast.baselines[name].kind
    if isinstance(told, str):
        return told
    return "own" if schedule.revision else "-"


def ranked(schedule: Schedule) -> list[tuple[int, str, Baseline]]:
    """Return (makespan in ns, name, baseline) of those that are known: first what fits, then by time.

    At equal times the schedule's own method comes first, then others' before compositions.
    """
    itself = schedule.forecast.method
    known = [(b.makespan_ns, name, b) for name, b in schedule.forecast.baselines.items() if b.makespan_ns is not None]
    return sorted(known, key=lambda row: (not row[2].fits, row[0], row[1] != itself, row[2].kind not in OTHERS, row[1]))


def missing(schedule: Schedule) -> list[str]:
    """Return in words how many have no makespan, and why."""
    found: Counter[str] = Counter()
    for baseline in schedule.forecast.baselines.values():
        if baseline.makespan_ns is None:
            ends = [words for words in (NOT_TRIED, NOT_IN_FULL) if words in baseline.reason]
            found[ends[0] if ends else "undefined here"] += 1
    known = {NOT_IN_FULL: "worse by their first microbatches", "undefined here": "undefined here", NOT_TRIED: NOT_TRIED}
    return [f"{found[reason]} {words}" for reason, words in known.items() if found[reason]]


def best(schedule: Schedule, kinds: tuple[BaselineKind, ...] | None = None) -> str | None:
    """Return the name of the fastest that fits, of those kinds or of all; None: there is none."""
    return next((name for _, name, b in ranked(schedule) if b.fits and (kinds is None or b.kind in kinds)), None)


def is_itself(schedule: Schedule, name: str) -> bool:
    """Whether the schedule is that baseline itself, and not its order on another placement, or another start of it."""
    forecast = schedule.forecast
    return name == forecast.method and forecast.baselines[name].makespan_ns == forecast.makespan_ns


def whose(schedule: Schedule, name: str) -> str:
    """Return `gis-offload-3, a composition`; the name alone where the kind is not known."""
    words = WORDS.get(kind(schedule, name))
    return name if words is None else f"{name}, {words}"


def faster(schedule: Schedule, name: str) -> str:
    """Say by how much this schedule is faster than a baseline, in steps per second."""
    ratio = (schedule.forecast.baselines[name].makespan_ns or 0) / max(1, schedule.forecast.makespan_ns) - 1
    if not ratio:
        return "as fast"
    return f"{abs(ratio):.1%} {'faster' if ratio > 0 else 'slower'}"
