"""The records of the schedule file from a lowered schedule."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import UNSET, UnsetType

from optpipe_compiler import __version__
from optpipe_compiler.documents import ir
from optpipe_compiler.documents.ops import op_id
from optpipe_compiler.documents.profile import (
    TRANSIENT,
    Sliceable,
    in_one_stage,
    of_unit,
    on_device,
    selected,
    value_of,
)
from optpipe_compiler.lower.graph import LANES, SEND_ACTIVATION, Graph
from optpipe_compiler.lower.waits import Waits, planned_peaks
from optpipe_compiler.model.problem import hosts_of, static_bytes, statics
from optpipe_compiler.model.schedule import Kind, Schedule

if TYPE_CHECKING:
    from optpipe_compiler.documents.profile import Layer, Machine, Profile
    from optpipe_compiler.model.placement import Layout
    from optpipe_compiler.model.problem import Caps, Problem

RECORDS: tuple[type[ir.ComputeOp | ir.Offload | ir.Reload], ...] = (
    ir.Forward,
    ir.BackwardInput,
    ir.BackwardWeight,
    ir.Backward,
    ir.Recompute,
    ir.Offload,
    ir.Reload,
    ir.SendActivation,
    ir.SendGradient,
    ir.RecvActivation,
    ir.RecvGradient,
)
"""By kind of node."""


@dataclass(frozen=True)
class Certificate:
    """What was proved and compared, and under which options; goes into the file as it is."""

    objective: ir.Objective
    outcome: ir.Outcome
    lower_bound_ns: int
    bound: str
    baselines: dict[str, ir.Baseline]
    options: dict[str, str | int | float | bool | None]


def lower(schedule: Schedule, profile: Profile, layout: Layout, caps: Caps, certificate: Certificate) -> ir.Schedule:
    """Return the sealed file for an exact schedule of `profile` placed by `layout`.

    The promised peaks are the planned ones; whether they are under the caps is left to the caller and to `verify`.
    """
    stages = _stages(profile, layout, schedule.problem)
    graph = Graph(schedule)
    order = graph.order()
    peaks = planned_peaks(graph, order)
    waits = Waits(graph, order, peaks)
    static = static_bytes(profile, layout)
    ops = _Ops(waits, stages, layout)
    devices = [ops.device(d, static[d] + peaks[d][0], peaks[d][1]) for d in layout.devices_by_number]
    setup = ir.Setup(
        devices=schedule.problem.devices,
        microbatches=schedule.problem.whole,
        layers=layout.cuts[-1],
        cap_bytes=caps.device_bytes,
        host_cap_bytes=caps.host_bytes,
        reserve_bytes=value_of(profile.machine.reserve_bytes),
        units=_units(schedule.problem),
        hosts=_hosts(profile.machine, schedule.problem.devices),
    )
    provenance = ir.Provenance(
        compiler=f"optpipe {__version__}",
        profile=profile.name,
        profile_digest=profile.digest(),
        options=certificate.options,
    )
    forecast = _forecast(schedule, profile, layout, graph, certificate)
    return ir.seal(
        ir.Schedule(
            digest="",
            setup=setup,
            model=profile.model,
            stages=stages,
            devices=devices,
            forecast=forecast,
            provenance=provenance,
        )
    )


def promised(schedule: Schedule, profile: Profile, layout: Layout) -> tuple[list[int], list[int]]:
    """Return the peaks that the file of `schedule` would promise, in bytes per device: on the device, on the host."""
    graph = Graph(schedule)
    peaks = planned_peaks(graph, graph.order())
    static = static_bytes(profile, layout)
    return [size + peak for size, (peak, _) in zip(static, peaks, strict=True)], [host for _, host in peaks]


def _units(problem: Problem) -> ir.Units | UnsetType:
    slicing = problem.slicing
    if slicing is None:
        return UNSET
    return ir.Units(tokens=slicing.tokens, cuts=list(map(list, slicing.cuts)), shape_of=list(slicing.shape_of))


def _hosts(machine: Machine, devices: int) -> list[ir.Host] | UnsetType:
    found = [ir.Host(devices=list(members), cap_bytes=limit) for members, limit in hosts_of(machine, devices)]
    return found or UNSET


def _stages(profile: Profile, layout: Layout, problem: Problem) -> list[ir.Stage]:
    layers = selected(profile.expanded_layers(), layout.selective)
    held = statics(layers, layout)
    return [_stage(layers, layout, index, held, problem) for index in range(layout.stages)]


def _carry(layers: list[Layer]) -> ir.Carry:
    found = [layer.slices or Sliceable() for layer in layers]
    return ir.Carry(
        bytes=[value_of(one.carry_bytes) for one in found],
        gradient_bytes=[one.gradient_or_carry_bytes for one in found],
        forward_transient_bytes=[value_of(one.forward_prefix_bytes) for one in found],
        backward_transient_bytes=[value_of(one.backward_prefix_bytes) for one in found],
    )


def _fixed(layers: list[Layer]) -> ir.Fixed | UnsetType:
    found = {
        name: [value_of(getattr(one.slices or Sliceable(), f"{op}_fixed_bytes")) for one in layers]
        for op, name in TRANSIENT.items()
    }
    return ir.Fixed(**found) if any(map(any, found.values())) else UNSET


def _stage(layers: list[Layer], layout: Layout, index: int, held: list[int], problem: Problem) -> ir.Stage:
    begin, end = layout.cuts[index], layout.cuts[index + 1]
    mine = in_one_stage(layers[begin:end])

    def each(name: str) -> list[int]:
        return [value_of(getattr(layer, name)) for layer in mine]

    return ir.Stage(
        stage=index,
        device=layout.owners[index],
        layers=(begin, end),
        static_bytes=sum(held[begin:end]),
        input_bytes=value_of(layers[begin - 1].output_bytes) if index > 0 else 0,
        output_bytes=value_of(mine[-1].output_bytes) if index + 1 < layout.stages else 0,
        saved_bytes=each("saved_bytes"),
        residue_bytes=[layer.residue_or_saved_bytes for layer in mine],
        captured_bytes=each("captured_bytes"),
        checkpoint_bytes=each("checkpoint_bytes"),
        forward_transient_bytes=each("forward_transient_bytes"),
        backward_input_transient_bytes=each("backward_input_transient_bytes"),
        backward_weight_transient_bytes=each("backward_weight_transient_bytes"),
        backward_transient_bytes=each("backward_transient_bytes"),
        selective=[layer for layer in range(begin, end) if layer in layout.selective] or UNSET,
        carry=_carry(mine) if problem.slices > 1 else UNSET,
        fixed=UNSET if problem.slicing is None else _fixed(mine),
    )


class _Ops:
    """The ops of a schedule with waits, as records."""

    def __init__(self, waits: Waits, stages: list[ir.Stage], layout: Layout) -> None:
        self.waits, self.graph, self.stages, self.layout = waits, waits.graph, stages, layout
        self.slices = self.graph.problem.slices
        nodes = self.graph.nodes
        columns = (nodes.kind, nodes.stage, nodes.unit, nodes.peer)
        self.nodes = list(zip(*(column.tolist() for column in columns), strict=True))
        """Kind, stage, unit and peer of each."""
        self._ids: dict[int, str] = {}
        """As far as they were asked for."""

    def device(self, number: int, peak: int, host_peak: int) -> ir.Device:
        """Return the promise of a device of the pipeline, and its lanes."""
        compute, d2h, h2d = (self.graph.lane(lane, number).tolist() for lane in LANES)
        return ir.Device(
            device=self.layout.named(number),
            peak_bytes=peak,
            host_bytes=host_peak,
            compute=[self._op(node) for node in compute],
            d2h=[self._op(node) for node in d2h],
            h2d=[self._op(node) for node in h2d],
            deliveries=[
                ir.Delivered(before=self._id(node), sends=[self._id(send) for send in sends])
                for node, sends in self.waits.deliveries(number)
            ],
        )

    def _op(self, node: int) -> Any:
        kind, stage, unit, peer = self.nodes[node]
        fields: dict[str, Any] = {"stage": stage, "microbatch": unit}
        if self.slices > 1:
            fields["microbatch"], fields["slice"] = divmod(unit, self.slices)
        if waits := self.waits.of.get(node):
            fields["after"] = [self._id(wait) for wait in waits]
        if kind >= SEND_ACTIVATION:
            fields["peer"] = self.layout.named(peer)
        elif kind >= Kind.R:
            fields["layers"] = self._layers(kind, stage, unit)
        return RECORDS[kind](**fields)

    def _layers(self, kind: int, stage: int, unit: int) -> tuple[int, int]:
        """Return the layers of an op on saved activations."""
        begin, end = self.stages[stage].layers
        return begin, end if kind == Kind.R else end - self.graph.problem.at(stage, unit).staying_layers

    def _id(self, node: int) -> str:
        if node not in self._ids:
            kind, stage, unit, _ = self.nodes[node]
            microbatch, slice = (unit, None) if self.slices == 1 else divmod(unit, self.slices)
            layers = self._layers(kind, stage, unit) if Kind.R <= kind < SEND_ACTIVATION else None
            self._ids[node] = op_id(RECORDS[kind].name, stage, microbatch, layers, slice)
        return self._ids[node]


def _forecast(
    schedule: Schedule, profile: Profile, layout: Layout, graph: Graph, certificate: Certificate
) -> ir.Forecast:
    completed = graph.nodes.end.copy()  # a message half is complete when the message arrives
    completed[graph.ops :] = np.tile(completed[graph.ops + 2 * graph.messages :], 3)
    names: tuple[ir.Lane, ...] = ("compute", "d2h", "h2d")
    lanes = [
        (layout.named(device), name, graph.lane(lane, device))
        for device in layout.devices_by_number
        for lane, name in zip(LANES, names, strict=True)
    ]
    times = [
        ir.Times(device=device, lane=name, start_ns=graph.nodes.start[nodes].tolist(), end_ns=completed[nodes].tolist())
        for device, name, nodes in lanes
        if len(nodes)
    ]
    return ir.Forecast(
        objective=certificate.objective,
        makespan_ns=schedule.makespan,
        span_ns=schedule.span,
        bubble_fraction=schedule.bubble_fraction,
        outcome=certificate.outcome,
        method=schedule.method,
        lower_bound_ns=certificate.lower_bound_ns,
        bound=certificate.bound,
        baselines=certificate.baselines,
        op_overhead_ns=value_of(profile.machine.op_overhead_ns),
        stages=_stage_costs(schedule.problem, profile, layout),
        links=[
            ir.LinkCost(
                devices=members,
                d2h_bytes_per_s=link.alone[0],
                h2d_bytes_per_s=link.alone[1],
                duplex_d2h_bytes_per_s=link.duplex[0],
                duplex_h2d_bytes_per_s=link.duplex[1],
                latency_ns=value_of(link.latency_ns),
                compute_permille=value_of(link.compute_permille) or UNSET,
            )
            for members, link in profile.machine.host_links(schedule.problem.devices)
        ],
        times=times,
    )


def _stage_costs(problem: Problem, profile: Profile, layout: Layout) -> list[ir.StageCost]:
    """Return a record for each stage and, where units differ, each shape and slice."""
    layers, slicing, machine = profile.expanded_layers(), problem.slicing, profile.machine
    found = []
    for index, (begin, end) in enumerate(pairwise(layout.cuts)):
        for number, stages in enumerate(problem.by_class):
            mine, stage, which = layers[begin:end], stages[index], dict[str, int]()
            if slicing is not None:
                shape, slice = divmod(number, slicing.slices)
                which = {"shape": shape, "slice": slice}
                tokens = slicing.cuts[shape][slice], slicing.cuts[shape][slice + 1]
                mine = [of_unit(one, tokens, slicing.tokens, is_cut=slicing.slices > 1) for one in mine]
            mine = [on_device(one, machine, layout.owners[index]) for one in mine]
            found.append(
                ir.StageCost(
                    stage=index,
                    forward_ns=stage.forward,
                    backward_input_ns=stage.backward_input,
                    backward_weight_ns=stage.backward_weight,
                    backward_ns=stage.backward,
                    recompute_ns=[layer.recompute_or_forward_ns for layer in mine],
                    send_activation_ns=stage.send_activation,
                    send_gradient_ns=stage.send_gradient,
                    **which,
                )
            )
    return found
