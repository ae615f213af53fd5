"""What happens in the machine: ops start and complete, messages and transfers go their way.

Who decides what starts (the list scheduler, a given order, given times) is elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.machine.compiled import compiled
from optpipe_compiler.machine.memory import deliver, is_later, receive, take
from optpipe_compiler.machine.state import (
    A_CHECK,
    A_END_D,
    A_END_H,
    A_GRADIENT,
    A_INPUT,
    A_MODE,
    A_WHERE,
    ACTIVATION,
    ALONE,
    AWAY,
    BACK,
    BEGUN_F,
    BOX,
    BUSY,
    COMPUTED,
    D_AHEAD,
    D_BACK,
    D_BUSY,
    D_END,
    D_FINISHED,
    D_FIRST,
    D_FIRST_PLACE,
    D_FIRST_STAGE,
    D_FREE,
    D_HELD,
    D_HIGH,
    D_HOST,
    D_HOST_BUDGET,
    D_KIND,
    D_LAST_PLACE,
    D_LEAVING,
    D_LINK,
    D_MAIL,
    D_MICROBATCH,
    D_MOMENT,
    D_NEXT,
    D_NEXT_BEHIND,
    D_OPENING,
    D_PEAK,
    D_STAGE,
    D_START,
    D_TOUCHED,
    DEVICE,
    DONE_B,
    DONE_F,
    DONE_W,
    EVENTS,
    FUSED,
    GIVEN,
    HALF_DONE,
    L_D_MICROBATCH,
    L_D_STAGE,
    L_FIRST_BEHIND,
    L_H_MICROBATCH,
    L_H_STAGE,
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
    back,
    pop,
    push,
    sort,
)

if TYPE_CHECKING:
    from optpipe_compiler.machine.state import MachineState, Row


@compiled
def reset(x: MachineState) -> None:
    """Nothing has run."""
    count, microbatches = x.acts.shape[:2]
    x.counts[:BOX] = 0
    x.starts[:] = NONE
    for s in range(count):
        x.stages[s, BEGUN_F:FUSED] = 0
        for m in range(microbatches):
            act = x.acts[s, m]
            act[A_INPUT] = NEVER if s else 0
            act[A_GRADIENT] = NEVER
            act[A_CHECK] = act[A_WHERE] = 0
    for link in range(x.links.shape[0]):
        x.links[link, L_D_STAGE] = x.links[link, L_H_STAGE] = NONE
    for d in range(x.devices.shape[0]):
        device = x.devices[d]
        device[D_HELD] = device[D_MAIL] = device[D_LEAVING] = device[D_BUSY] = device[D_AHEAD] = device[
            D_HIGH
        ] = device[D_PEAK] = device[D_FREE] = device[D_NEXT] = 0
        device[D_FIRST] = device[D_KIND] = device[D_MOMENT] = NONE
        device[D_TOUCHED] = 1
        device[D_BACK] = device[D_FINISHED] = device[D_FIRST_PLACE]
        device[D_OPENING] = device[D_LAST_PLACE] - device[D_FIRST_PLACE]
        device[D_HOST] = device[D_HOST_BUDGET]


@compiled
def next_moment(x: MachineState) -> int:
    """Let happen what happens at the time of the first event; return that time."""
    now = x.events[0, 0]
    while x.counts[EVENTS] and x.events[0, 0] == now:
        kind, s, m = pop(x)
        if kind == WAKE:
            x.devices[x.stages[s, DEVICE], D_TOUCHED] = 1
        elif kind >= ACTIVATION:
            receive_all(x, now)
            arrive(x, now, kind - ACTIVATION, s, m)
        elif kind >= D:
            transferred(x, now, kind, s, m)
        else:
            complete(x, now, kind, s, m)
    receive_all(x, now)
    arrive_at_once(x, now)
    return int(now)


# -- compute


@compiled
def begin(x: MachineState, now: int, kind: int, s: int, m: int) -> None:
    """A compute op starts."""
    device, row = x.devices[x.stages[s, DEVICE]], x.costs[sort(x, m), s]
    if device[D_FIRST] == NONE:
        device[D_FIRST] = now
    take(device, now, row[TAKEN + kind], True)
    device[D_BUSY] = 1
    device[D_KIND], device[D_STAGE], device[D_MICROBATCH] = kind, s, m
    device[D_START], device[D_END] = now, now + row[LENGTH + kind]
    if kind != W and kind != R:
        device[D_LEAVING] += sent(x, s, kind, m)
    if kind == R:
        x.acts[s, m, A_WHERE] = RECOMPUTING
    x.starts[kind, s, m] = now
    x.counts[OPS] += 1
    push(x, device[D_END], kind, s, m)


@compiled
def is_idle(x: MachineState, now: int, d: int) -> bool:
    """Whether a device's compute may start an op, for all that its lane runs and that offloads take from it."""
    device = x.devices[d]
    if device[D_BUSY] or device[D_NEXT] > now:
        return False
    if device[D_FREE] > now:
        _rest(x, d, device[D_FREE])
        return False
    return True


@compiled
def gives_way(x: MachineState, now: int, kind: int, s: int, m: int) -> bool:
    """Whether a compute op that could start must let its reload have compute first; the device is woken up after."""
    if (kind != B and kind != I) or x.acts[s, m, A_MODE] != OFFLOAD:
        return False
    d = x.stages[s, DEVICE]
    until = x.devices[d, D_FREE] + x.costs[sort(x, m), s, BUSY + 1]
    if until <= now:
        return False
    _rest(x, d, until)
    return True


@compiled
def _rest(x: MachineState, d: int, until: int) -> None:
    x.devices[d, D_NEXT] = until
    push(x, until, WAKE, x.devices[d, D_FIRST_STAGE], 0)


@compiled
def sent(x: MachineState, s: int, kind: int, m: int) -> int:
    """Return the units that an op sends to another device."""
    target = s + 1 if kind == F else s - 1
    if target < 0 or target >= x.acts.shape[0] or x.stages[target, DEVICE] == x.stages[s, DEVICE]:
        return 0
    return int(x.costs[sort(x, m), s, MESSAGE + (0 if kind == F else 1)])


@compiled
def complete(x: MachineState, now: int, kind: int, s: int, m: int) -> None:
    """A compute op has completed: it gives its memory back and hands its result on."""
    stage, act, row = x.stages[s], x.acts[s, m], x.costs[sort(x, m), s]
    device = x.devices[stage[DEVICE]]
    device[D_BUSY], device[D_TOUCHED] = 0, 1
    device[D_FREE] = now + (row[BUSY] if kind == F and act[A_MODE] == OFFLOAD else 0)
    device[D_HELD] -= row[GIVEN + (7 if act[A_MODE] == RECOMPUTE else 0) + kind]
    if kind == R:
        act[A_WHERE] = RESTORED
    elif kind == F:
        stage[DONE_F] += 1
        act[A_WHERE] = COMPUTED
        consume(x, device, stage, row, s - 1, 1)
        if s + 1 < x.acts.shape[0]:
            hand_on(x, now, kind, s, m)
        else:
            act[A_GRADIENT] = now
    elif kind != W:
        stage[DONE_B] += 1
        act[A_WHERE] = HALF_DONE
        consume(x, device, stage, row, s + 1, 0)
        if s:
            hand_on(x, now, kind, s, m)
    if kind in (W, B):
        stage[DONE_W] += 1
        while device[D_FINISHED] < device[D_LAST_PLACE]:
            done, number = divmod(x.order[device[D_FINISHED]], x.acts.shape[1])
            if back(x, number) >= x.stages[done, DONE_W]:
                break
            device[D_FINISHED] += 1


@compiled
def consume(x: MachineState, device: Row, stage: Row, row: Row, source: int, way: int) -> None:
    """What the op gave back included what it read; if that came from another device, it was a message."""
    if 0 <= source < x.acts.shape[0] and x.stages[source, DEVICE] != stage[DEVICE]:
        device[D_MAIL] -= row[MESSAGE + way]
        device[D_HELD] += row[MESSAGE + way]


@compiled
def hand_on(x: MachineState, now: int, kind: int, s: int, m: int) -> None:
    """Give the result of F, I or B to the next stage, at once or as a message."""
    way = 0 if kind == F else 1
    target = s + 1 if kind == F else s - 1
    time = now
    if x.stages[target, DEVICE] != x.stages[s, DEVICE]:
        time += x.costs[sort(x, m), s, LAG + way]
        x.counts[BOX + x.counts[PRODUCED]] = (kind * x.acts.shape[0] + s) * x.acts.shape[1] + m
        x.counts[PRODUCED] += 1
        if time > now:
            push(x, time, ACTIVATION + way, s, m)
    if kind == F:
        x.acts[target, m, A_INPUT] = time
    else:
        x.acts[target, m, A_GRADIENT] = time


# -- messages


@compiled
def receive_all(x: MachineState, now: int) -> None:
    """Post the receives of what was produced at this moment."""
    for number in range(x.counts[RECEIVED], x.counts[PRODUCED]):
        rest, m = divmod(x.counts[BOX + number], x.acts.shape[1])
        kind, s = divmod(rest, x.acts.shape[0])
        device = x.devices[x.stages[s + 1 if kind == F else s - 1, DEVICE]]
        is_running = device[D_KIND] != NONE and device[D_END] > now
        is_last = device[D_END] == now and is_later(x, device, kind, s, m, x.starts[kind, s, m])
        receive(device, x.costs[sort(x, m), s, MESSAGE + (0 if kind == F else 1)], is_running or is_last)
    x.counts[RECEIVED] = x.counts[PRODUCED]


@compiled
def arrive(x: MachineState, now: int, way: int, s: int, m: int) -> None:
    """A message of stage s has arrived."""
    sender = x.devices[x.stages[s, DEVICE]]
    deliver(sender, now, x.costs[sort(x, m), s, MESSAGE + way])
    sender[D_TOUCHED] = 1
    x.devices[x.stages[s - 1 if way else s + 1, DEVICE], D_TOUCHED] = 1


@compiled
def arrive_at_once(x: MachineState, now: int) -> None:
    """Deliver the messages of this moment that take no time, and forget all that were produced."""
    for number in range(x.counts[PRODUCED]):
        rest, m = divmod(x.counts[BOX + number], x.acts.shape[1])
        kind, s = divmod(rest, x.acts.shape[0])
        way = 0 if kind == F else 1
        if x.costs[sort(x, m), s, LAG + way] == 0:
            arrive(x, now, way, s, m)
    x.counts[PRODUCED] = x.counts[RECEIVED] = 0


# -- transfers


@compiled
def begin_transfer(x: MachineState, now: int, kind: int, s: int, m: int) -> None:
    """A transfer starts; one of the other direction that is running takes longer from now on, and so does this one."""
    device, row = x.devices[x.stages[s, DEVICE]], x.costs[sort(x, m), s]
    link = x.links[device[D_LINK]]
    if kind == D:
        x.acts[s, m, A_WHERE] = OFFLOADING
        link[L_D_STAGE], link[L_D_MICROBATCH] = s, m
        length = row[ALONE]
        if link[L_H_STAGE] != NONE:
            length = row[LENGTH + D]
            slow_down(x, H, link[L_H_STAGE], link[L_H_MICROBATCH])
    else:
        x.acts[s, m, A_WHERE] = RELOADING
        take(device, now, row[MOVED], False)
        link[L_H_STAGE], link[L_H_MICROBATCH] = s, m
        length = row[ALONE + 1]
        if link[L_D_STAGE] != NONE:
            length = row[LENGTH + H]
            slow_down(x, D, link[L_D_STAGE], link[L_D_MICROBATCH])
    x.starts[kind, s, m] = now
    x.counts[OPS] += 1
    end_transfer(x, kind, s, m, now + length)


@compiled
def slow_down(x: MachineState, kind: int, s: int, m: int) -> None:
    """A running transfer meets one of the other direction."""
    end = x.starts[kind, s, m] + x.costs[sort(x, m), s, LENGTH + kind]
    if end != (x.acts[s, m, A_END_D] if kind == D else x.acts[s, m, A_END_H]):
        end_transfer(x, kind, s, m, end)


@compiled
def end_transfer(x: MachineState, kind: int, s: int, m: int, end: int) -> None:
    """Let a transfer complete at `end`; an event for an earlier end no longer counts."""
    if kind == D:
        x.acts[s, m, A_END_D] = end
    else:
        x.acts[s, m, A_END_H] = end
    push(x, end, kind, s, m)


@compiled
def transferred(x: MachineState, now: int, kind: int, s: int, m: int) -> None:
    """A transfer has completed, unless it was slowed down meanwhile."""
    act = x.acts[s, m]
    if now != (act[A_END_D] if kind == D else act[A_END_H]):
        return
    device, moved = x.devices[x.stages[s, DEVICE]], x.costs[sort(x, m), s, MOVED]
    link = x.links[device[D_LINK]]
    if kind == D:
        link[L_D_STAGE] = NONE
        act[A_WHERE] = AWAY
        device[D_HELD] -= moved
        device[D_LEAVING] -= moved
    else:
        link[L_H_STAGE] = NONE
        act[A_WHERE] = BACK
        device[D_HOST] += moved
    d = link[L_FIRST_BEHIND]
    while d != NONE:
        x.devices[d, D_TOUCHED] = 1
        d = x.devices[d, D_NEXT_BEHIND]
