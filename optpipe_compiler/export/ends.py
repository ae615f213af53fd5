"""Whether a schedule's first layer is an embedding and its last a head: frameworks name these apart from blocks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from optpipe_compiler.documents.profile import value_of
from optpipe_compiler.documents.units import counted
from optpipe_compiler.errors import BadInput

if TYPE_CHECKING:
    from optpipe_compiler.documents.ir import Schedule
    from optpipe_compiler.documents.profile import Layer, Profile

PARTS = ("embedding.", "embedding-part", "embeddingpart", "head.", "head-part", "headpart")
"""How profiles name parts of an embedding or a head, in lower case: those of known models, of uniform profiles, and by
the class of users' layers."""
HALVES = "block."
"""How they name halves of blocks."""
TOKENS = ("TitanLayer", "LastTitanLayer")
"""How they name layers whose samples are tokens: those of torchtitan's main branch, by `layers_of`."""
KNOWN = ("gpt", "transformer")
"""Builders whose models have both."""
EMBEDDING, EMBEDDINGS = "emb", ("wte",)
"""What the name of an embedding has in it, or is: `tok_embeddings`, `embed_tokens`, GPT-2's `wte`."""
HEADS = ("head", "lmhead", "output", "outputlayer", "logits", "unembed", "unembedding", "embedout")
"""How heads are named, without `_` and `-`: those of torchtitan, Megatron, Hugging Face and GPT-NeoX among them."""


def ends(schedule: Schedule, profile: Profile | None, tool: str) -> tuple[bool, bool]:
    """Say whether the first layer is an embedding and the last a head: by the profile's names, or the known builders.

    Raises BadInput for parts, halves and samples that are tokens, which `tool` has not, and where only the profile can
    tell.
    """
    if profile is not None:
        layers = profile.expanded_layers()
        if len(layers) != schedule.setup.layers:
            raise BadInput(
                f"the profile has {counted(len(layers), 'layer')}, expected the schedule's {schedule.setup.layers}"
            )
        if parts := [layer.name for layer in layers if layer.name.lower().startswith(PARTS)]:
            raise BadInput(f"the profile has a layer {parts[0]}: {tool} has the embedding and the head whole")
        if halves := [layer.name for layer in layers if layer.name.startswith(HALVES)]:
            raise BadInput(f"the profile has a layer {halves[0]}: {tool} has blocks whole")
        if flat := [layer.name for layer in layers if layer.name.partition("-")[0] in TOKENS]:
            raise BadInput(
                f"the profile has a layer {flat[0]}, of layers_of of a recipe of torchtitan's main branch: its samples "
                f"are tokens, those of {tool} are sequences; expected a profile of sequences, or, in that recipe, "
                "planned(config, schedule)"
            )
        first, last = layers[0].name.lower(), layers[-1].name.lower()
        return EMBEDDING in first or first in EMBEDDINGS, last.replace("_", "").replace("-", "") in HEADS
    model = schedule.model
    if model is not None and model.builder not in KNOWN:
        raise BadInput(
            f"the schedule's model is {model.builder}, a function: expected --profile, whose names tell embedding and "
            "head from blocks, and whether samples are sequences"
        )
    config = {} if model is None else model.config
    for name in ("embedding_parts", "head_parts"):
        if config.get(name, 1) != 1:
            raise BadInput(f"the model has {config[name]} {name}: {tool} has the embedding and the head whole")
    if config.get("granularity", "block") != "block":
        raise BadInput(f"the model has blocks in halves: {tool} has blocks whole")
    return model is not None, model is not None


def head_is_in_parts(schedule: Schedule, profile: Profile | None) -> bool:
    """Whether several layers need the target, by the profile's names or the model's config."""
    if profile is not None:
        return profile.expanded_layers()[-1].name.lower().startswith(tuple(p for p in PARTS if p.startswith("head")))
    return schedule.model is not None and schedule.model.config.get("head_parts", 1) != 1


def unlike_blocks(profile: Profile, *, embedding: bool, head: bool) -> list[str]:
    """Return a sentence on the first and on the last layer where it is taken for a block and is unlike its neighbour.

    Layers are alike that save as much, under names that differ by numbers at most; times of equal layers differ where
    they are measured.
    """
    layers = profile.expanded_layers()
    if len(layers) == 1:
        return []
    taken = []
    if not embedding:
        taken.append(("first", layers[0], layers[1], "an embedding is told by a name such as embedding or wte"))
    if not head:
        taken.append(("last", layers[-1], layers[-2], "a head is told by a name such as head or logits"))
    return [
        f"the {place} layer {own.name} is taken for a decoder layer, unlike its neighbour {other.name}: {told}"
        for place, own, other, told in taken
        if _kind(own) != _kind(other)
    ]


def _kind(layer: Layer) -> tuple[str, int]:
    return re.sub(r"\d+", "", layer.name), value_of(layer.saved_bytes)
