"""Defaults of options from `[tool.optpipe]` of the nearest pyproject.toml, up from the current folder.

Keys are long options without their dashes. Those of the table itself are for every command that plans and has the
option; `[tool.optpipe.COMMAND]` has all options of that command. What is typed comes before what the file says.
"""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Any

import click

from optpipe_compiler.documents.files import read_text
from optpipe_compiler.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SHARED = (
    "profile",
    "mem",
    "host-mem",
    "microbatches",
    "devices",
    "placement",
    "stages-per-device",
    "objective",
    "no-offload",
    "no-recompute",
    "no-split",
    "jobs",
)
"""Options that mean the same to every command that has them; `profile` alone takes only those of its own table."""
NO_DEFAULTS = ("version", "help", "list-methods", "list-gpus", "list-models")


def nearest(folder: Path) -> Path | None:
    """Return the pyproject.toml of the folder or of the nearest one above it."""
    return next(
        (one / "pyproject.toml" for one in (folder, *folder.parents) if (one / "pyproject.toml").is_file()), None
    )


def defaults(group: click.Group, chosen: str, path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return click's default map for the command `chosen`, and where each option of it comes from.

    Raises BadInput, naming file and key, for keys that are none and values that the option does not take.
    """
    table = _table(path)
    _check_keys(group, table, path)
    command = group.commands[chosen]
    found, origins = _of_command(command, table if chosen != "profile" else {}, table.get(chosen, {}), path, chosen)
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            part = table.get(chosen, {}).get(name, {})
            found[name], more = _of_command(inner, {}, part, path, f"{chosen}.{name}")
            origins |= more
    return {chosen: found}, origins


def _table(path: Path) -> dict[str, Any]:
    try:
        parsed = tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{path}: is no TOML: {error}") from error
    tool = parsed.get("tool", {})
    table = tool.get("optpipe", {}) if isinstance(tool, dict) else {}
    if not isinstance(table, dict):
        raise BadInput(f"{path}: tool.optpipe is {table!r}, expected a table")
    return table


def _check_keys(group: click.Group, table: dict[str, Any], path: Path, where: str = "tool.optpipe") -> None:
    for key, value in table.items():
        inner = group.commands.get(key)
        if inner is not None and isinstance(value, dict):
            _check_own(inner, value, path, f"{where}.{key}")
        elif key not in SHARED:
            expected = ", ".join([*SHARED, *(f"[{where}.{name}]" for name in group.commands)])
            raise BadInput(f"{path}: [{where}] has the key {key!r}, expected some of {expected}")


def _check_own(command: click.Command, table: dict[str, Any], path: Path, where: str) -> None:
    known = dict(_options(command))
    for key, value in table.items():
        if isinstance(command, click.Group) and key in command.commands and isinstance(value, dict):
            _check_own(command.commands[key], value, path, f"{where}.{key}")
        elif key not in known:
            raise BadInput(f"{path}: [{where}] has the key {key!r}, expected some of {', '.join(known)}")


def _of_command(
    command: click.Command, shared: dict[str, Any], own: dict[str, Any], path: Path, name: str
) -> tuple[dict[str, Any], dict[str, str]]:
    found: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for key, param in _options(command):
        if key in own:
            where, value = f"[tool.optpipe.{name}]", own[key]
        elif key in shared and key in SHARED and not param.required:
            where, value = "[tool.optpipe]", shared[key]
        else:
            continue
        assert param.name is not None
        found[param.name] = _converted(command, param, value, f"{path}: {where} {key}")
        origins[key] = f"{path}: {where}"
    return found, origins


def _options(command: click.Command) -> Iterator[tuple[str, click.Parameter]]:
    """Yield what a file may set: long options without dashes, and PROFILE by its name."""
    for param in command.params:
        if isinstance(param, click.Argument):
            if param.metavar == "[PROFILE]":
                yield "profile", param
            continue
        key = max(param.opts, key=len).removeprefix("--")
        if key not in NO_DEFAULTS:
            yield key, param


def _converted(command: click.Command, param: click.Parameter, value: Any, where: str) -> Any:
    """Return the value as if it had been typed; numbers may be written as numbers, lists with commas as lists."""
    is_flag = isinstance(param, click.Option) and param.is_flag
    if is_flag != isinstance(value, bool) or isinstance(value, dict):
        raise BadInput(f"{where} is {value!r}, expected {'true or false' if is_flag else 'a value of the option'}")
    if is_flag:
        return value
    parts = [str(one) for one in value] if isinstance(value, list) else [str(value)]
    typed: Any = parts if param.multiple else ",".join(parts)
    if param.name == "model" and ":" in str(typed):
        raise BadInput(f"{where} is {typed!r}, which would call a function; expected that on the command line alone")
    try:
        param.type_cast_value(click.Context(command), typed)
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from error
    except click.UsageError as error:
        raise BadInput(f"{where} is {value!r}: {error.message}") from error
    return typed
