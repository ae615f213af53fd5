"""The compiled list scheduler: ranks say what goes first, the machine says when it can.

It runs the pipeline forward in time. Whenever a device is idle it starts, of the ops that are ready and safe, the one
of the lowest rank; a forward may leave the device to one of lower rank that is still to come. Transfers start as soon
as their link is free, and two that meet on a link take as long as it needs for both directions. Microbatches keep their
order within a stage. *Safe* is the banker's rule (Dijkstra, 1965): memory is granted only if afterwards the device can
still finish its activations one after the other, in the order of their backwards' ranks; so there is no deadlock if the
ranks make sense.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.machine.compiled import compiled
from optpipe_compiler.machine.events import begin, begin_transfer, gives_way, is_idle, next_moment, reset, sent
from optpipe_compiler.machine.memory import enough, free, is_safe
from optpipe_compiler.machine.state import (
    AWAY,
    BACK,
    CHECKPOINT,
    COMPUTED,
    EVENTS,
    FARTHEST,
    GIVEN,
    KEEP,
    LAG,
    LENGTH,
    MOVED,
    NEVER,
    NONE,
    OFFLOAD,
    OPS,
    RECOMPUTE,
    RESTORED,
    SAVED,
    TAKEN,
    B,
    D,
    F,
    H,
    I,
    R,
    W,
    activation,
    back,
    code,
    next_touched,
    sort,
    touch,
    touch_later,
)

if TYPE_CHECKING:
    from optpipe_compiler.machine.state import DeviceRecord, LinkRecord, MachineState

DONE, LATE, STUCK = range(3)
"""How a run ends: all ops have completed; a device can no longer be done by the cutoff; some ops never start."""
AHEAD = 1
"""Activations that a device may have reloaded ahead of their backwards while it has forwards to run. With 2 plans are
0.4 % longer where memory binds (docs/ABLATION.md)."""


@compiled
def play(x: MachineState, is_span: bool, cutoff: int) -> tuple[int, int, int]:
    """Run what activations say (ranks, modes), stages (fused, holds, waits) and devices (reserve).

    Afterwards it holds the starts of all ops and the peaks of all devices. Returns (DONE | LATE | STUCK, the makespan
    or the longest span in ticks, ops started).
    """
    _begin(x)
    now, is_over = 0, False
    while not is_over:
        d = next_touched(x)
        while d != NONE:
            if x.devices[d].link != NONE:
                _start_transfers(x, now, x.devices[d].link)
            if is_idle(x, now, d) and not _start_next(x, now, d, is_span, cutoff):
                return LATE, 0, x.counts[OPS]
            d = next_touched(x)
        are_called = touch_later(x)
        if x.counts[EVENTS] and (not are_called or x.events[0].time == now):
            now = next_moment(x)
        else:
            is_over = not are_called
    return _result(x, is_span)


@compiled
def _begin(x: MachineState) -> None:
    reset(x)
    for d in range(x.devices.shape[0]):
        device = x.devices[d]
        device.remaining = work(x, d, 0, x.acts.shape[1])
        device.enough = enough(x, d)
        _merge(x, device)


@compiled
def work(x: MachineState, d: int, first: int, last: int) -> int:
    """Return the compute ticks of a device's ops of the microbatches [first, last), recomputations too."""
    total = 0
    s = x.devices[d].first_stage
    while s != NONE:
        is_fused = x.stages[s].fused
        for m in range(first, last):
            row = x.costs[sort(x, m), s]
            total += row[LENGTH + F] + (row[LENGTH + B] if is_fused else row[LENGTH + I] + row[LENGTH + W])
            if x.acts[s, m].mode == RECOMPUTE:
                total += row[LENGTH + R]
        s = x.stages[s].next
    return total


@compiled
def _merge(x: MachineState, device: DeviceRecord) -> None:
    """Order the device's activations by the ranks of their backwards, of equal ones the later stage first."""
    microbatches = x.acts.shape[1]
    for place in range(device.first_place, device.last_place):
        best, lowest = NONE, NEVER
        s = device.first_stage
        while s != NONE:
            there = x.stages[s].done_w  # counts those that are in place; nothing has run yet
            if there < microbatches:
                rank = x.acts[s, back(x, there)].backward
                if rank <= lowest:
                    best, lowest = s, rank
            s = x.stages[s].next
        x.order[place] = code(0, best, back(x, x.stages[best].done_w))
        x.stages[best].done_w += 1
    s = device.first_stage
    while s != NONE:
        x.stages[s].done_w = 0
        s = x.stages[s].next


@compiled
def _result(x: MachineState, is_span: bool) -> tuple[int, int, int]:
    finished = value = 0
    for s in range(x.acts.shape[0]):
        finished += x.stages[s].done_w
    for d in range(x.devices.shape[0]):
        device = x.devices[d]
        if device.kind != NONE:
            value = max(value, device.end - (device.first if is_span else 0))
    return DONE if finished == x.order.size else STUCK, value, x.counts[OPS]


# -- compute


@compiled
def _start_next(x: MachineState, now: int, d: int, is_span: bool, cutoff: int) -> bool:
    """Start the device's best op, if any may start; return False if it cannot be done by the cutoff."""
    kind, s, m = _choose(x, now, d)
    if kind == NONE:
        return True
    device, stage, act, row = x.devices[d], x.stages[s], x.acts[s, m], x.costs[sort(x, m), s]
    first = now if device.first == NONE else device.first
    if now + device.remaining - (first if is_span else 0) > cutoff:
        return False
    if gives_way(x, now, kind, s, m):
        return True
    device.remaining -= row[LENGTH + kind]
    if kind == F:
        act.mode = _mode(x, d, s, m)
        stage.begun_f += 1
        device.opening -= 1
        if act.mode == OFFLOAD:
            device.leaving += row[MOVED]
            device.host -= row[MOVED]
    elif kind == W:
        stage.begun_w += 1
    elif kind != R:
        stage.begun_b += 1
        if act.mode == OFFLOAD:
            device.ahead -= 1
    begin(x, now, kind, s, m)
    _call(x, now, kind, s, m)
    return True


@compiled
def _choose(x: MachineState, now: int, d: int) -> tuple[int, int, int]:
    """Return (kind, stage, microbatch) of the op of the lowest rank that may start now; NONE thrice without any."""
    best, best_s, best_m, lowest = NONE, NONE, NONE, NEVER
    room = free(x.devices[d])
    s = x.devices[d].first_stage
    while s != NONE:
        stage = x.stages[s]
        m = stage.begun_f
        if m < x.acts.shape[1]:
            act = x.acts[s, m]
            if act.input <= now and act.forward < lowest:
                fits = x.costs[sort(x, m), s, TAKEN + F] <= room
                if fits and not _yields(x, now, d, s, m, room) and _may_run(x, d, s, m):
                    best, best_s, best_m, lowest = F, s, m, act.forward
        place = stage.begun_b
        if place < x.acts.shape[1]:
            m = back(x, place)
            act = x.acts[s, m]
            is_dropped = act.mode == RECOMPUTE and act.where == COMPUTED
            if (is_dropped or act.gradient <= now) and act.backward < lowest:
                kind = _backward(x, d, s, m)
                if kind != NONE:
                    best, best_s, best_m, lowest = kind, s, m, act.backward
        place = stage.begun_w
        if not stage.fused and place < stage.done_b:
            m = back(x, place)
            rank, taken = x.acts[s, m].weight, x.costs[sort(x, m), s, TAKEN + W]
            if rank < lowest and (taken <= room or taken == 0):
                best, best_s, best_m, lowest = W, s, m, rank
        s = stage.next
    return best, best_s, best_m


@compiled
def _yields(x: MachineState, now: int, d: int, s: int, m: int, room: int) -> bool:
    """Whether the forward of (s, m) leaves the device to another stage's, whose input is still to come.

    That one has a lower rank, and does not depend on the forward of (s, m) itself. A stage that `holds` does so where
    the device has no room for both, one that `waits` where the input comes before the forward of (s, m) would be over:
    the sooner a microbatch is through, the sooner its backwards begin.
    """
    stage = x.stages[s]
    if not (stage.holds or stage.waits):
        return False
    row, rank = x.costs[sort(x, m), s], x.acts[s, m].forward
    other = x.devices[d].first_stage
    while other != NONE:
        first = x.stages[other].begun_f
        is_after = other > s and first >= m
        if other != s and first < x.acts.shape[1] and not is_after:
            act = x.acts[other, first]
            if act.input > now and act.forward < rank:
                if stage.holds and row[TAKEN + F] + x.costs[sort(x, first), other, TAKEN + F] > room:
                    return True
                if stage.waits and _coming(x, other, first) < now + row[LENGTH + F]:
                    return True
        other = x.stages[other].next
    return False


@compiled
def _coming(x: MachineState, s: int, m: int) -> int:
    """Return when the input of a forward comes, NEVER where the forward before it has not begun."""
    if x.acts[s, m].input < NEVER:
        return x.acts[s, m].input
    device = x.devices[x.stages[s - 1].device]
    is_running = device.busy and device.kind == F and device.stage == s - 1 and device.microbatch == m
    return device.end + x.costs[sort(x, m), s - 1, LAG] if is_running else NEVER


@compiled
def _may_run(x: MachineState, d: int, s: int, m: int) -> bool:
    """Whether the forward of (s, m) is safe."""
    row, mode = x.costs[sort(x, m), s], _mode(x, d, s, m)
    given = row[GIVEN + (7 if mode == RECOMPUTE else 0) + F] + sent(x, s, F, m)
    given += row[MOVED] if mode == OFFLOAD else 0
    return is_safe(x, d, row[TAKEN + F], given, F, s, m)


@compiled
def _mode(x: MachineState, d: int, s: int, m: int) -> int:
    """Return what becomes of an activation whose forward begins now: it is kept where the host has no room for it."""
    mode = x.acts[s, m].mode
    return KEEP if mode == OFFLOAD and x.devices[d].host < x.costs[sort(x, m), s, MOVED] else mode


@compiled
def _backward(x: MachineState, d: int, s: int, m: int) -> int:
    """Return the kind of op with which the backward of (s, m) may go on now, NONE if it may not.

    The next backward of a stage may be recomputed for before its gradient is there, if nothing else has a lower rank,
    but no sooner than it is due.
    """
    act, stage, row = x.acts[s, m], x.stages[s], x.costs[sort(x, m), s]
    kept = 0
    if act.mode == RECOMPUTE and act.where == COMPUTED:
        if not _is_due(x, stage.recomputed_before, s, m):
            return NONE
        kind, kept = R, row[SAVED] - row[CHECKPOINT]
    elif (act.mode == KEEP and act.where == COMPUTED) or act.where == BACK or act.where == RESTORED:
        kind = B if stage.fused else I
    else:
        return NONE
    taken = row[TAKEN + kind]
    return kind if taken == 0 or is_safe(x, d, taken, taken - kept, kind, s, m) else NONE


@compiled
def _is_due(x: MachineState, before: int, s: int, m: int) -> bool:
    """Whether an activation may come back that is asked for so many stages before its backward; 0: at any time.

    From then on it takes memory. So it waits until the microbatch's backward has begun so many stages later, or, where
    there are not so many, its forward of the last stage.
    """
    last = x.acts.shape[0] - 1
    if before == 0:
        return True
    if s + before > last:
        called = x.starts[F, last, m]
    else:
        called = x.starts[B if x.stages[s + before].fused else I, s + before, m]
    return bool(called != NONE)


@compiled
def _call(x: MachineState, now: int, kind: int, s: int, m: int) -> None:
    """Look again at the devices whose activations are due, now that an op has begun."""
    is_last = kind == F and s == x.acts.shape[0] - 1
    if not is_last and kind != B and kind != I:
        return
    for distance in range(1, min(s, FARTHEST) + 1):
        stage, mode = x.stages[s - distance], x.acts[s - distance, m].mode
        before = stage.reloaded_before if mode == OFFLOAD else stage.recomputed_before
        if before == distance or (is_last and before > distance):
            touch(x, stage.device, 1)


# -- transfers


@compiled
def _start_transfers(x: MachineState, now: int, number: int) -> None:
    link = x.links[number]
    if link.d_stage == NONE and link.waiting:
        s, m = _next_offload(x, link)
        if s != NONE:
            begin_transfer(x, now, D, s, m)
    if link.h_stage == NONE:
        s, m = _next_reload(x, link)
        if s != NONE:
            device = x.devices[x.stages[s].device]
            device.ahead += 1
            device.back += 1
            begin_transfer(x, now, H, s, m)


@compiled
def _next_offload(x: MachineState, link: LinkRecord) -> tuple[int, int]:
    """Return (stage, microbatch) of what leaves first: by the ranks of forwards, among those that have completed."""
    best, best_m, lowest = NONE, NONE, NEVER
    d = link.first_behind
    while d != NONE:
        s = x.devices[d].first_stage
        while s != NONE:
            stage = x.stages[s]
            while stage.left < stage.done_f:
                act = x.acts[s, stage.left]
                if act.mode == OFFLOAD and act.where == COMPUTED:
                    break
                stage.left += 1
            if stage.left < stage.done_f:
                rank = x.acts[s, stage.left].forward
                if rank < lowest or (rank == lowest and s < best):
                    best, best_m, lowest = s, stage.left, rank
            s = stage.next
        d = x.devices[d].next_behind
    return best, best_m


@compiled
def _next_reload(x: MachineState, link: LinkRecord) -> tuple[int, int]:
    """Return (stage, microbatch) of what the link's devices need back first; NONE twice where it must wait."""
    best, best_m, lowest = NONE, NONE, NEVER
    d = link.first_behind
    while d != NONE:
        device = x.devices[d]
        while device.back < device.last_place:
            s, m = activation(x.order[device.back])
            if x.acts[s, m].mode == OFFLOAD:
                break
            device.back += 1
        if device.back < device.last_place and not (device.ahead >= AHEAD and device.opening):
            s, m = activation(x.order[device.back])
            act, moved = x.acts[s, m], x.costs[sort(x, m), s, MOVED]
            is_due = act.where == AWAY and _is_due(x, x.stages[s].reloaded_before, s, m)
            if is_due and act.backward < lowest and is_safe(x, d, moved, 0, H, s, m):
                best, best_m, lowest = s, m, act.backward
        d = device.next_behind
    return best, best_m
