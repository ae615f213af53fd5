"""What a run found: plan against reality, per rank and over all."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from optpipe_compiler.documents import ir
    from optpipe_torch.replan.records import PlannerNote, SwapRecord


@dataclass(frozen=True, slots=True)
class CheckReport:
    """One pipelined step against the unpipelined model: differences are absolute for the loss, for a parameter's
    gradient relative to the largest entry of its reference, where that is more than rounding (check.ROUNDING)."""

    ok: bool
    loss: float
    reference_loss: float
    parameters: int
    worst_parameter: str
    worst_difference: float
    tolerance: float


@dataclass(frozen=True, slots=True)
class KindTime:
    """All ops of one kind on a rank in an average step, measured and forecast (scaled like the run)."""

    measured_ns: float
    forecast_ns: float

    @property
    def ratio(self) -> float:
        """Measured / forecast."""
        return self.measured_ns / self.forecast_ns if self.forecast_ns else float("nan")


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step over all ranks."""

    loss: float
    makespan_ns: float
    """Last end minus first start over all ops of all ranks."""
    bubble: float
    """1 - compute time / (devices x makespan)."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """One device: what it held and how long its ops took, against the plan."""

    rank: int
    stages: list[int]
    peak_activation_bytes: int
    promised_activation_bytes: int
    peak_host_bytes: int
    promised_host_bytes: int
    busy_ns: float
    """Compute time in a median step."""
    kinds: dict[str, KindTime] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunReport:
    """A whole run. Times are of the steps after the first, which warms up (unless there is only one)."""

    mode: Literal["train", "rehearsal"]
    backend: str
    pinned: bool
    """Whether every rank had cores of its own."""
    time_scale: float
    """Forecast times were multiplied by this; 1 in training."""
    steps: list[StepRecord]
    forecast_makespan_ns: float
    """Scaled."""
    forecast_bubble: float
    ranks: list[RankReport]
    check: CheckReport | None = None
    swaps: list[SwapRecord] = field(default_factory=list)
    """Of schedules, with `--replan`. Forecast and kinds are then of the last schedule, and of its steps."""
    planner: list[PlannerNote] = field(default_factory=list)
    """What went wrong with planning, while training went on."""
    first_timed: int = 1
    """The first step that counts for times."""

    @property
    def losses(self) -> list[float]:
        """The loss of every step; in a rehearsal the number of stages that a microbatch passed."""
        return [step.loss for step in self.steps]

    @property
    def timed_steps(self) -> list[StepRecord]:
        """The steps that count for times: without the first, or those of the last schedule without its first."""
        return self.steps[self.first_timed :] or self.steps

    @property
    def makespan_ns(self) -> float | None:
        """Median measured step; None without steps."""
        return median(step.makespan_ns for step in self.timed_steps) if self.steps else None

    @property
    def bubble(self) -> float | None:
        """Median measured bubble; None without steps."""
        return median(step.bubble for step in self.timed_steps) if self.steps else None

    @property
    def kinds(self) -> dict[str, KindTime]:
        """Over all ranks."""
        names = sorted({name for rank in self.ranks for name in rank.kinds})
        found = {name: [rank.kinds[name] for rank in self.ranks if name in rank.kinds] for name in names}
        return {
            name: KindTime(sum(t.measured_ns for t in times), sum(t.forecast_ns for t in times))
            for name, times in found.items()
        }

    @property
    def compute_ratio(self) -> float | None:
        """All compute ops, measured / forecast; None of a rehearsal, and of a first step alone, which warms up."""
        times = [time for name, time in self.kinds.items() if name not in ("offload", "reload")]
        forecast = sum(time.forecast_ns for time in times)
        if self.mode == "rehearsal" or len(self.steps) < 2 or not forecast:
            return None
        return sum(time.measured_ns for time in times) / forecast


def forecast_durations(schedule: ir.Schedule, device: int) -> dict[str, int]:
    """The forecast duration in ns of every op of a device that takes time on a lane."""
    return {op.id: end - start for _, _, op, start, end in schedule.timed(device)}
