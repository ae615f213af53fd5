"""What the compiled machine knows: stages, devices, links, activations, and a queue of events.

All arrays together are one `MachineState`; they are made once for a problem and used again by every run. Axes: s
stages, d devices, l host links, m microbatches (or units, where they are cut into slices), c classes of equal ones; way
0 is to the host and 1 back. Times are ticks, sizes units of the problem. The classes below name the fields of records,
each an integer of 64 bits.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from optpipe_compiler.errors import BadInput
from optpipe_compiler.machine.compiled import called, compiled, lowest_bit
from optpipe_compiler.model.memory import op_memory
from optpipe_compiler.model.problem import DURATIONS, SIZES, Problem
from optpipe_compiler.model.schedule import Kind, classes, lengths

Ints = NDArray[np.int64]
Number = TypeVar("Number", int, Ints)
NEVER = 1 << 62
MOST_IN_ALL = 1 << 60
"""What the times, and what the sizes, of all ops may add up to: then no time is near NEVER, and none overflows."""
NONE = -1
F, I, W, B, R, D, H = range(7)  # noqa: E741  (torch's letter)
ACTIVATION, GRADIENT, WAKE = 7, 8, 9
"""Events beside the completions of ops: arrivals of messages; a moment at which a given order may go on."""
KEEP, OFFLOAD, RECOMPUTE = range(3)
FARTHEST = 8
"""Stages, at most, that may lie between an activation that comes back and the backward that calls for it.
With 4 or 16 a plan with room for one activation is 0.2 % shorter or 0.1 % longer (docs/ABLATION.md)."""
COMPUTED, OFFLOADING, AWAY, RELOADING, BACK, RECOMPUTING, RESTORED, HALF_DONE = range(1, 9)
"""Where an activation is, from the end of its forward to that of its input gradient."""

LENGTH, TAKEN, GIVEN, ALONE, LAG, MESSAGE = 0, 7, 14, 28, 30, 32
"""Columns of `costs`, each for several values: ticks of an op by kind (transfers: while the other direction of
the link is busy); units that it takes at its start and gives back at its end by kind, the latter once for activations
kept or offloaded and once for recomputed ones; ticks of a transfer by way while the other direction is idle; ticks and
units of the messages with its activation and with its input's gradient."""
SAVED, MOVED, RESIDUE, CHECKPOINT, ACCUMULATORS, GRADIENT, EXTRA = range(34, 41)
"""Units of a whole activation, of the part that an offload moves, of what stays between I and W, of what a recompute
leaves; of the gradients of keys and values that a backward adds, and of those that it frees; the most that an op takes
beyond the activation, once where backwards are split and once where they are in one piece."""
BUSY = 42
"""Ticks that the transfers of an activation take from compute, by way."""
COSTS = 44
EVENTS, OPS, CHECKS, PRODUCED, RECEIVED, RANDOM, BOX = range(7)
"""Entries of `counts`: events in the queue, ops started, safety checks, messages produced at this moment, those
of them that have been received; the state of random numbers, which a run leaves alone; then the codes of the ops that
produced the messages."""
BITS = 20
"""Of a microbatch's number, and of a stage's, in the code of an op: see `packed`."""
MASK = (1 << BITS) - 1


class StageRecord:
    """What is known of a stage, and how far it is."""

    device: int
    next: int
    """The device's next stage."""
    begun_f: int
    """Microbatches whose op has begun, by kind."""
    begun_b: int
    begun_w: int
    done_f: int
    """Microbatches whose op has completed, by kind."""
    done_b: int
    done_w: int
    left: int
    """Microbatches, from the first on, that need no offload any more."""
    fused: int
    """Whether backwards are run in one piece."""
    holds: int
    """Whether forwards leave room for earlier ones, and wait for them: see `dispatch._yields`."""
    waits: int
    recomputed_before: int
    """How many stages before its backward an activation is recomputed, at most `FARTHEST`: see `dispatch._is_due`."""
    reloaded_before: int


class DeviceRecord:
    """What is known of a device, what it holds and what it does."""

    first_stage: int
    first_place: int
    """Of its activations in `order`."""
    last_place: int
    """The place after them."""
    link: int
    next_behind: int
    """The next device behind its host link."""
    budget: int
    """Units for everything that is not static."""
    host_budget: int
    """Units of host memory."""
    reserve: int
    """Units of the budget that are left free for messages."""
    held: int
    """Units, without the received messages."""
    mail: int
    """Units of messages that were received and not consumed."""
    leaving: int
    """Units that offloads and messages on their way will free."""
    host: int
    """Units of host memory that are free."""
    busy: int
    remaining: int
    """Ticks of compute ops that have not begun."""
    enough: int
    """Units with which any one microbatch can go through the device alone."""
    opening: int
    """Forwards that have not begun."""
    ahead: int
    """Activations reloaded whose backward has not begun."""
    back: int
    """The place up to which offloads have been reloaded."""
    finished: int
    """The place up to which all is finished."""
    kind: int
    """Of the last compute op; also its stage, microbatch, start and end."""
    stage: int
    microbatch: int
    start: int
    end: int
    high: int
    """Most units since that op began."""
    peak: int
    """Most units ever."""
    first: int
    """Start of the first compute op."""
    moment: int
    """When messages of the device were last delivered."""
    before: int
    """Units held just before that."""
    free: int
    """When the last compute op, and what the offload behind it takes from compute, is over."""
    next: int
    """No compute op starts earlier; an event is set for this time."""


class LinkRecord:
    """What runs on a host link."""

    first_behind: int
    """The first device behind it."""
    waiting: int
    """Offloads that may begin."""
    d_stage: int
    """Of its running transfers."""
    d_microbatch: int
    h_stage: int
    h_microbatch: int


class ActivationRecord:
    """One of a stage and a microbatch."""

    forward: int
    """Ranks of its ops; lower goes first."""
    backward: int
    weight: int
    input: int
    """When the input is there."""
    gradient: int
    """When the gradient of the output is there."""
    check: int
    """Number of the last safety check that ran the forward ahead."""
    mode: int
    where: int
    end: int
    """When its transfer completes."""


class UnitRecord:
    """A microbatch, or a slice of one."""

    sort: int
    """Its class."""
    back: int
    """The microbatch at this position of the backwards of a stage, which is also the position of this one."""
    first: int
    """The first slice of the same whole microbatch."""


class EventRecord:
    """Something that will happen."""

    time: int
    code: int


if TYPE_CHECKING:

    class Row(Protocol):
        """One row of `MachineState.costs`."""

        def __getitem__(self, index: int) -> int: ...

    class Costs(Protocol):
        """All rows."""

        shape: tuple[int, ...]

        @overload
        def __getitem__(self, index: tuple[int, int]) -> Row: ...
        @overload
        def __getitem__(self, index: tuple[int, int, int]) -> int: ...

    Fields = TypeVar("Fields", covariant=True)

    class Records(Protocol[Fields]):
        """An array of records: one of them by its index, all values of a field by its name."""

        shape: tuple[int, ...]

        @overload
        def __getitem__(self, index: str) -> Ints: ...
        @overload
        def __getitem__(self, index: int | tuple[int, int]) -> Fields: ...
        def __setitem__(self, index: str, values: Any) -> None: ...


class MachineState(NamedTuple):
    """Constants and state of one problem."""

    stages: Records[StageRecord]
    """[s]"""
    costs: Costs
    """[c, s, COSTS]; one row where, and only where, all microbatches are whole and equal."""
    units: Records[UnitRecord]
    """[m]"""
    devices: Records[DeviceRecord]
    """[d]"""
    links: Records[LinkRecord]
    """[l]"""
    acts: Records[ActivationRecord]
    """[s, m]"""
    starts: Ints
    """[k, s, m] ticks, NONE where there is no such op."""
    order: Ints
    """[s x m] codes of activations, device by device, in the order of their backwards' ranks."""
    events: Records[EventRecord]
    """A binary heap."""
    touched: Ints
    """[moment, word] sets of devices, each a bit of a word: something happened that may let an op start, at this moment
    (0), or once all that happens at it has happened (1)."""
    counts: Ints


def machine(problem: Problem) -> MachineState:
    """Return the machine of `problem`; raise BadInput where its times or sizes come to more than `MOST_IN_ALL`."""
    stages, devices, links, costs = _constants(problem)
    count, microbatches = len(stages), problem.microbatches
    assert max(count, microbatches) <= MASK
    units = _records(UnitRecord, microbatches)
    units["sort"], units["back"] = classes(problem), [*map(problem.back, range(microbatches))]
    units["first"] = np.arange(microbatches) // problem.slices * problem.slices
    return MachineState(
        stages=stages.copy(),
        costs=costs,
        units=units,
        devices=devices.copy(),
        links=links.copy(),
        acts=_records(ActivationRecord, (count, microbatches)),
        starts=np.empty((7, count, microbatches), np.int64),
        order=np.zeros(count * microbatches, np.int64),
        events=_records(EventRecord, 4 * len(devices) + 4 * len(links) + 2 * count * microbatches),
        touched=np.zeros((2, len(devices) // 64 + 1), np.int64),
        counts=np.zeros(BOX + len(devices), np.int64),
    )


def _records(fields: type, shape: int | tuple[int, ...]) -> Any:
    return np.zeros(shape, [(name, np.int64) for name in fields.__annotations__])


@lru_cache(maxsize=64)
def _constants(problem: Problem) -> tuple[Any, Any, Any, Ints]:
    """Return `stages`, `devices` and `links` before anything runs, and `costs`, not to be written to."""
    for names, what in ((DURATIONS, "take {} ns one after the other"), (SIZES, "hold {} bytes in all")):
        if (number := problem.sum_of(names)) > MOST_IN_ALL:
            raise BadInput(f"a step's ops {what.format(number)}, expected at most {MOST_IN_ALL}")
    owned = [problem.stages_of(device) for device in range(problem.devices)]
    stages = _records(StageRecord, len(problem.stages))
    devices = _records(DeviceRecord, problem.devices)
    links = _records(LinkRecord, problem.links)
    stages["device"] = problem.device_of
    costs = np.zeros((len(problem.by_class), len(problem.stages), COSTS), np.int64)
    for number, s in np.ndindex(costs.shape[:2]):
        stage, row = problem.by_class[number][s], costs[number, s]
        row[LENGTH:TAKEN] = lengths(problem)[:, s, number]
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
        stages["next"][mine] = [*mine[1:], NONE]
        device = devices[d]
        device["first_stage"] = mine[0] if mine else NONE
        device["first_place"], device["last_place"] = place, place + len(mine) * problem.microbatches
        place = device["last_place"]
    devices["link"] = devices["next_behind"] = NONE
    for link in range(problem.links):
        behind = [d for d, one in enumerate(problem.link_of) if one == link]
        devices["link"][behind], devices["next_behind"][behind] = link, [*behind[1:], NONE]
        links["first_behind"][link] = behind[0] if behind else NONE
    devices["budget"] = problem.budget
    devices["host_budget"] = _host_shares(problem, owned)
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
    return x.units[m].sort if x.costs.shape[0] > 1 else 0


@compiled
def back(x: MachineState, place: int) -> int:
    """Return the microbatch at a position of the backwards of a stage, or the position of a microbatch."""
    return x.units[place].back if x.costs.shape[0] > 1 else place


def packed(kind: Number, s: Number, m: Number) -> Number:
    """Return the code of an op, or with kind 0 of an activation; codes are ordered as (kind, s, m) are."""
    return kind << 2 * BITS | s << BITS | m


def unpacked(which: Number) -> tuple[Number, Number, Number]:
    """Return kind, stage and microbatch of a code."""
    return which >> 2 * BITS, which >> BITS & MASK, which & MASK


code = compiled(packed)
op = compiled(unpacked)


@compiled
def activation(which: int) -> tuple[int, int]:
    """Return stage and microbatch of a code of kind 0."""
    return which >> BITS, which & MASK


@compiled
def below(x: MachineState, count: int) -> int:
    """Return a number of 0 to count - 1 at random."""
    return _drawn(x.counts, count)


@called
def _drawn(counts: Ints, count: int) -> int:
    """Return a number of 0 to count - 1 at random (SplitMix64: Steele, Lea and Flood, 2014).

    numba has numpy's generators, whose numbers may be others with another version of either, and plans with them.
    """
    counts[RANDOM] += -0x61C8864680B583EB
    mixed = counts[RANDOM]
    mixed = (mixed ^ (mixed >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    mixed = (mixed ^ (mixed >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    drawn: int = (mixed >> 20 & (1 << 40) - 1) % count
    return drawn


@compiled
def touch(x: MachineState, d: int, later: int) -> None:
    """Let a device be looked at, at this moment (0) or after it (1)."""
    x.touched[later, d >> 6] |= 1 << (d & 63)


@compiled
def next_touched(x: MachineState) -> int:
    """Take the first of the devices to be looked at now; NONE without any."""
    for word in range(x.touched.shape[1]):
        some = x.touched[0, word]
        if some:
            x.touched[0, word] = some & (some - 1)
            return word << 6 | lowest_bit(some)
    return NONE


@compiled
def touch_later(x: MachineState) -> bool:
    """Let those that were to be looked at after this moment be looked at now; return whether there are any."""
    is_any = False
    for word in range(x.touched.shape[1]):
        if x.touched[1, word]:
            is_any = True
            x.touched[0, word] |= x.touched[1, word]
            x.touched[1, word] = 0
    return is_any


@compiled
def push(x: MachineState, time: int, kind: int, s: int, m: int) -> None:
    """Add an event."""
    place = x.counts[EVENTS]
    x.counts[EVENTS] += 1
    _rise(x, place, time, code(kind, s, m))


@compiled
def pop(x: MachineState) -> tuple[int, int, int]:
    """Take the first event off the queue: its kind, stage and microbatch.

    Its place sinks to the bottom before the last event takes it: half the comparisons of letting that event sink, which
    nearly always belongs there (Wegener, Bottom-up heapsort, 1993).
    """
    events, first = x.events, x.events[0].code
    x.counts[EVENTS] -= 1
    last, place, child = x.counts[EVENTS], 0, 1
    while child < last:
        right = child + 1
        child += _is_before(events[right].time, events[right].code, events[child].time, events[child].code)
        events[place].time, events[place].code = events[child].time, events[child].code
        place, child = child, 2 * child + 1
    _rise(x, place, events[last].time, events[last].code)
    return op(first)


@compiled
def _rise(x: MachineState, place: int, time: int, which: int) -> None:
    """Put an event at a place of the heap that is free, or above it where it belongs."""
    events = x.events
    while place:
        above = (place - 1) >> 1
        if not _is_before(time, which, events[above].time, events[above].code):
            break
        events[place].time, events[place].code = events[above].time, events[above].code
        place = above
    events[place].time, events[place].code = time, which


@compiled
def _is_before(time: int, which: int, other_time: int, other: int) -> bool:
    return (time < other_time) | ((time == other_time) & (which < other))  # without branches, which are hard to foresee
