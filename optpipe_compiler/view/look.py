"""How ops, idle time and memory look in the terminal, in pictures and on the page: tables of words and colours."""

from __future__ import annotations

from typing import NamedTuple

from optpipe_compiler.documents.ops import LETTERS
from optpipe_compiler.forecast import Cause


class Look(NamedTuple):
    """Of one kind of op. `hatch`: striped where there is room, for eyes that see no colours."""

    words: str
    colour: str
    hatch: bool = False


LOOKS = {
    "forward": Look("forward", "#0072b2"),
    "backward_input": Look("input gradient", "#009e73"),
    "backward_weight": Look("weight gradient", "#e69f00", hatch=True),
    "backward": Look("both gradients", "#56b4e9"),
    "recompute": Look("recomputation", "#cc79a7", hatch=True),
    "offload": Look("offload to host", "#6c7684"),
    "reload": Look("reload from host", "#a7afba", hatch=True),
}
"""In the order of legends. Colours of Okabe and Ito (2008), which the colour-blind can tell apart, and two greys."""
COLUMNS = "F: forward; I, W, B: gradients of input, weights, both"
"""The letters above the times of a profile."""
IDLE = {
    Cause.FILL: Look("the pipeline has not come this far", "#7d8896"),
    Cause.DRAIN: Look("the pipeline is running out", "#8f8577"),
    Cause.MEMORY: Look("waited for memory", "#dd4b47"),
    Cause.TRANSFER: Look("waited for a transfer", "#a8743a"),
    Cause.COPIES: Look("waited while copies took its device's compute", "#1f8a8a"),
    Cause.IMBALANCE: Look("was ready while its device was busy with other work", "#9269d8"),
    Cause.ORDER: Look("was ready and had room, but the order has it later", "#7f8a1f"),
    Cause.SLACK: Look("could start earlier than in the forecast", "#c2569b"),
}
"""Why a device idles; the op to blame goes before the words where there is one. Each colour has a contrast of 3 with
light and with dark paper, and the cause's name is written beside it wherever there is room."""
HELD = {
    "static": Look("weights, gradients, optimizer state, reserve", "#8d97a5"),
    "kept": Look("activations that a backward will read", "#6b9bd1"),
    "residue": Look("what a weight gradient still needs", "#dcae52"),
    "captured": Look("what a running input gradient adds for the weight gradient", "#5fb39b"),
    "messages": Look("tensors on their way between stages", "#a98bd0"),
    "working": Look("what ops need only while they run", "#d98a73"),
}
"""What holds memory, by the names of forecast.HOLDERS."""
LEVELS = ((0.75, "#44bb99"), (1.0, "#ddaa33"))
"""Colours of memory up to a share of the cap."""
OVER = "#ee6677"
"""Of memory above it."""
BAR_COLOUR = "#ddaa33"
"""Of idle time as a bar."""


def ink(colour: str) -> str:
    """Return black or white, whichever differs more from the colour, by relative luminance as in report/rows.js."""
    red, green, blue = ((int(colour[start : start + 2], 16) / 255) ** 2.2 for start in (1, 3, 5))
    return "black" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.2 else "white"


def for_page() -> dict[str, dict[str, str | bool]]:
    """Return the table as the page's scripts read it: by letter, which is how the payload names kinds."""
    return {
        LETTERS[kind]: {"name": kind, "does": look.words, "colour": look.colour, "hatch": look.hatch}
        for kind, look in LOOKS.items()
    }
