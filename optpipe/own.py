"""Schedules of your own: registered by a decorator, then timed, judged and named like the built-in ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from optpipe.keywords import checked, checked_all
from optpipe_compiler import published
from optpipe_compiler.published.common import NotDefined
from optpipe_compiler.published.own import OwnOrder

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe_compiler.model.problem import Problem

Function = TypeVar("Function", bound=OwnOrder)


def primus_order(text: str, problem: Problem) -> list[list[str]]:
    """Return an order that Primus printed (lines `Rank 0: (F|0|0),...`) as a function for `schedule` gives it.

    Raises NotDefined where it printed the order for other ranks or microbatches than the problem has.
    """
    from optpipe_compiler.export import primus

    checked("text", text, "str")
    printed, asked = primus.size(text), (problem.devices, problem.microbatches)
    if all(printed) and printed != asked:
        raise NotDefined("the table has {} ranks and {} microbatches, not {} and {}".format(*printed, *asked))
    owners = {stage: device for device in range(problem.devices) for stage in problem.stages_of(device)}
    return primus.orders(text, [owners[stage] for stage in range(len(problem.stages))])


def schedule(
    name: str, *, placement: str = "linear", stages_per_device: int | tuple[int, ...] = 1, source: str = "own"
) -> Callable[[Function], Function]:
    """Register a function from an instance to an order, under `name`, for a placement (`linear`, `loop` or `v`).

        @optpipe.schedule("my-gpipe")
        def my_gpipe(problem):
            m = range(problem.microbatches)
            return [[f"{s}F{i}" for i in m] + [f"{s}B{i}" for i in m] for s in range(problem.devices)]

    The function gets a `Problem` (devices, microbatches, stages with their times and sizes, budgets) and returns, for
    each device, its ops in order: a list of texts, or one text with blanks. An op is stage, letter and microbatch:
    F forward, B backward or I and W (input and weight gradient), R recompute before its backward. `2D0` anywhere in the
    list of its device has the activation offloaded and reloaded. A heuristic may look at the costs; it raises
    `NotDefined` with a reason where it has no schedule.

    It is then a baseline of every plan made in this process, a candidate and a start of the search, a name for
    `compile(method=...)` and `compare(methods=...)`. A name may be registered again, but not one that is built in.
    """

    several = isinstance(stages_per_device, tuple | list)
    counts = checked_all("stages_per_device", stages_per_device if several else [stages_per_device], "int")
    checked("name", name, "str")

    def register(order: Function) -> Function:
        checked("the schedule", order, "function")
        published.register(name, order, tuple((placement, count) for count in counts), source)
        return order

    return register
