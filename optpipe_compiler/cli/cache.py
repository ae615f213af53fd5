"""optpipe cache: the plans that are kept."""

from __future__ import annotations

import os
import time
from typing import Any

import click

from optpipe_compiler.cli.common import console, json_option, say, say_json
from optpipe_compiler.errors import BadInput


@click.group(short_help="List or clear the plans that are kept.")
def cache() -> None:
    """List or clear the plans that `compile`, `sweep` and `explain` keep in the user's cache folder.

    OPTPIPE_CACHE names another folder; where it is empty, nothing is kept.

    Example: optpipe cache list
    """


@cache.command(name="list", short_help="List the plans that are kept.")
@json_option
def list_command(as_json: bool) -> None:
    """List the plans that are kept, the latest used first.

    Example: optpipe cache list --json
    """
    from rich.table import Table

    from optpipe_compiler.documents.units import short_bytes, show_ns

    kept = _users()
    found = kept.entries()
    total = sum(entry.size_bytes for entry in found)
    if as_json:
        say_json({"folder": str(kept.folder), "bytes": total, "plans": list(map(_report, found))})
        return
    if found:
        table = Table("profile", "devices", "microbatches", "cap", "takes", "outcome", "used", box=None, pad_edge=False)
        for entry in found:
            about = entry.about
            sizes = str(about.devices), str(about.microbatches), short_bytes(about.mem_bytes)
            table.add_row(about.profile, *sizes, show_ns(about.value_ns), about.outcome, _ago(entry.used_s))
        console().print(table)
        click.echo()
    plans = f"{len(found)} plan{'s' * (len(found) != 1)}"
    say(f"{plans}, {short_bytes(total)} of {short_bytes(kept.most_bytes)}, in {kept.folder}")


@cache.command(short_help="Remove all plans that are kept.")
@json_option
def clear(as_json: bool) -> None:
    """Remove all plans that are kept.

    Example: optpipe cache clear
    """
    kept = _users()
    removed = kept.clear()
    if as_json:
        say_json({"folder": str(kept.folder), "removed": removed})
    else:
        say(f"removed {removed} plan{'s' * (removed != 1)} from {kept.folder}")


def _users() -> Any:
    from optpipe_compiler.cache import FOLDER, users

    found = users()
    if found is None:
        raise BadInput(f"no plans are kept: the environment's {FOLDER} is empty, expected a folder or no such variable")
    try:
        with os.scandir(found.folder):
            return found
    except FileNotFoundError:  # it is made when the first plan is kept
        return found
    except OSError as error:
        raise BadInput(
            f"{found.folder}: cannot be read: {error.strerror}; the environment's {FOLDER} names another "
            "folder for plans"
        ) from error


def _report(entry: Any) -> dict[str, Any]:
    about = entry.about
    names = (
        "version",
        "profile",
        "profile_digest",
        "devices",
        "microbatches",
        "mem_bytes",
        "host_mem_bytes",
        "objective",
        "value_ns",
        "peak_bytes",
        "outcome",
        "wall_s",
    )
    return {"file": entry.path.name, "bytes": entry.size_bytes, **{name: getattr(about, name) for name in names}}


def _ago(then_s: float) -> str:
    """Say how long ago a moment was."""
    seconds = max(0.0, time.time() - then_s)
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds // unit:.0f} {name} ago"
    return "just now" if seconds < 60 else "a minute ago"
