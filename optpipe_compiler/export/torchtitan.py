"""The settings with which torchtitan runs a schedule's CSV: a module to import from a recipe.

Option names and rules are those of torchtitan 0.3.0 (`config/configs.py`, `distributed/pipeline_parallel.py`), whose
recipes are Python functions; 0.2.2 has the same names in TOML and calls `lm_head` `output`. torchtitan runs any CSV on
`_PipelineScheduleRuntime` and takes only the devices of the stages from `pipeline_parallel_schedule`: a loop, or a V of
two stages per device for `ZBVZeroBubble`. Its models have the modules `tok_embeddings`, `layers.N`, `norm`, `lm_head`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.documents.units import printable
from optpipe_compiler.errors import BadInput
from optpipe_compiler.export.ends import ends
from optpipe_compiler.export.whole import refuse_units

if TYPE_CHECKING:
    from optpipe_compiler.documents.ir import Checked, Schedule
    from optpipe_compiler.documents.profile import Profile

FIRST, LAST = "tok_embeddings", ("norm", "lm_head")

TEMPLATE = '''"""Pipeline settings for torchtitan 0.3. Written by {compiler} for the schedule
{digest}; its CSV lies beside this file. In a recipe:

    from {module} import with_schedule

    def planned() -> Trainer.Config:
        return with_schedule(llama3_8b())

{stages} stages on {devices} devices, {microbatches} microbatches per step.
{ends}"""

from pathlib import Path

MICROBATCH_SIZE = {size}  # {origin}
MODULES = [
{modules}
]


def with_schedule(config):
    """Return the recipe's config with the planned stages and order, which are for activations that are kept."""
    if (found := len(config.model_spec.model.layers)) != {blocks}:
        raise ValueError(f"the model has {{found}} layers, the schedule is for {blocks}")
    config.activation_checkpoint = None
    config.training.disable_cuda_graphs = True  # torchtitan has none with pipelines
    config.training.local_batch_size = {microbatches} * MICROBATCH_SIZE
    config.parallelism.pipeline_parallel_degree = {devices}
    config.parallelism.pipeline_parallel_microbatch_size = MICROBATCH_SIZE
    config.parallelism.pipeline_parallel_schedule = "{schedule}"
    config.parallelism.pipeline_parallel_schedule_csv = str(Path(__file__).with_name({csv}))
    config.parallelism.module_fqns_per_model_part = MODULES
    return config
'''


def render(checked: Checked, profile: Profile | None, csv: str, module: str) -> str:
    """Return the Python module; `csv` lies beside it. The profile, where given, names the layers."""
    schedule = checked.schedule
    refuse_units(schedule, "the schedule", "torchtitan")
    kind = schedule_class(schedule)
    embedding, head = ends(schedule, profile, "torchtitan")
    model = schedule.model
    return TEMPLATE.format(
        digest=_in_docstring(schedule.digest),
        compiler=_in_docstring(schedule.provenance.compiler),
        csv=repr(csv),
        module=_in_docstring(module),
        devices=schedule.setup.devices,
        stages=len(schedule.stages),
        blocks=schedule.setup.layers - embedding - head,
        microbatches=schedule.setup.microbatches,
        size=model.microbatch_size if model else 1,
        origin="as measured" if model else "not in the schedule: put in the size that the profile's costs are for",
        schedule=kind,
        ends=_about_the_ends(embedding, head, known=profile is not None or model is not None),
        modules="\n".join(f"    {_quoted(names)}," for names in module_names(schedule, embedding, head)),
    )


def _in_docstring(text: str) -> str:
    """Return what stands for `text` between the quotes of a docstring, and cannot end it."""
    return printable(text.replace("\\", "\\\\").replace('"', '\\"'))


def schedule_class(schedule: Schedule) -> str:
    """Return the name that makes torchtitan put the stages on the schedule's devices; raise BadInput if none does."""
    devices, stages = schedule.setup.devices, len(schedule.stages)
    found = [stage.device for stage in schedule.stages]
    if devices == 1:
        raise BadInput("torchtitan has no pipeline on 1 device; expected a schedule for at least 2")
    if stages % devices == 0:
        if found == [stage % devices for stage in range(stages)]:
            return "PipelineScheduleMulti"
        if found == [*range(devices), *reversed(range(devices))]:
            return "ZBVZeroBubble"
    raise BadInput(
        f"torchtitan cannot place the {stages} stages on the devices {found}; expected a loop over the devices or, "
        "with two stages per device, a V (optpipe compile --placement loop)"
    )


def module_names(schedule: Schedule, embedding: bool, head: bool) -> list[list[str]]:
    """Return torchtitan's modules of every stage; `embedding` and `head`: the first and last layer are no blocks."""
    count, shift = schedule.setup.layers, int(embedding)
    names = [[f"layers.{layer - shift}"] for layer in range(count)]
    names[0] = [FIRST, *(() if embedding else names[0])]
    names[-1] = [*(() if head else names[-1]), *LAST]
    return [[name for layer in names[slice(*stage.layers)] for name in layer] for stage in schedule.stages]


def _about_the_ends(embedding: bool, head: bool, *, known: bool) -> str:
    if not known:
        return (
            "All layers are taken for blocks: export with --profile if the first is an embedding or the last a head.\n"
        )
    missing = [name for name, own in ((FIRST, embedding), (" and ".join(LAST), head)) if not own]
    return f"The profile has no layer for {' and '.join(missing)}: their costs are not planned.\n" if missing else ""


def _quoted(names: list[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"
