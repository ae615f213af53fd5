"""Rules on the forecast: it is one execution of the contract, at its own costs, and its figures are recomputed."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from fractions import Fraction
from itertools import accumulate, pairwise
from math import floor, isfinite
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType

from optpipe_compiler.documents import ir
from optpipe_compiler.documents.ops import MESSAGES
from optpipe_compiler.verify.placed import LANES, PlacedOp, PlacedOps, named
from optpipe_compiler.verify.report import Violation
from optpipe_compiler.verify.sizes import Sizes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe_compiler.verify.placed import Message, Unit

TOLERANCE = Fraction(1, 10**9)
"""Of the bubble fraction, the only figure that is no integer."""


def cost_records(placed: PlacedOps) -> Iterator[Violation]:
    """forecast.stages has one record per stage, shape and slice in order, with one recompute time per layer."""
    costs, setup = placed.schedule.forecast.stages, placed.schedule.setup
    units: list[tuple[int | None, int | None]] = [(None, None)]
    if not isinstance(setup.units, UnsetType):
        units = [(shape, slice) for shape in range(len(setup.units.cuts)) for slice in range(setup.slices)]
    found = [(cost.stage, cost.shape, cost.slice) for cost in costs]
    expected = [
        (n, *(UNSET if one is None else one for one in unit)) for n in range(len(placed.stages)) for unit in units
    ]
    if found != expected:
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
        self.start: dict[str, int] = {}
        self.end: dict[str, int] = {}
        for times in self.forecast.times:
            places = placed.lanes[times.device, times.lane]
            for place, start, end in zip(places, times.start_ns, times.end_ns, strict=True):
                self.start[place.id], self.end[place.id] = start, end
        self.runs: dict[tuple[int, str], tuple[list[int], list[int]]] = {}
        self.sizes = Sizes(placed)
        self.link_of = {device: link for link in self.forecast.links for device in link.devices}
        self.working = [place for place in placed.places if place.kind not in MESSAGES]
        self._costs: dict[tuple[str, int, int, ir.Range | None, bool], int] = {}

    def cost(self, place: PlacedOp) -> int:
        """Return what the op must take by the forecast's own cost records."""
        op, of_class = place.op, self.placed.schedule.setup.class_of(*place.unit)
        shared = place.lane != "compute" and self.slowed(place)
        key = place.kind, place.stage, of_class, op.layers if isinstance(op, ir.SavedOp) else None, shared
        if key not in self._costs:
            self._costs[key] = self._cost(place, shared=shared)
        return self._costs[key]

    def _cost(self, place: PlacedOp, *, shared: bool) -> int:
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
            share = self.link_of[place.device].share_permille
            taken = Fraction(self._cost(place, shared=False) * share, 1000)
            found[place.lane, place.stage, place.unit] += floor(taken + Fraction(1, 2))
        return found

    def slowed(self, place: PlacedOp) -> bool:
        """Return whether a transfer of the other direction of the link runs at some time of this one."""
        other: ir.Lane = "h2d" if place.lane == "d2h" else "d2h"
        key = (min(self.link_of[place.device].devices), other)
        if key not in self.runs:
            lanes = [self.placed.lanes[device, other] for device in self.link_of[place.device].devices]
            spans = sorted((self.start[one.id], self.end[one.id]) for lane in lanes for one in lane)
            starts = [start for start, _ in spans]
            self.runs[key] = starts, list(accumulate((end for _, end in spans), max))
        starts, latest = self.runs[key]
        before = bisect_left(starts, self.end[place.id])
        return before > 0 and latest[before - 1] > self.start[place.id]

    def _record(self, stage: int, microbatch: int, slice: int | None) -> ir.StageCost:
        setup = self.placed.schedule.setup
        return self.forecast.stages[stage * setup.classes + setup.class_of(microbatch, slice)]

    def _of_layers(self, numbers: list[int], op: ir.SavedOp) -> list[int]:
        offset = self.placed.stages[op.stage].layers[0]
        return numbers[op.layers[0] - offset : op.layers[1] - offset]

    def travel(self, message: Message) -> int:
        """Return the time from the end of the producer to the arrival of its message."""
        cost = self._record(message.stage, *message.unit)
        return cost.send_activation_ns if message.what == "activation" else cost.send_gradient_ns


def transfer_ns(moved: int, bytes_per_s: int) -> int:
    """Return round(bytes * 10^9 / bandwidth), half up."""
    return (2 * moved * 10**9 + bytes_per_s) // (2 * bytes_per_s)


def costs(timed: ForecastTimes) -> Iterator[Violation]:
    """Every op takes exactly its cost: end = start + cost."""
    for place in timed.working:
        took, cost = timed.end[place.id] - timed.start[place.id], timed.cost(place)
        if took != cost:
            message = f"{place.id} on device {place.device} is forecast to take {took} ns, its cost is {cost} ns"
            yield place.breaks("cost", message)


def lane_times(timed: ForecastTimes) -> Iterator[Violation]:
    """An op starts at or after the end of the previous op of its lane, or at or after its issue."""
    for lane in timed.placed.lanes.values():
        for before, place in pairwise(lane):
            start = timed.start[place.id]
            free = (timed.start if before.kind in MESSAGES else timed.end)[before.id]
            if start < free:
                message = f"starts at {start} ns, before {before.id} frees the lane at {free} ns"
                yield place.breaks("times", f"{place.id} on device {place.device} {message}", before.id)


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
            start, free = timed.start[place.id], timed.end[before.id] + taken
            if taken and start < free:
                text = f"starts {start - timed.end[before.id]} ns after {before.id} on its lane, but copies take"
                text = f"{text} {taken} ns of compute between them"
                yield place.breaks("times", f"{place.id} on device {device} {text}", before.id)


def wait_times(timed: ForecastTimes) -> Iterator[Violation]:
    """An op starts at or after the end of every op in its `after`."""
    for place in timed.placed.places:
        for name in place.op.after:
            start, end = timed.start[place.id], timed.end[name]
            if start < end:
                message = f"starts at {start} ns but waits for {name}, which ends at {end} ns"
                yield place.breaks("times", f"{place.id} on device {place.device} {message}", name)


def message_times(timed: ForecastTimes) -> Iterator[Violation]:
    """A send is issued when its producer ends; both halves end when it arrives, `send_*_ns` later."""
    for place, message in timed.placed.sends:
        producer = _producer(timed.placed, message)
        ready = timed.end[producer]
        if timed.start[place.id] != ready:
            text = f"{place.id} on device {place.device} is issued at {timed.start[place.id]} ns, but {producer}"
            yield place.breaks("times", f"{text} ends at {ready} ns", producer)
        arrival = ready + timed.travel(message)
        for half in (place, timed.placed.by_id[message.recv]):
            if timed.end[half.id] != arrival:
                text = f"{half.id} on device {half.device} ends at {timed.end[half.id]} ns, but {message} arrives at"
                yield half.breaks("times", f"{text} {arrival} ns", producer)


def receive_times(timed: ForecastTimes) -> Iterator[Violation]:
    """A receive is issued not later than its message is sent."""
    for place, message in timed.placed.receives:
        if timed.start[place.id] > timed.start[message.send]:
            text = f"{place.id} on device {place.device} is issued at {timed.start[place.id]} ns, after its message is"
            yield place.breaks("times", f"{text} sent at {timed.start[message.send]} ns", message.send)


def arrivals(timed: ForecastTimes) -> Iterator[Violation]:
    """A forward, and the op that makes the gradient, starts at or after the arrival of its message."""
    for place, message in timed.placed.receives:
        reader = timed.placed.reader_of(place)
        if timed.start[reader] < timed.end[place.id]:
            text = f"{reader} on device {place.device} starts at {timed.start[reader]} ns, before {message} arrives at"
            yield timed.placed.by_id[reader].breaks("times", f"{text} {timed.end[place.id]} ns", place.id)


def _producer(placed: PlacedOps, message: Message) -> str:
    if message.what == "activation":
        return named("forward", message.stage, message.unit)
    return placed.gradient_of(message.stage, message.unit)


def link_times(timed: ForecastTimes) -> Iterator[Violation]:
    """The transfers of one direction of one link, over all devices behind it, do not overlap."""
    for link in timed.forecast.links:
        for lane in LANES[1:]:
            places = [place for device in link.devices for place in timed.placed.lanes[device, lane]]
            places.sort(key=lambda place: (timed.start[place.id], timed.end[place.id]))
            yield from _overlaps(timed, places)


def _overlaps(timed: ForecastTimes, places: list[PlacedOp]) -> Iterator[Violation]:
    """Yield the transfers, in order of start, that begin while one of another device still holds the link."""
    holder = places[0] if places else None
    for place in places[1:]:
        assert holder is not None
        start, end = timed.start[place.id], timed.end[holder.id]
        if start < end and holder.device != place.device:
            text = f"starts at {start} ns on the link that {holder.id} of device {holder.device} holds until {end} ns"
            yield place.breaks("link", f"{place.id} on device {place.device} {text}", holder.id)
        holder = max(holder, place, key=lambda one: timed.end[one.id])


def makespan(timed: ForecastTimes) -> Iterator[Violation]:
    """makespan_ns: last end minus first start over compute, d2h and h2d ops; span_ns: the longest per compute lane."""
    whole = _extent(timed, timed.working)
    if timed.forecast.makespan_ns != whole:
        yield Violation("makespan", f"makespan_ns is {timed.forecast.makespan_ns}, the times say {whole}")
    lanes: dict[int, list[PlacedOp]] = defaultdict(list)
    for place in timed.working:
        if place.lane == "compute":
            lanes[place.device].append(place)
    longest = max((_extent(timed, lane) for lane in lanes.values()), default=0)
    if timed.forecast.span_ns != longest:
        yield Violation("makespan", f"span_ns is {timed.forecast.span_ns}, the times say {longest}")


def _extent(timed: ForecastTimes, places: list[PlacedOp]) -> int:
    return max(timed.end[place.id] for place in places) - min(timed.start[place.id] for place in places)


def bubble(timed: ForecastTimes) -> Iterator[Violation]:
    """bubble_fraction = 1 - (sum of the durations of compute ops) / (devices * makespan), within 1e-9."""
    whole = _extent(timed, timed.working) * len(timed.placed.schedule.devices)
    lane = [place for place in timed.working if place.lane == "compute"]
    busy = sum(timed.end[place.id] - timed.start[place.id] for place in lane)
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
