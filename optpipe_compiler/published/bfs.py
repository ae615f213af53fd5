"""Breadth-first pipeline parallelism (Lamy-Poirier, 2022, arXiv:2211.05953 section 4): GPipe on a loop of stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.published.common import LOOP, Tasks, ordered
from optpipe_compiler.published.gpipe import all_forwards_first

if TYPE_CHECKING:
    from optpipe_compiler.model.problem import Problem


@ordered("bfs", LOOP)
def bfs(problem: Problem) -> Tasks:
    """Return the order: each stage takes all microbatches before the next.

    Peak M microbatches, bubble (P - 1)(F + B) / v where M >= P. The microbatches of a backward keep their order.
    """
    return all_forwards_first(problem)
