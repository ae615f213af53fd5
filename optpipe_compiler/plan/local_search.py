"""Local search over policies, in threads: the compiled machine runs without the interpreter's lock.

Every wished order of every instance is run with each first treatment of its activations; an earlier schedule is such a
wish, too, with what it does with its activations as one more treatment. The best of the different
(instance, wish) pairs then climb, each on its own and in the better order of the devices where there are two, in
rounds, after each of which the worse half is dropped down to one for each thread. One that stands still may become
worse for a while, in every change by no more than a threshold that falls to zero (threshold accepting: Dueck and
Scheuer, J. Comput. Phys. 90, 1990). Where there is time for more than that, all of it is done again, from the same
beginnings to other ends. Long steps are searched on few microbatches. Of many devices a quarter is searched first, for
a part of the time: it says which wishes are worth it.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import TYPE_CHECKING

from optpipe_compiler import machine
from optpipe_compiler.model import bounds
from optpipe_compiler.model.schedule import Mode, Schedule, Stuck, value
from optpipe_compiler.plan.fewer import narrowed, widened
from optpipe_compiler.plan.wishes import Wish, names, treatments, wish
from optpipe_compiler.published import NotDefined, Placed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optpipe_compiler.machine.policy import Policy, Setting
    from optpipe_compiler.machine.state import MachineState
    from optpipe_compiler.model.problem import Problem
    from optpipe_compiler.plan.carried import Start
    from optpipe_compiler.solver.worker import Limits

CLIMBERS = 8
"""Pairs of instance and wish that climb in the first round, at least two for each thread. With 4 or 16 plans are as
long in the mean; with 16 1 % shorter where links are slow and 1 % longer without links (docs/ABLATION.md)."""
OTHERS = 8
"""Instances that are not among these whose best pairs climb in the first round, too. Without them plans of a measured
profile, with 28 instances, are 1.3 to 3.6 % longer where memory is short, and as long elsewhere (docs/ABLATION.md)."""
ROUNDS = 10
"""Rounds until a restart, or the end. With 5 plans are 0.7 % longer where links are slow, with 20 0.1 % in the mean
(docs/ABLATION.md)."""
RESTART_AFTER = 2
"""How long they are, in the time that the last climbers need to stand still once. In a minute restarts are worth 0.7 %
in one case with room for one activation, in 22 s hardly anything (docs/ABLATION.md)."""
CHUNK_OPS = 200_000
"""Ops between two looks at the clock: some 0.02 s."""
OPS_PER_S = 10_000_000
"""Ops that stand for a second of one climber, about what it runs (docs/MACHINE.md), where the clock must not decide; as
if there were `CORES` threads."""
CORES = 2
FEW = 4
"""Microbatches per device that longer steps are searched on. What climbs on 2 fits these alone: by `python -m
bench.planner --clock --time-limit 60 --cases "unit P=64 M=512 cap=0.25P"` nothing that was found with 2 was better than
the best baseline's 1615 ms (9452f236); with 4 it is 1610 (b7b14c0f)."""
LEAST = 64
"""Microbatches, or slices, at least: fewer may be over before a link that cannot keep up shows (docs/ABLATION.md)."""
FEWER_SHARE = 0.33
"""Share of the time for the search on fewer devices, where there are many. With half of it plans of 64 devices are
0.2 % shorter, with a half of the time 0.1 %: of one seed each, too little to change it (docs/ABLATION.md)."""
WISHES = 3
"""So many wishes of each instance, the best there, are run on all devices. Instances are not compared there: where
layers differ, every fourth device is not the same model. With one a plan of 64 devices is 0.1 % shorter, of one seed
(docs/ABLATION.md)."""
LOOK_S = 0.05
"""Seconds between two looks at whether that is over."""
JOIN_S = 1.0
"""Seconds to wait for threads that were told to stop; a first compilation, which cannot be stopped, goes on beside."""
STILL_RUNS = 800
"""Runs of a policy for each stage that bring nothing before it may become worse: the more stages, the more there is to
change. What thresholds earn is in docs/ABLATION.md."""
COOLING_RUNS = 800
"""Runs for each stage in which it may. With half or twice as many plans differ by 0.04 % in the mean
(docs/ABLATION.md)."""
THRESHOLD = 0.01
"""By how much one change may make it worse at first, in parts of the best value. Without thresholds plans of a measured
profile are up to 0.5 % longer, with half or twice of this 0.04 % (docs/ABLATION.md)."""
LOOK = 8
"""Calls of `climb` after which is looked again at what executions take of a policy that promises less than the best.
With slow links plans are 0.3 % longer without, or after 32 calls (docs/ABLATION.md)."""
RUN_OPS = 4
"""About what a run takes for each stage and microbatch."""
NEVER = 1 << 62
START = "start"
"""The wish of an earlier schedule, with its number."""


@dataclass(frozen=True)
class SearchedProblem:
    """A problem, the name of its placement and stages per device, and what it cannot beat (ticks)."""

    problem: Problem
    placed: Placed
    bound: int
    starts: tuple[Start, ...] = ()
    """Earlier schedules to start from, too."""
    reorders: int | None = None
    """The number of the instance that differs in the order of the devices alone: only pairs that are worth it there are
    run here, too."""

    def wish(self, problem: Problem, name: str) -> Wish:
        """Return a wished order for the problem, or one of fewer microbatches; raises NotDefined."""
        start = self.start(problem, name)
        return wish(problem, name) if start is None else start.wish

    def setting(self, problem: Problem, name: str, *, is_span: bool) -> Setting:
        """Return what policies for that wish have in common; raises NotDefined, or Stuck, as `wish` does."""
        wished, whole = self.wish(problem, name), self.problem.microbatches
        return machine.policy.setting(problem, wished, whole, is_span=is_span)

    def start(self, problem: Problem, name: str) -> Start | None:
        """Return the earlier schedule of that name."""
        word, _, number = name.partition(" ")
        return self.starts[int(number)].of_microbatches(problem.microbatches) if word == START else None

    def names(self, problem: Problem) -> list[str]:
        """Return all wished orders."""
        return [f"{START} {number}" for number in range(len(self.starts))] + names(problem, self.placed)


@dataclass(frozen=True)
class Found:
    """A policy for a wish on instances[instance], and about what value (ticks) it leads to."""

    instance: int
    wish: str
    policy: Policy
    value: int


class _Climber:
    """A policy that is being improved: `best` so far, by what executions of it take."""

    def __init__(self, begun: Found, setting: Setting, executed: Callable[[Policy], int]) -> None:
        self.best = begun
        self.setting = setting
        self.executed = executed
        """What executions of a policy take."""
        self.current, self.trial = machine.policy.copied(begun.policy), machine.policy.copied(begun.policy)
        """What is changed next: the best, what is as good, or what is worse for a while; and room for the change."""
        self.current_value = begun.value
        self.still_ops = 0
        """Ops since the lowest promise was found, or since `STILL_RUNS` before the best was gone back to."""
        self.promise = begun.value
        """The lowest value that a run has had: a run may wait with a reload, as no execution does."""
        self.unseen = 0
        """Calls since executions were looked at."""

    def again(self) -> _Climber:
        """Return one that has not climbed yet."""
        return _Climber(self.best, self.setting, self.executed)

    def climb(self, x: MachineState, ops: int, seed: int) -> int:
        """Run changed policies for about so many ops; return how many these were."""
        stages, microbatches = x.acts.shape
        still_ops, cooling_ops = (_ops(stages, microbatches, runs) for runs in (STILL_RUNS, COOLING_RUNS))
        if self.still_ops >= 2 * still_ops + cooling_ops:
            self.current, self.current_value = machine.policy.copied(self.best.policy), self.best.value
            self.still_ops = still_ops
        cooled = (self.still_ops - still_ops) / cooling_ops
        threshold = int(THRESHOLD * self.best.value * (1 - cooled) ** 2) if 0 <= cooled < 1 else 0
        current, before = self.current, self.current_value
        self.current_value, spent = machine.policy.climb(
            x, current, self.trial, self.setting, before, ops, seed, threshold
        )
        self.still_ops += spent
        self.unseen += 1
        if self.current_value < self.promise:
            self.promise, self.still_ops, self.unseen = self.current_value, 0, LOOK
        if self.current_value < self.best.value and self.unseen >= LOOK:
            self.unseen = 0
            if (executed := self.executed(current)) < self.best.value:
                self.best = replace(self.best, policy=machine.policy.copied(current), value=executed)
        return spent


def _ops(stages: int, microbatches: int, runs_per_stage: int) -> int:
    """Return about how many ops so many runs have."""
    return runs_per_stage * stages * RUN_OPS * stages * microbatches


def shortened(problem: Problem) -> Problem:
    """Return the problem with no more microbatches than show its fill, its middle and its drain."""
    if problem.slicing is not None and len(problem.slicing.cuts) > 1:
        return problem
    whole = max(-(-LEAST // problem.slices), FEW * problem.devices)
    return replace(problem, microbatches=min(problem.microbatches, whole * problem.slices))


def load(instance: SearchedProblem) -> bool:
    """Get ready what the search and the lowering of its plan run on; return whether it had to be compiled."""
    is_compiled = machine.waits.load()
    problem = shortened(instance.problem)
    for name in instance.names(problem):
        with suppress(NotDefined, Stuck):
            given = instance.setting(problem, name, is_span=False)
            first = machine.policy.policy(problem, next(treatments(problem, given.wish)))
            return machine.policy.load(machine.state.machine(problem), first, given) or is_compiled
    return is_compiled


class LocalSearch:
    """A context in which a search runs; `take` gives what it has found so far.

    It takes the time limit, or as many ops as stand for it.
    """

    def __init__(self, instances: Sequence[SearchedProblem], limits: Limits) -> None:
        self.instances = instances
        self.limits = limits
        self.error: BaseException | None = None
        self._found: SimpleQueue[Found] = SimpleQueue()
        self._stop = Event()
        self._best = NEVER
        self._begun: list[_Climber] = []
        """All pairs that were run, whatever has climbed since."""
        self._widened: dict[int, dict[str, list[Policy]]] = {}
        self._last: list[_Climber] = []
        self._begin = time.monotonic()
        self._threads = CORES if limits.reproducible else limits.threads
        self._thread = Thread(target=self._run, daemon=True)

    def __enter__(self) -> LocalSearch:
        self._begin = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(JOIN_S)

    @property
    def is_running(self) -> bool:
        """Whether there may be more to come."""
        return self._thread.is_alive()

    def take(self, timeout_s: float) -> list[Found]:
        """Return what was found since the last call, waiting so long for the first of it; the best comes last."""
        found: list[Found] = []
        try:
            found.append(self._found.get(timeout=timeout_s) if timeout_s > 0 else self._found.get_nowait())
            while True:
                found.append(self._found.get_nowait())
        except Empty:
            return sorted(found, key=lambda one: -one.value)

    def climbing(self) -> list[Found]:
        """Return what has climbed to the end, the best first."""
        return sorted((climber.best for climber in self._last), key=lambda one: one.value)

    # -- in threads ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self.problems = [shortened(instance.problem) for instance in self.instances]
            with ThreadPoolExecutor(self.limits.threads) as pool:
                self._rounds(pool, self._screened(pool))
        except BaseException as error:  # reported by the planner, which goes on with what there is
            self.error = error

    def _of_fewer_devices(self) -> dict[int, dict[str, list[Policy]]]:
        """Search on fewer devices for a part of the time; return, by instance, its best wishes there with policies."""
        first = [(n, one) for n, one in enumerate(self.instances) if one.reorders is None]
        narrow = [(n, few) for n, one in first if (few := narrowed(one.problem)) is not None]
        if not narrow:
            return {}
        limits, seconds = self.limits, self.limits.time_limit_s
        instances = [
            SearchedProblem(few, self.instances[n].placed, bounds.best(few, limits.objective).ticks)
            for n, few in narrow
        ]
        with LocalSearch(instances, replace(limits, time_limit_s=FEWER_SHARE * seconds)) as search:
            while search.is_running and not self._stop.is_set():
                search._thread.join(LOOK_S)
        if search.error is not None:
            raise search.error
        self.limits = replace(limits, time_limit_s=(1 - FEWER_SHARE) * seconds)
        self._begin = time.monotonic()
        best: dict[int, dict[str, list[Policy]]] = {}
        for one in sorted((climber.best for climber in search._begun), key=lambda one: one.value):
            number, few = narrow[one.instance]
            mine, placed = best.setdefault(number, {}), self.instances[number].placed
            if len(mine) < WISHES:
                same = dict(zip(names(few, placed), names(self.problems[number], placed), strict=True))
                mine[same[one.wish]] = list(widened(one.policy, few, self.problems[number]))
        return best

    def _screened(self, pool: ThreadPoolExecutor) -> list[_Climber]:
        """Return the best climber of every pair of instance and wish, the best pairs first.

        Where fewer devices have said which wishes are worth it, of these and of earlier schedules alone.
        """
        self._widened = self._of_fewer_devices()
        first = [(n, one) for n, one in enumerate(self.instances) if one.reorders is None]
        pairs = [(n, name) for n, one in first for name in one.names(self.problems[n])]
        pairs = [(n, name) for n, name in pairs if name.startswith(START) or name in self._widened.get(n, {name: []})]
        found = sorted(self._screens(pool, in_order(pairs, self.instances)), key=_by_value)
        again = {one.reorders: n for n, one in enumerate(self.instances) if one.reorders is not None}
        best = [one.best for one in _varied(found, self._most) if one.best.instance in again]
        others = self._screens(pool, [(again[one.instance], one.wish) for one in best])
        reordered = {(self.instances[one.best.instance].reorders, one.best.wish): one for one in others}
        either = [(one, reordered.get((one.best.instance, one.best.wish), one)) for one in found]
        self._begun = sorted((min(two, key=_by_value) for two in either), key=_by_value)
        return self._begun

    def _screens(self, pool: ThreadPoolExecutor, pairs: list[tuple[int, str]]) -> list[_Climber]:
        return [climber for climber in pool.map(lambda pair: self._screen(*pair), pairs) if climber is not None]

    def _screen(self, number: int, name: str) -> _Climber | None:
        """Run a wish with each first treatment of the activations, until half the time is over."""
        instance, problem, is_clocked = self.instances[number], self.problems[number], not self.limits.reproducible
        if is_clocked and self._best < NEVER and (self._used_before(0.0) > 0.5 or instance.bound >= self._best):
            return None
        if self._stop.is_set():
            return None
        try:
            given = instance.setting(problem, name, is_span=self.limits.is_span)
        except (NotDefined, Stuck):
            return None
        x = machine.state.machine(problem)
        start = instance.start(problem, name)
        first = [] if start is None else [start.policy(problem)]
        known = self._widened.get(number if instance.reorders is None else instance.reorders, {}).get(name, [])
        best, least = None, NEVER
        for one in chain(
            first, known, (machine.policy.policy(problem, modes) for modes in treatments(problem, given.wish))
        ):
            trial, cutoff = machine.policy.copied(one), min(least, NEVER // 2)
            reached = machine.policy.value(x, one, given, cutoff)
            if reached >= NEVER and best is None and problem.freedom.split:  # halves may hold more than the whole
                one = trial
                one.fused[:] = True
                reached = machine.policy.value(x, one, given, cutoff)
            if reached < least:
                best, least = one, reached
        if best is None:
            return None
        executed = partial(self._executed, number, given)
        climber = _Climber(Found(number, name, best, executed(best)), given, executed)
        if is_clocked:
            self._tell(climber)
        return climber

    def _executed(self, number: int, given: Setting, policy: Policy) -> int:
        """Return what executions of a policy take: none waits with a reload until it is due.

        Where that then meets an offload, both take longer. Of few microbatches for many it is what the run promises.
        """
        problem = self.problems[number]
        x = machine.state.machine(problem)
        is_whole = problem.microbatches == self.instances[number].problem.microbatches
        if not is_whole or not policy.before[1].any() or not (policy.modes == Mode.OFFLOAD).any():
            return machine.policy.value(x, machine.policy.copied(policy), given, NEVER // 2)
        timed = _followed(x, problem, policy, given)
        return NEVER if timed is None else value(timed, self.limits.objective)

    def _rounds(self, pool: ThreadPoolExecutor, climbers: list[_Climber]) -> None:
        """Let the best climb, anew after a restart; drop the worse half while there are more than two or threads."""
        least = max(CORES, self._threads)
        begun = _varied(climbers, self._most)
        if not begun:
            return
        self._tell(begun[0])
        self._last = begun[:1]
        rounds = ROUNDS * (1 + self._restarts(begun, least))
        for number in range(rounds):
            if number % ROUNDS == 0:
                climbers, ended = [climber.again() for climber in begun], self._last if number else []
            climbers = [one for one in climbers if self.instances[one.best.instance].bound < self._best]
            if self._stop.is_set() or not climbers:
                return
            share = (1 - self._used_before(number / rounds)) / (rounds - number)
            first, count = number * (CLIMBERS + OTHERS), len(climbers)
            jobs = [(one, first + place, share, count) for place, one in enumerate(climbers)]
            list(pool.map(lambda job: self._climb(*job), jobs))
            climbers.sort(key=lambda one: one.best.value)
            self._tell(climbers[0])
            self._last = sorted([*climbers, *ended], key=lambda one: one.best.value)[: len(climbers)]
            climbers = climbers[: max(least, len(climbers) // 2)]

    @property
    def _most(self) -> int:
        """How many pairs climb in the first round, beside `OTHERS`."""
        return CLIMBERS if self.limits.reproducible else max(CLIMBERS, 2 * self.limits.threads)

    def _restarts(self, begun: list[_Climber], least: int) -> int:
        """Return how often there is time to climb again from where these begin until `least` of them stand still.

        Until then each can run a chunk in every round.
        """
        problem = self.problems[begun[0].best.instance]
        ops = RESTART_AFTER * _ops(len(problem.stages), problem.microbatches, STILL_RUNS) * least / self._threads
        ops = max(ops, ROUNDS * CLIMBERS * CHUNK_OPS)
        return max(0, int((1 - self._used_before(0.0)) * self.limits.time_limit_s * OPS_PER_S / ops) - 1)

    def _used_before(self, part: float) -> float:
        """Return which part of the time is over, by the clock where it decides, and as given where it does not."""
        used = (time.monotonic() - self._begin) / max(1e-9, self.limits.time_limit_s)
        return part if self.limits.reproducible else min(1.0, used)

    def _climb(self, climber: _Climber, number: int, share: float, climbing: int) -> None:
        """Improve one policy for its part of a round."""
        is_clocked = not self.limits.reproducible
        seconds = share * self.limits.time_limit_s * min(1.0, self._threads / climbing)
        quota = float("inf") if is_clocked else seconds * OPS_PER_S
        x = machine.state.machine(self.problems[climber.best.instance])
        end, spent = time.monotonic() + seconds, 0
        while spent < quota and not self._stop.is_set() and not (is_clocked and time.monotonic() >= end):
            seed = hash((self.limits.seed, number, spent)) & 0xFFFFFFFF
            before = climber.best
            spent += climber.climb(x, int(min(CHUNK_OPS, quota - spent)) + 1, seed)
            if climber.best is not before and is_clocked:
                self._tell(climber)
            if self.instances[climber.best.instance].bound >= climber.best.value:
                return

    def _tell(self, climber: _Climber) -> None:
        """Report a policy that is better than all before."""
        if climber.best.value < self._best:
            self._best = climber.best.value
            self._found.put(climber.best)


def in_order(pairs: Sequence[tuple[int, str]], instances: Sequence[SearchedProblem]) -> list[tuple[int, str]]:
    """Return pairs of instance and wish in the order in which they are run, as far as there is time: those of earlier
    schedules, then all of the placement with the lowest bound, and so on.

    When half of them were run, the best of all is among them in all of 57 cases (docs/ABLATION.md).
    """
    return sorted(pairs, key=lambda pair: (not pair[1].startswith(START), instances[pair[0]].bound))


def _by_value(one: _Climber) -> tuple[int, int, str]:
    return one.best.value, one.best.instance, one.best.wish


def _varied(climbers: list[_Climber], most: int) -> list[_Climber]:
    """Return the best so many, and the best of each of the `OTHERS` best instances that are not among these."""
    chosen, seen = climbers[:most], {climber.best.instance for climber in climbers[:most]}
    for climber in climbers[most:]:
        if climber.best.instance not in seen and len(chosen) < most + OTHERS:
            seen.add(climber.best.instance)
            chosen.append(climber)
    return chosen


class Realiser:
    """Runs policies on one whole instance."""

    def __init__(self, instance: SearchedProblem, *, is_span: bool) -> None:
        self.problem = instance.problem
        self.machine = machine.state.machine(instance.problem)
        self.setting = cache(partial(instance.setting, instance.problem, is_span=is_span))

    def schedule(self, found: Found) -> Schedule | None:
        """Return the schedule of a policy, at its earliest; None where its memory or its peaks do not come out."""
        with suppress(NotDefined, Stuck):  # a round of a published order may divide fewer microbatches, and not all
            return _followed(self.machine, self.problem, found.policy, self.setting(found.wish))
        return None


def _followed(x: MachineState, problem: Problem, policy: Policy, given: Setting) -> Schedule | None:
    """Return the schedule of a policy at its earliest; None where its memory or its peaks do not come out."""
    if machine.policy.value(x, machine.policy.copied(policy), given, NEVER // 2) >= NEVER // 2:
        return None
    timed = Schedule(problem, "local-search", x.starts.copy())
    with suppress(Stuck):  # ops of no length may have no order of their own
        # no execution waits with a reload until it is due; where it then meets an offload, both take longer
        return machine.orders.retime(timed, problem)
    return timed
