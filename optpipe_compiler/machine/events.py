"""What happens in the machine: ops start and complete, messages and transfers go their way.

Who decides what starts (the list scheduler, a given order, given times) is elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.machine.compiled import compiled
from optpipe_compiler.machine.memory import deliver, is_later, receive, take
from optpipe_compiler.machine.state import (
    ACTIVATION,
    ALONE,
    AWAY,
    BACK,
    BOX,
    BUSY,
    COMPUTED,
    EVENTS,
    GIVEN,
    HALF_DONE,
    LAG,
    LENGTH,
    MESSAGE,
    MOVED,
    NEVER,
    NONE,
    OFFLOAD,
    OFFLOADING,
    OPS,
    PRODUCED,
    RANDOM,
    RECEIVED,
    RECOMPUTE,
    RECOMPUTING,
    RELOADING,
    RESTORED,
    TAKEN,
    WAKE,
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
    op,
    pop,
    push,
    sort,
    touch,
)

if TYPE_CHECKING:
    from optpipe_compiler.machine.state import DeviceRecord, MachineState, Row, StageRecord


@compiled
def reset(x: MachineState) -> None:
    """Nothing has run."""
    count, microbatches = x.acts.shape
    for place in range(RANDOM):
        x.counts[place] = 0
    for place in range(x.starts.size):
        x.starts.flat[place] = NONE
    for s in range(count):
        stage = x.stages[s]
        stage.begun_f = stage.begun_b = stage.begun_w = 0
        stage.done_f = stage.done_b = stage.done_w = stage.left = 0
        for m in range(microbatches):
            act = x.acts[s, m]
            act.input = NEVER if s else 0
            act.gradient = NEVER
            act.check = act.where = 0
    for place in range(x.touched.size):
        x.touched.flat[place] = 0
    for link in range(x.links.shape[0]):
        x.links[link].d_stage = x.links[link].h_stage = NONE
        x.links[link].waiting = 0
    for d in range(x.devices.shape[0]):
        device = x.devices[d]
        device.held = device.mail = device.leaving = device.high = device.peak = 0
        device.busy = device.ahead = device.free = device.next = 0
        device.first = device.kind = device.moment = NONE
        touch(x, d, 0)
        device.back = device.finished = device.first_place
        device.opening = device.last_place - device.first_place
        device.host = device.host_budget


@compiled
def next_moment(x: MachineState) -> int:
    """Let happen what happens at the time of the first event; return that time."""
    now = x.events[0].time
    while x.counts[EVENTS] and x.events[0].time == now:
        kind, s, m = pop(x)
        if kind == WAKE:
            touch(x, x.stages[s].device, 0)
        elif kind >= ACTIVATION:
            receive_all(x, now)
            arrive(x, now, kind - ACTIVATION, s, m)
        elif kind >= D:
            transferred(x, now, kind, s, m)
        else:
            complete(x, now, kind, s, m)
    receive_all(x, now)
    arrive_at_once(x, now)
    return now


# -- compute


@compiled
def begin(x: MachineState, now: int, kind: int, s: int, m: int) -> None:
    """A compute op starts."""
    device, row = x.devices[x.stages[s].device], x.costs[sort(x, m), s]
    if device.first == NONE:
        device.first = now
    take(device, now, row[TAKEN + kind], True)
    device.busy = 1
    device.kind, device.stage, device.microbatch = kind, s, m
    device.start, device.end = now, now + row[LENGTH + kind]
    if kind != W and kind != R:
        device.leaving += sent(x, s, kind, m)
    if kind == R:
        x.acts[s, m].where = RECOMPUTING
    x.starts[kind, s, m] = now
    x.counts[OPS] += 1
    push(x, device.end, kind, s, m)


@compiled
def is_idle(x: MachineState, now: int, d: int) -> bool:
    """Whether a device's compute may start an op, for all that its lane runs and that offloads take from it."""
    device = x.devices[d]
    if device.busy or device.next > now:
        return False
    if device.free > now:
        _rest(x, d, device.free)
        return False
    return True


@compiled
def gives_way(x: MachineState, now: int, kind: int, s: int, m: int) -> bool:
    """Whether a compute op that could start must let its reload have compute first; the device is woken up after."""
    if (kind != B and kind != I) or x.acts[s, m].mode != OFFLOAD:
        return False
    d = x.stages[s].device
    until = x.devices[d].free + x.costs[sort(x, m), s, BUSY + 1]
    if until <= now:
        return False
    _rest(x, d, until)
    return True


@compiled
def _rest(x: MachineState, d: int, until: int) -> None:
    x.devices[d].next = until
    push(x, until, WAKE, x.devices[d].first_stage, 0)


@compiled
def sent(x: MachineState, s: int, kind: int, m: int) -> int:
    """Return the units that an op sends to another device."""
    target = s + 1 if kind == F else s - 1
    if target < 0 or target >= x.acts.shape[0] or x.stages[target].device == x.stages[s].device:
        return 0
    return x.costs[sort(x, m), s, MESSAGE + (0 if kind == F else 1)]


@compiled
def complete(x: MachineState, now: int, kind: int, s: int, m: int) -> None:
    """A compute op has completed: it gives its memory back and hands its result on."""
    stage, act, row = x.stages[s], x.acts[s, m], x.costs[sort(x, m), s]
    device = x.devices[stage.device]
    device.busy = 0
    touch(x, stage.device, 0)
    device.free = now + (row[BUSY] if kind == F and act.mode == OFFLOAD else 0)
    device.held -= row[GIVEN + (7 if act.mode == RECOMPUTE else 0) + kind]
    if kind == R:
        act.where = RESTORED
    elif kind == F:
        stage.done_f += 1
        act.where = COMPUTED
        if act.mode == OFFLOAD:
            x.links[device.link].waiting += 1
        consume(x, device, stage, row, s - 1, 1)
        if s + 1 < x.acts.shape[0]:
            hand_on(x, now, kind, s, m)
        else:
            act.gradient = now
    elif kind != W:
        stage.done_b += 1
        act.where = HALF_DONE
        consume(x, device, stage, row, s + 1, 0)
        if s:
            hand_on(x, now, kind, s, m)
    if kind in (W, B):
        stage.done_w += 1
        while device.finished < device.last_place:
            done, number = activation(x.order[device.finished])
            if back(x, number) >= x.stages[done].done_w:
                break
            device.finished += 1


@compiled
def consume(x: MachineState, device: DeviceRecord, stage: StageRecord, row: Row, source: int, way: int) -> None:
    """What the op gave back included what it read; if that came from another device, it was a message."""
    if 0 <= source < x.acts.shape[0] and x.stages[source].device != stage.device:
        device.mail -= row[MESSAGE + way]
        device.held += row[MESSAGE + way]


@compiled
def hand_on(x: MachineState, now: int, kind: int, s: int, m: int) -> None:
    """Give the result of F, I or B to the next stage, at once or as a message."""
    way = 0 if kind == F else 1
    target = s + 1 if kind == F else s - 1
    time = now
    if x.stages[target].device != x.stages[s].device:
        time += x.costs[sort(x, m), s, LAG + way]
        x.counts[BOX + x.counts[PRODUCED]] = code(kind, s, m)
        x.counts[PRODUCED] += 1
        if time > now:
            push(x, time, ACTIVATION + way, s, m)
    if kind == F:
        x.acts[target, m].input = time
    else:
        x.acts[target, m].gradient = time


# -- messages


@compiled
def receive_all(x: MachineState, now: int) -> None:
    """Post the receives of what was produced at this moment."""
    for number in range(x.counts[RECEIVED], x.counts[PRODUCED]):
        kind, s, m = op(x.counts[BOX + number])
        device = x.devices[x.stages[s + 1 if kind == F else s - 1].device]
        is_running = device.kind != NONE and device.end > now
        is_last = device.end == now and is_later(x, device, kind, s, m, x.starts[kind, s, m])
        receive(device, x.costs[sort(x, m), s, MESSAGE + (0 if kind == F else 1)], is_running or is_last)
    x.counts[RECEIVED] = x.counts[PRODUCED]


@compiled
def arrive(x: MachineState, now: int, way: int, s: int, m: int) -> None:
    """A message of stage s has arrived."""
    deliver(x.devices[x.stages[s].device], now, x.costs[sort(x, m), s, MESSAGE + way])
    touch(x, x.stages[s].device, 0)
    touch(x, x.stages[s - 1 if way else s + 1].device, 0)


@compiled
def arrive_at_once(x: MachineState, now: int) -> None:
    """Deliver the messages of this moment that take no time, and forget all that were produced."""
    for number in range(x.counts[PRODUCED]):
        kind, s, m = op(x.counts[BOX + number])
        way = 0 if kind == F else 1
        if x.costs[sort(x, m), s, LAG + way] == 0:
            arrive(x, now, way, s, m)
    x.counts[PRODUCED] = x.counts[RECEIVED] = 0


# -- transfers


@compiled
def begin_transfer(x: MachineState, now: int, kind: int, s: int, m: int) -> None:
    """A transfer starts; one of the other direction that is running takes longer from now on, and so does this one."""
    device, row = x.devices[x.stages[s].device], x.costs[sort(x, m), s]
    link = x.links[device.link]
    if kind == D:
        x.acts[s, m].where = OFFLOADING
        link.waiting -= 1
        link.d_stage, link.d_microbatch = s, m
        length = row[ALONE]
        if link.h_stage != NONE:
            length = row[LENGTH + D]
            slow_down(x, H, link.h_stage, link.h_microbatch)
    else:
        x.acts[s, m].where = RELOADING
        take(device, now, row[MOVED], False)
        link.h_stage, link.h_microbatch = s, m
        length = row[ALONE + 1]
        if link.d_stage != NONE:
            length = row[LENGTH + H]
            slow_down(x, D, link.d_stage, link.d_microbatch)
    x.starts[kind, s, m] = now
    x.counts[OPS] += 1
    end_transfer(x, kind, s, m, now + length)


@compiled
def slow_down(x: MachineState, kind: int, s: int, m: int) -> None:
    """A running transfer meets one of the other direction."""
    end = x.starts[kind, s, m] + x.costs[sort(x, m), s, LENGTH + kind]
    if end != x.acts[s, m].end:
        end_transfer(x, kind, s, m, end)


@compiled
def end_transfer(x: MachineState, kind: int, s: int, m: int, end: int) -> None:
    """Let a transfer complete at `end`; an event for an earlier end no longer counts."""
    x.acts[s, m].end = end
    push(x, end, kind, s, m)


@compiled
def transferred(x: MachineState, now: int, kind: int, s: int, m: int) -> None:
    """A transfer has completed, unless it was slowed down meanwhile."""
    act = x.acts[s, m]
    if now != act.end:
        return
    device, moved = x.devices[x.stages[s].device], x.costs[sort(x, m), s, MOVED]
    link = x.links[device.link]
    if kind == D:
        link.d_stage = NONE
        act.where = AWAY
        device.held -= moved
        device.leaving -= moved
    else:
        link.h_stage = NONE
        act.where = BACK
        device.host += moved
    d = link.first_behind
    while d != NONE:
        touch(x, d, 0)
        d = x.devices[d].next_behind
