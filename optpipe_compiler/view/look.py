"""How ops look in the terminal, in pictures and on the page: one table of words and colours."""

from __future__ import annotations

from typing import NamedTuple

from optpipe_compiler.documents.ops import LETTERS


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
