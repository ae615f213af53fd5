"""What is remembered of planning while training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SwapRecord:
    """One swap. Forecasts are for the costs that were measured before it.

    Measured times are medians, over up to `TRIAL` steps right before and after it, of the ranks' longest spans; the
    planner rests in these steps, and the first one after the swap, which warms up, is none of them.
    """

    step: int
    """The first step, from 0, with the new schedule."""
    digest: str
    forecast_before_ns: int
    forecast_after_ns: int
    measured_before_ns: int
    measured_after_ns: int | None
    """None while no step has been measured."""
    moved_layers: int
    moved_bytes: int
    """Sent and received by the rank that has most of them."""
    swap_ns: int
    """How long training stood still for it, on the slowest rank."""
    planning_ns: int
    undoes: bool = False
    """Whether it went back to the schedule before the last swap, because steps had become longer."""


@dataclass(frozen=True)
class PlannerNote:
    """Something that went wrong with planning, while training went on."""

    step: int
    """Steps that were done."""
    said: str
