"""Device memory of the compiled machine: what ops and messages hold, and whether a grant is safe.

It is the file's memory (docs/IR.md). A receive is posted before the op that runs while its message is produced, so it
holds memory from that op's start on; that is known only when the message is produced. So a device keeps a reserve for
messages, and where that was too small its peak says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.machine.compiled import compiled
from optpipe_compiler.machine.state import (
    A_CHECK,
    A_GRADIENT,
    A_INPUT,
    A_MODE,
    A_WHERE,
    ACCUMULATORS,
    BEGUN_B,
    BEGUN_F,
    BEGUN_W,
    CHECKPOINT,
    CHECKS,
    D_BEFORE,
    D_BUDGET,
    D_ENOUGH,
    D_FINISHED,
    D_FIRST_STAGE,
    D_HELD,
    D_HIGH,
    D_HOST_BUDGET,
    D_KIND,
    D_LAST_PLACE,
    D_LEAVING,
    D_MAIL,
    D_MICROBATCH,
    D_MOMENT,
    D_PEAK,
    D_RESERVE,
    D_STAGE,
    D_START,
    EXTRA,
    FUSED,
    GRADIENT,
    KEEP,
    MESSAGE,
    MOVED,
    NEVER,
    NEXT,
    NONE,
    OFFLOAD,
    RECOMPUTE,
    RELOADING,
    RESIDUE,
    SAVED,
    TAKEN,
    U_FIRST,
    F,
    H,
    R,
    W,
    back,
    sort,
)

if TYPE_CHECKING:
    from optpipe_compiler.machine.state import MachineState, Row

# -- what is held


@compiled
def free(device: Row) -> int:
    """Return the units that an op may take."""
    return int(device[D_BUDGET] - device[D_HELD] - max(device[D_MAIL], device[D_RESERVE]))


@compiled
def take(device: Row, now: int, units: int, is_compute: bool) -> None:
    """An op starts and takes its units; from a compute op on, the device's highest level is measured anew."""
    before = device[D_BEFORE] if device[D_MOMENT] == now else device[D_HELD]
    device[D_HELD] += units
    level = max(before, device[D_HELD]) + device[D_MAIL]
    device[D_HIGH] = level if is_compute else max(device[D_HIGH], level)
    device[D_PEAK] = max(device[D_PEAK], device[D_HIGH])


@compiled
def receive(device: Row, units: int, is_posted_before: bool) -> None:
    """A message was produced; its receive was posted before the device's last compute op, or is posted now."""
    device[D_MAIL] += units
    device[D_HIGH] = (
        device[D_HIGH] + units if is_posted_before else max(device[D_HIGH], device[D_HELD] + device[D_MAIL])
    )
    device[D_PEAK] = max(device[D_PEAK], device[D_HIGH])


@compiled
def deliver(device: Row, now: int, units: int) -> None:
    """A message of the device has arrived and its buffer is free."""
    if device[D_MOMENT] != now:
        device[D_MOMENT], device[D_BEFORE] = now, device[D_HELD]
    device[D_HELD] -= units
    device[D_LEAVING] -= units


@compiled
def is_later(x: MachineState, device: Row, kind: int, s: int, m: int, start: int) -> bool:
    """Whether the device's last compute op comes, in planned order, after one that ends now: see schedule.sequence."""
    if device[D_KIND] == NONE:
        return False
    if device[D_START] != start:
        return bool(device[D_START] > start)
    last = device[D_MICROBATCH]
    if x.units[last, U_FIRST] != x.units[m, U_FIRST]:
        return bool(last > m)
    mine, other = _phase(device[D_KIND]), _phase(kind)
    if mine != other:
        return mine > other
    if last != m:
        return bool((last > m) == (kind == F))
    count = 2 * x.acts.shape[0]
    depth = device[D_STAGE] if device[D_KIND] == F else count - device[D_STAGE]
    return bool(depth > (s if kind == F else count - s))


@compiled
def _phase(kind: int) -> int:
    return 0 if kind == F else 2 if kind == R else 4 if kind == W else 3


# -- what may be granted


@compiled
def is_safe(x: MachineState, d: int, taken: int, given: int, kind: int, s: int, m: int) -> bool:
    """Whether, after the op took and gave its units, the device can finish its activations one after the other."""
    device = x.devices[d]
    left = free(device) - taken
    if left < 0:
        return False
    left += given + device[D_LEAVING]
    if left >= device[D_ENOUGH]:
        return True
    x.counts[CHECKS] += 1
    if kind == F:
        x.acts[s, m, A_CHECK] = x.counts[CHECKS]
    for place in range(device[D_FINISHED], device[D_LAST_PLACE]):
        left = _finish(x, d, x.order[place], left, kind, s, m)
        if left < 0:
            return False
        if left >= device[D_ENOUGH]:
            return True
    return True


@compiled
def _finish(x: MachineState, d: int, activation: int, left: int, kind: int, granted_s: int, granted_m: int) -> int:
    """Return the units that are free once the activation is finished, NONE if that gets stuck.

    The microbatch's forwards up to its stage that have not begun are run first, its earlier slices before. (Later ones
    have their backwards before, and so are finished.)
    """
    s, m = divmod(activation, x.acts.shape[1])
    is_cut = x.costs.shape[0] > 1
    for slice in range(x.units[m, U_FIRST] if is_cut else m, m + 1):
        earlier = x.devices[d, D_FIRST_STAGE]
        while earlier != NONE and earlier <= s:
            act = x.acts[earlier, slice]
            if slice >= x.stages[earlier, BEGUN_F] and act[A_CHECK] != x.counts[CHECKS]:
                row = x.costs[sort(x, slice), earlier]
                act[A_CHECK] = x.counts[CHECKS]
                is_there = act[A_INPUT] < NEVER
                if row[TAKEN + F] + (0 if is_there else row[MESSAGE + 1]) > left:
                    return NONE
                left -= _staying(act, row) - (row[MESSAGE + 1] if is_there else 0)
            earlier = x.stages[earlier, NEXT]
    there, more = _held(x, s, m, kind, granted_s, granted_m)
    if there or more:
        row = x.costs[sort(x, m), s]
        outgoing = row[MESSAGE] if x.acts[s, m, A_GRADIENT] < NEVER else 0
        added = freed = 0
        if is_cut and back(x, m) >= x.stages[s, BEGUN_B]:
            added, freed = row[ACCUMULATORS], row[GRADIENT]
        if more + added + row[EXTRA + x.stages[s, FUSED]] - outgoing > left:
            return NONE
        left += there + outgoing - added + freed
    return left


@compiled
def _staying(act: Row, row: Row) -> int:
    """Return the units of an activation that stay on the device after its forward."""
    if act[A_MODE] == KEEP:
        return int(row[SAVED])
    return int(row[CHECKPOINT] if act[A_MODE] == RECOMPUTE else row[SAVED] - row[MOVED])


@compiled
def _held(x: MachineState, s: int, m: int, kind: int, granted_s: int, granted_m: int) -> tuple[int, int]:
    """Return the units of one activation on the device now, and those that its backward will still add."""
    stage, place = x.stages[s], back(x, m)
    if place < stage[BEGUN_W] or (place < stage[BEGUN_B] and stage[FUSED]):
        return 0, 0
    act, row = x.acts[s, m], x.costs[sort(x, m), s]
    if place < stage[BEGUN_B]:
        return row[RESIDUE], 0
    is_granted = kind in (H, R) and s == granted_s and m == granted_m
    if act[A_MODE] == KEEP or is_granted or act[A_WHERE] >= RELOADING:
        return row[SAVED], 0
    staying = _staying(act, row)
    return staying, row[SAVED] - staying


@compiled
def enough(x: MachineState, d: int) -> int:
    """Return the units with which any one microbatch can go through the device alone."""
    hold = need = 0
    has_host_cap = x.devices[d, D_HOST_BUDGET] < NEVER
    s = x.devices[d, D_FIRST_STAGE]
    while s != NONE:
        most = slices = 0
        for m in range(x.acts.shape[1]):
            act, row = x.acts[s, m], x.costs[sort(x, m), s]
            may_stay = act[A_MODE] == KEEP or (act[A_MODE] == OFFLOAD and has_host_cap)
            stays = (row[SAVED] if may_stay else _staying(act, row)) + row[ACCUMULATORS]
            slices = stays if x.units[m, U_FIRST] == m else slices + stays
            most = max(most, slices)
            need = max(need, row[SAVED] + row[EXTRA + x.stages[s, FUSED]])
        hold += most
        s = x.stages[s, NEXT]
    return hold + need
