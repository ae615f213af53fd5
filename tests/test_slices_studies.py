"""Studies of sliced schedules, and of microbatches of unequal length, plan with the same slices and lengths."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from optpipe_compiler import cache, compiler
from optpipe_compiler.compiler import Options, compile_schedule
from optpipe_compiler.costs.uniform import UniformOptions, uniform_profile
from optpipe_compiler.diff import compare as differences
from optpipe_compiler.documents import ir
from optpipe_compiler.documents import profile as profiles
from optpipe_compiler.documents.files import canonical
from optpipe_compiler.documents.profile import Model, Profile, Sliceable, value_of
from optpipe_compiler.study import comparison, explain, sweep
from optpipe_compiler.study.facts import Facts, facts
from optpipe_compiler.study.planned import Instance, options_of
from optpipe_compiler.study.pool import answers_here
from optpipe_compiler.study.variations import variations
from optpipe_compiler.view.explanation import sentences
from tests.test_cli import refused, run  # noqa: F401  (run is a fixture)

GB = 10**9
LENGTHS = (32_768, 8_192, 16_384, 32_768, 8_000, 30_000)
UNIFORM = UniformOptions(devices=2, layers_per_device=2, sliceable=True, attention_share=0.3, kv_fraction=0.1)
COSTS = uniform_profile(UNIFORM)
QUICK = Options(2 * GB, 6, time_limit_s=0.0, reproducible=True, search=False)


def planned(profile: Profile = COSTS, **options: object) -> ir.Checked:
    return compile_schedule(profile, replace(QUICK, **options)).checked  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def sliced() -> ir.Checked:
    return planned(slices=4)


@pytest.fixture(scope="module")
def packed() -> ir.Checked:
    return planned(slices=2, lengths=LENGTHS)


# -- what a study of a schedule plans


@pytest.mark.parametrize(
    ("asked", "slices"), [({}, 1), ({"slices": 4}, 4), ({"slices": "auto"}, "auto"), ({"lengths": LENGTHS}, 1)]
)
def test_the_options_of_a_schedule_have_its_slices_and_lengths(asked, slices):
    found = options_of(planned(**asked).schedule, "s")
    assert (found.slices, found.lengths) == (slices, asked.get("lengths"))


def test_every_change_is_planned_with_the_slices_of_the_schedule(sliced):
    instance = explain.instance_of(sliced, COSTS, "s", 0.0)
    seen: list[ir.Schedule] = []

    def plan(function, questions, jobs):
        for question, found in answers_here(function, questions, jobs):
            assert found.schedule is not None
            seen.append(found.schedule.schedule)
            yield question, found

    explanation = explain.explain(sliced, instance, 1, pool=plan)
    assert len(seen) > 5
    assert {one.setup.slices for one in seen} == {4}
    assert explanation.slices == 4
    assert "Every change is planned with 4 slices per microbatch." in list(sentences(explanation))


def test_more_microbatches_of_unequal_length_are_those_of_the_first_again_and_compared_per_token(packed):
    instance = explain.instance_of(packed, COSTS, "s", 0.0)
    asked = [one for one in explain.listed(packed.schedule, instance) if one.family in ("same", "microbatches")]
    assert asked[1].instance.options.lengths == LENGTHS + LENGTHS[:3]
    found = [explain.plan(one.instance) for one in asked]
    explanation = explain.summed_up(packed.schedule, asked, found)
    each = [one.value_ns / sum(change.instance.options.lengths) for one, change in zip(found, asked, strict=True)]
    best = min(each[0], packed.schedule.forecast.makespan_ns / sum(LENGTHS))
    assert explanation.what_ifs[0].found == pytest.approx(1 - each[1] / best)
    said = " ".join(sentences(explanation))
    assert "9 microbatches instead of 6 would save, per token, " in said
    assert "for microbatches of 8000 to 32768 tokens, 128112 in all" in said


def test_layers_that_are_changed_can_still_be_cut():
    head = replace(UNIFORM, head_ms=(4, 4, 4))
    heavy = uniform_profile(head)
    last = structs.replace(heavy.layers[-1], slices=Sliceable(forward_overhead_ns=7, backward_overhead_ns=9))
    heavy = structs.replace(heavy, layers=[*heavy.layers[:-1], last])
    instance = Instance(heavy, compiler.settled(heavy, replace(QUICK, mem_bytes=100 * GB, slices=4)))
    found = {one.family: one.instance.profile for one in variations(instance, offloads=False, uneven=True)}
    for family in ("head", "layers"):
        changed = profiles.parse(canonical(found[family]), family)
        schedule = planned(changed, mem_bytes=100 * GB, slices=4).schedule
        assert schedule.setup.slices == 4
    before, after = (
        sum(value_of(layer.slices.forward_attention_ns) for layer in one.expanded_layers() if layer.slices)
        for one in (heavy, found["layers"])
    )
    assert after == pytest.approx(before, abs=len(heavy.expanded_layers()))


# -- comparisons


def row(name: str, schedule: ir.Checked) -> Facts | comparison.Absent:
    options = comparison.options_for(schedule.schedule, name, "s")
    return comparison.published_row(comparison.Wanted(name, COSTS, options))


def test_known_schedules_are_compared_in_the_same_slices_and_those_of_whole_microbatches_whole(sliced, packed):
    theirs = row("seq1f1b", sliced)
    assert isinstance(theirs, Facts)
    assert theirs.slices == 4
    assert theirs.makespan_ns == sliced.schedule.forecast.baselines["seq1f1b"].makespan_ns
    whole = row("1f1b", sliced)
    assert isinstance(whole, Facts)
    assert whole.slices == 1
    assert whole.makespan_ns == planned(method="1f1b").schedule.forecast.makespan_ns
    for name, slices in (("1f1b", 1), ("seq1f1b", 2)):
        packed_row = row(name, packed)
        assert isinstance(packed_row, Facts)
        assert (packed_row.slices, packed_row.lengths) == (slices, LENGTHS)
    assert comparison.compare([facts(packed, "ours"), row("1f1b", packed)]).differences == ()
    assert isinstance(row("seq1f1b", planned()), comparison.Absent)


def test_rows_say_their_slices_and_unequal_lengths_are_another_instance(sliced, packed):
    found = comparison.compare([facts(sliced, "a"), facts(packed, "b")])
    assert found.differences == (
        "lengths of microbatches differ: all as long as the costs are for in a; "
        "8000 to 32768 tokens, 128112 in all in b",
    )
    model = Model(builder="gpt", microbatch_size=3, sequence_length=32_768)
    known = ir.seal(structs.replace(packed.schedule, model=model))
    seconds = known.forecast.makespan_ns / 10**9
    assert comparison.compare([facts_of(known)]).rows[0].tokens_per_s == pytest.approx(3 * sum(LENGTHS) / seconds)


def facts_of(schedule: ir.Schedule) -> Facts:
    from optpipe_compiler.study.facts import judged

    return judged(schedule, "a")


def test_a_difference_of_slices_is_said(sliced, packed):
    found = {change.name: (change.old, change.new) for change in differences(sliced.schedule, packed.schedule).setup}
    assert found["slices"] == (4, 2)
    assert found["ends of slices"][0].startswith("6 x 0-")


# -- sweeps, bounds, plans that are kept


def test_a_sweep_is_planned_in_slices_and_for_lengths_and_says_so(run):  # noqa: F811
    Path("profile.json").write_text(canonical(COSTS))
    Path("lengths").write_text(" ".join(map(str, LENGTHS)))
    words = ("--mem", "1GB,2GB", "--slices", "2", "--lengths", "lengths", "--time-limit", "0", "-j", "1")
    outcome = run("sweep", *words)
    assert outcome.code == 0
    said = " ".join(outcome.out.split())
    assert "Every point is planned with 2 slices per microbatch, for microbatches of 8000 to 32768 tokens" in said
    file = json.loads(Path("sweep.json").read_text())
    assert [(point["microbatches"], point["slices"]) for point in file["points"]] == [(6, 2), (6, 2)]
    assert "6 x 2" in said
    assert "…" not in outcome.out
    again = run("sweep", *words, "--json")
    assert json.loads(again.out)["points"] == file["points"]
    assert refused(run("sweep", *words[:4], "--time-limit", "0"), 2).startswith("sweep.json: $.options.lengths is '327")
    other = refused(run("sweep", *words, "--microbatches", "4", "-o", "other.json"), 2)
    assert other == "--lengths has 6 lengths, expected one for each of 4"


def test_a_sweep_of_an_earlier_revision_goes_on(tmp_path):
    path = tmp_path / "sweep.json"
    costs, common = sweep.SweptCosts.of(COSTS), Options(0, time_limit_s=0.0)
    before = json.loads(canonical(sweep.begin(None, costs, common)))
    for name in ("slices", "lengths"):
        del before["options"][name]
    path.write_text(json.dumps(before | {"revision": 2}))
    assert sweep.begin(path, costs, common).points == []


def test_bounds_are_for_the_slices_that_are_asked_for(run):  # noqa: F811
    Path("profile.json").write_text(canonical(COSTS))
    found = {}
    for slices in ("1", "8"):
        report = json.loads(run("bounds", "--mem", "2GB", "--slices", slices, "--json").out)
        found[slices] = report["bounds"][0]["lower_bound_ns"]
    assert found["8"] < found["1"]
    assert "with 8 slices per microbatch" in run("bounds", "--mem", "2GB", "--slices", "8").out


def test_plans_for_other_lengths_are_no_answer(tmp_path):
    kept = cache.Cache(tmp_path)
    first, other = (
        cache.compile_schedule(COSTS, replace(QUICK, lengths=lengths), cache=kept)
        for lengths in (LENGTHS, LENGTHS[::-1])
    )
    assert not other.is_cached
    assert other.schedule.setup.lengths == first.schedule.setup.lengths[::-1]
