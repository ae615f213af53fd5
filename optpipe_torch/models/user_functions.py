"""Which functions a file may have called: those of the project that the command is started in.

A JSON file can name any function of any module, and importing a module runs it. So a name is looked up on disk before
anything of it is imported: every file that the import would run must be source below the current folder, and belong
neither to Python, nor to an installed package or an environment, nor to OptPipe. A function that the user names on
the command line is called wherever it lies.
"""

from __future__ import annotations

import importlib
import importlib.util
import keyword
import pkgutil
import sys
import sysconfig
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optpipe_compiler
import optpipe_torch
import runtime_torch
from optpipe_compiler.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Iterator

OWN = ("gpt", "transformer")
"""The builders that come with the package (known.py): a GPT over bytes, and known architectures."""
INSTALLED = frozenset({"site-packages", "dist-packages"})

_allowed: set[str] = set()


def allow(function: str) -> None:
    """Let this process call `package.module:function` wherever it lies: the user has named it on the command line."""
    _allowed.add(function)


def origin(builder: str, source: str = "") -> str:
    """Return where the name of a function stands: on the command line, or in the file that `source` names."""
    return "--model" if builder in _allowed else f"{source}$.model.builder"


def refuse_foreign(builder: str, source: str = "") -> None:
    """Raise BadInput if a file may not have `builder` called; imports nothing. `source` names the file."""
    if builder in OWN or builder in _allowed:
        return
    module, _ = _parts(builder, source)
    try:
        reason = _why_foreign(module)
    except ModuleNotFoundError as error:
        raise _not_found(builder, source, error) from error
    if reason is not None:
        raise _refused(builder, source, reason)


def import_function(builder: str) -> Any:
    """Return the function `package.module:function`; modules of the current folder come after all others."""
    refuse_foreign(builder)
    module_name, name = _parts(builder, "")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        function: Any = getattr(importlib.import_module(module_name), name)
        home = str(getattr(function, "__module__", None))
        reason = None if builder in _allowed else _why_foreign(home)
    except ModuleNotFoundError as error:
        raise _not_found(builder, "", error) from error
    except (ImportError, AttributeError, ValueError) as error:
        raise BadInput(f"{_expected(builder, '')}: {error}") from error
    if reason is not None:
        raise _refused(builder, "", f"it comes from {home}, and {reason}")
    return function


def _parts(builder: str, source: str) -> tuple[str, str]:
    """Return the module's and the function's name."""
    module, colon, function = builder.partition(":")
    names = [*module.split("."), function]
    if not colon or not all(name.isidentifier() and not keyword.iskeyword(name) for name in names):
        raise BadInput(_expected(builder, source))
    return module, function


def _expected(builder: str, source: str) -> str:
    own = "" if builder in _allowed else f"{' or '.join(map(repr, OWN))}, or "
    return f"{origin(builder, source)} is {builder!r}, expected {own}an importable package.module:function"


def _not_found(builder: str, source: str, error: ModuleNotFoundError) -> BadInput:
    return BadInput(f"{_expected(builder, source)}: {error} below {Path.cwd()}, the current folder, or installed")


def _refused(builder: str, source: str, reason: str) -> BadInput:
    return BadInput(
        f"{source}$.model.builder is {builder!r}, which a file alone may not call: {reason}; expected a function of a "
        f"source file below {Path.cwd()}, or the same name on the command line (--model {builder})"
    )


def _why_foreign(module: str) -> str | None:
    """Return why importing `module` would run something that is not the project's; None where it would not.

    Raise ModuleNotFoundError where there is no such module.
    """
    with _current_folder_last():
        for name, spec in _specs(module):
            if spec is None:
                raise ModuleNotFoundError(f"No module named {name!r}")
            if spec.origin is None and spec.submodule_search_locations is not None and name != module:
                continue  # a folder without __init__.py runs nothing
            if not spec.has_location or spec.origin is None:
                return f"module {name!r} is part of Python, or no source file"
            if not _is_project_source(Path(spec.origin)):
                return f"module {name!r} is {spec.origin}"
    return None


def _specs(module: str) -> Iterator[tuple[str, ModuleSpec | None]]:
    """Yield where the module's parents and the module itself are found, outermost first, without importing any."""
    name, _, rest = module.partition(".")
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a module without a file, such as __main__ or one that was made by hand
        spec = None
    yield name, spec
    while rest and spec is not None:
        part, _, rest = rest.partition(".")
        name = f"{name}.{part}"
        spec = _submodule(name, spec)
        yield name, spec


def _submodule(name: str, parent: ModuleSpec) -> ModuleSpec | None:
    """Look `name` up in its parent's folders, as the import system does; folders without __init__.py add up."""
    if name in sys.modules:
        return sys.modules[name].__spec__
    portions: list[str] = []
    for folder in parent.submodule_search_locations or ():
        finder = pkgutil.get_importer(folder)
        spec = None if finder is None else finder.find_spec(name, None)
        if spec is not None and spec.loader is not None:
            return spec
        portions += (spec.submodule_search_locations or ()) if spec is not None else ()
    if not portions:
        return None
    namespace = ModuleSpec(name, None, is_package=True)
    namespace.submodule_search_locations = portions
    return namespace


@contextmanager
def _current_folder_last() -> Iterator[None]:
    """Look up modules as `import_function` will import them."""
    sys.path.append(str(Path.cwd()))
    try:
        yield
    finally:
        sys.path.pop()


def _is_project_source(file: Path) -> bool:
    """Whether a file is Python source of the project that the current folder is, links followed."""
    real, here = file.resolve(), Path.cwd().resolve()
    if real.suffix != ".py" or not real.is_relative_to(here) or INSTALLED & set(real.parts):
        return False
    between = [folder for folder in real.parents if folder != here and folder.is_relative_to(here)]
    environments = any((folder / "pyvenv.cfg").exists() for folder in between)
    return not environments and not any(real.is_relative_to(folder) for folder in FOLDERS)


def _folders_of_python_and_optpipe() -> list[Path]:
    python = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    own = [Path(file).parent for file in (optpipe_compiler.__file__, optpipe_torch.__file__, runtime_torch.__file__)]
    return [folder.resolve() for folder in python + own]


FOLDERS = _folders_of_python_and_optpipe()
"""Found before anything is looked up, because sysconfig imports a module for it."""
