"""The machine follows a given order under the caps, or given times: what a plan takes, and what a schedule holds.

An op starts once its lane is free, what it reads is there and its memory is. One that takes memory before an earlier
one of the plan's `allocations` does so only while the earlier one still fits. tests/given_order.py is the definition in
plain Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_compiler.machine.compiled import compiled, entry, views
from optpipe_compiler.machine.events import begin, begin_transfer, gives_way, is_idle, next_moment, reset
from optpipe_compiler.machine.memory import free
from optpipe_compiler.machine.state import (
    AWAY,
    BACK,
    COMPUTED,
    EVENTS,
    HALF_DONE,
    KEEP,
    MOVED,
    NEVER,
    NONE,
    OFFLOAD,
    OPS,
    RECOMPUTE,
    RESTORED,
    TAKEN,
    WAKE,
    D,
    F,
    H,
    R,
    W,
    machine,
    next_touched,
    op,
    packed,
    push,
    sort,
    unpacked,
)
from optpipe_compiler.model.schedule import Schedule, Stuck, stage_links

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe_compiler.machine.state import DeviceRecord, Ints, MachineState
    from optpipe_compiler.model.problem import Problem

TRIES = 4
"""Runs of one order, each with more room for messages than the one before, until its peaks fit."""


class Orders(NamedTuple):
    """The order of every lane, and of what takes memory on every device.

    Rows: lanes (compute by device, offloads by link, reloads by link), then the allocations of each device.
    """

    codes: Ints
    """The ops of all rows: (kind x stages + stage) x microbatches + microbatch."""
    rows: Ints
    """[row, (first, end, next)] places in `codes`; next is the first op that has not started, while it runs."""


class Given(NamedTuple):
    """Ops at given times."""

    sequence: Ints
    """Their codes, in planned order."""
    ticks: Ints
    """[k, s, m] when they start."""
    levels: Ints
    """By op, to be filled in: the most units that its device holds from its start to that of the device's next one."""


@entry
def run(x: MachineState, o: Orders, given: Given) -> int:
    """Run an order at its earliest, or the ops of `given`, where there are any, at their times, memory not minded.

    Returns how many ops have started, all if the order does not get stuck. The machine is compiled once for both.
    """
    x, o, given = views(x), views(o), views(given)
    reset(x)
    for row in range(o.rows.shape[0]):
        o.rows[row, 2] = o.rows[row, 0]
    for d in range(x.devices.shape[0]):
        x.devices[d].remaining = NONE
    now = place = 0
    while True:
        if given.sequence.size:
            while place < given.sequence.size and _is_next(x, given, place):
                _start_given(x, given, place)
                place += 1
        else:
            d = next_touched(x)
            while d != NONE:
                _start_all(x, o, now, d)
                d = next_touched(x)
        if x.counts[EVENTS] == 0:
            break
        now = next_moment(x)
    for d in range(x.devices.shape[0] if given.sequence.size else 0):
        _close(x.devices[d], given)
    started: int = x.counts[OPS]
    return started


# -- a given order


@compiled
def _start_all(x: MachineState, o: Orders, now: int, d: int) -> None:
    device = x.devices[d]
    link, links = device.link, x.links.shape[0]
    seeking = True
    while seeking:
        seeking = False
        if is_idle(x, now, d) and _start_next(x, o, now, d):
            seeking = True
        if link != NONE:
            if x.links[link].d_stage == NONE and _start_next(x, o, now, x.devices.shape[0] + link):
                seeking = True
            if x.links[link].h_stage == NONE and _start_next(x, o, now, x.devices.shape[0] + links + link):
                seeking = True


@compiled
def _start_next(x: MachineState, o: Orders, now: int, lane: int) -> bool:
    """Start the next op of a lane if it may start."""
    if o.rows[lane, 2] == o.rows[lane, 1]:
        return False
    code = o.codes[o.rows[lane, 2]]
    kind, s, m = op(code)
    d = x.stages[s].device
    if not _is_ready(x, now, kind, s, m) or gives_way(x, now, kind, s, m):
        return False
    if not _fits(x, o, d, code, kind, s, m):
        return False
    o.rows[lane, 2] += 1
    if kind < D:
        begin(x, now, kind, s, m)
    else:
        if kind == D:
            x.devices[d].host -= x.costs[sort(x, m), s, MOVED]
        begin_transfer(x, now, kind, s, m)
    return True


@compiled
def _is_ready(x: MachineState, now: int, kind: int, s: int, m: int) -> bool:
    """Whether what the op reads is there, and its release or its gate has passed."""
    act = x.acts[s, m]
    where = act.where
    if kind == F:
        if act.input > now or (x.units[m].first != m and x.acts[s, m - 1].where == 0):
            return False
        if act.forward > now:
            device = x.devices[x.stages[s].device]
            if device.remaining != act.forward:
                device.remaining = act.forward
                push(x, act.forward, WAKE, s, m)
            return False
        return True
    if kind == W:
        return where == HALF_DONE
    if kind in (R, D):
        return where == COMPUTED
    if kind == H:
        if where != AWAY or act.backward == NONE:
            return where == AWAY
        return _has_started(x, act.backward)
    restored = COMPUTED if act.mode == KEEP else BACK if act.mode == OFFLOAD else RESTORED
    later = m + 1  # its backward reads what this one's adds to
    is_last = later == x.acts.shape[1] or x.units[later].first == later
    has_turn = is_last or x.acts[s, later].where == HALF_DONE
    return act.gradient <= now and where == restored and has_turn


@compiled
def _fits(x: MachineState, o: Orders, d: int, code: int, kind: int, s: int, m: int) -> bool:
    """Whether the memory is there, also for the ops that the plan lets take theirs earlier."""
    device = x.devices[d]
    if kind == D:
        return device.host >= x.costs[sort(x, m), s, MOVED]
    row = o.rows[x.devices.shape[0] + 2 * x.links.shape[0] + d]
    while row[2] < row[1] and _has_started(x, o.codes[row[2]]):
        row[2] += 1
    need, room = x.costs[sort(x, m), s, TAKEN + kind], free(device)
    place = row[2]
    while place < row[1] and o.codes[place] != code:
        other = o.codes[place]
        if not _has_started(x, other):
            other_kind, other_s, other_m = op(other)
            need += x.costs[sort(x, other_m), other_s, TAKEN + other_kind]
            if need > room:
                return False
        place += 1
    return need <= room or need == 0


@compiled
def _has_started(x: MachineState, code: int) -> bool:
    kind, s, m = op(code)
    has_started: bool = x.starts[kind, s, m] != NONE
    return has_started


# -- given times


@compiled
def _is_next(x: MachineState, given: Given, place: int) -> bool:
    """Whether the op at this place of the sequence starts before anything else happens."""
    kind, s, m = op(given.sequence[place])
    is_next: bool = x.counts[EVENTS] == 0 or given.ticks[kind, s, m] < x.events[0].time
    return is_next


@compiled
def _start_given(x: MachineState, given: Given, place: int) -> None:
    """Start an op. Of a device, `remaining` is the place of its last op and `opening` the highest level then."""
    kind, s, m = op(given.sequence[place])
    now, device = given.ticks[kind, s, m], x.devices[x.stages[s].device]
    if kind == D:
        device.host -= x.costs[sort(x, m), s, MOVED]
        device.host_budget = min(device.host_budget, device.host)
    else:
        _close(device, given)
    if kind < D:
        begin(x, now, kind, s, m)
    else:
        begin_transfer(x, now, kind, s, m)
    if kind != D:
        given.levels[place] = device.held + device.mail
        device.remaining, device.opening = place, device.high


@compiled
def _close(device: DeviceRecord, given: Given) -> None:
    """Add what messages came to, if that was more, since the device's last op began."""
    if device.remaining != NONE:
        given.levels[device.remaining] += max(0, device.high - device.opening)


# -- from plans and schedules to arrays and back

_NO_ORDERS = Orders(np.zeros(0, np.int64), np.zeros((0, 3), np.int64))
_NOTHING_GIVEN = Given(np.zeros(0, np.int64), np.zeros((0, 0, 0), np.int64), np.zeros(0, np.int64))


class Held(NamedTuple):
    """What a schedule holds, in units: the file promises no more (docs/IR.md, Memory)."""

    peaks: list[int]
    """By device, without what is always held."""
    host_peaks: list[int]
    """By device, of its offloads."""
    levels: Ints
    """By op of `Schedule.sequence`, from its start to that of its device's next op; 0 for offloads."""


def retime(schedule: Schedule, problem: Problem, method: str | None = None) -> Schedule:
    """Return `schedule`'s orders at their earliest on `problem`, which may count in other ticks and units."""
    old, new = schedule.problem.unit_bytes, problem.unit_bytes
    x = machine(problem)
    x.devices["host_budget"] = [share * old // new for share in schedule.host_peaks]
    x.acts["backward"] = NONE
    return _followed(problem, x, _orders_of(schedule), method or schedule.method)


def released(
    problem: Problem,
    compute: Sequence[Ints],
    transfers: tuple[Sequence[Ints], Sequence[Ints]] = ((), ()),
    gates: Ints | None = None,
    releases: Ints | None = None,
    *,
    method: str,
) -> Schedule:
    """Return the earliest times of these orders, whose rows are (kind, stage, microbatch), without caps.

    `transfers`: offloads and reloads by link. By [stage, microbatch], a reload starts no earlier than its gate, the
    code of an op of its device's compute lane (NONE: none), and a forward no earlier than its release, in ticks. Raises
    Stuck when the order waits for itself.
    """
    x = machine(problem)
    x.devices["host_budget"] = x.devices["budget"] = NEVER
    x.acts["backward"] = NONE if gates is None else gates
    x.acts["forward"] = 0 if releases is None else releases
    return _followed(problem, x, _arrays(problem, [*compute, *transfers[0], *transfers[1]]), method)


def held(schedule: Schedule) -> Held:
    """Return what `schedule` holds at its own times, whatever the caps."""
    problem, columns = schedule.problem, schedule.columns
    x = machine(problem)
    x.devices["host_budget"] = 0
    _set_modes(x, columns.kind, columns.stage, columns.microbatch)
    levels = np.zeros(len(columns.kind), np.int64)
    codes = packed(columns.kind, columns.stage, columns.microbatch)
    run(x, _NO_ORDERS, Given(codes[schedule.rows], np.ascontiguousarray(schedule.ticks), levels))
    return Held(x.devices["peak"].tolist(), (-x.devices["host_budget"]).tolist(), levels)


def peaks(schedule: Schedule) -> list[int]:
    """Return the most units that each device holds at one time, what is always held excluded."""
    return held(schedule).peaks


def _followed(problem: Problem, x: MachineState, o: Orders, method: str) -> Schedule:
    count = int((o.rows[: problem.devices + 2 * problem.links, 1]).max(initial=0))
    kind, stage, microbatch = unpacked(o.codes[:count])
    _set_modes(x, kind, stage, microbatch)
    x.devices["reserve"] = 0
    for _ in range(TRIES):
        begun = run(x, o, _NOTHING_GIVEN)
        if begun < count:
            raise Stuck(f"{count - begun} of {count} tasks never start")
        excess = x.devices["peak"] - x.devices["budget"]
        if (excess <= 0).all():
            return Schedule(problem, method, x.starts)
        x.devices["reserve"] += np.maximum(excess, 0)
    raise Stuck("messages always take more memory than there is")


def _set_modes(x: MachineState, kind: Ints, stage: Ints, microbatch: Ints) -> None:
    x.acts["mode"] = KEEP
    for of, mode in ((R, RECOMPUTE), (H, OFFLOAD)):
        x.acts["mode"][stage[kind == of], microbatch[kind == of]] = mode


def _orders_of(schedule: Schedule) -> Orders:
    """Return the order of every lane, read off the start times."""
    problem, columns, rows = schedule.problem, schedule.columns, schedule.rows
    codes, kind = packed(columns.kind, columns.stage, columns.microbatch)[rows], columns.kind[rows]
    stage, links = columns.stage[rows], problem.links
    owner = np.array(problem.device_of)[stage]
    lane = np.where(kind < D, owner, problem.devices + stage_links(problem)[stage] + np.where(kind == H, links, 0))
    by_lane = np.argsort(lane, kind="stable")
    takes = kind != D
    by_owner = np.argsort(owner[takes], kind="stable")
    lanes = np.searchsorted(lane[by_lane], np.arange(problem.devices + 2 * links + 1))
    allocations = np.searchsorted(owner[takes][by_owner], np.arange(problem.devices + 1))
    return _rows([codes[by_lane], codes[takes][by_owner]], [lanes, allocations])


def _arrays(problem: Problem, lanes: Sequence[Ints], allocations: Sequence[Ints] = ()) -> Orders:
    """Return the orders of these rows (kind, stage, microbatch); without allocations memory is taken in any order."""
    codes, firsts = [], []
    for every, count in ((lanes, problem.devices + 2 * problem.links), (allocations, problem.devices)):
        lengths = [*map(len, every), *[0] * (count - len(every))]
        firsts.append(np.cumsum([0, *lengths]))
        codes.append(packed(*np.concatenate([np.zeros((0, 3), np.int64), *every]).T))
    return _rows(codes, firsts)


def _rows(codes: list[Ints], firsts: list[Ints]) -> Orders:
    """`firsts`: for the lanes and for the allocations, where each begins in its codes, and where the last ends."""
    places = [firsts[0], firsts[1] + len(codes[0])]
    begin, end = (np.concatenate([one[cut] for one in places]) for cut in (slice(None, -1), slice(1, None)))
    return Orders(np.concatenate(codes), np.stack([begin, end, begin], axis=1))
