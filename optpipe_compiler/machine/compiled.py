"""How the machine is compiled: by LLVM, free of the interpreter's lock, kept in the user's cache folder.

What is kept lies in a folder of its own for each state of this room's sources, in a file for each kind of processor.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import time
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import NamedTemporaryFile
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from optpipe_compiler.errors import MissingDependency
from optpipe_compiler.machine.translate import AXES, fields, module, outside

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Function = TypeVar("Function", bound=Callable[..., Any])
    import llvmlite.binding as llvm

    Array = np.ndarray[Any, Any]

SPEED = 2
"""LLVM's level of optimisation; with the third, bench/machine.py takes a third longer to compile and is no faster."""
UNUSED_S = 30 * 24 * 3600
"""Compiled code of other versions is removed when it was not used for so long."""


class Library:
    """Functions that are compiled together, the first time that one of them is called from outside.

    `modules` are imported before, so that all of them are known. `folder` says where compiled code is kept.
    """

    def __init__(self, modules: Sequence[str] = (), folder: Callable[[], Path | None] = lambda: None) -> None:
        self._modules = modules
        self._folder = folder
        self._functions: list[Callable[..., Any]] = []
        self._entries: list[_Entry] = []
        self._linking = Lock()
        self._engine: llvm.ExecutionEngine | None = None
        """It owns the code."""

    def compiled(self, function: Function) -> Function:
        """Let compiled functions call a function, which `translate` must be able to read; Python calls it as it is."""
        self._functions.append(function)
        return function

    def entry(self, function: Function) -> Function:
        """Make a function one whose compiled code Python calls; compiled functions may call it, too."""
        self._functions.append(function)
        self._entries.append(_Entry(function, self.link))
        return cast("Function", self._entries[-1])

    def link(self) -> None:
        """Give every entry its code."""
        with self._linking:
            if self._engine is None:
                for name in self._modules:
                    import_module(name)
                self._engine = _engine(
                    partial(module, self._functions, [one.function for one in self._entries]), self._folder()
                )
                for one in self._entries:
                    one.code = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(
                        self._engine.get_function_address(outside(one.function))
                    )


class _Entry:
    """A function that runs as compiled code; `function` is the one that it was compiled from."""

    def __init__(self, function: Callable[..., Any], link: Callable[[], None]) -> None:
        self.function = function
        self.__doc__ = function.__doc__
        self.code: Callable[[object, object], None] | None = None
        self._link = link
        *takes, returns = (str(kind) for kind in function.__annotations__.values())
        self._axes = [AXES.get(kind, 0) for kind in takes]
        self._returns = returns

    def __call__(self, *arguments: Any) -> Any:
        if self.code is None:
            self._link()
        assert self.code is not None
        tables: list[Any] = []  # they must live as long as the code runs
        words: list[int] = []
        for argument, axes in zip(arguments, self._axes, strict=True):
            if isinstance(argument, np.ndarray):
                words += _words(argument, axes)
            elif isinstance(argument, tuple):
                tables.append(_table(argument))
                words.append(ctypes.addressof(tables[-1]))
            else:
                words.append(int(argument))
        found = (ctypes.c_int64 * max(1, self._returns.count("int")))()
        self.code((ctypes.c_int64 * len(words))(*words), found)
        if self._returns == "None":
            return None
        return tuple(found) if self._returns.startswith("tuple") else found[0]


def _table(record: tuple[Array, ...]) -> ctypes.Array[ctypes.c_int64]:
    """Return a named tuple of arrays as compiled code reads it."""
    words: list[int] = []
    for field, array in zip(fields(type(record)), record, strict=True):
        words += _words(array, field.axes, field.last)
    return (ctypes.c_int64 * len(words))(*words)


def _words(array: Array, axes: int, last: int | None = None) -> list[int]:
    """Return where an array lies, and its lengths."""
    is_as_read = array.dtype == np.int64 and array.flags.c_contiguous and array.ndim == axes
    if not is_as_read or (last is not None and array.shape[-1] != last):
        raise TypeError(f"compiled code cannot read an array of {array.dtype} {array.shape} here")
    return [array.ctypes.data, *array.shape]


def _engine(text: Callable[[], str], folder: Path | None) -> llvm.ExecutionEngine:
    """Return what runs the code of a module, compiled for this processor."""
    try:
        import llvmlite
        import llvmlite.binding as llvm
    except ImportError as error:
        raise MissingDependency("planning needs llvmlite: pip install llvmlite") from error
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    triple, cpu, features = llvm.get_process_triple(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    target = llvm.Target.from_triple(triple)
    reloc = "static" if target.name.startswith("x86") else "default"  # its code lies in this process
    machine = target.create_target_machine(cpu=cpu, features=features, opt=SPEED, reloc=reloc, jit=True)
    digest = hashlib.sha256("\n".join((triple, cpu, features, llvmlite.__version__)).encode()).hexdigest()
    code = _kept(None if folder is None else folder / f"{digest[:16]}.o", lambda: _compiled(text(), machine))
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine


def _kept(path: Path | None, make: Callable[[], bytes]) -> bytes:
    """Return what is kept in a file, behind its digest; where it is not there or not whole, what `make` returns."""
    if path is None:
        return make()
    with suppress(OSError):
        whole = path.read_bytes()
        if hashlib.sha256(whole[32:]).digest() == whole[:32]:
            return whole[32:]
    code = make()
    with suppress(OSError):
        with NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(code).digest() + code)
        Path(file.name).replace(path)
    return code


def _compiled(text: str, machine: llvm.TargetMachine) -> bytes:
    import llvmlite.binding as llvm

    head = f'target datalayout = "{machine.target_data}"\ntarget triple = "{machine.triple}"\n'
    whole = llvm.parse_assembly(head + text)
    options = llvm.create_pipeline_tuning_options(SPEED)
    options.loop_vectorization = options.slp_vectorization = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(whole, builder)
    return cast("bytes", machine.emit_object(whole))


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
    return folder


_MACHINE = Library([f"{__package__}.{name}" for name in ("dispatch", "orders", "policy")], _folder)
compiled, entry = _MACHINE.compiled, _MACHINE.entry
