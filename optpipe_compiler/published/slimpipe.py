"""SlimPipe (Li et al., 2025, arXiv:2504.14519): interleaved 1F1B on equal slices, one microbatch after the other.

All slices of a microbatch go through a stage of a device before the next one begins, so n is a multiple of P. (The
paper evens out the work of attention by sending keys and values between devices, which this file format does not have:
choose slices of equal time instead.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.published.common import LOOP, NotDefined, Tasks, ordered
from optpipe_compiler.published.seq1f1b import interleaved

if TYPE_CHECKING:
    from optpipe_compiler.model.problem import Problem


@ordered("slimpipe", LOOP)
def slimpipe(problem: Problem) -> Tasks:
    """Return the order: interleaved 1F1B in groups of one microbatch; peak 1 + 2 (P - 1) / (n v) microbatches."""
    if problem.slices % problem.devices:
        raise NotDefined(
            f"slimpipe needs a number of slices divisible by {problem.devices} devices, not {problem.slices}"
        )
    return interleaved(problem, "slimpipe", problem.slices)
