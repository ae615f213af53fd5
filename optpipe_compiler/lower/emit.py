"""The records of the schedule file from a lowered schedule, and a schedule from those records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from optpipe_compiler import __version__
from optpipe_compiler.documents import ir
from optpipe_compiler.documents.ops import op_id
from optpipe_compiler.documents.profile import in_one_stage, selected, value_of
from optpipe_compiler.lower.graph import Graph, Node
from optpipe_compiler.lower.waits import Waits, planned_peaks
from optpipe_compiler.model.problem import (
    alone,
    duplex,
    host_links,
    recompute_ns,
    residue_bytes,
    static_bytes,
    statics,
)
from optpipe_compiler.model.schedule import Kind, Schedule, Task

if TYPE_CHECKING:
    from optpipe_compiler.documents.profile import Layer, Profile
    from optpipe_compiler.model.placement import Layout
    from optpipe_compiler.model.problem import Caps, Problem

COMPUTE: dict[Kind, type[ir.Forward | ir.BackwardInput | ir.BackwardWeight | ir.Backward]] = {
    Kind.F: ir.Forward,
    Kind.I: ir.BackwardInput,
    Kind.W: ir.BackwardWeight,
    Kind.B: ir.Backward,
}
MESSAGES: dict[str, type[ir.SendActivation | ir.RecvActivation | ir.SendGradient | ir.RecvGradient]] = {
    "send_activation": ir.SendActivation,
    "recv_activation": ir.RecvActivation,
    "send_gradient": ir.SendGradient,
    "recv_gradient": ir.RecvGradient,
}


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
    stages = _stages(profile, layout)
    graph = Graph(schedule, stages)
    order = graph.order()
    peaks = planned_peaks(order, schedule.problem.devices)
    waits = Waits(graph, order, peaks)
    waits.add()
    devices = [_device(waits, d, static_bytes(profile, layout, d) + peak, host) for d, (peak, host) in enumerate(peaks)]
    setup = ir.Setup(
        devices=schedule.problem.devices,
        microbatches=schedule.problem.microbatches,
        layers=layout.cuts[-1],
        cap_bytes=caps.device_bytes,
        host_cap_bytes=caps.host_bytes,
        reserve_bytes=value_of(profile.machine.reserve_bytes),
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
    order = Graph(schedule, _stages(profile, layout)).order()
    peaks = planned_peaks(order, schedule.problem.devices)
    static = [static_bytes(profile, layout, device) for device in range(schedule.problem.devices)]
    return [size + peak for size, (peak, _) in zip(static, peaks, strict=True)], [host for _, host in peaks]


def _stages(profile: Profile, layout: Layout) -> list[ir.Stage]:
    layers = selected(profile.expanded_layers(), layout.selective)
    held = statics(layers, layout)
    return [_stage(layers, layout, index, held) for index in range(layout.stages)]


def _stage(layers: list[Layer], layout: Layout, index: int, held: list[int]) -> ir.Stage:
    begin, end = layout.cuts[index], layout.cuts[index + 1]
    mine = in_one_stage(layers[begin:end])

    def each(name: str) -> list[int]:
        return [value_of(getattr(layer, name)) for layer in mine]

    return ir.Stage(
        stage=index,
        device=layout.device_of[index],
        layers=(begin, end),
        static_bytes=sum(held[begin:end]),
        input_bytes=value_of(layers[begin - 1].output_bytes) if index > 0 else 0,
        output_bytes=value_of(mine[-1].output_bytes) if index + 1 < layout.stages else 0,
        saved_bytes=each("saved_bytes"),
        residue_bytes=[residue_bytes(layer) for layer in mine],
        captured_bytes=each("captured_bytes"),
        checkpoint_bytes=each("checkpoint_bytes"),
        forward_transient_bytes=each("forward_transient_bytes"),
        backward_input_transient_bytes=each("backward_input_transient_bytes"),
        backward_weight_transient_bytes=each("backward_weight_transient_bytes"),
        backward_transient_bytes=each("backward_transient_bytes"),
        selective=[layer for layer in range(begin, end) if layer in layout.selective] or UNSET,
    )


def _device(waits: Waits, device: int, peak: int, host_peak: int) -> ir.Device:
    graph = waits.graph
    return ir.Device(
        device=device,
        peak_bytes=peak,
        host_bytes=host_peak,
        compute=[_compute_op(node) for node in graph.lane("compute", device)],
        d2h=[ir.Offload(**_saved_op(node)) for node in graph.lane("d2h", device)],
        h2d=[ir.Reload(**_saved_op(node)) for node in graph.lane("h2d", device)],
        deliveries=[
            ir.Delivered(before=_id(node), sends=[_id(send) for send in sends])
            for node, sends in waits.deliveries(device)
        ],
    )


def _op(node: Node) -> dict[str, Any]:
    return {
        "stage": node.stage,
        "microbatch": node.microbatch,
        "after": [_id(wait) for wait in node.waits],
    }


def _saved_op(node: Node) -> dict[str, Any]:
    return _op(node) | {"layers": node.layers}


def _id(node: Node) -> str:
    if node.task is None:
        return op_id(str(node.message), node.stage, node.microbatch)
    kind = node.task.kind
    if kind in COMPUTE:
        return op_id(str(COMPUTE[kind].__struct_config__.tag), node.stage, node.microbatch)
    name = {Kind.R: "recompute", Kind.D: "offload", Kind.H: "reload"}[kind]
    return op_id(name, node.stage, node.microbatch, node.layers)


def _compute_op(node: Node) -> ir.ComputeOp:
    if node.task is None:
        return MESSAGES[node.message](peer=node.peer, **_op(node))
    if node.task.kind is Kind.R:
        return ir.Recompute(**_saved_op(node))
    return COMPUTE[node.task.kind](**_op(node))


def _forecast(
    schedule: Schedule, profile: Profile, layout: Layout, graph: Graph, certificate: Certificate
) -> ir.Forecast:
    lanes: tuple[ir.Lane, ...] = ("compute", "d2h", "h2d")
    devices = range(schedule.problem.devices)
    arrivals = {
        (node.message, node.stage, node.microbatch): node.end
        for chain, nodes in graph.lanes.items()
        if chain[0] == "pair"
        for node in nodes
    }
    times = [
        ir.Times(
            device=device,
            lane=lane,
            start_ns=[node.start for node in graph.lane(lane, device)],
            end_ns=[_end(node, arrivals) for node in graph.lane(lane, device)],
        )
        for device in devices
        for lane in lanes
        if graph.lane(lane, device)
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
        stages=[_stage_cost(schedule.problem, profile, layout, index) for index in range(layout.stages)],
        links=[
            ir.LinkCost(
                devices=members,
                d2h_bytes_per_s=alone(link)[0],
                h2d_bytes_per_s=alone(link)[1],
                duplex_d2h_bytes_per_s=duplex(link)[0],
                duplex_h2d_bytes_per_s=duplex(link)[1],
                latency_ns=value_of(link.latency_ns),
            )
            for members, link in host_links(profile.machine, schedule.problem.devices)
        ],
        times=times,
    )


def _end(node: Node, arrivals: dict[tuple[str, int, int], int]) -> int:
    """Return when an op has completed; a message half has when the message arrives."""
    if node.task is not None:
        return node.end
    if node.message.startswith("send"):
        return arrivals[node.message, node.stage, node.microbatch]
    sender = node.stage - 1 if node.message == "recv_activation" else node.stage + 1
    return arrivals[node.message.replace("recv", "send"), sender, node.microbatch]


def _stage_cost(problem: Problem, profile: Profile, layout: Layout, index: int) -> ir.StageCost:
    stage = problem.stages[index]
    layers = profile.expanded_layers()[layout.cuts[index] : layout.cuts[index + 1]]
    return ir.StageCost(
        stage=index,
        forward_ns=stage.forward,
        backward_input_ns=stage.backward_input,
        backward_weight_ns=stage.backward_weight,
        backward_ns=stage.backward,
        recompute_ns=[recompute_ns(layer) for layer in layers],
        send_activation_ns=stage.send_activation,
        send_gradient_ns=stage.send_gradient,
    )


def lift(schedule: ir.Schedule, problem: Problem) -> Schedule:
    """Return the planned schedule that the file's forecast describes, on the problem that it was lowered from."""
    kinds = {record.__struct_config__.tag: kind for kind, record in COMPUTE.items()}
    kinds |= {"recompute": Kind.R, "offload": Kind.D, "reload": Kind.H}
    starts: dict[Task, int] = {}
    for times in schedule.forecast.times:
        ops = getattr(schedule.devices[times.device], times.lane)
        for op, start in zip(ops, times.start_ns, strict=True):
            if op.name in kinds:
                starts[Task(kinds[op.name], op.stage, op.microbatch)] = start
    return Schedule(problem, schedule.forecast.method, starts)
