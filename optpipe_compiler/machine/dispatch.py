"""The compiled list scheduler: ranks say what goes first, the machine says when it can.

It runs the pipeline forward in time. Whenever a device is idle it starts, of the ops that are ready and safe, the one
of the lowest rank; transfers start as soon as their link is free, and two that meet on a link take as long as it needs
for both directions. Microbatches keep their order within a stage. *Safe* is the banker's rule (Dijkstra, 1965): memory
is granted only if afterwards the device can still finish its activations one after the other, in the order of their
backwards' ranks; so there is no deadlock if the ranks make sense.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.machine.compiled import compiled, entry
from optpipe_compiler.machine.events import begin, begin_transfer, gives_way, is_idle, next_moment, reset, sent
from optpipe_compiler.machine.memory import enough, free, is_safe
from optpipe_compiler.machine.state import (
    A_BACKWARD,
    A_FORWARD,
    A_GRADIENT,
    A_INPUT,
    A_MODE,
    A_WEIGHT,
    A_WHERE,
    AWAY,
    BACK,
    BEGUN_B,
    BEGUN_F,
    BEGUN_W,
    CHECKPOINT,
    COMPUTED,
    D_AHEAD,
    D_BACK,
    D_END,
    D_ENOUGH,
    D_FIRST,
    D_FIRST_PLACE,
    D_FIRST_STAGE,
    D_HOST,
    D_KIND,
    D_LAST_PLACE,
    D_LEAVING,
    D_LINK,
    D_NEXT_BEHIND,
    D_OPENING,
    D_REMAINING,
    D_TOUCHED,
    DEVICE,
    DONE_B,
    DONE_F,
    DONE_W,
    EVENTS,
    FUSED,
    GIVEN,
    KEEP,
    L_D_STAGE,
    L_FIRST_BEHIND,
    L_H_STAGE,
    LEFT,
    LENGTH,
    MOVED,
    NEVER,
    NEXT,
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
    back,
    sort,
)

if TYPE_CHECKING:
    from optpipe_compiler.machine.state import MachineState, Row

DONE, LATE, STUCK = range(3)
"""How a run ends: all ops have completed; a device can no longer be done by the cutoff; some ops never start."""
AHEAD = 1
"""Activations that a device may have reloaded ahead of their backwards while it has forwards to run."""


@entry
def play(x: MachineState, is_span: bool, cutoff: int) -> tuple[int, int, int]:
    """Run what the machine's activations say (ranks, modes), its stages (FUSED) and its devices (reserve).

    Afterwards it holds the starts of all ops and the peaks of all devices. Returns (DONE | LATE | STUCK, the makespan
    or the longest span in ticks, ops started).
    """
    _begin(x)
    now, devices = 0, x.devices
    while True:
        for d in range(devices.shape[0]):
            if devices[d, D_TOUCHED]:
                devices[d, D_TOUCHED] = 0
                if devices[d, D_LINK] != NONE:
                    _start_transfers(x, now, devices[d, D_LINK])
                if is_idle(x, now, d) and not _start_next(x, now, d, is_span, cutoff):
                    return LATE, 0, x.counts[OPS]
        if x.counts[EVENTS] == 0:
            break
        now = next_moment(x)
    return _result(x, is_span)


@compiled
def _begin(x: MachineState) -> None:
    reset(x)
    for d in range(x.devices.shape[0]):
        device = x.devices[d]
        device[D_REMAINING] = _work(x, d)
        device[D_ENOUGH] = enough(x, d)
        _merge(x, device)


@compiled
def _work(x: MachineState, d: int) -> int:
    total = 0
    s = x.devices[d, D_FIRST_STAGE]
    while s != NONE:
        is_fused = x.stages[s, FUSED]
        for m in range(x.acts.shape[1]):
            row = x.costs[sort(x, m), s]
            total += row[LENGTH + F] + (row[LENGTH + B] if is_fused else row[LENGTH + I] + row[LENGTH + W])
            if x.acts[s, m, A_MODE] == RECOMPUTE:
                total += row[LENGTH + R]
        s = x.stages[s, NEXT]
    return total


@compiled
def _merge(x: MachineState, device: Row) -> None:
    """Order the device's activations by the ranks of their backwards, of equal ones the later stage first."""
    microbatches = x.acts.shape[1]
    for place in range(device[D_FIRST_PLACE], device[D_LAST_PLACE]):
        best, lowest = NONE, NEVER
        s = device[D_FIRST_STAGE]
        while s != NONE:
            there = x.stages[s, DONE_W]  # counts those that are in place; nothing has run yet
            if there < microbatches:
                rank = x.acts[s, back(x, there), A_BACKWARD]
                if rank <= lowest:
                    best, lowest = s, rank
            s = x.stages[s, NEXT]
        x.order[place] = best * microbatches + back(x, x.stages[best, DONE_W])
        x.stages[best, DONE_W] += 1
    s = device[D_FIRST_STAGE]
    while s != NONE:
        x.stages[s, DONE_W] = 0
        s = x.stages[s, NEXT]


@compiled
def _result(x: MachineState, is_span: bool) -> tuple[int, int, int]:
    finished = value = 0
    for s in range(x.acts.shape[0]):
        finished += x.stages[s, DONE_W]
    for d in range(x.devices.shape[0]):
        device = x.devices[d]
        if device[D_KIND] != NONE:
            value = max(value, device[D_END] - (device[D_FIRST] if is_span else 0))
    return DONE if finished == x.order.size else STUCK, value, x.counts[OPS]


# -- compute


@compiled
def _start_next(x: MachineState, now: int, d: int, is_span: bool, cutoff: int) -> bool:
    """Start the device's best op, if any may start; return False if it cannot be done by the cutoff."""
    kind, s, m = _choose(x, now, d)
    if kind == NONE:
        return True
    device, stage, act, row = x.devices[d], x.stages[s], x.acts[s, m], x.costs[sort(x, m), s]
    first = now if device[D_FIRST] == NONE else device[D_FIRST]
    if now + device[D_REMAINING] - (first if is_span else 0) > cutoff:
        return False
    if gives_way(x, now, kind, s, m):
        return True
    device[D_REMAINING] -= row[LENGTH + kind]
    if kind == F:
        act[A_MODE] = _mode(x, d, s, m)
        stage[BEGUN_F] += 1
        device[D_OPENING] -= 1
        if act[A_MODE] == OFFLOAD:
            device[D_LEAVING] += row[MOVED]
            device[D_HOST] -= row[MOVED]
    elif kind == W:
        stage[BEGUN_W] += 1
    elif kind != R:
        stage[BEGUN_B] += 1
        if act[A_MODE] == OFFLOAD:
            device[D_AHEAD] -= 1
    begin(x, now, kind, s, m)
    return True


@compiled
def _choose(x: MachineState, now: int, d: int) -> tuple[int, int, int]:
    """Return (kind, stage, microbatch) of the op of the lowest rank that may start now; NONE thrice without any."""
    best, best_s, best_m, lowest = NONE, NONE, NONE, NEVER
    room = free(x.devices[d])
    s = x.devices[d, D_FIRST_STAGE]
    while s != NONE:
        stage = x.stages[s]
        m = stage[BEGUN_F]
        if m < x.acts.shape[1]:
            act = x.acts[s, m]
            if act[A_INPUT] <= now and act[A_FORWARD] < lowest:
                fits = x.costs[sort(x, m), s, TAKEN + F] <= room
                if fits and _may_run(x, d, s, m):
                    best, best_s, best_m, lowest = F, s, m, act[A_FORWARD]
        place = stage[BEGUN_B]
        if place < x.acts.shape[1]:
            m = back(x, place)
            act = x.acts[s, m]
            is_dropped = act[A_MODE] == RECOMPUTE and act[A_WHERE] == COMPUTED
            if (is_dropped or act[A_GRADIENT] <= now) and act[A_BACKWARD] < lowest:
                kind = _backward(x, d, s, m)
                if kind != NONE:
                    best, best_s, best_m, lowest = kind, s, m, act[A_BACKWARD]
        place = stage[BEGUN_W]
        if not stage[FUSED] and place < stage[DONE_B]:
            m = back(x, place)
            rank, taken = x.acts[s, m, A_WEIGHT], x.costs[sort(x, m), s, TAKEN + W]
            if rank < lowest and (taken <= room or taken == 0):
                best, best_s, best_m, lowest = W, s, m, rank
        s = stage[NEXT]
    return best, best_s, best_m


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
    mode = x.acts[s, m, A_MODE]
    return KEEP if mode == OFFLOAD and x.devices[d, D_HOST] < x.costs[sort(x, m), s, MOVED] else int(mode)


@compiled
def _backward(x: MachineState, d: int, s: int, m: int) -> int:
    """Return the kind of op with which the backward of (s, m) may go on now, NONE if it may not.

    The next backward of a stage may be recomputed for before its gradient is there, if nothing else has a lower rank.
    """
    act, stage, row = x.acts[s, m], x.stages[s], x.costs[sort(x, m), s]
    kept = 0
    if act[A_MODE] == RECOMPUTE and act[A_WHERE] == COMPUTED:
        kind, kept = R, row[SAVED] - row[CHECKPOINT]
    elif (act[A_MODE] == KEEP and act[A_WHERE] == COMPUTED) or act[A_WHERE] == BACK or act[A_WHERE] == RESTORED:
        kind = B if stage[FUSED] else I
    else:
        return NONE
    taken = row[TAKEN + kind]
    return kind if taken == 0 or is_safe(x, d, taken, taken - kept, kind, s, m) else NONE


# -- transfers


@compiled
def _start_transfers(x: MachineState, now: int, number: int) -> None:
    link = x.links[number]
    if link[L_D_STAGE] == NONE:
        s, m = _next_offload(x, link)
        if s != NONE:
            begin_transfer(x, now, D, s, m)
    if link[L_H_STAGE] == NONE:
        s, m = _next_reload(x, link)
        if s != NONE:
            device = x.devices[x.stages[s, DEVICE]]
            device[D_AHEAD] += 1
            device[D_BACK] += 1
            begin_transfer(x, now, H, s, m)


@compiled
def _next_offload(x: MachineState, link: Row) -> tuple[int, int]:
    """Return (stage, microbatch) of what leaves first: by the ranks of forwards, among those that have completed."""
    best, best_m, lowest = NONE, NONE, NEVER
    d = link[L_FIRST_BEHIND]
    while d != NONE:
        s = x.devices[d, D_FIRST_STAGE]
        while s != NONE:
            stage = x.stages[s]
            while stage[LEFT] < stage[DONE_F]:
                act = x.acts[s, stage[LEFT]]
                if act[A_MODE] == OFFLOAD and act[A_WHERE] == COMPUTED:
                    break
                stage[LEFT] += 1
            if stage[LEFT] < stage[DONE_F]:
                rank = x.acts[s, stage[LEFT], A_FORWARD]
                if rank < lowest or (rank == lowest and s < best):
                    best, best_m, lowest = s, stage[LEFT], rank
            s = stage[NEXT]
        d = x.devices[d, D_NEXT_BEHIND]
    return best, best_m


@compiled
def _next_reload(x: MachineState, link: Row) -> tuple[int, int]:
    """Return (stage, microbatch) of what the link's devices need back first; NONE twice where it must wait."""
    best, best_m, lowest = NONE, NONE, NEVER
    d = link[L_FIRST_BEHIND]
    while d != NONE:
        device = x.devices[d]
        while device[D_BACK] < device[D_LAST_PLACE]:
            s, m = divmod(x.order[device[D_BACK]], x.acts.shape[1])
            if x.acts[s, m, A_MODE] == OFFLOAD:
                break
            device[D_BACK] += 1
        if device[D_BACK] < device[D_LAST_PLACE] and not (device[D_AHEAD] >= AHEAD and device[D_OPENING]):
            s, m = divmod(x.order[device[D_BACK]], x.acts.shape[1])
            act, moved = x.acts[s, m], x.costs[sort(x, m), s, MOVED]
            if act[A_WHERE] == AWAY and act[A_BACKWARD] < lowest and is_safe(x, d, moved, 0, H, s, m):
                best, best_m, lowest = s, m, act[A_BACKWARD]
        d = device[D_NEXT_BEHIND]
    return best, best_m
