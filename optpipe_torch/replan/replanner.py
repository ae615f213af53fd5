"""The loop's part in planning while training: measure, ask the planner, agree, swap between two steps, remember.

Rank 0 has the planner. After each step all ranks share one small message: what rank 0 wants done, whether anybody is
not ready for it, and the longest of their steps. Whatever becomes of the planner, training goes on with what it has.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from msgspec import UnsetType

from optpipe_compiler.documents import ir
from optpipe_compiler.documents import profile as profiles
from optpipe_compiler.errors import BadInput, OptPipeError
from optpipe_torch.replan.measured import gathered, profile_from_steps, taken_ns
from optpipe_torch.replan.planner import Planner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.optim import Optimizer

    from optpipe_compiler.documents.profile import Profile
    from optpipe_compiler.study.beside import Answer
    from runtime_torch.runner import Runner, StepResult

NOTHING, MEASURE, OFFER, SWAP = range(4)
"""What rank 0 wants done after a step."""
THRESHOLD = 0.02
"""The share of a step that a plan must save to be swapped in."""
HORIZON = 100
"""Steps within which a plan that moves weights must have saved the time of the move."""
WINDOW = 3
"""Steps that are measured for a plan; the one after a swap, which warms up, is none of them."""
CHANGED = 0.05
"""A plan is sought again when a step takes that share longer or shorter than when the last one was."""


@dataclass(frozen=True)
class SwapRecord:
    """One swap. Forecasts are for the costs that were measured before it.

    Measured times are medians, over the steps before and after it, of the ranks' longest spans.
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
    """On rank 0."""
    swap_ns: int
    """How long training stood still for it, on the slowest rank."""
    planning_ns: int


@dataclass
class _Offer:
    """A schedule that all ranks prepare for."""

    schedule: ir.Schedule | None = None
    error: str | None = None
    answer: Answer | None = None
    """On rank 0."""


@dataclass
class _Watch:
    """What rank 0 knows of the search."""

    rounds: int = 0
    asked_ns: float = 0.0
    """What a step took when the last plan was asked for."""
    done: bool = False
    profile: Profile | None = None
    """The measured one that the planner has."""


class Replanner:
    """Improves a runner's schedule while it trains: `after(result)` behind every step, `close()` behind the last.

    Made on all ranks. `profile` is that of the schedule (or its path), needed on rank 0 of `group` only, `optimizer` as
    for `Runner.replace`. With `keeps_placement` (the default) only orders are swapped, and no weight moves. A plan is
    swapped in that saves more than `threshold` of a step, after the time of the move is shared by `HORIZON` steps.
    `plan_s`: the time limit of a search; each one that finds nothing doubles it, up to `ROUNDS` of them, until steps
    take another time. `on_event` is called on rank 0 with {"event": "measured" | "planned" | "swap" | "planner", ...}.
    """

    ROUNDS = 3

    def __init__(
        self,
        runner: Runner,
        profile: Profile | Path | str | None,
        *,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        keeps_placement: bool = True,
        threshold: float = THRESHOLD,
        window: int = WINDOW,
        plan_s: float = 20.0,
        group: dist.ProcessGroup | None = None,
        on_event: Callable[[dict[str, Any]], None] = lambda event: None,
    ) -> None:
        self.swaps: list[SwapRecord] = []
        """On every rank."""
        self._runner = runner
        self._optimizer = optimizer
        self._keeps_placement = keeps_placement
        self._threshold = threshold
        self._plan_s = plan_s
        self._window = window
        self._group = group
        self._tell = on_event
        self._rank = dist.get_rank(group)
        self._step = 0
        self._since = 0
        """Steps since the last swap."""
        self._results: deque[StepResult] = deque(maxlen=window)
        self._spans: deque[float] = deque(maxlen=window)
        self._offer: _Offer | None = None
        self._thread: Thread | None = None
        self._watch = _Watch()
        self._planner: Planner | None = None
        self._offered: Answer | None = None
        on = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else "cpu"
        self._message = torch.zeros(3, dtype=torch.float64, device=on)
        problem = None
        if self._rank == 0:
            try:
                self._profile = _read(profile)
                if not isinstance(runner.schedule.setup.units, UnsetType):
                    raise BadInput(
                        "the schedule has slices or unequal microbatches, whose costs no run tells yet: it "
                        "is not planned anew while it trains"
                    )
                planned, known = runner.schedule.provenance.profile_digest, self._profile.digest()
                if planned != known:
                    raise BadInput(f"the schedule was planned with another profile: {planned[:19]}, not {known[:19]}")
                self._planner = Planner()
            except BadInput as error:
                problem = error
        said = [None if problem is None else str(problem)]
        dist.broadcast_object_list(said, group=group, group_src=0)
        if said[0] is not None:
            raise problem or BadInput(said[0])

    def after(self, result: StepResult) -> SwapRecord | None:
        """Take note of a step, on all ranks, between its optimizer and the next step; return the swap, if any."""
        self._step += 1
        self._since += 1
        if self._since > 1:
            self._results.append(result)
        wish = self._wish() if self._rank == 0 else NOTHING
        is_late = self._thread is not None and self._thread.is_alive()
        self._message[:] = torch.tensor([wish, is_late, result.step_ns], dtype=torch.float64)
        dist.all_reduce(self._message, op=dist.ReduceOp.MAX, group=self._group)
        wanted, late, span = self._message.tolist()
        if self._since > 1:
            self._spans.append(span)
        self._note_time()
        if wanted == MEASURE:
            self._measure()
        elif wanted == OFFER:
            self._prepare()
        elif wanted == SWAP and not late:
            return self._swap()
        return None

    @property
    def schedule(self) -> ir.Schedule:
        """The schedule that runs."""
        return self._runner.schedule

    def close(self) -> None:
        """End the planner; what it was looking for is lost."""
        if self._planner is not None:
            self._planner.end()
            self._planner = None

    # -- rank 0: what to do next

    def _wish(self) -> int:
        if self._offer is not None:
            return SWAP
        planner, watch = self._planner, self._watch
        if planner is None:
            return NOTHING
        heard = planner.hear()
        if isinstance(heard, str):
            self._tell({"event": "planner", "step": self._step, "said": heard})
            watch.done = True
        elif heard is not None:
            return self._judge(heard)
        if planner.is_busy or len(self._results) < self._window or not planner.is_alive:
            return NOTHING
        now = median(self._spans) if self._spans else 0.0
        if watch.done and watch.asked_ns and abs(now / watch.asked_ns - 1) > CHANGED:
            watch.done, watch.rounds = False, 0
        return NOTHING if watch.done else MEASURE

    def _judge(self, answer: Answer) -> int:
        """Decide on what the planner has found."""
        gain = answer.gain - answer.move_ns / HORIZON / max(1, answer.present_ns)
        swaps = gain > self._threshold and answer.digest != self._runner.schedule.digest
        self._tell(
            {
                "event": "planned",
                "step": self._step,
                "forecast_before_ns": answer.present_ns,
                "forecast_after_ns": answer.found_ns,
                "move_ns": answer.move_ns,
                "swaps": swaps,
                "schedule_text": answer.schedule_text if swaps else None,
            }
        )
        self._watch.rounds += 1
        if swaps:
            self._offered = answer
            self._watch.rounds = 0
            return OFFER
        self._watch.done = self._watch.rounds >= self.ROUNDS
        return NOTHING

    # -- all ranks

    def _measure(self) -> None:
        """Gather the window's ops; rank 0 asks the planner."""
        steps = gathered(list(self._results), self._group)
        if self._planner is None:
            return
        watch = self._watch
        try:
            watch.profile = profile_from_steps(self._profile, self._runner.schedule, steps)
        except OptPipeError as error:
            watch.done = True
            self._tell({"event": "planner", "step": self._step, "said": str(error)})
            return
        watch.asked_ns = median(self._spans)
        self._planner.ask(
            profile=watch.profile,
            schedule=self._runner.schedule,
            taken_ns=taken_ns(steps),
            time_limit_s=self._plan_s * 2**watch.rounds,
            seed=watch.rounds,
            keeps_placement=self._keeps_placement,
        )
        self._tell({"event": "measured", "step": self._step, "step_ns": watch.asked_ns})

    def _prepare(self) -> None:
        """Read the schedule that rank 0 offers in a thread; training goes on meanwhile."""
        text = ["" if self._offered is None else self._offered.schedule_text]
        dist.broadcast_object_list(text, group=self._group, group_src=0)
        offer = self._offer = _Offer(answer=self._offered)

        def read() -> None:
            try:
                offer.schedule = ir.parse(text[0], "the planner's schedule")
            except OptPipeError as error:
                offer.error = str(error)

        self._thread = Thread(target=read, daemon=True)
        self._thread.start()

    def _swap(self) -> SwapRecord | None:
        """Let all ranks replace the schedule, or none."""
        begin = time.perf_counter_ns()
        offer, self._offer, self._thread = self._offer, None, None
        assert offer is not None
        before = self._runner.schedule
        try:
            done = self._runner.replace(offer.schedule or before, self._optimizer)
        except OptPipeError as error:  # on all ranks, with nothing changed
            self._watch.done = True
            if self._rank == 0:
                self._tell({"event": "planner", "step": self._step, "said": str(error)})
            return None
        if self._runner.schedule.digest == before.digest:  # nobody could read it
            self._watch.done = True
            return None
        answer = offer.answer
        known = [] if answer is None else [answer.present_ns, answer.found_ns]
        planning_ns = 0 if self._planner is None else self._planner.took_ns
        measured = round(median(self._spans)) if self._spans else 0
        about: list[Any] = [(known, planning_ns, done.moved_bytes)]
        dist.broadcast_object_list(about, group=self._group, group_src=0)
        known, planning_ns, moved_bytes = about[0]
        self._message[:] = time.perf_counter_ns() - begin
        dist.all_reduce(self._message, op=dist.ReduceOp.MAX, group=self._group)
        record = SwapRecord(
            step=self._step,
            digest=self._runner.schedule.digest,
            forecast_before_ns=known[0],
            forecast_after_ns=known[1],
            measured_before_ns=measured,
            measured_after_ns=None,
            moved_layers=done.moved_layers,
            moved_bytes=moved_bytes,
            swap_ns=round(self._message[0].item()),
            planning_ns=planning_ns,
        )
        self.swaps.append(record)
        if self._watch.profile is not None:
            self._profile = self._watch.profile
        self._since = 0
        self._results.clear()
        self._spans.clear()
        if self._rank == 0:
            self._tell({"event": "swap", **asdict(record)})
        return record

    def _note_time(self) -> None:
        """Say in the last record what steps take since."""
        if self.swaps and self._since > 1 and len(self._spans):
            self.swaps[-1] = replace(self.swaps[-1], measured_after_ns=round(median(self._spans)))


def _read(profile: Profile | Path | str | None) -> Profile:
    if profile is None:
        raise BadInput("Replanner needs the schedule's profile on rank 0")
    return profiles.load(Path(profile)) if isinstance(profile, Path | str) else profile
