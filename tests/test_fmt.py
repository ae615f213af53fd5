"""optpipe fmt: canonical text and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from small_schedules import build, random_shape

from optpipe_compiler.documents import ir, profile
from optpipe_compiler.documents.files import canonical
from tests import test_cli
from tests.instances import uniform

run, refused = test_cli.run, test_cli.refused


def scrambled(text: str, seed: int = 0) -> str:
    """The same JSON with keys in another order, other spaces, and defaults written out."""
    rng = Random(seed)

    def shuffle(value):
        if isinstance(value, dict):
            keys = list(value)
            rng.shuffle(keys)
            found = {key: shuffle(value[key]) for key in keys}
            return found | {"after": []} if "op" in value and "after" not in value else found
        return [shuffle(item) for item in value] if isinstance(value, list) else value

    return json.dumps(shuffle(json.loads(text)), indent=rng.choice([None, 2]))


@pytest.fixture
def files(run):
    """A scrambled schedule and profile, and their canonical texts."""
    schedule = build(random_shape(Random(1), placements=[(0, 1, 0, 1)], microbatches=3), 1)
    wanted = {"schedule.json": ir.to_text(schedule), "costs.json": canonical(uniform(3, 2))}
    for name, text in wanted.items():
        Path(name).write_text(scrambled(text))
        assert Path(name).read_text() != text
    return wanted


def test_both_kinds_are_rewritten_as_canonical_text_with_the_same_meaning(run, files):
    digest, costs = ir.load("schedule.json").digest, profile.load(Path("costs.json")).digest()
    outcome = run("fmt", *files)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == "rewrote schedule.json\nrewrote costs.json\n"
    assert {name: Path(name).read_text() for name in files} == files
    assert ir.load("schedule.json").digest == digest
    assert profile.load(Path("costs.json")).digest() == costs


def test_canonical_files_are_left_alone(run, files):
    run("fmt", *files)
    before = {name: Path(name).stat().st_mtime_ns for name in files}
    assert run("fmt", *files).out == ""
    assert run("fmt", "--check", *files).code == 0
    assert {name: Path(name).stat().st_mtime_ns for name in files} == before


def test_check_names_the_files_that_are_not_canonical_and_writes_nothing(run, files):
    before = {name: Path(name).read_text() for name in files}
    sentence = refused(run("fmt", "--check", "profile.json", *files), 1)
    assert sentence == "not in canonical form: schedule.json, costs.json"
    assert {name: Path(name).read_text() for name in files} == before


def test_other_line_ends_are_not_canonical(run):
    Path("profile.json").write_bytes(Path("profile.json").read_bytes().replace(b"\n", b"\r\n"))
    assert refused(run("fmt", "--check", "profile.json"), 1) == "not in canonical form: profile.json"
    run("fmt", "profile.json")
    assert b"\r" not in Path("profile.json").read_bytes()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "bad.json: is not complete JSON: "),
        ("null", 'bad.json: $.format is missing, expected "optpipe-schedule" or "optpipe-profile"'),
        ("[" * 200 + "]" * 200, "bad.json: is nested too deeply, expected at most 100 levels"),
        ('{"format": 1, "format": 1}', "bad.json: $.format stands there twice, expected once"),
        ("[]", 'bad.json: $.format is missing, expected "optpipe-schedule" or "optpipe-profile"'),
        ('{"format": "other"}', 'bad.json: $.format is "other", expected "optpipe-schedule" or "optpipe-profile"'),
        ('{"format": "optpipe-profile", "version": 9, "revision": 0}', "bad.json: $.version is 9, expected 1 to 2"),
        ('{"format": "optpipe-profile", "version": 1, "revision": 0}', "bad.json: $ is {"),
    ],
)
def test_what_does_not_load_is_refused_and_no_file_is_touched(run, files, text, sentence):
    Path("bad.json").write_text(text)
    before = {name: Path(name).read_text() for name in files}
    assert refused(run("fmt", *files, "bad.json"), 2).startswith(sentence)
    assert {name: Path(name).read_text() for name in files} == before


def test_an_edited_contract_is_not_blessed(run, files):
    Path("schedule.json").write_text(
        Path("schedule.json").read_text().replace('"microbatches": 3', '"microbatches": 4')
    )
    assert refused(run("fmt", "schedule.json"), 2).startswith("schedule.json: $.digest is ")


def test_a_file_of_a_newer_revision_keeps_the_fields_that_are_not_known(run):
    raw = json.loads(Path("profile.json").read_text()) | {"revision": profile.REVISION + 1, "news": 1}
    text = json.dumps(raw)
    Path("profile.json").write_text(text)
    assert profile.load(Path("profile.json"))
    assert refused(run("fmt", "profile.json"), 2).startswith(
        f"profile.json: $.revision is {profile.REVISION + 1}, expected"
    )
    assert Path("profile.json").read_text() == text


def test_fmt_needs_a_file(run):
    outcome = run("fmt")
    assert outcome.code == 2
    assert "Missing argument 'FILE...'" in outcome.err


def test_what_is_piped_in_is_checked_as_it_is_and_never_rewritten(run, files, tmp_path):
    """It can be read only once, and what would be written there would be read by nobody."""
    run("fmt", *files)
    name = "costs.json"
    assert test_cli.shell(f"cat {name} | optpipe fmt --check /dev/stdin", tmp_path).returncode == 0
    assert test_cli.shell(f"tr -d ' ' < {name} | optpipe fmt --check /dev/stdin", tmp_path).returncode == 1
    refusal = test_cli.shell(f"cat {name} | timeout 20 optpipe fmt /dev/stdin", tmp_path)
    assert (refusal.returncode, refusal.stdout) == (2, "")
    assert refusal.stderr == "optpipe: /dev/stdin: is no file that could be rewritten, expected one, or --check\n"
