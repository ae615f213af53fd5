"""Reading and writing of the two file formats: versions, JSON paths in errors, canonical text, atomic writes."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import secrets
import stat
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from optpipe_compiler.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def uncollected() -> Iterator[None]:
    """Within, no garbage is collected: plans and files are millions of records that make no cycles to speak of."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of every record in a file: immutable, keyword-only, defaults not written.

    A default is what *is* the field's default, not what equals it. So records are pickled as they are written: their
    text, and a digest over it, is the same in another process.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as JSON."""
        return _read_back, (msgspec.json.encode(self), type(self))


def _read_back(text: bytes, kind: type[Record]) -> Record:
    return msgspec.json.decode(text, type=kind)


T = TypeVar("T", bound=Record)

LARGEST_FILE = 10**9
"""Bytes; of traces, which other tools write, `LARGEST_TRACE`."""
LARGEST_TRACE = 2 * 10**9
MOST_NESTED = 100
"""Levels of lists and objects in a file; ours have 7."""


def read_text(path: Path, most_bytes: int = LARGEST_FILE) -> str:
    """Return the UTF-8 text of `path`, without a byte-order mark; raise BadInput if it is too large or unreadable."""
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise BadInput(f"{path}: is too large, expected at most {most_bytes // 10**6} MB")
        return content.decode("utf-8-sig")
    except OSError as error:
        stdin = "; /dev/stdin reads what is piped in" if str(path) == "-" else ""
        raise BadInput(f"{path}: cannot be read: {error.strerror}{stdin}") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: is not UTF-8 text (byte {error.start})") from error


def parse_json(text: str, name: str) -> Any:
    """Return the value of a JSON text; raise BadInput for what is no JSON, nested too deeply, or has a key twice.

    RFC 8259 leaves open which of two equal keys counts, so two readers of one file could see different schedules.
    """
    try:
        raw = msgspec.json.decode(text)
        if _depth(raw) > MOST_NESTED:
            raise RecursionError
    except msgspec.DecodeError as error:
        _refuse_constants(text, name)
        raise BadInput(f"{name}: is not complete JSON: {error}") from error
    except RecursionError as error:
        raise BadInput(f"{name}: is nested too deeply, expected at most {MOST_NESTED} levels") from error
    try:
        json.loads(text, object_pairs_hook=_refuse_repeated)
    except _Repeated as repeated:
        where = _find(_REPEATED, json.loads(text, object_pairs_hook=_mark_repeated), "$")
        raise BadInput(f"{name}: {where}.{repeated} stands there twice, expected once") from repeated
    return raw


def _depth(value: Any) -> int:
    """Return how many lists and objects stand in one another, `MOST_NESTED` + 1 for more than that."""
    level, depth = [value] if type(value) in _NESTS else [], 0
    while level and depth <= MOST_NESTED:
        insides = (one.values() if type(one) is dict else one for one in level)
        level, depth = [item for inside in insides for item in inside if type(item) in _NESTS], depth + 1
    return depth


_NESTS = frozenset({dict, list})


class _Repeated(Exception):
    """An object has the key that is the text of this error twice."""


_REPEATED = object()
"""Stands for an object that has a key twice."""


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> None:
    if len(dict(pairs)) < len(pairs):
        raise _Repeated(Counter(key for key, _ in pairs).most_common(1)[0][0])


def _mark_repeated(pairs: list[tuple[str, Any]]) -> object:
    found = dict(pairs)
    return found if len(found) == len(pairs) else _REPEATED


def _refuse_constants(text: str, name: str) -> None:
    """Raise BadInput where a text is JSON but for NaN or Infinity, which other writers put there."""
    found: list[str] = []

    def seen(constant: str) -> object:
        found.append(constant)
        return _CONSTANT

    with suppress(ValueError, RecursionError):
        where = _find(_CONSTANT, json.loads(text, parse_constant=seen), "$")
        if where is not None:
            raise BadInput(f"{name}: {where} is {found[0]}, expected a finite number")


_CONSTANT = object()
"""Stands for NaN, Infinity or -Infinity."""


def _find(wanted: object, value: Any, path: str) -> str | None:
    """Return the path of the first place in `value` that is `wanted`."""
    if value is wanted:
        return path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    steps = ((item, f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}") for key, item in inside)
    return next((found for item, step in steps if (found := _find(wanted, item, step)) is not None), None)


@uncollected()
def decode(text: str, kind: type[T], name: str, *, format: str, version: int, revision: int) -> T:
    """Decode `text` as a `kind`; raise BadInput naming file, JSON path, value and expectation.

    A newer `version` is always refused. A newer `revision` of the same version may add fields, which are ignored;
    at a known revision an unknown field is an error.
    """
    if (written := _as_written(text, kind, format, version, revision)) is not None:
        return written
    raw = parse_json(text, name)
    if not isinstance(raw, dict):
        raise BadInput(f"{name}: $ is {short_json(raw)}, expected an object")
    if raw.get("format") != format:
        raise BadInput(f"{name}: $.format is {shown_at(raw, 'format')}, expected {short_json(format)}")
    for field in ("version", "revision"):
        value = raw.get(field)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise BadInput(f"{name}: $.{field} is {shown_at(raw, field)}, expected an integer of at least 0")
    if not 1 <= raw["version"] <= version:
        raise BadInput(
            f"{name}: $.version is {raw['version']}, expected 1 to {version}; "
            + ("a newer optpipe wrote this file" if raw["version"] > version else "there was no such version")
        )
    try:
        record = msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise BadInput(_explain(name, raw, kind, said_by(error))) from error
    if raw["revision"] <= revision:
        _refuse_unknown(name, raw, record)
    return record


class _Head(msgspec.Struct):
    """What every file says of itself."""

    format: str
    version: int
    revision: int


def _as_written(text: str, kind: type[T], format: str, version: int, revision: int) -> T | None:
    """Return the record of a text that has all of it and nothing else, in its order; None: it is another text.

    Most files are so, whatever their spaces and line ends are. No key stands there twice: the record's JSON has none.
    """
    try:
        head, record = msgspec.json.decode(text, type=_Head), msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError):
        return None
    is_known = head.format == format and 1 <= head.version <= version and 0 <= head.revision <= revision
    return record if is_known and msgspec.json.format(text, indent=-1) == msgspec.json.encode(record).decode() else None


def shown_at(raw: object, field: str) -> str:
    """Return in words what an object has for a field: its JSON, or `missing`."""
    return short_json(raw[field]) if isinstance(raw, dict) and field in raw else "missing"


def check_digest(found: str, expected: str, said: str) -> None:
    """Raise BadInput where a file has another digest than expected; `said`: which file, and what it is not."""
    if found != expected:
        raise BadInput(f"{said}: its digest is {found[:19]}, expected {expected[:19]}")


JSON_TYPES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
"""Words for msgspec's names of types."""


def said_by(error: Exception) -> str:
    """Return what an error says; msgspec's sentences with words for the types that it names."""

    def in_words(match: re.Match[str]) -> str:
        return f"{match[1]} {' or '.join(JSON_TYPES.get(name, name) for name in match[2].split(' | '))}"

    return re.sub(r"\b([Ee]xpected|got) `([^`]+)`", in_words, str(error))


def _explain(name: str, raw: object, kind: type[Record], message: str) -> str:
    """Turn msgspec's "Expected X, got Y - at `$.a[0].b`" into a sentence that shows the value found there."""
    what, _, where = message.partition(" - at `")
    path = where.rstrip("`") or "$"
    value, found = _at(raw, path)
    shown = f" is {short_json(value)}" if found else ""
    if what.startswith(("Invalid enum value", "Invalid value")) and (
        choices := _choices_at(msgspec.json.schema(kind), path)
    ):
        return f"{name}: {path}{shown}, expected one of {', '.join(choices)}"
    return f"{name}: {path}{shown}: {what[0].lower()}{what[1:]}"


def _steps(path: str) -> list[str]:
    """Return the steps of a path such as $.a[0].b: a, [0], b."""
    return path.replace("[", ".[").split(".")[1:]


def _choices_at(schema: dict[str, Any], path: str) -> list[str]:
    """Return which values a schema knows at a path, if it counts them up."""
    defs = schema.get("$defs", {})

    def branches(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if "$ref" in node:
            node = defs[node["$ref"].rsplit("/", 1)[1]]
        yield node
        for branch in node.get("anyOf", ()):
            yield from branches(branch)

    nodes = [schema]
    for step in _steps(path):
        inside = []
        for node in (branch for one in nodes for branch in branches(one)):
            if step.startswith("["):
                inside += [node[key] for key in ("items", "additionalProperties") if isinstance(node.get(key), dict)]
            else:
                found = node.get("properties", {}).get(step, node.get("additionalProperties"))
                inside += [found] if isinstance(found, dict) else []
        nodes = inside
    return list(dict.fromkeys(str(value) for one in nodes for node in branches(one) for value in node.get("enum", ())))


def _at(raw: Any, path: str) -> tuple[Any, bool]:
    try:
        for step in _steps(path):
            raw = raw[int(step[1:-1])] if step.startswith("[") else raw[step]
    except (KeyError, IndexError, TypeError, ValueError):
        return None, False
    return raw, True


def short_json(value: object) -> str:
    """Return a value as JSON, cut to 60 characters."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _refuse_unknown(name: str, raw: Any, record: Record) -> None:
    """Refuse fields that the schema does not know, by path; the schema is walked next to the raw value.

    Most files are as they are written: the record has all that is in them.
    """
    if msgspec.json.decode(msgspec.json.encode(record)) == raw:
        return
    known = msgspec.json.schema(type(record))
    found = _unknown(raw, known, known.get("$defs", {}), "$")
    if found is not None:
        raise BadInput(f"{name}: {found}: is not a known field")


def _unknown(value: Any, schema: dict[str, Any], defs: dict[str, Any], path: str) -> str | None:
    if "$ref" in schema:
        schema = defs[schema["$ref"].rsplit("/", 1)[1]]
    if "anyOf" in schema:
        schema = _branch(value, schema, defs)
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        items = ((item, schema["items"], f"{path}[{index}]") for index, item in enumerate(value))
    elif isinstance(value, dict) and "properties" in schema:
        for key in value:
            if key not in schema["properties"]:
                return f"{path}.{key}"
        items = ((item, schema["properties"][key], f"{path}.{key}") for key, item in value.items())
    elif isinstance(value, dict) and isinstance(schema.get("additionalProperties"), dict):
        items = ((item, schema["additionalProperties"], f"{path}.{key}") for key, item in value.items())
    else:
        return None
    return next((bad for bad in (_unknown(v, s, defs, p) for v, s, p in items) if bad is not None), None)


def _branch(value: Any, schema: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any]:
    """Choose the branch of a union that describes `value`: by its tag, else the first object for an object."""
    branches: list[dict[str, Any]] = [defs[b["$ref"].rsplit("/", 1)[1]] if "$ref" in b else b for b in schema["anyOf"]]
    if isinstance(value, dict):
        field = schema.get("discriminator", {}).get("propertyName")
        for branch in branches:
            tag = branch.get("properties", {}).get(field, {}) if field else {}
            if branch.get("type") == "object" and (not field or value.get(field) in tag.get("enum", [])):
                return branch
    return {}


def canonical(record: Record) -> str:
    """Return the one text form of `record`: fixed key order, LF, a line per op, layer or baseline, a final newline."""
    return _render(msgspec.to_builtins(record), 0, top=True) + "\n"


_LINE = json.JSONEncoder(separators=(", ", ": "), ensure_ascii=False)


def _render(value: Any, depth: int, *, top: bool = False) -> str:
    pad, inner = " " * depth, " " * (depth + 1)
    if isinstance(value, dict) and (top or _is_table(value) or any(map(_spreads, value.values()))):
        rows = [f"{inner}{json.dumps(key)}: {_render(item, depth + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(rows) + f"\n{pad}}}"
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        rows = [_line(item) if _is_flat(item) else _render(item, depth + 1) for item in value]
        return f"[\n{inner}" + f",\n{inner}".join(rows) + f"\n{pad}]"
    return _LINE.encode(value)


def _line(value: dict[str, Any]) -> str:
    """Return the same as `_LINE`, sooner, of what has no fractions: most of a large file are ops."""
    return msgspec.json.format(msgspec.json.encode(value), indent=0).decode()


_SCALARS = frozenset({int, str, bool, type(None)})


def _is_flat(value: Any) -> bool:
    """Whether an object has scalars and lists of them alone, and no fractions, which msgspec writes in another way."""
    if not isinstance(value, dict):
        return False
    others = [item for item in value.values() if type(item) not in _SCALARS]
    return not others or all(type(item) in (list, tuple) and _SCALARS.issuperset(map(type, item)) for item in others)


def _is_table(value: dict[str, Any]) -> bool:
    """Whether an object has rows with names, such as baselines."""
    return bool(value) and all(isinstance(item, dict) for item in value.values())


def _spreads(value: Any) -> bool:
    """Whether a value takes several lines: a list of objects, or an object with one inside or of objects."""
    if isinstance(value, list):
        return bool(value) and isinstance(value[0], dict | list)
    return isinstance(value, dict) and any(isinstance(item, dict) or _spreads(item) for item in value.values())


def is_special(path: Path) -> bool:
    """Whether a path is no place for a file, but a device, a pipe, or a name for something open such as /dev/stdout."""
    with suppress(OSError):  # a name that is too long
        return str(path).startswith(("/dev/", "/proc/")) or (path.exists() and not path.is_file() and not path.is_dir())
    return False


def is_same(path: Path, other: Path) -> bool:
    """Whether two paths lead to one file, which is there or not; what is special, such as /dev/null, is none."""
    if is_special(path) or is_special(other):
        return False
    try:
        return os.path.realpath(path) == os.path.realpath(other) or path.samefile(other)
    except (OSError, ValueError):
        return False


def _target(path: Path) -> Path:
    """Return what a path leads to, links followed."""
    target = Path(os.path.realpath(path))
    try:
        number = errno.ELOOP if target.is_symlink() else 0
    except OSError as error:  # a name that is too long
        number = error.errno or errno.EIO
    if number:
        raise BadInput(f"{path}: cannot be written: {os.strerror(number)}")
    return target


def check_writable(path: Path) -> None:
    """Raise BadInput if `path` cannot be written, before time is spent on what belongs there."""
    target = _target(path)
    if target.is_dir():
        raise BadInput(f"{path}: cannot be written: Is a directory")
    if not is_special(path) and not target.parent.is_dir():
        raise BadInput(f"{path}: cannot be written: No such file or directory")
    if not os.access(path if is_special(path) else target.parent, os.W_OK):
        raise BadInput(f"{path}: cannot be written: Permission denied")


STANDARD = {"/dev/stdout": 1, "/dev/stderr": 2}
"""Descriptors of files that are open, by name."""


def _is_open(path: Path) -> int | None:
    """Return the descriptor that a name such as /dev/stdout or /dev/fd/3 stands for; None: it is the name of a file."""
    found = re.fullmatch(r"/(?:dev|proc/self)/fd/([0-9]{1,9})", str(path))
    return int(found[1]) if found else STANDARD.get(str(path))


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write `content` to a temporary name beside `path` and rename it, so that an interrupted write loses nothing.

    A link is followed: what it leads to is replaced. What is special (/dev/stdout, a pipe) is written to, not replaced;
    what is open already, where it stands: opened once more, a file behind it would lose what it has.
    A new file has the permissions that the umask leaves, one that was there keeps its own.
    """
    data = content.encode() if isinstance(content, str) else content
    target = _target(path)
    temporary = target.with_name(f".optpipe-{secrets.token_hex(8)}")
    try:
        if (number := _is_open(path)) is not None:
            with os.fdopen(os.dup(number), "wb") as file:
                file.write(data)
            return
        if is_special(path):
            path.write_bytes(data)
            return
        with os.fdopen(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666), "wb") as file:
            file.write(data)
        if target.exists():
            temporary.chmod(stat.S_IMODE(target.stat().st_mode))
        temporary.replace(target)
    except OSError as error:
        raise BadInput(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
