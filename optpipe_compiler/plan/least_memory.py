"""Where no schedule was found: one microbatch after the other with the least memory, or the proof that none fits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.documents.units import show_bytes
from optpipe_compiler.errors import Infeasible

if TYPE_CHECKING:
    from optpipe_compiler.model.problem import Caps
    from optpipe_compiler.plan.incumbents import Attempt, Incumbents


def one_microbatch_at_a_time(incumbents: Incumbents, caps: Caps) -> None:
    """Solve for the least memory of each placement; raise Infeasible where none fits the caps."""
    from optpipe_compiler.solver.minimum import one_at_a_time

    best: tuple[int, int, Attempt] | None = None
    for attempt in incumbents.attempts:
        problem, devices, fixed = attempt.problem, range(attempt.problem.devices), attempt.fixed
        least = max(fixed[d] + max(problem.stages[s].saved for s in problem.stages_of(d)) for d in devices)
        if attempt.is_partial or (best is not None and least >= max(best[0], caps.device_bytes + 1)):
            continue  # whole offloads need no more memory; or one stage alone needs more than another placement
        timed = one_at_a_time(attempt.problem, fixed)
        if incumbents.keep(attempt, timed, "least memory") is None:
            continue
        needed, _ = attempt.peaks(timed)
        worst = max(devices, key=lambda d: needed[d])
        if best is None or needed[worst] < best[0]:
            best = needed[worst], worst, attempt
    if best is not None and incumbents.winner() is None:
        raise _refusal(*best, caps)


def _refusal(needed: int, device: int, attempt: Attempt, caps: Caps) -> Infeasible:
    cap = caps.device_bytes
    place = f"placement {attempt.layout.name}, {attempt.layout.stages} stages"
    host = "" if caps.host_bytes is None else f" and --host-mem {show_bytes(caps.host_bytes)}"
    if needed <= cap:
        return Infeasible(f"no schedule fits{host}: offloading needs more host memory; raise --host-mem or --mem")
    return Infeasible(
        f"no schedule fits --mem {show_bytes(cap)}{host}: device {device} is {needed - cap} bytes "
        f"({show_bytes(needed - cap)}) short; the smallest --mem that would do is {needed} "
        f"({show_bytes(needed)}; {place})"
    )
