"""The checked-in JSON Schemas are those of the records, and say what the tool says."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import jsonschema
import pytest

from optpipe_compiler.documents import ir, profile
from optpipe_compiler.documents.files import canonical
from optpipe_compiler.documents.schema import FILES, schema, to_text
from optpipe_compiler.errors import BadInput
from tests.instances import quick, uniform

SCHEMAS = Path(__file__).parent.parent / "schemas"


def examples() -> dict[str, dict]:
    """One file of each format that uses links, offload, recompute and split backwards."""
    costs = uniform(shared_links="pairs", embedding_ms=(0.1, 0, 0.1))
    planned = quick(costs, 10**9).schedule
    return {
        "profile.schema.json": json.loads(canonical(costs)),
        "schedule.schema.json": json.loads(ir.to_text(planned)),
    }


EXAMPLES = examples()
PARSE = {"profile.schema.json": profile.parse, "schedule.schema.json": ir.parse}


def broken(name: str, path: list[str | int], value: object) -> dict:
    """The example with one value replaced, or removed if the value is ...."""
    result = copy.deepcopy(EXAMPLES[name])
    place = result
    for step in path[:-1]:
        place = place[step]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return result


def test_the_schemas_directory_holds_these_files_and_no_others():
    assert {path.name for path in SCHEMAS.iterdir()} == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_the_checked_in_schema_is_the_generated_one(name):
    assert (SCHEMAS / name).read_text() == to_text(name), "run make schemas"


@pytest.mark.parametrize("name", FILES)
def test_the_schema_is_itself_valid_and_the_same_on_every_python(name):
    jsonschema.Draft202012Validator.check_schema(schema(name))
    assert "\\n    " not in to_text(name), "a docstring's indentation: Python 3.13 strips it, 3.12 does not"


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_the_compiler_writes_is_valid(name):
    jsonschema.validate(EXAMPLES[name], schema(name))


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("profile.schema.json", ["layers"], []),
        ("profile.schema.json", ["machine"], ...),
        ("profile.schema.json", ["machine", "devices"], 0),
        ("profile.schema.json", ["machine", "links", 0, "d2h_bytes_per_s"], "fast"),
        ("profile.schema.json", ["layers", 0, "forward_ns"], -1),
        ("profile.schema.json", ["layers", 0, "forward_ns"], {"value": 1, "source": "guessed"}),
        ("profile.schema.json", ["layers", 0, "wrong"], 1),
        ("profile.schema.json", ["format"], "optpipe-schedule"),
        ("schedule.schema.json", ["devices", 0, "compute", 0, "op"], "forwards"),
        ("schedule.schema.json", ["devices", 0, "compute", 0, "microbatch"], ...),
        ("schedule.schema.json", ["devices", 0, "compute", 0, "wrong"], 1),
        ("schedule.schema.json", ["devices", 0, "peak_bytes"], -1),
        ("schedule.schema.json", ["stages", 0, "layers"], [0, 1, 2]),
        ("schedule.schema.json", ["forecast", "outcome"], "unknown"),
        ("schedule.schema.json", ["digest"], ...),
    ],
)
def test_what_the_schema_refuses_the_tool_refuses(name, path, value):
    wrong = broken(name, path, value)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema(name))
    with pytest.raises(BadInput):
        PARSE[name](json.dumps(wrong), "file")
