"""The text to train on: files named by the user, or the small one that ships with the package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from optpipe_compiler.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Iterable

SMALLEST = 1024
"""Bytes; less is no training text but a wrong file."""

_HERE = Path(__file__).resolve().parent.parent
_PLACES = (_HERE / "data" / "text.txt", _HERE.parent / "examples" / "text.txt")
"""In an installed wheel, and in a source checkout."""


def default_path() -> Path:
    """Return where the text that ships with optpipe is."""
    return next((place for place in _PLACES if place.is_file()), _PLACES[0])


def default_text() -> bytes:
    """Return the bytes of the text that ships with optpipe."""
    return read([default_path()])


def read(paths: Iterable[Path]) -> bytes:
    """Return the bytes of the files one after the other; raise BadInput when one is missing or all are too small."""
    named = list(paths)
    data = b"".join(map(_read, named))
    if len(data) < SMALLEST:
        names = ", ".join(map(str, named)) or "no file"
        raise BadInput(f"{names}: has {len(data)} bytes of text, expected at least {SMALLEST}")
    return data


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
