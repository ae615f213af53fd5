"""The laws of the full model, one function each, and what it minimises."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ortools.sat.python import cp_model

    from optpipe_compiler.model.problem import Problem
    from optpipe_compiler.solver.variables import Activation, Expr, Variables


def add_all(model: cp_model.CpModel, problem: Problem, v: Variables, budgets: Sequence[Expr] | None = None) -> None:
    """Add every law; `budgets` replaces the problem's memory per device, by variables if they are to be minimised."""
    for (s, m), a in v.activations.items():
        model.add_exactly_one(a.keep, a.offload, a.recompute)
        _data(model, problem, v, s, m, a)
        _residency(model, problem, s, a)
        _in_order(model, problem, v, s, m, a)
    _compute_lanes(model, problem, v)
    _links(model, problem, v)
    _device_memory(model, problem, v, problem.budget if budgets is None else budgets)
    _host_memory(model, problem, v)


def _data(model: cp_model.CpModel, problem: Problem, v: Variables, s: int, m: int, a: Activation) -> None:
    """F after F of the stage before; backward after F and the next stage's backward; W after I; messages take time."""
    stage = problem.at(s, m)
    if s > 0:
        before = problem.at(s - 1, m)
        model.add(a.forward >= v.activations[s - 1, m].forward + before.forward + before.send_activation)
    if s + 1 < len(problem.stages):
        model.add(a.backward >= v.activations[s + 1, m].backward_end + problem.at(s + 1, m).send_gradient)
    model.add(a.backward >= a.forward + stage.forward)
    model.add(a.weight >= a.backward_end)
    model.add(a.release == a.weight + stage.backward_weight).only_enforce_if(a.split)
    model.add(a.release == a.backward_end).only_enforce_if(~a.split)
    model.add(a.away >= a.forward + stage.forward)
    model.add(a.away_end == a.away + stage.offload - (stage.offload - stage.offload_alone) * a.away_alone)
    model.add(a.back_end == a.back + stage.reload - (stage.reload - stage.reload_alone) * a.back_alone)
    model.add_implication(a.away_alone, a.offload)
    model.add_implication(a.back_alone, a.offload)
    model.add(a.back >= a.away_end).only_enforce_if(a.offload)
    model.add(a.backward >= a.back_end).only_enforce_if(a.offload)
    again = model.add(a.again >= a.forward + stage.forward)
    if problem.slices > 1:  # `_in_order` says when one that is not recomputed would be
        again.only_enforce_if(a.recompute)
    model.add(a.backward >= a.again + stage.recompute).only_enforce_if(a.recompute)


def _residency(model: cp_model.CpModel, problem: Problem, s: int, a: Activation) -> None:
    """What the backward reads is there from F (kept), from the reload's start or from the recomputation's start on."""
    model.add(a.late == a.forward).only_enforce_if(a.keep)
    if problem.can_offload(s):
        model.add(a.late == a.back).only_enforce_if(a.offload)
    if problem.can_recompute(s):
        model.add(a.late == a.again).only_enforce_if(a.recompute)


def _in_order(model: cp_model.CpModel, problem: Problem, v: Variables, s: int, m: int, a: Activation) -> None:
    """Per stage and kind, microbatches run in order: torch's engine needs it, and equal microbatches lose nothing.

    Slices of a microbatch ascend in forwards and offloads, and descend in all others.
    """
    one = v.activations.get((s, m - 1))
    other = v.activations.get((s, problem.back(problem.back(m) - 1)))
    if one is not None:
        model.add(a.forward >= one.forward + problem.at(s, m - 1).forward)
    if other is not None:
        model.add(a.backward >= other.backward_end)
        model.add(a.weight >= other.weight)
    if one is not None:
        model.add(a.away >= one.away)
    if other is not None:
        model.add(a.back >= other.back)
        model.add(a.again >= other.again)
    if problem.slices > 1:  # later slices come back first: one that is not recomputed holds up no earlier one
        model.add(a.again == (0 if other is None else other.again)).only_enforce_if(~a.recompute)


def _compute_lanes(model: cp_model.CpModel, problem: Problem, v: Variables) -> None:
    """A device runs one compute op at a time, and none while copies take its compute: see `Stage`."""
    lanes: list[list[cp_model.IntervalVar]] = [[] for _ in range(problem.devices)]
    for (s, m), a in v.activations.items():
        stage = problem.at(s, m)
        size = stage.backward + (stage.backward_input - stage.backward) * a.split
        lane = lanes[stage.device]
        lane.append(model.new_fixed_size_interval_var(a.forward, stage.forward, f"F_{s}_{m}"))
        lane.append(model.new_interval_var(a.backward, size, a.backward_end, f"I_{s}_{m}"))
        if problem.freedom.split:
            lane.append(_optional(model, a.weight, stage.backward_weight, a.split, f"W_{s}_{m}"))
        if problem.can_recompute(s):
            lane.append(_optional(model, a.again, stage.recompute, a.recompute, f"R_{s}_{m}"))
        if problem.can_offload(s) and stage.offload_busy:
            end = a.forward + stage.forward
            lane.append(_optional(model, end, stage.offload_busy, a.offload, f"D_busy_{s}_{m}"))
        if problem.can_offload(s) and stage.reload_busy:
            begin = a.backward - stage.reload_busy
            lane.append(_optional(model, begin, stage.reload_busy, a.offload, f"H_busy_{s}_{m}"))
    for lane in lanes:
        model.add_no_overlap(lane)


def _optional(
    model: cp_model.CpModel, start: Expr, size: int, present: cp_model.IntVar, name: str
) -> cp_model.IntervalVar:
    return model.new_optional_fixed_size_interval_var(start, size, present, name)


def _links(model: cp_model.CpModel, problem: Problem, v: Variables) -> None:
    """Each direction of a host link serves one transfer at a time, over all devices behind it.

    One that is taken to be alone overlaps none of the other direction either.
    """
    lanes: dict[tuple[int | None, str], list[cp_model.IntervalVar]] = {}
    for (s, m), a in v.activations.items():
        if problem.can_offload(s):
            stage = problem.at(s, m)
            link = problem.link_of[stage.device]
            size = stage.offload - (stage.offload - stage.offload_alone) * a.away_alone
            away = model.new_optional_interval_var(a.away, size, a.away_end, a.offload, f"D_{s}_{m}")
            size = stage.reload - (stage.reload - stage.reload_alone) * a.back_alone
            back = model.new_optional_interval_var(a.back, size, a.back_end, a.offload, f"H_{s}_{m}")
            lanes.setdefault((link, "d2h"), []).append(away)
            lanes.setdefault((link, "h2d"), []).append(back)
            if stage.offload_alone < stage.offload or stage.reload_alone < stage.reload:
                sole = _optional(model, a.away, stage.offload_alone, a.away_alone, "")
                lanes.setdefault((link, "h2d and offloads alone"), []).extend([sole, back])
                sole = _optional(model, a.back, stage.reload_alone, a.back_alone, "")
                lanes.setdefault((link, "d2h and reloads alone"), []).extend([sole, away])
    for lane in lanes.values():
        model.add_no_overlap(lane)


@dataclass
class _Cumulative:
    """Collects (interval, demand) of one resource; zero demands are left out."""

    model: cp_model.CpModel
    v: Variables
    intervals: list[cp_model.IntervalVar] = field(default_factory=list)
    demands: list[int] = field(default_factory=list)

    def add(self, start: Expr, end: Expr, demand: int, present: cp_model.LiteralT | None, name: str) -> None:
        """Hold `demand` over [start, end), if `present`."""
        if demand <= 0:
            return
        size = self.model.new_int_var(0, self.v.horizon, f"{name}_length")
        self.v.lengths.append((size, start, end))
        if present is None:
            self.intervals.append(self.model.new_interval_var(start, size, end, name))
        else:
            self.intervals.append(self.model.new_optional_interval_var(start, size, end, present, name))
        self.demands.append(demand)


def _device_memory(model: cp_model.CpModel, problem: Problem, v: Variables, budgets: Sequence[Expr]) -> None:
    """At every moment what is resident on a device fits its budget (docs/IR.md).

    The gradients of what a slice carries are there from the backward of the microbatch's last slice to its own.
    """
    resources = [_Cumulative(model, v) for _ in range(problem.devices)]
    for (s, m), a in v.activations.items():
        stage = problem.at(s, m)
        held = resources[stage.device]
        growth = max(0, stage.residue - stage.saved)
        both = min(stage.saved, stage.residue)
        name = f"{s}_{m}"
        held.add(a.late, a.release, both, None, f"residue_{name}")
        held.add(a.late, a.backward_end, stage.saved - both, None, f"saved_{name}")
        held.add(a.backward, a.release, growth, a.split, f"growth_{name}")
        _while_running(held, problem, s, m, a, growth)
        _messages(resources, problem, v, s, m, a)
        last = v.activations[s, m + problem.slices - 1 - m % problem.slices]
        held.add(last.backward, a.backward_end, stage.gradient, None, f"gradient_{name}")
        if problem.can_offload(s):
            held.add(a.forward, a.away_end, stage.moved, a.offload, f"leaving_{name}")
            held.add(a.forward, a.late, stage.staying, a.offload, f"staying_{name}")
        if problem.can_recompute(s):
            end = a.forward + stage.forward
            held.add(a.forward, end, stage.saved, a.recompute, f"dropped_{name}")
            held.add(end, a.again, stage.checkpoint, a.recompute, f"checkpoint_{name}")
    for held, budget in zip(resources, budgets, strict=True):
        if held.intervals:
            model.add_cumulative(held.intervals, held.demands, budget)


def _while_running(held: _Cumulative, problem: Problem, s: int, m: int, a: Activation, growth: int) -> None:
    """Transient bytes and messages exist while their op runs; a recompute reads no message and writes none."""
    stage, name = problem.at(s, m), f"{s}_{m}"
    held.add(a.forward, a.forward + stage.forward, stage.forward_extra, None, f"F_extra_{name}")
    fused, halves = stage.backward_extra, stage.backward_input_extra + stage.captured - growth
    held.add(a.backward, a.backward_end, min(fused, halves), None, f"B_extra_{name}")
    held.add(a.backward, a.backward_end, fused - min(fused, halves), ~a.split, f"fused_extra_{name}")
    held.add(a.backward, a.backward_end, halves - min(fused, halves), a.split, f"I_extra_{name}")
    held.add(a.weight, a.weight + stage.backward_weight, stage.backward_weight_extra, a.split, f"W_extra_{name}")
    if problem.can_recompute(s):
        extra = stage.forward_extra - stage.incoming - stage.outgoing
        held.add(a.again, a.again + stage.recompute, extra, a.recompute, f"R_extra_{name}")


def _messages(resources: list[_Cumulative], problem: Problem, v: Variables, s: int, m: int, a: Activation) -> None:
    """What a stage hands on is there until it is read, and with its sender until it is delivered.

    With its own op, and with that which reads it, it counts in `_while_running`. A receive is posted before the op that
    runs meanwhile, whose highest level it adds to: that is left to the machine.
    """
    if s == 0:
        return
    stage, before, source = problem.at(s, m), problem.at(s - 1, m), v.activations[s - 1, m]
    made = source.forward + before.forward
    ways = [
        (before, made, stage, a.forward, before.outgoing, before.send_activation, f"activation_{s}_{m}"),
        (stage, a.backward_end, before, source.backward, stage.incoming, stage.send_gradient, f"gradient_{s}_{m}"),
    ]
    for maker, end, reader, start, units, lag, name in ways:
        resources[reader.device].add(end, start, units, None, f"waiting_{name}")
        if maker.device != reader.device and lag:
            resources[maker.device].add(end, end + lag, units, None, f"leaving_{name}")


def _host_memory(model: cp_model.CpModel, problem: Problem, v: Variables) -> None:
    """Each device gets a share of its host's memory that its offloads never exceed; the shares fit every limit."""
    limits = problem.host_limits
    if not limits:
        return
    resources = [_Cumulative(model, v) for _ in range(problem.devices)]
    for (s, m), a in v.activations.items():
        if problem.can_offload(s):
            stage = problem.at(s, m)
            held = resources[stage.device]
            held.add(a.away, a.back_end, stage.moved, a.offload, f"host_{s}_{m}")
    largest = [min((limit for devices, limit in limits if d in devices), default=None) for d in range(problem.devices)]
    every = sum(demand for held in resources for demand in held.demands)
    v.shares.extend(
        model.new_int_var(0, every if most is None else most, f"share_{d}") for d, most in enumerate(largest)
    )
    for devices, limit in limits:
        model.add(sum(v.shares[d] for d in devices) <= limit)
    for held, share in zip(resources, v.shares, strict=True):
        if held.intervals:
            model.add_cumulative(held.intervals, held.demands, share)


def minimise(model: cp_model.CpModel, problem: Problem, v: Variables, objective: str) -> None:
    """Minimise the makespan, or the longest span of one device (first start to last end on its compute lane)."""
    last = problem.back(problem.microbatches - 1)
    if objective == "makespan":
        model.add(v.activations[0, 0].forward == 0)
        for s in range(len(problem.stages)):
            model.add(v.makespan >= v.activations[s, last].backward_end)
        for a in v.activations.values():
            model.add(v.makespan >= a.release)
    else:
        first = {d: min(problem.stages_of(d)) for d in range(problem.devices) if problem.stages_of(d)}
        for (s, _), a in v.activations.items():
            begin = v.activations[first[problem.stages[s].device], 0].forward
            model.add(v.makespan >= a.release - begin)
    model.minimize(v.makespan)
