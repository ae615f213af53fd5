"""The decision variables of the full model: one set per stage and microbatch, or slice of one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from optpipe_compiler.model.schedule import Kind

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

    from optpipe_compiler.model.problem import Problem

    Expr = cp_model.LinearExprT
    Var = cp_model.IntVar


@dataclass(frozen=True)
class Activation:
    """Variables of one (stage, microbatch). Starts of absent optional tasks are free within their order."""

    forward: Var
    backward: Var
    """Start of the fused backward or of the input gradient, which share a place in the order."""
    backward_end: Var
    split: Var
    weight: Var
    release: Var
    """End of the last task that reads the activation."""
    keep: Var
    offload: Var
    recompute: Var
    away: Var
    """Start of the offload."""
    away_end: Var
    away_alone: Var
    """Whether no reload of the link overlaps the offload, which is then shorter."""
    back: Var
    """Start of the reload."""
    back_end: Var
    back_alone: Var
    again: Var
    """Start of the recomputation."""
    late: Var
    """From here on the activation is resident until its backward: the forward's start when it is kept."""

    def ops(self) -> dict[Kind, tuple[Var, cp_model.LiteralT | None]]:
        """Return the start of each op, and whether there is one; None: always."""
        return {
            Kind.F: (self.forward, None),
            Kind.B: (self.backward, ~self.split),
            Kind.I: (self.backward, self.split),
            Kind.W: (self.weight, self.split),
            Kind.R: (self.again, self.recompute),
            Kind.D: (self.away, self.offload),
            Kind.H: (self.back, self.offload),
        }


@dataclass(frozen=True)
class Variables:
    """All variables of a model over `horizon` ticks."""

    horizon: int
    activations: dict[tuple[int, int], Activation]
    makespan: Var
    lengths: list[tuple[Var, Expr, Expr]] = field(default_factory=list)
    """(length, start, end) of every residency; they follow from the rest, but a hint must name them."""
    shares: list[Var] = field(default_factory=list)
    """Host memory of each device, where it is limited."""


def create(model: cp_model.CpModel, problem: Problem, horizon: int) -> Variables:
    """Create the variables with the domains that the instance allows."""
    activations = {
        (s, m): create_activation(model, problem, s, m, horizon)
        for s in range(len(problem.stages))
        for m in range(problem.microbatches)
    }
    return Variables(horizon, activations, model.new_int_var(0, horizon, "makespan"))


def create_activation(model: cp_model.CpModel, problem: Problem, s: int, m: int, horizon: int) -> Activation:
    """Create the variables of one stage and microbatch."""
    stage = problem.at(s, m)

    def time(name: str, beyond: int = 0) -> Var:
        return model.new_int_var(0, horizon + beyond, f"{name}_{s}_{m}")

    def choice(name: str, possible: bool) -> Var:
        return model.new_bool_var(f"{name}_{s}_{m}") if possible else model.new_constant(0)

    return Activation(
        forward=time("F"),
        backward=time("I"),
        backward_end=time("I_end"),
        split=choice("split", problem.freedom.split),
        weight=time("W"),
        release=time("release"),
        keep=model.new_bool_var(f"keep_{s}_{m}"),
        offload=choice("offload", problem.can_offload(s)),
        recompute=choice("recompute", problem.can_recompute(s)),
        away=time("D"),
        away_end=time("D_end", stage.offload),
        away_alone=choice("D_alone", stage.offload_alone < stage.offload),
        back=time("H"),
        back_end=time("H_end", stage.reload),
        back_alone=choice("H_alone", stage.reload_alone < stage.reload),
        again=time("R"),
        late=time("late"),
    )
