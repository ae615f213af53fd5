"""Device memory of the compiled machine: what ops and messages hold, and whether a grant is safe.

It is the file's memory (docs/IR.md). A receive is posted before the op that runs while its message is produced, so it
holds memory from that op's start on; that is known only when the message is produced. So a device keeps a reserve for
messages, and where that was too small its peak says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.machine.compiled import compiled
from optpipe_compiler.machine.state import (
    ACCUMULATORS,
    CHECKPOINT,
    CHECKS,
    EXTRA,
    GRADIENT,
    KEEP,
    MESSAGE,
    MOVED,
    NEVER,
    NONE,
    OFFLOAD,
    RECOMPUTE,
    RELOADING,
    RESIDUE,
    SAVED,
    TAKEN,
    F,
    H,
    R,
    W,
    activation,
    back,
    sort,
)

if TYPE_CHECKING:
    from optpipe_compiler.machine.state import ActivationRecord, DeviceRecord, MachineState, Row

# -- what is held


@compiled
def free(device: DeviceRecord) -> int:
    """Return the units that an op may take."""
    return device.budget - device.held - max(device.mail, device.reserve)


@compiled
def take(device: DeviceRecord, now: int, units: int, is_compute: bool) -> None:
    """An op starts and takes its units; from a compute op on, the device's highest level is measured anew."""
    before = device.before if device.moment == now else device.held
    device.held += units
    level = max(before, device.held) + device.mail
    device.high = level if is_compute else max(device.high, level)
    device.peak = max(device.peak, device.high)


@compiled
def receive(device: DeviceRecord, units: int, is_posted_before: bool) -> None:
    """A message was produced; its receive was posted before the device's last compute op, or is posted now."""
    device.mail += units
    device.high = device.high + units if is_posted_before else max(device.high, device.held + device.mail)
    device.peak = max(device.peak, device.high)


@compiled
def deliver(device: DeviceRecord, now: int, units: int) -> None:
    """A message of the device has arrived and its buffer is free."""
    if device.moment != now:
        device.moment, device.before = now, device.held
    device.held -= units
    device.leaving -= units


@compiled
def is_later(x: MachineState, device: DeviceRecord, kind: int, s: int, m: int, start: int) -> bool:
    """Whether the device's last compute op comes, in planned order, after one that ends now: see schedule.sequence."""
    if device.kind == NONE:
        return False
    if device.start != start:
        return device.start > start
    last = device.microbatch
    if x.units[last].first != x.units[m].first:
        return last > m
    mine, other = _phase(device.kind), _phase(kind)
    if mine != other:
        return mine > other
    if last != m:
        return (last > m) == (kind == F)
    count = 2 * x.acts.shape[0]
    depth = device.stage if device.kind == F else count - device.stage
    return depth > (s if kind == F else count - s)


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
    left += given + device.leaving
    if left >= device.enough:
        return True
    x.counts[CHECKS] += 1
    if kind == F:
        x.acts[s, m].check = x.counts[CHECKS]
    for place in range(device.finished, device.last_place):
        left = _finish(x, d, x.order[place], left, kind, s, m)
        if left < 0:
            return False
        if left >= device.enough:
            return True
    return True


@compiled
def _finish(x: MachineState, d: int, which: int, left: int, kind: int, granted_s: int, granted_m: int) -> int:
    """Return the units that are free once the activation is finished, NONE if that gets stuck.

    The microbatch's forwards up to its stage that have not begun are run first, its earlier slices before. (Later ones
    have their backwards before, and so are finished.)
    """
    s, m = activation(which)
    is_cut = x.costs.shape[0] > 1
    for slice in range(x.units[m].first if is_cut else m, m + 1):
        earlier = x.devices[d].first_stage
        while earlier != NONE and earlier <= s:
            act = x.acts[earlier, slice]
            if slice >= x.stages[earlier].begun_f and act.check != x.counts[CHECKS]:
                row = x.costs[sort(x, slice), earlier]
                act.check = x.counts[CHECKS]
                is_there = act.input < NEVER
                if row[TAKEN + F] + (0 if is_there else row[MESSAGE + 1]) > left:
                    return NONE
                left -= _staying(act, row) - (row[MESSAGE + 1] if is_there else 0)
            earlier = x.stages[earlier].next
    there, more = _held(x, s, m, kind, granted_s, granted_m)
    if there or more:
        row = x.costs[sort(x, m), s]
        outgoing = row[MESSAGE] if x.acts[s, m].gradient < NEVER else 0
        added = freed = 0
        if is_cut and back(x, m) >= x.stages[s].begun_b:
            added, freed = row[ACCUMULATORS], row[GRADIENT]
        if more + added + row[EXTRA + x.stages[s].fused] - outgoing > left:
            return NONE
        left += there + outgoing - added + freed
    return left


@compiled
def _staying(act: ActivationRecord, row: Row) -> int:
    """Return the units of an activation that stay on the device after its forward."""
    if act.mode == KEEP:
        return row[SAVED]
    return row[CHECKPOINT] if act.mode == RECOMPUTE else row[SAVED] - row[MOVED]


@compiled
def _held(x: MachineState, s: int, m: int, kind: int, granted_s: int, granted_m: int) -> tuple[int, int]:
    """Return the units of one activation on the device now, and those that its backward will still add."""
    stage, place = x.stages[s], back(x, m)
    if place < stage.begun_w or (place < stage.begun_b and stage.fused):
        return 0, 0
    act, row = x.acts[s, m], x.costs[sort(x, m), s]
    if place < stage.begun_b:
        return row[RESIDUE], 0
    is_granted = kind in (H, R) and s == granted_s and m == granted_m
    if act.mode == KEEP or is_granted or act.where >= RELOADING:
        return row[SAVED], 0
    staying = _staying(act, row)
    return staying, row[SAVED] - staying


@compiled
def enough(x: MachineState, d: int) -> int:
    """Return the units with which any one microbatch can go through the device alone."""
    hold = need = 0
    has_host_cap = x.devices[d].host_budget < NEVER
    s = x.devices[d].first_stage
    while s != NONE:
        most = slices = 0
        for m in range(x.acts.shape[1]):
            act, row = x.acts[s, m], x.costs[sort(x, m), s]
            may_stay = act.mode == KEEP or (act.mode == OFFLOAD and has_host_cap)
            stays = (row[SAVED] if may_stay else _staying(act, row)) + row[ACCUMULATORS]
            slices = stays if x.units[m].first == m else slices + stays
            most = max(most, slices)
            need = max(need, row[SAVED] + row[EXTRA + x.stages[s].fused])
        hold += most
        s = x.stages[s].next
    return hold + need
