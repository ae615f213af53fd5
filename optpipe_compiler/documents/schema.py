"""JSON Schema of the two files, from the records. `python -m optpipe_compiler.documents.schema DIR` writes them."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from optpipe_compiler.documents.files import write_atomically
from optpipe_compiler.documents.ir import Schedule
from optpipe_compiler.documents.profile import Profile

FILES = {"profile.schema.json": Profile, "schedule.schema.json": Schedule}


def schema(name: str) -> dict[str, Any]:
    """Return the schema of one file; unknown fields are refused, as the tool does at a known revision."""
    result = msgspec.json.schema(FILES[name])
    for definition in result["$defs"].values():
        if "description" in definition:  # Python 3.13 strips the indentation of docstrings, earlier ones keep it
            definition["description"] = inspect.cleandoc(definition["description"])
        if definition.get("type") == "object":
            definition["additionalProperties"] = False
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **result}


def to_text(name: str) -> str:
    """Return the schema as it is checked in."""
    return json.dumps(schema(name), indent=1) + "\n"


if __name__ == "__main__":
    for file in FILES:
        write_atomically(Path(sys.argv[1]) / file, to_text(file))
