"""Files are refused by path, value and expectation, read across revisions, and written whole or not at all."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from optpipe_compiler.documents import files, ir, profile
from optpipe_compiler.documents.files import (
    Record,
    canonical,
    check_writable,
    decode,
    is_same,
    read_text,
    write_atomically,
)
from optpipe_compiler.errors import BadInput
from tests.instances import quick, uniform

SMALL: dict[str, Any] = {
    "format": "optpipe-profile",
    "version": 1,
    "revision": 0,
    "name": "small",
    "machine": {"devices": 2, "links": [{"d2h_bytes_per_s": 5, "h2d_bytes_per_s": 5}]},
    "layers": [
        {"name": "block", "forward_ns": 1, "backward_input_ns": 1, "backward_weight_ns": 1, "saved_bytes": 1},
        {"name": "block", "forward_ns": 1, "backward_input_ns": 1, "backward_weight_ns": 1, "saved_bytes": 1},
    ],
}


def with_value(path: str, value: object) -> str:
    """The text of SMALL with `value` at `path`, or without what stands there if `value` is ...."""
    result = json.loads(json.dumps(SMALL))
    place, steps = result, [int(step) if step.isdigit() else step for step in path.split(".")]
    for step in steps[:-1]:
        place = place[step]
    if value is ...:
        del place[steps[-1]]
    else:
        place[steps[-1]] = value
    return json.dumps(result)


def refusal(text: str) -> str:
    with pytest.raises(BadInput) as caught:
        profile.parse(text, "small.json")
    return str(caught.value)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("layers.1.forward_ns", -3, "$.layers[1].forward_ns is -3: expected an integer >= 0"),
        ("layers.1.forward_ns", 1.5, "$.layers[1].forward_ns is 1.5: expected an integer or an object, got a number"),
        ("layers.0.saved_bytes", "b", '$.layers[0].saved_bytes is "b": expected an integer or an object, got a string'),
        ("layers.0.count", 0, "$.layers[0].count is 0: expected an integer >= 1"),
        ("machine.devices", None, "$.machine.devices is null: expected an integer, got null"),
        ("layers", [], "$.layers is []: expected a list of length >= 1"),
        ("name", ..., "object missing required field `name`"),
        ("format", "optpipe-schedule", '$.format is "optpipe-schedule", expected "optpipe-profile"'),
        ("format", ..., '$.format is missing, expected "optpipe-profile"'),
        ("version", "1", '$.version is "1", expected an integer of at least 0'),
        ("version", True, "$.version is true, expected an integer of at least 0"),
        ("version", 0, "$.version is 0, expected 1 to 2; there was no such version"),
        ("revision", ..., "$.revision is missing, expected an integer of at least 0"),
        ("revision", -1, "$.revision is -1, expected an integer of at least 0"),
    ],
)
def test_a_wrong_value_is_named_by_file_path_value_and_expectation(path, value, message):
    refused = refusal(with_value(path, value))
    assert refused.startswith("small.json: $")
    assert message in refused


def test_a_choice_that_does_not_exist_is_answered_with_those_that_do():
    text = with_value("layers.0.forward_ns", {"value": 1, "source": "guessed"})
    expected = ", expected one of estimated, manual, measured"
    assert refusal(text) == 'small.json: $.layers[0].forward_ns.source is "guessed"' + expected


def test_an_op_that_no_lane_has_is_answered_with_those_that_it_has():
    text = ir.to_text(quick(uniform(), 10**9).schedule).replace('"op": "forward"', f'"op": "{"x" * 500}"', 1)
    with pytest.raises(
        BadInput, match=r"^s: \$\.devices\[0\]\.compute\[\d+\]\.op is .{60}, expected one of forward, b.*"
    ) as error:
        ir.parse(text, "s")
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_does_not_have_are_named_by_their_path(constant):
    text = with_value("layers.1.forward_ns", 123456).replace("123456", constant)
    assert refusal(text) == f"small.json: $.layers[1].forward_ns is {constant}, expected a finite number"


def test_a_long_value_is_shortened_in_the_message():
    assert len(refusal(with_value("layers.0.forward_ns", "x" * 500))) < 160


@pytest.mark.parametrize("text", ["[]", "3", "null", '"optpipe-profile"'])
def test_what_is_no_object_is_refused(text):
    assert refusal(text) == f"small.json: $ is {text}, expected an object"


@pytest.mark.parametrize(
    "path", ["wrong", "machine.wrong", "machine.links.0.wrong", "layers.1.wrong", "layers.1.forward_ns"]
)
def test_an_unknown_field_is_refused_at_a_known_revision_and_ignored_at_a_newer_one(path):
    extra: object = {"value": 1, "source": "manual", "wrong": 1} if path.endswith("ns") else 1
    text = with_value(path, extra)
    where = re.sub(r"\.(\d+)", r"[\1]", path) + (".wrong" if path.endswith("ns") else "")
    assert refusal(text) == f"small.json: $.{where}: is not a known field"
    newer = text.replace('"revision": 0', f'"revision": {profile.REVISION + 1}')
    assert len(profile.parse(newer, "small.json").layers) == 2


def test_an_unknown_field_inside_an_op_is_found_through_the_union():
    text = ir.to_text(quick(uniform(), 10**9).schedule)
    wrong = text.replace('{"op": "send_activation", ', '{"op": "send_activation", "wrong": 1, ', 1)
    with pytest.raises(BadInput, match=r"^s\.json: \$\.devices\[0\]\.compute\[\d+\]\.wrong: is not a known field$"):
        ir.parse(wrong, "s.json")


def test_a_newer_version_is_always_refused_and_said_to_be_newer():
    newer = with_value("version", 3).replace('"revision": 0', '"revision": 7')
    assert refusal(newer) == "small.json: $.version is 3, expected 1 to 2; a newer optpipe wrote this file"


def test_a_truncated_file_is_refused_wherever_it_ends():
    text = canonical(profile.parse(json.dumps(SMALL), "small.json"))
    for end in range(len(text.rstrip())):
        assert refusal(text[:end]).startswith("small.json: is not complete JSON: ")


REPEATED = {
    "$.name": ('"name": "small"', '"name": "small", "name": "small"'),
    "$.format": ('"format"', '"format": "optpipe-schedule", "format"'),
    "$.layers[1].count": ('"saved_bytes": 1}]', '"count": 1, "saved_bytes": 1, "count": 2}]'),
    "$.machine.links[0].d2h_bytes_per_s": ('"links": [{', '"links": [{"d2h_bytes_per_s": 1, '),
    "$.machine.x[1].y": ('"devices": 2', '"devices": 2, "x": [null, {"y": [1], "y": {}}]'),
}


@pytest.mark.parametrize("path", REPEATED)
def test_a_key_that_stands_twice_in_an_object_is_refused_by_its_path(path):
    old, new = REPEATED[path]
    assert json.dumps(SMALL).count(old) == 1
    text = json.dumps(SMALL).replace(old, new)
    assert refusal(text) == f"small.json: {path} stands there twice, expected once"


@pytest.mark.parametrize("levels", [101, 900, 100_000])
@pytest.mark.parametrize("pair", [("[", "]"), ('{"a": ', "}")])
def test_a_file_that_is_nested_too_deeply_is_refused(levels, pair):
    inner = pair[0] * levels + "1" + pair[1] * levels
    sentence = "small.json: is nested too deeply, expected at most 100 levels"
    assert refusal(inner) == sentence
    assert refusal(json.dumps(SMALL).replace('"small"', inner)) == sentence
    assert "levels" not in refusal(pair[0] * 99 + "1" + pair[1] * 99)


def test_a_schedule_with_an_edited_contract_is_refused_by_its_digest():
    text = ir.to_text(quick(uniform(), 10**9).schedule)
    edited = text.replace('"cap_bytes": 1000000000', '"cap_bytes": 2000000000')
    assert edited != text
    with pytest.raises(BadInput, match=r"^s\.json: \$\.digest is 'sha256:.*', expected 'sha256:.*edited"):
        ir.parse(edited, "s.json")


def test_a_schedule_with_another_forecast_keeps_its_digest():
    schedule = quick(uniform(), 10**9).schedule
    changed = msgspec.structs.replace(schedule, forecast=msgspec.structs.replace(schedule.forecast, method="other"))
    assert ir.parse(ir.to_text(changed), "s.json").digest == schedule.digest


def test_the_text_has_an_op_or_a_layer_per_line_and_reads_back_to_the_same_bytes():
    schedule = quick(uniform(), 10**9).schedule
    text = ir.to_text(schedule)
    ops = sum(len(device.compute) + len(device.d2h) + len(device.h2d) for device in schedule.devices)
    assert sum(line.startswith('    {"op": ') for line in text.split("\n")) == ops
    assert ops == text.count('"op": ')
    assert ir.to_text(ir.parse(text, "s.json")) == text
    assert text.endswith("}\n")
    assert "\r" not in text


class Sample(Record, frozen=True, kw_only=True, omit_defaults=False):
    format: str = "sample"
    version: int = 1
    revision: int = 0
    text: str = ""
    either: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)


def test_text_that_is_not_ascii_survives():
    written = canonical(Sample(text='Größe 大 \u2028 \\ " \n', either={"ä": {"b": 1}}))
    assert "Größe 大" in written
    assert decode(written, Sample, "x", format="sample", version=1, revision=0).text == 'Größe 大 \u2028 \\ " \n'


def test_a_file_that_is_as_it_was_written_is_decoded_once(monkeypatch):
    record = Sample(text="a", either={"b": {"c": 1}})
    written = canonical(record)
    other = json.dumps(msgspec.to_builtins(record), sort_keys=True)
    parsed = []
    monkeypatch.setattr(files, "parse_json", lambda text, name: parsed.append(text) or json.loads(text))
    for text in (written, written.replace("\n", "\r\n"), other):
        assert decode(text, Sample, "x", format="sample", version=1, revision=0) == record
    assert parsed == [other]


def test_a_file_that_is_as_it_was_written_has_to_be_of_a_known_version():
    for record, said in (
        (Sample(version=2), "$.version is 2, expected 1 to 1"),
        (Sample(version=0), "$.version is 0, expected 1 to 1"),
        (Sample(revision=-1), "$.revision is -1, expected an integer of at least 0"),
        (Sample(format="other"), '$.format is "other", expected "sample"'),
    ):
        with pytest.raises(BadInput, match="^x: " + re.escape(said)):
            decode(canonical(record), Sample, "x", format="sample", version=1, revision=0)


def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path):
    with pytest.raises(BadInput, match=r"missing\.json: cannot be read: No such file or directory$"):
        read_text(tmp_path / "missing.json")
    with pytest.raises(BadInput, match=r"cannot be read: Is a directory$"):
        read_text(tmp_path)
    (tmp_path / "latin").write_bytes(b'{"a": "\xe9"}')
    with pytest.raises(BadInput, match=r"latin: is not UTF-8 text \(byte 7\)$"):
        read_text(tmp_path / "latin")


def test_a_write_replaces_the_file_and_leaves_nothing_beside_it(tmp_path):
    target = tmp_path / "a.json"
    target.write_text("old")
    write_atomically(target, "new ä\n")
    assert target.read_bytes() == "new ä\n".encode()
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("interruption", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", ["chmod", "replace"])
def test_a_write_that_fails_loses_nothing(tmp_path, monkeypatch, step, interruption):
    target = tmp_path / "a.json"
    target.write_text("old")

    def fail(*args: object) -> None:
        raise interruption

    monkeypatch.setattr(Path, step, fail)
    with pytest.raises((BadInput, KeyboardInterrupt)) as caught:
        write_atomically(target, "new")
    if isinstance(interruption, OSError):
        assert str(caught.value) == f"{target}: cannot be written: No space left on device"
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_write_into_a_missing_directory_or_over_a_directory_is_refused(tmp_path):
    with pytest.raises(BadInput, match=r"b\.json: cannot be written: No such file or directory$"):
        write_atomically(tmp_path / "missing" / "b.json", "text")
    (tmp_path / "folder").mkdir()
    with pytest.raises(BadInput, match=r"folder: cannot be written: Is a directory$"):
        write_atomically(tmp_path / "folder", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_a_new_file_has_the_permissions_that_the_umask_leaves_and_an_old_one_keeps_its_own(tmp_path, mask):
    before = os.umask(mask)
    try:
        write_atomically(tmp_path / "new.json", "text")
        (tmp_path / "old.json").touch()
        (tmp_path / "old.json").chmod(0o640)
        write_atomically(tmp_path / "old.json", "text")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("new.json", "old.json")]
    assert modes == [0o666 & ~mask, 0o640]


def test_a_link_is_followed_and_stays(tmp_path):
    for folder in ("real", "links"):
        (tmp_path / folder).mkdir()
    for name in ("there.json", "to-be.json"):
        (tmp_path / "links" / name).symlink_to(f"../real/{name}")
        check_writable(tmp_path / "links" / name) if name == "to-be.json" else (tmp_path / "real" / name).touch()
        write_atomically(tmp_path / "links" / name, "text")
        assert (tmp_path / "links" / name).is_symlink()
        assert (tmp_path / "real" / name).read_text() == "text"
    (tmp_path / "links" / "nowhere").symlink_to("../missing/file")
    with pytest.raises(BadInput, match=r"nowhere: cannot be written: No such file or directory$"):
        write_atomically(tmp_path / "links" / "nowhere", "text")
    (tmp_path / "links" / "itself").symlink_to("itself")
    with pytest.raises(BadInput, match=r"itself: cannot be written: "):
        write_atomically(tmp_path / "links" / "itself", "text")


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomically(pipe, "text\n")
        assert os.read(reader, 100) == b"text\n"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_whether_a_path_can_be_written_is_known_without_writing_it(tmp_path):
    check_writable(tmp_path / "new.json")
    (tmp_path / "old.json").write_text("old")
    check_writable(tmp_path / "old.json")
    check_writable(Path(os.devnull))
    with pytest.raises(BadInput, match=r"b\.json: cannot be written: No such file or directory$"):
        check_writable(tmp_path / "missing" / "b.json")
    with pytest.raises(BadInput, match=r"cannot be written: Is a directory$"):
        check_writable(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]


def test_a_name_that_is_too_long_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 300)
    for write in (check_writable, lambda path: write_atomically(path, "")):
        with pytest.raises(BadInput, match=r"x: cannot be written: File name too long$"):
            write(path)
    assert not is_same(path, tmp_path / "other")


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"\xef\xbb\xbf{}\r\n")
    assert read_text(path) == "{}\r\n"
