"""What the compiled machine knows: stages, devices, links, activations, and a queue of events.

All arrays together are one `MachineState`; they are made once for a problem and used again by every run. Axes: s
stages, d devices, l host links, m microbatches (or units, where they are cut into slices), c classes of equal ones; way
0 is to the host and 1 back. Times are ticks, sizes units of the problem.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optpipe_compiler.machine.compiled import compiled
from optpipe_compiler.model.memory import op_memory
from optpipe_compiler.model.schedule import Kind, classes, lengths

if TYPE_CHECKING:
    from optpipe_compiler.model.problem import Problem

NEVER = 1 << 62
NONE = -1
F, I, W, B, R, D, H = range(7)  # noqa: E741  (torch's letter)
ACTIVATION, GRADIENT, WAKE = 7, 8, 9
"""Events beside the completions of ops: arrivals of messages; a moment at which a given order may go on."""
KEEP, OFFLOAD, RECOMPUTE = range(3)
COMPUTED, OFFLOADING, AWAY, RELOADING, BACK, RECOMPUTING, RESTORED, HALF_DONE = range(1, 9)
"""Where an activation is, from the end of its forward to that of its input gradient."""

LENGTH, TAKEN, GIVEN, ALONE, LAG, MESSAGE = 0, 7, 14, 28, 30, 32
"""Columns of `costs`, each for several values: ticks of an op by kind (transfers: while the other direction of
the link is busy); units that it takes at its start and gives back at its end by kind, the latter once for activations
kept or offloaded and once for recomputed ones; ticks of a transfer by way while the other direction is idle; ticks and
units of the messages with its activation and with its input's gradient."""
SAVED, MOVED, RESIDUE, CHECKPOINT, ACCUMULATORS, GRADIENT, EXTRA = range(34, 41)
BUSY = 42
"""Ticks that the transfers of an activation take from compute, by way."""
"""Units of a whole activation, of the part that an offload moves, of what stays between I and W, of what a recompute
leaves; of the gradients of keys and values that a backward adds, and of those that it frees; the most that an op takes
beyond the activation, once where backwards are split and once where they are in one piece."""
COSTS = 44
DEVICE, NEXT, BEGUN_F, BEGUN_B, BEGUN_W, DONE_F, DONE_B, DONE_W, LEFT, FUSED = range(10)
"""Columns of `stages`: its owner; the owner's next stage; microbatches whose op has begun, or has completed, by
kind; those, from the first on, that need no offload any more; whether backwards are run in one piece."""
COLUMNS = 10

(
    D_FIRST_STAGE,
    D_FIRST_PLACE,  # of its activations in `order`
    D_LAST_PLACE,  # the place after them
    D_LINK,  # its host link
    D_NEXT_BEHIND,  # the next device behind that link
    D_BUDGET,  # units for everything that is not static
    D_HOST_BUDGET,  # units of host memory
    D_RESERVE,  # units of the budget that are left free for messages
    D_HELD,  # units, without the received messages
    D_MAIL,  # units of messages that were received and not consumed
    D_LEAVING,  # units that offloads and messages on their way will free
    D_HOST,  # units of host memory that are free
    D_BUSY,
    D_TOUCHED,  # whether something happened that may let an op start
    D_REMAINING,  # ticks of compute ops that have not begun
    D_ENOUGH,  # units with which any one microbatch can go through the device alone
    D_OPENING,  # forwards that have not begun
    D_AHEAD,  # activations reloaded whose backward has not begun
    D_BACK,  # the place up to which offloads have been reloaded
    D_FINISHED,  # the place up to which all is finished
    D_KIND,  # of the last compute op; also its stage, microbatch, start and end
    D_STAGE,
    D_MICROBATCH,
    D_START,
    D_END,
    D_HIGH,  # most units since that op began
    D_PEAK,  # most units ever
    D_FIRST,  # start of the first compute op
    D_MOMENT,  # when messages of the device were last delivered
    D_BEFORE,  # units held just before that
    D_FREE,  # when the last compute op, and what the offload behind it takes from compute, is over
    D_NEXT,  # no compute op starts earlier; an event is set for this time
) = range(32)
"""Columns of `devices`."""
L_FIRST_BEHIND, L_D_STAGE, L_D_MICROBATCH, L_H_STAGE, L_H_MICROBATCH = range(5)
"""Columns of `links`: the first device behind it, and its running transfers."""
(
    A_FORWARD,  # ranks of its ops; lower goes first
    A_BACKWARD,
    A_WEIGHT,
    A_INPUT,  # when the input is there
    A_GRADIENT,  # when the gradient of the output is there
    A_CHECK,  # number of the last safety check that ran the forward ahead
    A_MODE,
    A_WHERE,
    A_END_D,  # when its transfers complete
    A_END_H,
) = range(10)
"""Columns of `acts`."""
U_CLASS, U_BACK, U_FIRST = range(3)
"""Columns of `units`: its class; the microbatch at this position of the backwards of a stage, which is also the
position of this one; the first slice of the same whole microbatch."""
EVENTS, OPS, CHECKS, PRODUCED, RECEIVED, BOX = range(6)
"""Entries of `counts`: events in the queue, ops started, safety checks, messages produced at this moment, those
of them that have been received; then the codes of the ops that produced them."""


Ints = NDArray[np.int64]
Row = NDArray[np.int64]
"""One row of an array of `MachineState`."""


class MachineState(NamedTuple):
    """Constants and state of one problem."""

    stages: Ints
    """[s, COLUMNS]"""
    costs: Ints
    """[c, s, COSTS]; one row where, and only where, all microbatches are whole and equal."""
    units: Ints
    """[m, U_*]"""
    devices: Ints
    """[d, D_*]"""
    links: Ints
    """[l, L_*]"""
    acts: Ints
    """[s, m, A_*]"""
    starts: Ints
    """[k, s, m] ticks, NONE where there is no such op."""
    order: Ints
    """[s x m] activations (s x microbatches + m) device by device, in the order of their backwards' ranks."""
    events: Ints
    """Binary heap of (time, code), the code being (kind x stages + stage) x microbatches + microbatch."""
    counts: Ints


def machine(problem: Problem) -> MachineState:
    """Return the machine of `problem`."""
    stages, devices, links, costs = _constants(problem)
    count, microbatches = len(stages), problem.microbatches
    back = np.array([problem.back(unit) for unit in range(microbatches)], np.int64)
    first = np.arange(microbatches) // problem.slices * problem.slices
    return MachineState(
        stages=stages.copy(),
        costs=costs,
        units=np.stack([classes(problem), back, first], axis=1),
        devices=devices.copy(),
        links=links.copy(),
        acts=np.zeros((count, microbatches, A_END_H + 1), np.int64),
        starts=np.empty((7, count, microbatches), np.int64),
        order=np.zeros(count * microbatches, np.int64),
        events=np.empty((4 * len(devices) + 4 * len(links) + 2 * count * microbatches, 2), np.int64),
        counts=np.zeros(BOX + len(devices), np.int64),
    )


@lru_cache(maxsize=64)
def _constants(problem: Problem) -> tuple[Ints, Ints, Ints, Ints]:
    """Return `stages`, `devices` and `links` before anything runs, and `costs`, not to be written to."""
    owned = [problem.stages_of(device) for device in range(problem.devices)]
    count = 1 + max((link for link in problem.link_of if link is not None), default=-1)
    after = {s: later for mine in owned for s, later in zip(mine, [*mine[1:], NONE], strict=True)}
    stages = np.zeros((len(problem.stages), COLUMNS), np.int64)
    devices = np.zeros((problem.devices, D_NEXT + 1), np.int64)
    links = np.zeros((count, L_H_MICROBATCH + 1), np.int64)
    for s, stage in enumerate(problem.stages):
        stages[s, DEVICE], stages[s, NEXT] = stage.device, after[s]
    every = problem.classes or (problem.stages,) * (1 if problem.slicing is None else 2)
    costs = np.zeros((len(every), len(problem.stages), COSTS), np.int64)
    for number, s in np.ndindex(costs.shape[:2]):
        stage, row = every[number][s], costs[number, s]
        row[LENGTH:TAKEN] = lengths(problem)[:, s, number if problem.classes else 0]
        row[TAKEN:GIVEN] = [op_memory(stage, kind, False)[0] for kind in Kind]
        row[GIVEN:ALONE] = [op_memory(stage, kind, again)[1] for again in (False, True) for kind in Kind]
        row[ALONE:LAG] = stage.offload_alone, stage.reload_alone
        row[LAG:MESSAGE] = stage.send_activation, stage.send_gradient
        row[MESSAGE:SAVED] = stage.outgoing, stage.incoming
        row[BUSY:COSTS] = stage.offload_busy, stage.reload_busy
        row[SAVED:BUSY] = (
            stage.saved,
            stage.moved,
            stage.residue,
            stage.checkpoint,
            stage.accumulators,
            stage.gradient,
            max(stage.forward_extra, stage.backward_input_extra + stage.captured, stage.backward_weight_extra),
            max(stage.forward_extra, stage.backward_extra),
        )
    place = 0
    for d, mine in enumerate(owned):
        device = devices[d]
        device[D_FIRST_STAGE] = mine[0] if mine else NONE
        device[D_FIRST_PLACE], device[D_LAST_PLACE] = place, place + len(mine) * problem.microbatches
        place = device[D_LAST_PLACE]
        link = problem.link_of[d]
        device[D_LINK] = NONE if link is None else link
        device[D_NEXT_BEHIND] = next(
            (o for o in range(d + 1, problem.devices) if link is not None and problem.link_of[o] == link), NONE
        )
    for link in range(count):
        links[link, L_FIRST_BEHIND] = next((d for d, one in enumerate(problem.link_of) if one == link), NONE)
    devices[:, D_BUDGET] = problem.budget
    devices[:, D_HOST_BUDGET] = _host_shares(problem, owned)
    return stages, devices, links, costs


def _host_shares(problem: Problem, owned: list[list[int]]) -> list[int]:
    """Return what each device may hold on its host: of every limit a part by what it could offload."""
    shares = [NEVER] * problem.devices
    weight = [sum(problem.stages[s].moved for s in mine if problem.can_offload(s)) for mine in owned]
    for devices, limit in problem.host_limits:
        whole = max(1, sum(weight[d] for d in devices))
        for d in devices:
            shares[d] = min(shares[d], limit * weight[d] // whole)
    return shares


@compiled
def sort(x: MachineState, m: int) -> int:
    """Return the class of a microbatch in `costs`."""
    return int(x.units[m, U_CLASS]) if x.costs.shape[0] > 1 else 0


@compiled
def back(x: MachineState, place: int) -> int:
    """Return the microbatch at a position of the backwards of a stage, or the position of a microbatch."""
    return int(x.units[place, U_BACK]) if x.costs.shape[0] > 1 else place


@compiled
def push(x: MachineState, time: int, kind: int, s: int, m: int) -> None:
    """Add an event."""
    code = (kind * x.acts.shape[0] + s) * x.acts.shape[1] + m
    events, child = x.events, x.counts[EVENTS]
    while child:
        parent = (child - 1) >> 1
        if events[parent, 0] < time or (events[parent, 0] == time and events[parent, 1] < code):
            break
        events[child, 0], events[child, 1] = events[parent, 0], events[parent, 1]
        child = parent
    events[child, 0], events[child, 1] = time, code
    x.counts[EVENTS] += 1


@compiled
def pop(x: MachineState) -> tuple[int, int, int]:
    """Take the first event off the queue: its kind, stage and microbatch."""
    events, first = x.events, x.events[0, 1]
    x.counts[EVENTS] -= 1
    count, parent = x.counts[EVENTS], 0
    time, code = events[count, 0], events[count, 1]
    while True:
        child = 2 * parent + 1
        if child >= count:
            break
        right = child + 1
        if right < count and (
            events[right, 0] < events[child, 0]
            or (events[right, 0] == events[child, 0] and events[right, 1] < events[child, 1])
        ):
            child = right
        if time < events[child, 0] or (time == events[child, 0] and code < events[child, 1]):
            break
        events[parent, 0], events[parent, 1] = events[child, 0], events[child, 1]
        parent = child
    events[parent, 0], events[parent, 1] = time, code
    rest, m = divmod(first, x.acts.shape[1])
    kind, s = divmod(rest, x.acts.shape[0])
    return kind, s, m
