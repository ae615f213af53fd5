"""Sizes, times and strings as people write and see them, and back: GB is 10^9 bytes, GiB is 2^30."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import TYPE_CHECKING

from optpipe_compiler.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Sequence

FACTORS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "pb": 10**15,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "pib": 2**50,
}
NUMBER_AND_UNIT = re.compile(r"\s*([0-9]{1,100}(?:\.[0-9]{1,100})?)\s*([A-Za-z]*)\s*")
"""With no more digits than Python reads in one number."""
SMALLEST_CAP = 10**6
"""Bytes below which a cap without a unit was meant to have one."""
SECONDS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}
LARGEST = (1 << 62) - 1
"""Sums of what the files hold stay within 64 bits."""


def parse_bytes(text: str, option: str) -> int:
    """Return the bytes that `text` (40GB, 37.25GiB, 1000) says; raise BadInput naming the option."""
    match = NUMBER_AND_UNIT.fullmatch(text)
    if match is None or match[2].lower() not in FACTORS:
        raise BadInput(f"{option} is {text!r}, expected a size such as 40GB, 37.25GiB or 512MB")
    size = int(Fraction(match[1]) * FACTORS[match[2].lower()])
    if size > LARGEST:
        raise BadInput(f"{option} is {text!r}, expected less than 2^62 bytes")
    return size


def parse_cap(text: str, option: str) -> int:
    """Return the bytes of a memory cap; raise BadInput for a small number without a unit, which can hardly be meant."""
    size = parse_bytes(text, option)
    if text.strip().isdigit() and 0 < size < SMALLEST_CAP:
        number = text.strip()
        raise BadInput(
            f"{option} is {number}, which is {number} bytes; did you mean {number}GB? (write {number}B if not)"
        )
    return size


def exact_cap(size: int) -> str:
    """Return a memory cap to the byte, as `parse_cap` reads it: a small number has its unit."""
    return f"{size}B" if 0 < size < SMALLEST_CAP else str(size)


SMALLEST, RAISE = "the smallest --mem that would do is", "raise --mem to"
"""How sentences name a cap that would do: the first where nothing less would."""


def parse_ns(text: str, option: str) -> int:
    """Return the nanoseconds that `text` (12.5ms, 2s, 300us, 0) says; raise BadInput naming the option."""
    match = NUMBER_AND_UNIT.fullmatch(text)
    unit = match[2].lower() if match else ""
    if match is None or (unit not in SECONDS and not (unit == "" and not Fraction(match[1]))):
        raise BadInput(f"{option} is {text!r}, expected a time such as 12.5ms, 2s or 300us")
    return int(Fraction(match[1]) * SECONDS.get(unit, 1))


def show_bytes(size: int) -> str:
    """Return a size in decimal and binary units: `40.00 GB (37.25 GiB)`."""
    for decimal, binary, name in ((10**9, 2**30, "G"), (10**6, 2**20, "M"), (10**3, 2**10, "k")):
        if abs(size) >= decimal:
            return f"{size / decimal:.2f} {name}B ({size / binary:.2f} {name.upper()}iB)"
    return f"{size} B"


def short_bytes(size: int) -> str:
    """Return a size in decimal units alone, for tables: `40.00 GB`."""
    return show_bytes(size).split(" (")[0]


def show_slicing(slices: int | str, lengths: Sequence[int] | None) -> str | None:
    """Return in words how microbatches are cut (`auto`: searched), and how long they are; None: whole, equal ones."""
    found = []
    if slices == "auto":
        found.append("with whole microbatches and with slices of them, whichever is best")
    elif slices != 1:
        found.append(f"with {slices} slices per microbatch")
    if lengths is not None:
        found.append(f"for microbatches of {show_lengths(lengths)}")
    return ", ".join(found) or None


def show_lengths(lengths: Sequence[int]) -> str:
    """Return in words how long microbatches are."""
    least, most = min(lengths), max(lengths)
    return f"{least if least == most else f'{least} to {most}'} tokens, {sum(lengths)} in all"


def show_hosts(total: int | None, hosts: Sequence[int]) -> str:
    """Return in words what offloads may hold: on all hosts together (None: unlimited), and on each of `hosts`."""
    if not hosts:
        return "taken as unlimited" if total is None else show_bytes(total)
    if len(set(hosts)) == 1:
        each = f"{show_bytes(hosts[0])} on {'1 host' if len(hosts) == 1 else f'each of {len(hosts)} hosts'}"
    else:
        each = f"{', '.join(map(short_bytes, hosts))} on {len(hosts)} hosts"
    return each if total is None else f"{each}, {show_bytes(total)} on all together"


def show_ns(time: int) -> str:
    """Return a time with a unit that leaves few digits."""
    for factor, name in ((10**9, "s"), (10**6, "ms"), (10**3, "us")):
        if time >= factor:
            return f"{time / factor:.4g} {name}" if time < 1000 * factor else f"{time / factor:,.0f} {name}"
    return f"{time} ns"


def counted(number: int, one: str, several: str = "") -> str:
    """Return a number of things in words that agree with it: `1 layer`, `2 layers`."""
    return f"{number} {one if number == 1 else several or one + ('es' if one.endswith('ch') else 's')}"


def enumerated(parts: Sequence[str]) -> str:
    """Return parts as a sentence has them: `a, b and c`; a comma goes before `and` where parts have some."""
    comma = "," if any("," in part for part in parts) else ""
    return ", ".join(parts) if len(parts) < 2 else ", ".join(parts[:-1]) + f"{comma} and {parts[-1]}"


def show_layers(layers: Sequence[int]) -> str:
    """Return layer numbers in order as runs: `0-3, 5`."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][1] + 1 == layer:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def printable(text: str, keep: str = "") -> str:
    """Return `text` with its control, bidirectional and other invisible characters, but `keep`, as JSON escapes.

    So nothing that a file says moves a terminal's cursor, ends a line, or turns the order of letters around.
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in keep else _escaped(letter) for letter in text)


def _escaped(letter: str) -> str:
    units = letter.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))
