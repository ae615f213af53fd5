"""What binds in a schedule, in sentences: idle time by cause, then what each change could and did save."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from optpipe_compiler.documents.units import counted, enumerated, show_ns, show_slicing
from optpipe_compiler.view.bar import Bar, description_column

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console, RenderableType

    from optpipe_compiler.study.explain import Explanation, Idle, WhatIf
    from optpipe_compiler.study.variations import Variation

NEGLIGIBLE = 0.0005
"""Shares below this are shown as nothing."""
WORTH = 0.9
"""The memory that is named is the least that saves this part of the most that was found."""
LOST = {
    "fill": "while the pipeline fills",
    "drain": "while it drains",
    "memory": "waiting for {}",
    "transfer": "waiting for {}",
    "copies": "while copies take the compute of {}",
    "imbalance": "waiting for {}, which is busy with other work",
    "order": "because {} runs other ops first",
    "slack": "for no reason that the file names",
}
DOINGS = {"offload": "offloading", "selective": "selective recompute"}
"""What a schedule does and a change forbids."""
SUBJECTS = {
    "link": ("host links twice as fast", "Host links twice as fast would save"),
    "copies": ("copies that take no compute", "Copies that take no compute would save"),
    "messages": ("messages in no time", "Messages that take no time would save"),
    "layers": ("layers of equal cost", "Layers of equal cost, evenly cut, would save"),
}


class ChangesBar(Bar):
    """Changes planned."""

    def __init__(self, console: Console, total: int) -> None:
        columns = (TextColumn("what if"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        super().__init__(console, *columns, description_column(), description="", total=total)

    def update(self, variation: Variation) -> None:
        """Count one more."""
        self.bar.update(self.task, advance=1, description=variation.text)
        self.say(f"planned: {variation.text}")


def render(explanation: Explanation) -> RenderableType:
    """Return the sentences and the table of all changes."""
    parts = [Text(sentence) for sentence in sentences(explanation)]
    return Group(*parts, Text(), _table(explanation))


def sentences(explanation: Explanation) -> Iterator[str]:
    """Yield everything in sentences, the most important first."""
    yield _standing(explanation)
    if (units := show_slicing(explanation.slices, explanation.lengths)) is not None:
        yield f"Every change is planned {units}."
    yield from _idle(explanation)
    if explanation.what_ifs or not explanation.left:
        yield _binding(explanation)
    memory = [one for one in explanation.what_ifs if one.family == "memory"]
    if memory:
        yield _memory(memory, explanation)
    for one in explanation.what_ifs:
        if one.family in SUBJECTS:
            yield f"{SUBJECTS[one.family][1]} {_saving(one, explanation)}."
        elif one.family == "microbatches":
            yield f"{one.text} instead of {explanation.microbatches} would save, {_per(explanation)}, " + (
                f"{_saving(one, explanation)}."
            )
        elif one.family == "head":
            saving = _saving(one, explanation)
            yield f"The head in {one.amount} of equal cost, if together they cost no more, would save {saving}."
            yield "What they do cost, profile --head-parts says."
        elif one.family in DOINGS:
            yield _costs(one, explanation)
    if explanation.left:
        yield f"Interrupted: {counted(explanation.left, 'change')} not planned."


def _standing(explanation: Explanation) -> str:
    value, best, bound = explanation.value_ns, explanation.best_ns, explanation.bound_ns
    text = f"A step takes {show_ns(value)} ({explanation.objective}); "
    if bound >= value:
        return text + "that is optimal: nothing can be saved without changing the instance."
    text += f"the bound is {show_ns(bound)}, so another schedule of the same instance saves at most "
    text += f"{_share(1 - bound / value)}"
    if best < value:
        found = f"{_share(1 - best / value)} was found in {_searches(explanation)}, {show_ns(best)}"
        return text + f"; {found}. What follows is against that."
    return text + f"; nothing was found in {_searches(explanation)}."


def _idle(explanation: Explanation) -> Iterator[str]:
    if not any(one.causes for one in explanation.idle):
        yield "No device ever idles."
        return
    total: dict[str, float] = {}
    for one in explanation.idle:
        for cause, _, share in one.causes:
            total[cause] = total.get(cause, 0.0) + share / len(explanation.idle)
    ranked = sorted(total.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{cause} {share:.1%}" for cause, share in ranked if share >= NEGLIGIBLE)
    yield f"The devices idle {explanation.bubble_fraction:.1%} of the time: {parts}."
    yield _worst(max(explanation.idle, key=lambda one: one.fraction))


def _worst(one: Idle) -> str:
    lost = [f"{share:.1%} {LOST[cause].format(what)}" for cause, what, share in one.causes if share >= NEGLIGIBLE]
    return f"Device {one.device} idles most, {one.fraction:.1%} of the step: {enumerated(lost[:4])}."


def _binding(explanation: Explanation) -> str:
    """Name what was found to save most, and what may save more by its bound; or say that nothing does."""
    tried = [one for one in explanation.what_ifs if one.effect in ("relaxed", "different")]
    if max((one.at_most for one in tried), default=0.0) < NEGLIGIBLE:
        return "Nothing that was tried can save anything: the work itself binds."
    best = max((one for one in tried if one.found is not None), key=lambda one: one.found or 0.0, default=None)
    if best is None or best.found is None or best.found < NEGLIGIBLE:
        return f"Nothing that was tried saved anything in {_searches(explanation)}, though the bounds leave room."
    text = (
        f"What helps most, as far as it was found, is {_subject(best)}: {_share(best.found)} less time "
        f"{_per(explanation)}"
    )
    most = best.found + NEGLIGIBLE
    open_ = dict.fromkeys(_subject(one) for one in tried if one.family != best.family and one.at_most > most)
    return f"{text}; the bounds do not exclude more for {enumerated(list(open_))}." if open_ else f"{text}."


def _subject(one: WhatIf) -> str:
    named = {"memory": "more memory", "microbatches": one.text, "head": f"the {one.text}"}
    return named.get(one.family) or SUBJECTS[one.family][0]


def _memory(memory: Sequence[WhatIf], explanation: Explanation) -> str:
    most = max(one.found or 0.0 for one in memory)
    if most < NEGLIGIBLE:
        return f"{memory[-1].amount} would save {_saving(memory[-1], explanation)}."
    enough = next(one for one in memory if (one.found or 0.0) >= WORTH * most)
    text = f"{enough.amount} would save {_saving(enough, explanation)}"
    rest = memory[-1]
    if rest is not enough:
        text += f"; {rest.amount} {_saving(rest, explanation)}"
    return text + "."


def _saving(one: WhatIf, explanation: Explanation) -> str:
    """Say what was found and what the bound leaves, and whether that decides it."""
    if one.at_most < NEGLIGIBLE:
        return "nothing (bound)"
    unchanged = 1 - explanation.bound_ns / max(1, explanation.best_ns)
    alike = ", as unchanged" if abs(one.at_most - unchanged) < NEGLIGIBLE else ""
    most = f"at most {_share(one.at_most)} (bound{alike})"
    if one.outcome == "infeasible":
        return f"{most}; nothing fits"
    if one.found is None:
        return f"{most}; no schedule was found in {_searches(explanation)}: not decided"
    if one.decided:
        return f"{_share(max(0.0, one.found))}, {most}"
    open_ = "not decided" if one.finished else "not decided, and the search was still finding better ones"
    if one.found < -NEGLIGIBLE:
        return f"{most}; what was found in {_searches(explanation)} takes {_share(-one.found)} longer: {open_}"
    found = _share(one.found) if one.found >= NEGLIGIBLE else "nothing"
    return f"{most}; {found} was found in {_searches(explanation)}: {open_}"


def _costs(one: WhatIf, explanation: Explanation) -> str:
    """Say what goes without a restriction: a share of time that is added."""
    what = DOINGS[one.family]
    if one.outcome == "infeasible":
        return f"Without {what} nothing fits this cap."
    if one.found is not None and one.found > -NEGLIGIBLE:
        return f"Without {what} a step takes no longer: such a schedule was found in {_searches(explanation)}."
    text = f"no schedule was found in {_searches(explanation)}"
    if one.found is not None:
        text = f"what was found in {_searches(explanation)} takes {_share(-one.found)} longer"
    if one.at_most > -NEGLIGIBLE:
        return f"Without {what} {text}; that it must is not proven."
    return f"Without {what} a step takes at least {_share(-one.at_most)} longer (bound); {text}."


def _per(explanation: Explanation) -> str:
    return "per microbatch" if explanation.lengths is None else "per token"


def _share(value: float) -> str:
    return f"{value:.1%}"


def _signed(value: float) -> str:
    return f"{value:.1%}" if abs(value) >= NEGLIGIBLE else "0.0%"


def _searches(explanation: Explanation) -> str:
    return f"searches of {explanation.time_limit_s:g} s"


def _table(explanation: Explanation) -> Table:
    table = Table(title=f"time {_per(explanation)}", title_justify="left", box=None, pad_edge=False)
    table.add_column("if")
    for column in ("saves (found)", "at most (bound)", "step found"):
        table.add_column(column, justify="right")
    table.add_column("")
    for one in explanation.what_ifs:
        table.add_row(
            one.text,
            "nothing fits" if one.outcome == "infeasible" else "-" if one.found is None else _signed(one.found),
            _signed(one.at_most),
            "-" if one.value_ns is None else show_ns(one.value_ns),
            "" if one.decided else "not decided" if one.finished else "not decided, unfinished",
        )
    return table
