"""Rules on the forecast: it is one execution of the contract, at its own costs, and its figures are recomputed."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from fractions import Fraction
from itertools import accumulate, pairwise
from math import isfinite
from operator import ne
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import UNSET, UnsetType

from optpipe_compiler.documents import ir
from optpipe_compiler.documents.ops import MESSAGES
from optpipe_compiler.verify.placed import CODES, LANES, PlacedOp, PlacedOps, message_name
from optpipe_compiler.verify.report import Violation
from optpipe_compiler.verify.sizes import Sizes
from optpipe_compiler.verify.tables import LARGEST

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from optpipe_compiler.verify.placed import Ints, Unit

TOLERANCE = Fraction(1, 10**9)
"""Of the bubble fraction, the only figure that is no integer."""


def cost_records(placed: PlacedOps) -> Iterator[Violation]:
    """forecast.stages has one record per stage, shape and slice in order, with one recompute time per layer."""
    costs, setup = placed.schedule.forecast.stages, placed.schedule.setup
    units: list[tuple[int | None, int | None]] = [(None, None)]
    if not isinstance(setup.units, UnsetType):
        units = [(shape, slice) for shape in range(len(setup.units.cuts)) for slice in range(setup.slices)]
    found = [(cost.stage, cost.shape, cost.slice) for cost in costs]
    expected = (
        (n, *(UNSET if one is None else one for one in unit)) for n in range(len(placed.stages)) for unit in units
    )
    if len(found) != len(placed.stages) * len(units) or any(map(ne, found, expected)):
        numbers = ", ".join(str(cost.stage) for cost in costs[:8])
        what = "each stage in order" if units == [(None, None)] else "each stage, shape and slice in order"
        yield Violation("cost", f"forecast.stages is for the stages {numbers or 'none'}, expected {what}")
        return
    for cost in costs:
        stage = placed.stages[cost.stage]
        layers = stage.layers[1] - stage.layers[0]
        if len(cost.recompute_ns) != layers:
            message = f"forecast.stages[{cost.stage}] has {len(cost.recompute_ns)} recompute times, expected {layers}"
            yield Violation("cost", message)


def message_costs(placed: PlacedOps) -> Iterator[Violation]:
    """A message that no stage sends takes no time: at the ends of the model and on the same device."""
    for cost in placed.schedule.forecast.stages:
        for step, what, found in ((1, "activation", cost.send_activation_ns), (-1, "gradient", cost.send_gradient_ns)):
            if found and placed.peer(cost.stage, 1 if step == 1 else -1) is None:
                message = f"send_{what}_ns of stage {cost.stage} is {found}, but that stage sends no {what}: expected 0"
                yield Violation("cost", message, placed.stages[cost.stage].device)


def links(placed: PlacedOps) -> Iterator[Violation]:
    """A device is behind one link at most, and behind one where it has transfers."""
    behind: dict[int, int] = {}
    for number, link in enumerate(placed.schedule.forecast.links):
        if len(set(link.devices)) < len(link.devices):
            yield Violation("link", f"forecast.links[{number}] names a device twice")
        for device in link.devices:
            if device >= len(placed.schedule.devices):
                yield Violation("link", f"forecast.links[{number}] names device {device}, which does not exist")
            elif behind.setdefault(device, number) != number:
                message = f"device {device} is behind forecast.links[{behind[device]}] and [{number}], expected one"
                yield Violation("link", message, device)
    for lane in LANES[1:]:
        for number in range(len(placed.schedule.devices)):
            if placed.lanes[number, lane] and number not in behind:
                message = f"device {number} has {lane} transfers but forecast.links has no link for it"
                yield placed.lanes[number, lane][0].breaks("link", message)


def timetable(placed: PlacedOps) -> Iterator[Violation]:
    """forecast.times has one entry per device and lane that has ops, with a start and an end for every op."""
    seen: set[tuple[int, str]] = set()
    for times in placed.schedule.forecast.times:
        at = f"forecast.times of the {times.lane} lane of device {times.device}"
        if times.device >= len(placed.schedule.devices):
            yield Violation("times", f"{at}: there is no such device")
            continue
        if (times.device, times.lane) in seen:
            yield Violation("times", f"{at} stands there twice", times.device, times.lane)
        seen.add((times.device, times.lane))
        ops = len(placed.lanes[times.device, times.lane])
        if not len(times.start_ns) == len(times.end_ns) == ops:
            message = f"{at} has {len(times.start_ns)} starts and {len(times.end_ns)} ends for {ops} ops"
            yield Violation("times", message, times.device, times.lane)
    for (device, lane), places in placed.lanes.items():
        if places and (device, lane) not in seen:
            message = f"forecast.times has no entry for the {lane} lane of device {device}"
            yield Violation("times", message, device, lane)


class ForecastTimes:
    """A forecast whose timetable and cost records are complete: start, end and cost of every op in ns."""

    def __init__(self, placed: PlacedOps) -> None:
        self.placed = placed
        self.forecast = placed.schedule.forecast
        self.start, self.end = np.zeros((2, len(placed.places)), np.int64)
        """By number of op."""
        for times in self.forecast.times:
            if places := placed.lanes[times.device, times.lane]:
                mine = slice(places[0].number, places[-1].number + 1)
                self.start[mine], self.end[mine] = times.start_ns, times.end_ns
        self.runs: dict[tuple[int, str], tuple[list[int], list[int]]] = {}
        self.sizes = Sizes(placed)
        self.link_of = {device: link for link in self.forecast.links for device in link.devices}
        self.working = np.flatnonzero(~placed.columns.is_message)
        """Numbers of the ops that take their lane for some time."""
        self.on_compute = self.working[[placed.places[number].lane == "compute" for number in self.working.tolist()]]

    def costs(self) -> npt.NDArray[Any]:
        """Return what each of the `working` must take by the forecast's own cost records."""
        shared = np.zeros(len(self.placed.places), np.int64)
        for place in self.placed.of("offload", "reload"):
            shared[place.number] = self.slowed(place)
        groups, group = self.placed.alike(self.working, (2 * self.placed.layers + shared)[self.working])
        found = [self.cost(place, shared=bool(shared[place.number])) for place in groups]
        costs: npt.NDArray[Any] = np.array(found, np.int64 if max(found, default=0) <= LARGEST else object)
        return costs[group]

    def cost(self, place: PlacedOp, *, shared: bool) -> int:
        """Return what an op must take, if it is a transfer beside one of the other direction or not."""
        op, cost = place.op, self._record(place.stage, *place.unit)
        match op:
            case ir.Forward():
                return cost.forward_ns
            case ir.BackwardInput():
                return cost.backward_input_ns
            case ir.BackwardWeight():
                return cost.backward_weight_ns
            case ir.Backward():
                return cost.backward_ns
            case ir.Recompute():
                return sum(self._of_layers(cost.recompute_ns, op)) + self.forecast.op_overhead_ns
            case ir.Offload() | ir.Reload():
                link = self.link_of[place.device]
                if isinstance(op, ir.Offload):
                    rate = link.duplex_d2h_bytes_per_s if shared else link.d2h_bytes_per_s
                else:
                    rate = link.duplex_h2d_bytes_per_s if shared else link.h2d_bytes_per_s
                moved = self.sizes.of(op).moved(op.layers)
                return link.latency_ns + transfer_ns(moved, rate)
        raise AssertionError(f"an op without a cost: {op.name}")

    def busy(self) -> dict[tuple[str, int, Unit], int]:
        """Return, by direction, stage and unit, what copies take from compute: of each a share of its time alone.

        Each is rounded to the nearest ns, half up.
        """
        found: dict[tuple[str, int, Unit], int] = defaultdict(int)
        for place in self.placed.of("offload", "reload"):
            if share := self.link_of[place.device].share_permille:
                alone = self.cost(place, shared=False)
                found[place.lane, place.stage, place.unit] += (2 * alone * share + 1000) // 2000
        return found

    def slowed(self, place: PlacedOp) -> bool:
        """Return whether a transfer of the other direction of the link runs at some time of this one."""
        other: ir.Lane = "h2d" if place.lane == "d2h" else "d2h"
        key = (min(self.link_of[place.device].devices), other)
        if key not in self.runs:
            lanes = [self.placed.lanes[device, other] for device in self.link_of[place.device].devices]
            spans = sorted((int(self.start[one.number]), int(self.end[one.number])) for lane in lanes for one in lane)
            starts = [start for start, _ in spans]
            self.runs[key] = starts, list(accumulate((end for _, end in spans), max))
        starts, latest = self.runs[key]
        before = bisect_left(starts, self.end[place.number])
        return before > 0 and latest[before - 1] > int(self.start[place.number])

    def _record(self, stage: int, microbatch: int, slice: int | None) -> ir.StageCost:
        setup = self.placed.schedule.setup
        return self.forecast.stages[stage * setup.classes + setup.class_of(microbatch, slice)]

    def _of_layers(self, numbers: list[int], op: ir.SavedOp) -> list[int]:
        offset = self.placed.stages[op.stage].layers[0]
        return numbers[op.layers[0] - offset : op.layers[1] - offset]

    def travels(self, sends: Ints) -> Ints:
        """Return the time from the end of the producer of each message to its arrival."""
        columns, classes = self.placed.columns, self.placed.schedule.setup.classes
        costs = self.forecast.stages
        activations = np.array([cost.send_activation_ns for cost in costs], np.int64)
        gradients = np.array([cost.send_gradient_ns for cost in costs], np.int64)
        record = columns.stage[sends] * classes + self.placed.classes[sends]
        found: Ints = np.where(columns.kind[sends] == CODES["send_activation"], activations[record], gradients[record])
        return found


def transfer_ns(moved: int, bytes_per_s: int) -> int:
    """Return round(bytes * 10^9 / bandwidth), half up."""
    return (2 * moved * 10**9 + bytes_per_s) // (2 * bytes_per_s)


def costs(timed: ForecastTimes) -> Iterator[Violation]:
    """Every op takes exactly its cost: end = start + cost."""
    took, cost = (timed.end - timed.start)[timed.working], timed.costs()
    for wrong in np.flatnonzero(took != cost).tolist():
        place = timed.placed.places[timed.working[wrong]]
        text = f"is forecast to take {took[wrong]} ns, its cost is {cost[wrong]} ns"
        yield place.breaks("cost", f"{place.id} on device {place.device} {text}")


def lane_times(timed: ForecastTimes) -> Iterator[Violation]:
    """An op starts at or after the end of the previous op of its lane, or at or after its issue."""
    places, is_message = timed.placed.places, timed.placed.columns.is_message
    frees = np.where(is_message, timed.start, timed.end)
    for number in (np.flatnonzero(timed.start[1:] < frees[:-1]) + 1).tolist():
        place, before = places[number], places[number - 1]
        if (place.device, place.lane) == (before.device, before.lane):
            text = f"starts at {timed.start[number]} ns, before {before.id} frees the lane at {frees[number - 1]} ns"
            yield place.breaks("times", f"{place.id} on device {place.device} {text}", before.id)


def copy_times(timed: ForecastTimes) -> Iterator[Violation]:
    """Copies have their time of the compute lane: offloads behind their forward, reloads before their backward."""
    busy = timed.busy()
    if not any(busy.values()):
        return
    for device in range(len(timed.placed.schedule.devices)):
        lane = [place for place in timed.placed.lanes[device, "compute"] if place.kind not in MESSAGES]
        for before, place in pairwise(lane):
            taken = busy.get(("d2h", before.stage, before.unit), 0) if before.kind == "forward" else 0
            if place.kind in ("backward_input", "backward"):
                taken += busy.get(("h2d", place.stage, place.unit), 0)
            waited = int(timed.start[place.number]) - int(timed.end[before.number])
            if taken and waited < taken:
                text = f"starts {waited} ns after {before.id} on its lane, but copies take"
                text = f"{text} {taken} ns of compute between them"
                yield place.breaks("times", f"{place.id} on device {device} {text}", before.id)


def wait_times(timed: ForecastTimes) -> Iterator[Violation]:
    """An op starts at or after the end of every op in its `after`."""
    for number, other in _pairs(*timed.placed.waits, timed.start, timed.end):
        place, name = timed.placed.places[number], timed.placed.places[other].id
        text = f"starts at {timed.start[number]} ns but waits for {name}, which ends at {timed.end[other]} ns"
        yield place.breaks("times", f"{place.id} on device {place.device} {text}", name)


def message_times(timed: ForecastTimes) -> Iterator[Violation]:
    """A send is issued when its producer ends; both halves end when it arrives, `send_*_ns` later."""
    places, messages = timed.placed.places, timed.placed.messages
    sends, receives = messages.sends, messages.receives
    producers = timed.placed.partners(sends)
    ready, travel = timed.end[producers], timed.travels(sends)
    late = timed.start[sends] != ready, timed.end[sends] - travel != ready, timed.end[receives] - travel != ready
    for number in np.flatnonzero(np.any(late, axis=0)).tolist():
        place, producer = places[sends[number]], places[producers[number]].id
        if late[0][number]:
            text = f"{place.id} on device {place.device} is issued at {timed.start[place.number]} ns, but {producer}"
            yield place.breaks("times", f"{text} ends at {ready[number]} ns", producer)
        arrival = int(ready[number]) + int(travel[number])
        for half in (place, places[receives[number]]):
            if timed.end[half.number] != arrival:
                text = f"{half.id} on device {half.device} ends at {timed.end[half.number]} ns"
                text = f"{text}, but {message_name(place)} arrives at {arrival} ns"
                yield half.breaks("times", text, producer)


def receive_times(timed: ForecastTimes) -> Iterator[Violation]:
    """A receive is issued not later than its message is sent."""
    messages = timed.placed.messages
    for other, number in _pairs(messages.sends, messages.receives, timed.start, timed.start):
        place, send = timed.placed.places[number], timed.placed.places[other]
        text = f"{place.id} on device {place.device} is issued at {timed.start[number]} ns, after its message is"
        yield place.breaks("times", f"{text} sent at {timed.start[other]} ns", send.id)


def arrivals(timed: ForecastTimes) -> Iterator[Violation]:
    """A forward, and the op that makes the gradient, starts at or after the arrival of its message."""
    placed, receives = timed.placed, timed.placed.messages.receives
    for number, other in _pairs(placed.partners(receives), receives, timed.start, timed.end):
        reader, receive = placed.places[number], placed.places[other]
        text = f"{reader.id} on device {reader.device} starts at {timed.start[number]} ns, before"
        text = f"{text} {message_name(receive)} arrives at {timed.end[other]} ns"
        yield reader.breaks("times", text, receive.id)


def _pairs(ops: Ints, others: Ints, start: Ints, end: Ints) -> Iterator[tuple[int, int]]:
    """Yield those pairs of ops of which the first starts before the second one's `end`."""
    early = start[ops] < end[others]
    yield from zip(ops[early].tolist(), others[early].tolist(), strict=True)


def link_times(timed: ForecastTimes) -> Iterator[Violation]:
    """The transfers of one direction of one link, over all devices behind it, do not overlap."""
    for link in timed.forecast.links:
        for lane in LANES[1:]:
            places = [place for device in link.devices for place in timed.placed.lanes[device, lane]]
            places.sort(key=lambda place: (timed.start[place.number], timed.end[place.number]))
            yield from _overlaps(timed, places)


def _overlaps(timed: ForecastTimes, places: list[PlacedOp]) -> Iterator[Violation]:
    """Yield the transfers, in order of start, that begin while one of another device still holds the link."""
    holder = places[0] if places else None
    for place in places[1:]:
        assert holder is not None
        start, end = timed.start[place.number], timed.end[holder.number]
        if start < end and holder.device != place.device:
            text = f"starts at {start} ns on the link that {holder.id} of device {holder.device} holds until {end} ns"
            yield place.breaks("link", f"{place.id} on device {place.device} {text}", holder.id)
        holder = max(holder, place, key=lambda one: timed.end[one.number])


def makespan(timed: ForecastTimes) -> Iterator[Violation]:
    """makespan_ns: last end minus first start over compute, d2h and h2d ops; span_ns: the longest per compute lane."""
    whole = _extent(timed, timed.working)
    if timed.forecast.makespan_ns != whole:
        yield Violation("makespan", f"makespan_ns is {timed.forecast.makespan_ns}, the times say {whole}")
    lanes = np.split(timed.on_compute, np.flatnonzero(np.diff(timed.placed.columns.device[timed.on_compute])) + 1)
    longest = max((_extent(timed, lane) for lane in lanes if len(lane)), default=0)
    if timed.forecast.span_ns != longest:
        yield Violation("makespan", f"span_ns is {timed.forecast.span_ns}, the times say {longest}")


def _extent(timed: ForecastTimes, ops: Ints) -> int:
    return int(timed.end[ops].max()) - int(timed.start[ops].min())


def bubble(timed: ForecastTimes) -> Iterator[Violation]:
    """bubble_fraction = 1 - (sum of the durations of compute ops) / (devices * makespan), within 1e-9."""
    whole = _extent(timed, timed.working) * len(timed.placed.schedule.devices)
    busy = sum((timed.end - timed.start)[timed.on_compute].tolist())
    expected = 1 - Fraction(busy, whole) if whole else Fraction(0)
    claimed = timed.forecast.bubble_fraction
    if not isfinite(claimed) or abs(Fraction(claimed) - expected) > TOLERANCE:
        yield Violation("bubble", f"bubble_fraction is {claimed}, the times say {expected.limit_denominator(10**6)}")


def bound(placed: PlacedOps) -> Iterator[Violation]:
    """lower_bound_ns <= the objective's value, and the outcome is optimal when, and only when, they meet."""
    forecast = placed.schedule.forecast
    value = forecast.makespan_ns if forecast.objective == "makespan" else forecast.span_ns
    shown = f"lower_bound_ns is {forecast.lower_bound_ns} and the {forecast.objective} is {value}"
    if forecast.lower_bound_ns > value:
        yield Violation("bound", f"{shown}: the bound is above the value")
    if (forecast.outcome == "optimal") != (forecast.lower_bound_ns == value):
        yield Violation("bound", f"{shown}, but the outcome is {forecast.outcome}")
