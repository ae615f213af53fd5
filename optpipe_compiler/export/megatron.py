"""A schedule's cut as Megatron-Core's `--pipeline-model-parallel-layout`.

Syntax as `PipelineParallelLayerLayout.parse_str_to_list` reads it: stages in model order, divided by `|`, of `E`
(embedding), `t` (decoder layer) and `L` (norm, logits, loss); `x*n` and `(...)*n` repeat. Stage s is on pipeline rank
s modulo the ranks, so the stages over the ranks are the virtual stages. The order of ops is Megatron's own: 1F1B,
interleaved where there are several stages per rank.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from optpipe_compiler.errors import BadInput
from optpipe_compiler.export.ends import ends

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe_compiler.documents.ir import Checked, Schedule
    from optpipe_compiler.documents.profile import Profile

FOLDED = 3
"""So many equal letters or stages in a row are written as a repetition."""


def render(checked: Checked, profile: Profile | None) -> str:
    """Return the arguments, one line; raise BadInput for what Megatron-Core has no layout for."""
    schedule = checked.schedule
    embedding, head = ends(schedule, profile, "Megatron")
    devices, layers = schedule.setup.devices, schedule.setup.layers - embedding - head
    _refuse(schedule, layers)
    arguments = {
        "--num-layers": layers,
        "--pipeline-model-parallel-size": devices,
        "--pipeline-model-parallel-layout": f'"{layout(schedule, embedding=embedding, head=head)}"',
    }
    if schedule.model is not None:
        arguments["--micro-batch-size"] = schedule.model.microbatch_size
    return " ".join(f"{name} {value}" for name, value in arguments.items())


def layout(schedule: Schedule, *, embedding: bool, head: bool) -> str:
    """Return the layout; `embedding` and `head`: the first and last layer are no decoder layers."""
    names = ["t"] * schedule.setup.layers
    names[0] = "E" if embedding else "Et"
    names[-1] = "L" if head else f"{names[-1]}L"
    stages = ["".join(names[slice(*stage.layers)]) for stage in schedule.stages]
    return "".join(_stages(stages))


def _stages(stages: list[str]) -> Iterator[str]:
    """Yield the stages with their dividers, runs of equal ones folded; the last has none behind it."""
    *before, last = stages
    for letters, run in groupby(before):
        count, text = sum(1 for _ in run), f"{_letters(letters)}|"
        yield f"({text})*{count}" if count >= FOLDED else text * count
    yield _letters(last)


def _letters(letters: str) -> str:
    found = ""
    for letter, run in groupby(letters):
        count = sum(1 for _ in run)
        found += f"{letter}*{count}" if count >= FOLDED else letter * count
    return found


def refuse_chunks_of_one_device(schedule: Schedule, tool: str) -> None:
    """Raise BadInput for virtual stages without a pipeline, which Megatron's arguments refuse."""
    if schedule.setup.devices == 1 < len(schedule.stages):
        raise BadInput(
            f"{tool} has no virtual stages on 1 device, the schedule has {len(schedule.stages)} stages there; expected "
            "one (optpipe compile --stages-per-device 1)"
        )


def _refuse(schedule: Schedule, layers: int) -> None:
    refuse_chunks_of_one_device(schedule, "Megatron")
    devices, stages = schedule.setup.devices, len(schedule.stages)
    found = [stage.device for stage in schedule.stages]
    if layers < 1:
        raise BadInput("the schedule has no layer between embedding and head, expected at least one")
    if stages % devices or found != [stage % devices for stage in range(stages)]:
        raise BadInput(
            f"Megatron puts stage s on rank s modulo the ranks, the schedule has its {stages} stages on the devices "
            f"{found}; expected a loop (optpipe compile --placement loop)"
        )
    microbatches = schedule.setup.microbatches
    if stages > devices and microbatches % devices:
        raise BadInput(
            f"Megatron interleaves groups of as many microbatches as ranks, the schedule has {microbatches} for "
            f"{devices}; expected a multiple, or one stage per device (optpipe compile --placement linear)"
        )
