"""The loop's part in planning while training: measure, ask the planner, agree, swap between two steps, remember.

Rank 0 has the planner. After each step all ranks share one small message: what rank 0 wants done, whether anybody is
not ready for it, and the longest of their steps. A swap after which steps are longer is undone. Whatever becomes of
the planner, training goes on with what it has.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from numbers import Real
from pathlib import Path
from statistics import median
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from optpipe_compiler.documents import ir
from optpipe_compiler.documents import profile as profiles
from optpipe_compiler.documents.profile import Profile
from optpipe_compiler.errors import BadInput, OptPipeError, of_kind
from optpipe_torch.replan.measured import Learnt, gathered, profile_from_steps, taken_ns
from optpipe_torch.replan.planner import Lost, Planner
from optpipe_torch.replan.records import PlannerNote, SwapRecord
from optpipe_torch.replan.trial import TRIAL, is_longer
from runtime_torch.runner import Runner
from runtime_torch.swap import is_same_cut, several

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim import Optimizer

    from optpipe_compiler.study.beside import Answer
    from runtime_torch.replay import StepResult
    from runtime_torch.swap import Swap

NOTHING, MEASURE, OFFER, SWAP, UNDO = range(5)
"""What rank 0 wants done after a step."""
THRESHOLD = 0.02
"""The share of a step that a plan must save to be swapped in."""
HORIZON = 100
"""Steps within which a plan that moves weights must have saved the time of the move, and undoing it that of the way
back."""
WINDOW = 5
"""Steps that are measured for a plan; the one after a swap, which warms up, is none of them."""
CHANGED = 0.05
"""A plan is sought again when steps take that share longer or shorter than when the last one was."""
RESTARTS = 3
"""How often a planner that is lost is started again."""


@dataclass
class _Offer:
    """A schedule that all ranks prepare for; times are rank 0's, and the same on all ranks."""

    forecast_before_ns: int
    forecast_after_ns: int
    planning_ns: int
    schedule: ir.Schedule | None = None
    error: str = ""


@dataclass(frozen=True)
class _Before:
    """What ran before the last swap, until that has stood its trial; times in ns."""

    schedule: ir.Schedule
    profile: Profile | None
    """With which it was planned; on rank 0."""
    spans: list[float]
    allowed: float
    """The share by which steps may be longer now."""


@dataclass
class _Watch:
    """What rank 0 knows of the search."""

    rounds: int = 0
    """Searches in a row that led to nothing."""
    asked_ns: list[float] = field(default_factory=list)
    """What steps took when the last plan was asked for."""
    is_done: bool = False
    restarts: int = 0
    measured: Profile | None = None
    """That the planner has."""
    refused: set[str] = field(default_factory=set)
    """Digests of plans that turned out slower, or could not be swapped in."""
    undone: tuple[str, list[float]] | None = None
    """The digest of a plan that has just been swapped out again, and what steps took with it."""
    retried: set[str] = field(default_factory=set)
    """Digests of plans that were undone while the machine became slower, and may be taken once more."""


class Replanner:
    """Improves a runner's schedule while it trains: `after(result)` behind every step, `close()` behind the last.

    Made on all ranks. `profile` is that of the schedule (or its path), needed on rank 0 of `group` only, `optimizer` as
    for `Runner.replace`. With `keeps_placement` (the default) only orders are swapped, and no weight moves. A plan is
    swapped in that saves more than `threshold` of a step, after the time of the move is shared by `HORIZON` steps; when
    the next steps are longer than those before, it is swapped out again and not taken a second time, unless steps then
    are as long as they were with it. `plan_s`: the time limit of a search; each one that leads to nothing doubles it,
    up to `ROUNDS` of them, until steps take another time.
    `group`: all ranks that train together, replicas of the pipeline included (None: all that there are). `on_event` is
    called on rank 0 with {"event": "measured" | "planned" | "swap" | "planner", ...}.
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
        of_kind("runner", runner, Runner, "a Runner")
        of_kind("threshold", threshold, Real, "a share of a step, such as 0.02")
        of_kind("window", window, int, "a number of steps")
        of_kind("plan_s", plan_s, Real, "a number of seconds")
        of_kind("on_event", on_event, Callable, "a function of an event")
        if window < 1:
            raise BadInput(f"window is {window}, expected at least 1 step")
        self.swaps: list[SwapRecord] = []
        """On every rank."""
        self.notes: list[PlannerNote] = []
        """On rank 0: what went wrong with planning."""
        self.profile: Profile | None = None
        """On rank 0: the costs that the schedule that runs was planned for."""
        self._runner = runner
        self._optimizer = None if optimizer is None else several(optimizer)
        self._keeps_placement = keeps_placement
        self._threshold = threshold
        self._plan_s = plan_s
        self._window = window
        self._group = group
        self._tell = on_event
        self._rank = dist.get_rank(group)
        self._step = 0
        self._learnt: Learnt | None = None
        """On rank 0."""
        self._since = 0
        """Steps since the last swap."""
        self._results: deque[StepResult] = deque(maxlen=window)
        self._spans: deque[float] = deque(maxlen=TRIAL)
        self._offer: _Offer | None = None
        self._thread: Thread | None = None
        self._before: _Before | None = None
        self._watch = _Watch()
        self._planner: Planner | None = None
        self._found: Answer | None = None
        on = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else "cpu"
        self._message = torch.zeros(3, dtype=torch.float64, device=on)
        problem = None
        if self._rank == 0:
            try:
                self.profile = _read(profile)
                planned, known = runner.schedule.provenance.profile_digest, self.profile.digest()
                if planned != known:
                    raise BadInput(f"the schedule was planned with another profile: {planned[:19]}, not {known[:19]}")
                self._learnt = Learnt(self.profile)
                self._planner = Planner()
            except BadInput as error:
                problem = error
        said = [None if problem is None else str(problem)]
        dist.broadcast_object_list(said, group=group, group_src=0)
        if said[0] is not None:
            raise problem or BadInput(said[0])

    def after(self, result: StepResult, *, is_last: bool = False) -> SwapRecord | None:
        """Take note of a step, on all ranks, between its optimizer and the next step; return the swap, if any.

        Behind the last step nothing is swapped in: no step would run it.
        """
        self._step += 1
        self._since += 1
        if self._since > 1:
            self._results.append(result)
        wish = self._wish() if self._rank == 0 and not is_last else NOTHING
        is_reading = self._thread is not None and self._thread.is_alive()
        wanted, any_reads, span = self._share(wish, is_reading, result.step_ns)
        if self._since > 1:
            self._spans.append(span)
            if self.swaps and self._since <= TRIAL + 1:
                self.swaps[-1] = replace(self.swaps[-1], measured_after_ns=round(median(self._spans)))
        if wanted == MEASURE:
            self._measure()
        elif wanted == OFFER:
            self._prepare()
        elif wanted == SWAP and not any_reads:
            return self._swap()
        elif wanted == UNDO:
            return self._undo()
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

    def _share(self, *figures: float) -> list[float]:
        """Return the largest of every figure over all ranks."""
        self._message[:] = torch.tensor(figures, dtype=torch.float64)
        dist.all_reduce(self._message, op=dist.ReduceOp.MAX, group=self._group)
        found: list[float] = self._message.tolist()
        return found

    # -- rank 0: what to do next

    def _wish(self) -> int:
        if self._before is not None:
            return self._verdict(self._before)
        if self._offer is not None:  # the steps before a swap are measured while the planner rests
            return SWAP if len(self._spans) == TRIAL else NOTHING
        planner, watch = self._planner, self._watch
        if planner is None:
            return NOTHING
        if watch.undone is not None:
            if len(self._spans) < TRIAL:
                return NOTHING
            self._retry(*watch.undone)
        heard = planner.hear()
        if isinstance(heard, Lost):
            self._lose(planner, heard)
        elif isinstance(heard, str):
            self._note(heard)
            watch.is_done = True
        elif heard is not None:
            return self._judge(heard)
        if planner.is_busy or not planner.is_alive or len(self._results) < self._window:
            return NOTHING
        if watch.is_done and self._has_changed(watch.asked_ns):
            watch.is_done, watch.rounds = False, 0
        return NOTHING if watch.is_done else MEASURE

    def _has_changed(self, before: list[float]) -> bool:
        return is_longer(self._spans, before, CHANGED) or is_longer(before, self._spans, CHANGED)

    def _verdict(self, before: _Before) -> int:
        """Decide whether the last swap is undone."""
        if len(self._spans) < TRIAL:
            return NOTHING
        if is_longer(self._spans, before.spans, before.allowed):
            return UNDO
        self._before, self._watch.rounds = None, 0
        return NOTHING

    def _retry(self, digest: str, spans: list[float]) -> None:
        """Let a plan that was undone be taken once more, where steps are as long as with it: so it was not to blame."""
        watch = self._watch
        watch.undone = None
        if digest not in watch.retried and not is_longer(spans, self._spans, 0.0):
            watch.retried.add(digest)
            watch.refused.discard(digest)

    def _judge(self, answer: Answer) -> int:
        """Decide on what the planner has found."""
        gain = answer.gain - answer.move_ns / HORIZON / max(1, answer.present_ns)
        swaps = gain > self._threshold and answer.digest not in (self._runner.schedule.digest, *self._watch.refused)
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
        if not swaps:
            self._led_to_nothing()
            return NOTHING
        self._found = answer
        return OFFER

    def _led_to_nothing(self) -> None:
        self._watch.rounds += 1
        self._watch.is_done = self._watch.rounds >= self.ROUNDS

    def _lose(self, planner: Planner, heard: Lost) -> None:
        """Start the planner again, unless that has been done often enough."""
        again = self._watch.restarts < RESTARTS
        self._note(f"{heard.why}; {'it is started again' if again else 'training goes on with the present schedule'}")
        if again:
            self._watch.restarts += 1
            planner.start()

    def _note(self, said: str) -> None:
        if self._rank == 0:
            self.notes.append(PlannerNote(self._step, said))
            self._tell({"event": "planner", "step": self._step, "said": said})

    # -- all ranks

    def _measure(self) -> None:
        """Gather the window's ops; rank 0 asks the planner."""
        steps = gathered(list(self._results), self._group)
        if self._planner is None or self.profile is None or self._learnt is None:
            return
        watch, schedule = self._watch, self._runner.schedule
        watch.asked_ns = list(self._spans)
        try:
            if self._keeps_placement:  # what a stage takes is all that matters
                watch.measured = profile_from_steps(self.profile, schedule, steps)
            else:
                watch.measured = self._learnt.profile(schedule, steps)
        except OptPipeError as error:
            watch.is_done = True
            self._note(str(error))
            return
        self._planner.ask(
            profile=watch.measured,
            schedule=schedule,
            taken_ns=taken_ns(schedule, steps),
            time_limit_s=self._plan_s * 2**watch.rounds,
            seed=watch.rounds,
            keeps_placement=self._keeps_placement,
            refused=frozenset(watch.refused),
        )
        self._tell({"event": "measured", "step": self._step, "step_ns": median(watch.asked_ns)})

    def _prepare(self) -> None:
        """Read the schedule that rank 0 offers in a thread; training goes on meanwhile."""
        answer, planner = self._found, self._planner
        offered: list[Any] = [None]
        if answer is not None and planner is not None:
            offered = [(answer.schedule_text, answer.present_ns, answer.found_ns, planner.took_ns)]
        dist.broadcast_object_list(offered, group=self._group, group_src=0)
        text, *times = offered[0]
        offer = self._offer = _Offer(*times)

        def read() -> None:
            try:
                offer.schedule = ir.parse(text, "the planner's schedule")
            except OptPipeError as error:
                offer.error = str(error)

        self._spans.clear()
        self._thread = Thread(target=read, daemon=True)
        self._thread.start()

    def _swap(self) -> SwapRecord | None:
        """Let all ranks go on with the schedule that was offered, or none."""
        offer, self._offer, self._thread = self._offer, None, None
        assert offer is not None
        before, spans = self._runner.schedule, list(self._spans)
        done = self._replace(offer)
        if done is None:
            if self._rank == 0 and self._found is not None:
                self._watch.refused.add(self._found.digest)
            self._led_to_nothing()
            return None
        allowed = done.wall_ns / HORIZON / max(1.0, median(spans))
        self._before = _Before(before, self.profile, spans, allowed)
        self.profile = self._watch.measured or self.profile
        return self._go_on(offer, done)

    def _undo(self) -> SwapRecord | None:
        """Let all ranks go back to the schedule before the last swap."""
        before, self._before = self._before, None
        assert before is not None
        last = self.swaps[-1]
        if not is_same_cut(before.schedule, self._runner.schedule):  # the steps are not lost: they tell costs apart
            steps = gathered(list(self._results), self._group)
            if self._learnt is not None:
                self._learnt.add(self._runner.schedule, steps)
        self._watch.refused.add(last.digest)
        self._led_to_nothing()
        offer, slower = _Offer(last.forecast_after_ns, last.forecast_before_ns, 0, before.schedule), list(self._spans)
        done = self._replace(offer)
        if done is None:
            return None
        self._watch.undone = last.digest, slower
        self.profile = before.profile
        return self._go_on(offer, done, undoes=True)

    def _replace(self, offer: _Offer) -> Swap | None:
        """Let the runners of all ranks replace the schedule, or none; return what was done, by the slowest rank."""
        begin = time.perf_counter_ns()
        before = self._runner.schedule
        everyone = dist.group.WORLD if self._group is None else self._group
        done, said = None, offer.error
        try:
            # a rank that cannot read the schedule names its present one: the others then keep theirs
            done = self._runner.replace(offer.schedule or before, self._optimizer, group=everyone)
        except OptPipeError as error:  # on all ranks, with nothing changed
            said = str(error)
        fails = done is None or offer.schedule is None
        failed, moved_bytes, wall_ns = self._share(
            fails, 0 if done is None else done.moved_bytes, time.perf_counter_ns() - begin
        )
        if done is not None and not failed:
            return replace(done, moved_bytes=round(moved_bytes), wall_ns=round(wall_ns))
        if self._runner.schedule is not before:  # another pipeline could not
            self._runner.replace(before, self._optimizer, group=everyone)
        moves = offer.schedule is not None and not is_same_cut(before, offer.schedule)
        self._keeps_placement = self._keeps_placement or moves
        self._note((said or "another rank keeps its schedule") + ("; the placement is kept from now on" * moves))
        return None

    def _go_on(self, offer: _Offer, done: Swap, *, undoes: bool = False) -> SwapRecord:
        """Begin anew with the schedule that runs now; return what is remembered of its swap."""
        record = SwapRecord(
            step=self._step,
            digest=self._runner.schedule.digest,
            forecast_before_ns=offer.forecast_before_ns,
            forecast_after_ns=offer.forecast_after_ns,
            measured_before_ns=round(median(self._spans)),
            measured_after_ns=None,
            moved_layers=done.moved_layers,
            moved_bytes=done.moved_bytes,
            swap_ns=done.wall_ns,
            planning_ns=offer.planning_ns,
            undoes=undoes,
        )
        self.swaps.append(record)
        self._since = 0
        self._results.clear()
        self._spans.clear()
        if self._rank == 0:
            self._tell({"event": "swap", **asdict(record)})
        return record


def _read(profile: Profile | Path | str | None) -> Profile:
    if profile is None:
        raise BadInput("Replanner needs the schedule's profile on rank 0")
    of_kind("profile", profile, (Profile, Path, str), "a profile or its path")
    return profiles.load(Path(profile)) if isinstance(profile, Path | str) else profile
