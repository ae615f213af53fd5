"""How the machine is compiled: by numba, free of the interpreter's lock, kept in the user's cache folder.

numba notices changes of the file that holds a function, but not of the functions that it calls. So what is kept lies in
a folder of its own for each state of this room's sources.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar, cast

from llvmlite import ir
from numba import config, njit, version_info
from numba.extending import intrinsic

if TYPE_CHECKING:
    from collections.abc import Callable

    Arrays = TypeVar("Arrays", bound=tuple[Any, ...])
    Function = TypeVar("Function", bound=Callable[..., Any])

_OPTIONS: dict[str, Any] = {"nogil": True, "_nrt": False, "error_model": "numpy", "no_cfunc_wrapper": True}
_CALLED: dict[str, Any] = {"no_cpython_wrapper": True}
_INNER: dict[str, Any] = _CALLED | {"forceinline": True}
_KNOWN = (0, 62) <= version_info.short < (0, 69)
"""Whether this numba compiles as `inlined` expects; others do it in their own way, which takes longer."""
_SETTING = Lock()
"""numba has one cache folder for all, and threads may import parts of the machine at the same time."""
UNUSED_S = 30 * 24 * 3600
"""Compiled code of other versions is removed when it was not used for so long."""
if _KNOWN:
    from optpipe_compiler.machine.inlined import Pipeline, once

    _OPTIONS["pipeline_class"] = Pipeline
if _KNOWN and not config.BOUNDSCHECK:  # type: ignore[attr-defined]
    from optpipe_compiler.machine.views import views as _views
else:
    _views = njit(lambda arrays: arrays, **_OPTIONS, **_INNER)
views = cast("Callable[[Arrays], Arrays]", _views)
"""Make of a named tuple of arrays what functions of the machine pass to each other."""


@intrinsic
def _lowest_bit(_: Any, word: Any) -> Any:
    def generate(_: Any, builder: Any, sig: Any, given: Any) -> Any:
        return builder.cttz(given[0], ir.Constant(ir.IntType(1), True))

    return word(word), generate


lowest_bit = cast("Callable[[int], int]", _lowest_bit)
"""Return the place of the lowest bit of an integer that is not 0."""


def compiled(function: Function) -> Function:
    """Compile a function of the machine that only compiled functions call; it is inlined there.

    Functions of the machine own no memory: without counting references to its arrays they take a third of the time
    (`_nrt`, as numba's own library has it). They divide by nothing that can be zero: without looking they take two
    thirds.
    """
    one = njit(**_OPTIONS, **_INNER)(function)
    return cast("Function", once(one) if _KNOWN else one)


def called(function: Function) -> Function:
    """Compile a function of the machine that many places call, and that is not worth being inlined in each."""
    one = njit(**_OPTIONS, **_CALLED)(function)
    return cast("Function", once(one) if _KNOWN else one)


def entry(function: Function) -> Function:
    """Compile a function that Python calls, with all that it calls, and keep it in the user's cache folder."""
    if _FOLDER is None:
        return cast("Function", njit(**_OPTIONS)(function))
    settings: Any = config
    with _SETTING:
        before, settings.CACHE_DIR = settings.CACHE_DIR, str(_FOLDER)
        try:
            one: Any = njit(cache=True, **_OPTIONS)(function)
        finally:
            settings.CACHE_DIR = before
    if (cache := getattr(one, "_cache", None)) is not None:  # numba may be told not to compile
        cache.save_overload = partial(_save_if_there_is_room, cache.save_overload)
        cache.load_overload = partial(_load_if_readable, cache)
    return cast("Function", one)


def _save_if_there_is_room(save: Callable[..., None], *found: object) -> None:
    with suppress(OSError):
        save(*found)


def _load_if_readable(cache: Any, *found: object) -> object:
    """Return the compiled code; None, so that it is compiled anew, where a crash left files that cannot be read."""
    try:
        return type(cache).load_overload(cache, *found)
    except Exception:  # whatever pickle makes of them
        with suppress(OSError):
            cache.flush()
        return None


def misses(function: Any) -> int:
    """Return how often what Python calls was compiled, as it was not in the cache; 0 where numba is told not to."""
    stats = getattr(function, "stats", None)
    return 0 if stats is None else int(stats.cache_misses.total())


def is_kept() -> bool:
    """Whether the cache folder has compiled code: the first plan on a machine waits until there is some."""
    return _FOLDER is not None and any(_FOLDER.rglob("*.nbi"))


def _folder() -> Path | None:
    """Return the folder for compiled code, None where there is no place for it."""
    room = Path(__file__).parent
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(room.glob("*.py")))).hexdigest()
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "optpipe"
    folder = base / f"machine-{digest[:16]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
    except OSError:
        return None
    for other in base.glob("machine-*"):
        with suppress(OSError):  # another process may remove it, too
            if time.time() - other.stat().st_mtime > UNUSED_S:
                shutil.rmtree(other)
    return folder if os.access(folder, os.W_OK) else None


_FOLDER = _folder()
