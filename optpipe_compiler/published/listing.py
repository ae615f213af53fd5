"""The schedules to compare with, as text for the terminal and as a page for the docs: the same in both."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from optpipe_compiler.published import METHODS
from optpipe_compiler.published.descriptions import CITATIONS, SYMBOLS, describe

if TYPE_CHECKING:
    from collections.abc import Iterator

KINDS = {
    "paper": "a paper defines all of it; the parameters that it leaves open are set by us",
    "stock": "what training frameworks run",
    "composition": "ours: a paper's order with offloads or recomputations that neither a paper nor a framework "
    "combines with it",
}


def as_text(width: int) -> str:
    """Return all methods for a terminal of `width` columns."""
    lines = [*_wrapped("Schedules to compare with. Kinds:", width)]
    for kind, says in KINDS.items():
        lines += _wrapped(f"{kind}: {says}", width, "  ")
    lines += ["", "Symbols:"]
    for symbol, says in SYMBOLS.items():
        lines += _wrapped(f"{symbol}: {says}", width, "  ")
    for name, method in METHODS.items():
        found = describe(name)
        lines += ["", *_wrapped(f"{name}  {method.kind}; {method.placed} a device; {method.source}", width)]
        if found is not None:
            lines += _wrapped(found.says, width, "  ")
            lines += _wrapped(f"bubble: {found.bubble}", width, "  ")
            lines += _wrapped(f"memory: {found.memory}", width, "  ")
    return "\n".join(lines)


def as_records() -> list[dict[str, object]]:
    """Return all methods for other programs."""
    return [
        {
            "name": name,
            "kind": method.kind,
            "placement": method.placements[0][0],
            "stages_per_device": [count for _, count in method.placements],
            "source": method.source,
        }
        | ({} if (found := describe(name)) is None else found._asdict())
        for name, method in METHODS.items()
    ]


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def as_markdown() -> str:
    """Return docs/METHODS.md."""
    return "\n".join(_page()) + "\n"


def _page() -> Iterator[str]:
    yield "# Methods\n"
    yield "The schedules that a plan is compared with, under the same costs and caps. `optpipe compile --list-methods`"
    yield "prints this page, `--method NAME` writes one of them, `optpipe compare --methods` sets them side by side."
    yield "It is made by `make methods` from `optpipe_compiler/published/`.\n"
    yield "| symbol | meaning |\n|---|---|"
    for symbol, says in SYMBOLS.items():
        yield f"| {symbol} | {says} |"
    yield "\nFormulas hold for stages of equal cost and messages of no time, and are checked against the machine by"
    yield "`tests/test_methods.py`. What is recomputed keeps its stage's input, which comes on top."
    for kind, says in KINDS.items():
        yield f"\n## {kind.capitalize()}\n\n{says[0].upper()}{says[1:]}.\n"
        yield "| method | what it is | bubble | memory | placement | source |\n|---|---|---|---|---|---|"
        for name, method in METHODS.items():
            if method.kind == kind:
                found = describe(name)
                assert found is not None
                cells = (found.says, _code(found.bubble), _code(found.memory), f"{method.placed} a device")
                yield f"| `{name}` | {' | '.join(cells)} | {method.source} |"
    yield "\n## Sources\n\n| source | |\n|---|---|"
    for source, citation in CITATIONS.items():
        yield f"| {source} | {citation} |"


def _code(text: str) -> str:
    """Return a formula as code, words as they are."""
    formula, where, words = text.partition(" where ")
    return f"`{formula}`{where}{words}" if is_formula(formula) else text


def is_formula(text: str) -> bool:
    """Whether a text is a formula in the symbols and not words."""
    names = ("P", "M", "v", "n", "F", "I", "W", "B", "ceil", "gcd", "min")
    try:
        code = compile(text, "formula", "eval")
    except SyntaxError:
        return False
    return set(code.co_names) <= set(names)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(as_markdown(), encoding="utf-8")
