"""How ops are named: ids such as `forward:2:0`, and a text form such as `2F0`. Nothing else makes or parses either.

The text form is the one of torch.distributed.pipelining: stage, letter, microbatch. A slice of a microbatch follows it
behind a dot, `2F0.1`; layers follow as `2D0:3-5`; a message has the letter of what makes its tensor: `>2F0` sends it,
`<2F0` receives it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from optpipe_compiler.errors import BadInput

LETTERS = {
    "forward": "F",
    "backward_input": "I",
    "backward_weight": "W",
    "backward": "B",
    "recompute": "R",
    "offload": "D",
    "reload": "H",
}
"""Of the ops that take their lane for some time."""
MESSAGES = {"send_activation": ">F", "recv_activation": "<F", "send_gradient": ">I", "recv_gradient": "<I"}
"""Direction, and the letter of what makes the tensor; a fused backward's gradient has the letter I, too."""
WITH_LAYERS = ("recompute", "offload", "reload")

_KINDS = {symbol: kind for kind, symbol in (LETTERS | MESSAGES).items()}
_NUMBER = "(0|[1-9][0-9]*)"
_LAYERS = f"(?::{_NUMBER}-{_NUMBER})?"
_UNIT = f"{_NUMBER}(?:\\.{_NUMBER})?"
_ID = re.compile(f"([a-z_]+):{_NUMBER}:{_UNIT}{_LAYERS}")
_TEXT = re.compile(f"([<>]?){_NUMBER}([A-Z]){_UNIT}{_LAYERS}")


class OpName(NamedTuple):
    """What tells an op from all others of a schedule. `layers`: `[first, end)`, of the ops that have some."""

    kind: str
    """Spelled out, as in files."""
    stage: int
    microbatch: int
    layers: tuple[int, int] | None = None
    slice: int | None = None
    """Of the microbatch; None where microbatches are not cut."""

    @property
    def id(self) -> str:
        """`kind:stage:microbatch` or `kind:stage:microbatch.slice`, with layers and `:first-end` behind it."""
        return op_id(*self)

    @property
    def text(self) -> str:
        """`2F0`, `2D0:3-5`, `>2F0`."""
        symbol = LETTERS.get(self.kind) or MESSAGES[self.kind]
        layers = "" if self.layers is None else f":{self.layers[0]}-{self.layers[1]}"
        return f"{symbol[:-1]}{self.stage}{symbol[-1]}{unit_name(self.microbatch, self.slice)}{layers}"


def unit_name(microbatch: int, slice: int | None = None) -> str:
    """Return how a microbatch is written, or a slice of one: `0`, `0.1`."""
    return str(microbatch) if slice is None else f"{microbatch}.{slice}"


def op_id(
    kind: str, stage: int, microbatch: int, layers: tuple[int, int] | None = None, slice: int | None = None
) -> str:
    """Return the id of an op: what `after` lists."""
    name = f"{kind}:{stage}:{microbatch}" if slice is None else f"{kind}:{stage}:{microbatch}.{slice}"
    return name if layers is None else f"{name}:{layers[0]}-{layers[1]}"


def range_name(kind: str, stage: int, microbatch: int, slice: int | None = None) -> str:
    """Return how profilers show an op: `forward 3 m2` is microbatch 2 on stage 3, `forward 3 m2.1` slice 1 of it."""
    return f"{kind} {stage} m{unit_name(microbatch, slice)}"


def parse(name: str, *, whole: bool = False) -> OpName:
    """Read an id or a text form; raise BadInput for what is neither.

    With `whole`, ops that have layers may leave them out, which are then all of their stage's.
    """
    if found := _ID.fullmatch(name):
        kind, stage, microbatch, part, *layers = found.groups()
    elif found := _TEXT.fullmatch(name):
        way, stage, letter, microbatch, part, *layers = found.groups()
        kind = _KINDS.get(way + letter, "")
    else:
        kind, stage, microbatch, part, layers = "", "0", "0", None, [None, None]
    has_layers = kind in WITH_LAYERS and not (whole and layers[0] is None)
    if kind not in _KINDS.values() or has_layers != (layers[0] is not None):
        raise BadInput(f"{name!r} is no op, expected one such as 'forward:2:0', '2F0' or '2D0:3-5'")
    first, end = layers
    among = None if first is None else (int(first), int(end))
    return OpName(kind, int(stage), int(microbatch), among, None if part is None else int(part))
