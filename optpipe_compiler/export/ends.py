"""Whether a schedule's first layer is an embedding and its last a head: frameworks name these apart from blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.errors import BadInput

if TYPE_CHECKING:
    from optpipe_compiler.documents.ir import Schedule
    from optpipe_compiler.documents.profile import Profile

PARTS = ("embedding.", "embedding-part", "embeddingpart", "head.", "head-part", "headpart")
"""How profiles name parts of an embedding or a head, in lower case: those of known models, of uniform profiles, and by
the class of users' layers."""
HALVES = "block."
"""How they name halves of blocks."""
KNOWN = ("gpt", "transformer")
"""Builders whose models have both."""


def ends(schedule: Schedule, profile: Profile | None, tool: str) -> tuple[bool, bool]:
    """Say whether the first layer is an embedding and the last a head: by the profile's names, or the known builders.

    Raises BadInput for parts and halves, which `tool` has not.
    """
    if profile is not None:
        layers = profile.expanded_layers()
        if len(layers) != schedule.setup.layers:
            raise BadInput(f"the profile has {len(layers)} layers, expected the schedule's {schedule.setup.layers}")
        if parts := [layer.name for layer in layers if layer.name.lower().startswith(PARTS)]:
            raise BadInput(f"the profile has a layer {parts[0]}: {tool} has the embedding and the head whole")
        if halves := [layer.name for layer in layers if layer.name.startswith(HALVES)]:
            raise BadInput(f"the profile has a layer {halves[0]}: {tool} has blocks whole")
        return "emb" in layers[0].name.lower(), layers[-1].name.lower() in ("head", "lm_head", "output")
    config = {} if schedule.model is None else schedule.model.config
    for name in ("embedding_parts", "head_parts"):
        if config.get(name, 1) != 1:
            raise BadInput(f"the model has {config[name]} {name}: {tool} has the embedding and the head whole")
    if config.get("granularity", "block") != "block":
        raise BadInput(f"the model has blocks in halves: {tool} has blocks whole")
    known = schedule.model is not None and schedule.model.builder in KNOWN
    return known, known
