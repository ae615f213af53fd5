"""optpipe fmt: schedules and profiles in their canonical text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from optpipe_compiler.cli.common import json_option, say, say_json
from optpipe_compiler.errors import BadInput, Rejected


@click.command(short_help="Rewrite schedules and profiles as their canonical text.")
@click.argument("paths", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 and name the files that would change.")
@json_option
def fmt(paths: tuple[Path, ...], check: bool, as_json: bool) -> None:
    """Rewrite schedules and profiles as their canonical text: one op or layer per line, fixed key order.

    Only the text changes, never its meaning. Nothing is written unless all files can be read.

    Example: optpipe fmt schedule.json profile.json
    """
    from optpipe_compiler.documents.files import is_special, read_text, write_atomically

    for path in paths:
        if not check and is_special(path):
            raise BadInput(f"{path}: is no file that could be rewritten, expected one, or --check")
    texts = {path: read_text(path) for path in paths}
    wanted = {path: canonical_text(text, str(path)) for path, text in texts.items()}
    others = [path for path, text in wanted.items() if texts[path] != text or _has_mark(path)]
    if as_json and check:
        say_json({"would_change": list(map(str, others))})
    if check and others:
        raise Rejected(f"not in canonical form: {', '.join(map(str, others))}")
    for path in others:
        write_atomically(path, wanted[path])
        if not as_json:
            say(f"rewrote {path}")
    if as_json and not check:
        say_json({"rewrote": list(map(str, others))})


def _has_mark(path: Path) -> bool:
    """Whether a file begins with a byte-order mark; what is piped in can be read only once, and is not asked."""
    from optpipe_compiler.documents.files import is_special

    if is_special(path):
        return False
    with path.open("rb") as file:
        return file.read(3) == b"\xef\xbb\xbf"


def canonical_text(text: str, name: str) -> str:
    """Return the canonical text of a schedule or profile; raise BadInput for what is neither or not understood."""
    from optpipe_compiler.documents import ir, profile
    from optpipe_compiler.documents.files import canonical, parse_json, shown_at

    raw = parse_json(text, name)
    kind = raw.get("format") if isinstance(raw, dict) else None
    record: Any
    if kind == ir.FORMAT:
        record, revision = ir.parse(text, name), ir.REVISION
    elif kind == profile.FORMAT:
        record, revision = profile.parse(text, name), profile.REVISION
    else:
        raise BadInput(f'{name}: $.format is {shown_at(raw, "format")}, expected "{ir.FORMAT}" or "{profile.FORMAT}"')
    if record.revision > revision:
        raise BadInput(
            f"{name}: $.revision is {record.revision}, expected at most {revision}; a newer optpipe wrote this file, "
            "and fields that this one does not know would be lost"
        )
    return canonical(record)
