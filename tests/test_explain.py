"""What binds: changes that are what they say, savings that are found or bounded, sentences that follow from them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from optpipe_compiler import cache, compiler
from optpipe_compiler.documents import ir
from optpipe_compiler.documents.files import canonical
from optpipe_compiler.documents.profile import Layer, value_of
from optpipe_compiler.study import explain as study
from optpipe_compiler.study import planned
from optpipe_compiler.study.explain import instance_of, listed, summed_up
from optpipe_compiler.study.planned import Instance, Planned, plan
from optpipe_compiler.study.variations import variations
from optpipe_compiler.verify import check
from optpipe_compiler.view.explanation import sentences
from tests.instances import quick, uniform
from tests.test_cli import refused, run  # noqa: F401  (run is a fixture)

GB = 10**9
COSTS = uniform(2, 2, d2h_ms=0.5, h2d_ms=0.5)


def instance(profile=COSTS, **options) -> Instance:
    chosen = compiler.Options(**({"mem_bytes": GB, "microbatches": 4, "time_limit_s": 0.0} | options))
    return Instance(profile, compiler.settled(profile, chosen))


@pytest.fixture(scope="module")
def schedule() -> ir.Schedule:
    return quick(COSTS, GB, recompute=False).schedule


@pytest.fixture
def here(monkeypatch):
    """Plan in this process instead of others."""
    monkeypatch.setattr(study, "answers", lambda function, questions, jobs: ((q, function(q)) for q in questions))


# -- changes ------------------------------------------------------------------------------------------------------


def test_the_changes_are_what_they_say():
    found = {change.text: change for change in variations(instance(), offloads=True, uneven=True)}
    assert list(found) == [
        "nothing",
        "memory +10%",
        "memory +25%",
        "memory +50%",
        "memory +100%",
        "host links x 2",
        "messages x 0",
        "no offload",
        "6 microbatches",
        "even layers",
    ]
    assert found["nothing"].instance == instance()
    assert [found[f"memory +{n}%"].instance.options.mem_bytes for n in (10, 100)] == [11 * GB // 10, 2 * GB]
    before, after = (one.machine.links[0] for one in (COSTS, found["host links x 2"].instance.profile))
    assert value_of(after.d2h_bytes_per_s) == 2 * value_of(before.d2h_bytes_per_s)
    assert value_of(after.h2d_bytes_per_s) == 2 * value_of(before.h2d_bytes_per_s)
    assert found["messages x 0"].instance.profile.machine.p2p == []
    assert found["no offload"].instance.options.offload is False
    assert found["6 microbatches"].instance.options.microbatches == 6


EVEN = {"offloads": False, "uneven": False}


def test_a_heavy_head_is_asked_about_in_parts_that_sum_up_to_it():
    whole = uniform(4, 2, head_ms=(2, 2.4, 2.8), head_parts=1)
    head = structs.replace(whole.layers[-1], static_bytes=8 * GB, forward_transient_bytes=400)
    heavy = structs.replace(whole, layers=[structs.replace(whole.layers[0], output_bytes=7), head])
    found = {change.text: change for change in variations(instance(heavy), offloads=False, uneven=False)}
    *others, last = found["head in 4 parts"].instance.profile.expanded_layers()
    assert [one.output_bytes for one in (*others, last)] == [7] * 11 + [0]
    assert [one.forward_ns for one in (*others[-3:], last)] == [500_000] * 4
    assert [one.static_bytes for one in (*others[-3:], last)] == [2 * GB] * 4
    assert last.forward_transient_bytes == 100
    for light in (COSTS, uniform(4, 2, head_ms=(0.1, 0.1, 0.1)), uniform(4, 2, head_ms=(2, 2, 2), head_parts=4)):
        texts = {change.text for change in variations(instance(light), offloads=False, uneven=False)}
        assert not any("head" in text for text in texts)


def test_a_part_of_the_head_saves_its_share_of_the_logits_beside_its_input():
    whole = uniform(4, 2, head_ms=(2, 2, 2))
    kept = {"saved_bytes": 7 + 2 * 400, "residue_bytes": 7 + 400, "captured_bytes": 400, "checkpoint_bytes": 7}
    layers = [structs.replace(whole.layers[0], output_bytes=7), structs.replace(whole.layers[-1], **kept)]
    found = {one.text: one for one in variations(instance(structs.replace(whole, layers=layers)), **EVEN)}
    for part in found["head in 4 parts"].instance.profile.expanded_layers()[-4:]:
        assert part.saved_bytes == part.residue_bytes == 7 + 100
        assert part.captured_bytes == 100
        assert part.shared_bytes == part.checkpoint_bytes == 7


def test_a_head_of_less_than_a_block_is_asked_about_in_parts_and_one_in_parts_is_not():
    light = uniform(4, 2, head_ms=(0.3, 0.3, 0.3))  # 0.6 of a block
    assert "head in 4 parts" in {one.text for one in variations(instance(light), **EVEN)}
    heavy = uniform(4, 2, head_ms=(4, 4, 4))
    for names in (("head.0", "head.1"), ("HeadPart", "HeadPart-2")):
        parts = [structs.replace(heavy.layers[-1], name=name) for name in names]
        cut = structs.replace(heavy, layers=[*heavy.layers[:-1], *parts])
        assert not any("head" in one.text for one in variations(instance(cut), **EVEN))


def test_a_head_in_parts_saves_what_it_costs_to_wait_for_it(here):
    heavy = uniform(4, 2, head_ms=(2, 2, 2))
    checked = compiler.compile_schedule(heavy, compiler.Options(mem_bytes=4 * GB, microbatches=16, time_limit_s=2.0))
    explained = study.explain(checked.checked, instance_of(checked.checked, heavy, "plan", 0.5), 1)
    head = next(one for one in explained.what_ifs if one.family == "head")
    assert head.found is not None
    assert head.found > 0.2
    begin = "The head in 4 parts of equal cost, if together they cost no more, would save "
    assert any(line.startswith(begin) for line in sentences(explained))


def test_what_changes_nothing_is_not_asked():
    texts = {change.text for change in variations(instance(), offloads=False, uneven=False)}
    assert not texts & {"no offload", "even layers"}
    bare = structs.replace(COSTS, machine=structs.replace(COSTS.machine, links=[], p2p=[]))
    texts = {change.text for change in variations(instance(bare), offloads=False, uneven=False)}
    assert not texts & {"host links x 2", "messages x 0"}
    alone = instance(uniform(1, 2))
    assert alone.profile.machine.p2p
    assert "messages x 0" not in {change.text for change in variations(alone, offloads=False, uneven=False)}


def test_layers_are_asked_to_be_even_only_where_a_device_has_more_work(schedule):
    assert "even layers" not in {change.text for change in listed(schedule, instance())}
    heavy = uniform(2, 2, head_ms=(5, 5, 5))
    uneven = quick(heavy, 3 * GB).schedule
    assert "even layers" in {change.text for change in listed(uneven, instance(heavy, mem_bytes=3 * GB))}


def test_even_layers_are_not_tied_as_the_first_one_is():
    held = {"count": 1, "static_bytes": 100, "tie": "weight", "tied_bytes": 80}
    ends = [structs.replace(COSTS.layers[0], name=name, **held) for name in ("embedding", "head")]
    tied = structs.replace(COSTS, layers=[ends[0], *COSTS.layers, ends[1]])
    found = [one for one in variations(instance(tied), offloads=False, uneven=True) if one.text == "even layers"]
    [layer] = found[0].instance.profile.layers
    assert (layer.tie, layer.tied_bytes, layer.count * value_of(layer.static_bytes)) == (None, 0, 198)


def test_even_layers_have_the_same_work_and_bytes_in_all():
    heavy = uniform(3, 2, head_ms=(3, 3, 3))
    odd = Layer(
        name="odd",
        forward_ns=7,
        backward_input_ns=8,
        backward_weight_ns=9,
        backward_ns=16,
        recompute_ns=5,
        saved_bytes=100,
        residue_bytes=130,
        captured_bytes=50,
        checkpoint_bytes=100,
        static_bytes=11,
        output_bytes=13,
    )
    profile = structs.replace(heavy, layers=[*heavy.layers, odd])
    found = [one for one in variations(instance(profile), offloads=False, uneven=True) if one.text == "even layers"]
    [layer] = found[0].instance.profile.layers
    assert layer.count == 6
    for name in ("forward_ns", "backward_input_ns", "backward_weight_ns", "saved_bytes", "static_bytes"):
        whole = sum(value_of(getattr(one, name)) for one in profile.expanded_layers())
        assert abs(layer.count * value_of(getattr(layer, name)) - whole) <= layer.count / 2, name
    schedule = quick(found[0].instance.profile, 9 * GB, devices=3).schedule
    assert len({cost.forward_ns for cost in schedule.forecast.stages}) == 1


def test_a_change_can_be_planned_and_its_bound_holds():
    for change in variations(instance(), offloads=True, uneven=True):
        found = plan(change.instance)
        assert found.value_ns is not None, change.text
        assert found.bound_ns <= found.value_ns, change.text
    nothing = plan(instance(mem_bytes=1))
    assert (nothing.outcome, nothing.value_ns) == ("infeasible", None)
    assert "the smallest --mem that would do is" in nothing.reason


# -- from answers to savings --------------------------------------------------------------------------------------


def answered(schedule: ir.Schedule, **found: Planned) -> study.Explanation:
    """The explanation when the change of each family gets that answer; without one it is as good as the schedule."""
    asked = listed(schedule, instance(schedule_costs(schedule)))
    value = schedule.forecast.makespan_ns
    default = Planned("feasible", value, value // 2)
    return summed_up(schedule, asked, [found.get(change.text.replace(" ", "_"), default) for change in asked])


def schedule_costs(schedule: ir.Schedule):
    return uniform(2, 2, d2h_ms=0.5, h2d_ms=0.5)


def saved(explanation: study.Explanation, text: str) -> study.WhatIf:
    return next(one for one in explanation.what_ifs if one.text == text)


def better(schedule: ir.Schedule, percent: int, bound: int = 50) -> Planned:
    value = schedule.forecast.makespan_ns
    return Planned("feasible", value * (100 - percent) // 100, value * (100 - bound) // 100)


def test_savings_are_shares_of_the_time_per_microbatch(schedule):
    found = answered(
        schedule,
        **{
            "memory_+25%": better(schedule, 10, 20),
            "6_microbatches": better(schedule, -35, -20),
            "no_offload": better(schedule, -40, -30),
        },
    )
    assert saved(found, "memory +25%").found == pytest.approx(0.1)
    assert saved(found, "memory +25%").at_most == pytest.approx(0.2)
    assert saved(found, "6 microbatches").found == pytest.approx(1 - 1.35 / 1.5)
    assert saved(found, "6 microbatches").at_most == pytest.approx(1 - 1.2 / 1.5)
    assert saved(found, "no offload").found == pytest.approx(-0.4)
    assert saved(found, "no offload").at_most == pytest.approx(-0.3)
    text = " ".join(sentences(found))
    assert "What helps most, as far as it was found, is more memory: 10.0% less time per microbatch; " in text
    assert (
        "the bounds do not exclude more for host links twice as fast, messages in no time and 6 microbatches." in text
    )
    assert "(+25%) would save at most 20.0% (bound); 10.0% was found in searches of 0 s: not decided" in text
    assert "6 instead of 4 microbatches" not in text
    assert "6 microbatches instead of 4 would save, per microbatch, at most 20.0% (bound); 10.0% was found" in text
    assert "Without offloading a step takes at least 30.0% longer (bound); what was found in " in text


def test_what_is_valid_with_less_memory_or_unchanged_is_never_lost_with_more(schedule):
    worse = better(schedule, -30)
    found = answered(schedule, **{"memory_+10%": better(schedule, 8), "memory_+50%": worse, "host_links_x_2": worse})
    assert [saved(found, f"memory +{n}%").found for n in (10, 25, 50, 100)] == [pytest.approx(0.08)] * 4
    assert saved(found, "host links x 2").found == 0


def test_a_bound_of_a_relaxed_instance_holds_for_the_instance_and_for_restricted_ones(schedule):
    value = schedule.forecast.makespan_ns
    found = answered(
        schedule,
        **{"memory_+50%": Planned("optimal", value, value), "no_offload": Planned("feasible", value * 2, value // 2)},
    )
    assert found.bound_ns == value
    assert [saved(found, f"memory +{n}%").at_most for n in (10, 25, 50, 100)] == [0, 0, 0, pytest.approx(0.5, 0.01)]
    assert saved(found, "no offload").at_most == 0


def test_where_changes_choose_the_slices_a_bound_holds_for_its_own_instance_alone(schedule):
    value = schedule.forecast.makespan_ns
    asked = [
        replace(each, instance=replace(each.instance, options=replace(each.instance.options, slices="auto")))
        for each in listed(schedule, instance(schedule_costs(schedule)))
    ]
    high = {"memory +50%", "messages x 0"}
    found = [Planned("feasible", value, value if each.text in high else value // 2) for each in asked]
    explanation = summed_up(schedule, asked, found)
    assert explanation.bound_ns == max(schedule.forecast.lower_bound_ns, value // 2)
    assert [saved(explanation, f"memory +{n}%").at_most for n in (10, 25, 50)] == [pytest.approx(0.5, 0.01)] * 2 + [0]
    assert saved(explanation, "no offload").at_most == pytest.approx(0.5, 0.01)


def test_savings_are_measured_against_the_best_known_of_the_unchanged_instance(schedule):
    found = answered(schedule, nothing=better(schedule, 10), **{"memory_+100%": better(schedule, 19)})
    assert found.best_ns == schedule.forecast.makespan_ns * 90 // 100
    assert saved(found, "memory +100%").found == pytest.approx(0.1)
    assert saved(found, "messages x 0").found == 0
    assert "10.0% was found in searches of 0 s" in next(iter(sentences(found)))
    also = answered(schedule, no_offload=better(schedule, 5))
    assert also.best_ns == schedule.forecast.makespan_ns * 95 // 100
    assert any("Without offloading a step takes no longer" in sentence for sentence in sentences(also))


def test_what_a_bound_excludes_is_nothing_whatever_was_found(schedule):
    value = schedule.forecast.makespan_ns
    met = Planned("optimal", value, value)
    asked = listed(schedule, instance())
    fixed = ir.msgspec.structs.replace(
        schedule, forecast=structs.replace(schedule.forecast, lower_bound_ns=value, outcome="optimal")
    )
    longer = Planned("feasible", value * 3 // 2, value * 3 // 2)
    found = summed_up(fixed, asked, [longer if one.effect == "different" else met for one in asked])
    text = " ".join(sentences(found))
    assert "that is optimal: nothing can be saved without changing the instance." in text
    assert "Nothing that was tried can save anything" in text
    assert "Host links twice as fast would save nothing (bound)." in text
    assert "1.00 GB more per device (+100%) would save nothing (bound)." in text


def test_a_bound_that_a_change_does_not_move_is_said_to_be_that_of_the_unchanged_instance(schedule):
    found = replace(answered(schedule), best_ns=100, bound_ns=90)
    links = [replace(saved(found, "host links x 2"), at_most=share) for share in (0.1, 0.2)]
    same, moved = (" ".join(sentences(replace(found, what_ifs=(one,)))) for one in links)
    assert "Host links twice as fast would save at most 10.0% (bound, as unchanged); nothing was found" in same
    assert "Host links twice as fast would save at most 20.0% (bound); nothing was found" in moved


def test_what_plan_and_bound_leave_open_is_not_decided_and_what_was_cut_short_says_so(schedule):
    value = schedule.forecast.makespan_ns
    near = Planned("feasible", value * 90 // 100, value * 898 // 1000)
    found = answered(
        schedule, **{"memory_+100%": near, "host_links_x_2": replace(better(schedule, 10), finished=False)}
    )
    assert saved(found, "memory +100%").decided
    assert not saved(found, "host links x 2").decided
    text = " ".join(sentences(found))
    assert "1.00 GB more per device (+100%) would save 10.0%, at most 10.2% (bound)." in text
    assert "10.0% was found in searches of 0 s: not decided, and the search was still finding better ones." in text


def test_a_plan_for_more_memory_that_needs_less_is_one_for_less(schedule):
    lean = replace(better(schedule, 9), peak_bytes=5 * GB // 4)
    found = answered(schedule, **{"memory_+100%": lean})
    assert [saved(found, f"memory +{n}%").found for n in (10, 25, 50, 100)] == [0, *[pytest.approx(0.09)] * 3]


def test_a_plan_for_more_memory_that_needs_no_more_is_one_of_the_unchanged_instance(schedule):
    """Otherwise memory would be said to save what a longer search does."""
    lean = replace(better(schedule, 9), peak_bytes=GB)
    found = answered(schedule, **{"memory_+50%": lean})
    assert found.best_ns == lean.value_ns
    assert [saved(found, f"memory +{n}%").found for n in (10, 25, 50, 100)] == [0] * 4


def test_every_change_starts_from_the_best_plan_of_the_unchanged_instance(here, schedule, monkeypatch):
    started = []
    monkeypatch.setattr(study, "plan", lambda one: started.append(one.options.seeds) or plan(one))
    found = study.explain(check(schedule, COSTS), instance(), 1)
    assert started[0] == (check(schedule),)
    assert {seed.schedule.forecast.makespan_ns for [seed] in started[1:]} == {found.best_ns}
    relaxed = [one for one in found.what_ifs if one.effect == "relaxed"]
    assert all(one.found is not None and one.found >= 0 for one in relaxed)


def test_a_plan_is_finished_when_the_second_half_of_its_time_gave_little():
    halves = cache.Halfway(2.0)
    for seconds, value in ((0.5, 2000), (0.9, 1000), (1.1, 500)):
        halves.see(compiler.Progress("phase", value, 1, "", seconds))
    assert planned._is_near(999, halves.value_ns)
    assert not planned._is_near(990, halves.value_ns)
    assert not planned._is_near(1, cache.Halfway(2.0).value_ns)


def test_changes_under_which_nothing_fits_or_was_found_say_so(schedule):
    value = schedule.forecast.makespan_ns
    found = answered(
        schedule,
        no_offload=Planned("infeasible", None, value, reason="no schedule fits"),
        **{"6_microbatches": Planned("not found", None, value)},
    )
    text = " ".join(sentences(found))
    assert "Without offloading nothing fits this cap." in text
    assert "no schedule was found in searches of 0 s: not decided" in text
    assert "Nothing that was tried saved anything in searches of 0 s, though the bounds leave room." in text


def test_idle_shares_add_up_to_the_bubble(schedule):
    idle = study.idle(schedule)
    assert [one.device for one in idle] == [0, 1]
    assert sum(one.fraction for one in idle) / 2 == pytest.approx(schedule.forecast.bubble_fraction)
    for one in idle:
        assert sum(share for *_, share in one.causes) == pytest.approx(one.fraction)
    found = answered(schedule)
    worst = max(idle, key=lambda one: one.fraction)
    assert any(
        sentence.startswith(f"Device {worst.device} idles most, {worst.fraction:.1%}") for sentence in sentences(found)
    )


def test_every_cause_of_idle_time_has_words(schedule):
    from optpipe_compiler.forecast import Cause

    for cause in Cause:
        one = study.Idle(0, 0.5, ((cause.value, "device 1", 0.5),))
        found = replace(answered(schedule), idle=(one,))
        assert any("Device 0 idles most, 50.0% of the step: 50.0% " in sentence for sentence in sentences(found))
    busy = replace(answered(schedule), idle=(study.Idle(0, 0.0, ()),))
    assert "No device ever idles." in list(sentences(busy))


# -- the command --------------------------------------------------------------------------------------------------


def written(schedule: ir.Schedule) -> None:
    Path("profile.json").write_text(canonical(COSTS))
    Path("schedule.json").write_text(ir.to_text(schedule))


def test_explain_plans_every_change_and_bounds_it(run, here, schedule):  # noqa: F811
    written(schedule)
    report = json.loads(run("explain", "--time-limit", "0", "--json").out)
    assert len(report["what_ifs"]) == 8
    assert report["bound_ns"] <= report["best_ns"] <= report["value_ns"] == schedule.forecast.makespan_ns
    for one in report["what_ifs"]:
        assert one["found"] <= one["at_most"] + 1e-9, one["text"]
        assert one["bound_ns"] <= one["value_ns"], one["text"]
    memory = [one["found"] for one in report["what_ifs"] if one["family"] == "memory"]
    assert memory == sorted(memory)


def test_explain_plans_in_processes_and_prints_sentences_and_a_table(run):  # noqa: F811
    Path("profile.json").write_text(canonical(uniform(2, 1)))
    Path("schedule.json").write_text(ir.to_text(quick(uniform(2, 1), GB, microbatches=2).schedule))
    outcome = run("explain", "--time-limit", "0", "-j", "1")
    assert outcome.code == 0
    assert outcome.out.startswith("A step takes ")
    assert "The devices idle " in outcome.out
    assert re.search(
        r"^memory \+100% +[\d.]+% +[\d.]+% +[\d.]+ ms( +not decided(,\s+unfinished)?)?$", outcome.out, re.MULTILINE
    )
    assert "planned: memory +100%" in outcome.err.splitlines()


@pytest.mark.parametrize("planned", [0, 1, 3])
def test_an_interruption_returns_what_is_planned_by_then(run, here, schedule, monkeypatch, planned):  # noqa: F811
    written(schedule)
    answer, count = study.answers, 0

    def interrupted(function, questions, jobs):
        nonlocal count
        for found in answer(function, questions, jobs):
            if count == planned:
                raise KeyboardInterrupt
            count += 1
            yield found

    monkeypatch.setattr(study, "answers", interrupted)
    outcome = run("explain", "schedule.json", "--time-limit", "0.5", "--json")
    if not planned:
        assert outcome.code == 130
        return
    assert outcome.code == 0
    report = json.loads(outcome.out)
    assert len(report["what_ifs"]) == planned - 1
    assert len(report["what_ifs"]) + report["left"] == len(study.listed(schedule, instance())) - 1
    count = 0
    shown = run("explain", "schedule.json", "--time-limit", "0.5").out
    assert "A step takes" in shown and f"Interrupted: {report['left']} changes not planned." in shown
    assert "Nothing that was tried" not in shown or planned > 1


def test_the_options_of_the_schedule_are_kept(schedule):
    checked = quick(COSTS, 2 * GB, objective="span", placement="v", split=False, seed=3).checked
    spanning, asked = checked.schedule, instance_of(checked, COSTS, "s", 1.5)
    options = asked.options
    assert (options.objective, options.placement, options.split, options.offload) == ("span", "v", False, True)
    assert (options.seed, options.time_limit_s, options.method) == (3, 1.5, None)
    same = [change for change in listed(spanning, asked) if change.effect == "same"]
    found = summed_up(spanning, same, [Planned("feasible", spanning.forecast.span_ns, 1)])
    assert (found.objective, found.value_ns) == ("span", spanning.forecast.span_ns)


def test_a_published_schedule_is_explained_against_a_search(schedule):
    fixed = quick(COSTS, 4 * GB, method="gpipe").checked
    assert instance_of(fixed, COSTS, "s", 1).options.method is None


def test_a_schedule_that_kept_a_placement_is_explained_on_that_placement():
    heavy = uniform(2, 4, head_ms=(4, 4, 4))
    kept = quick(heavy, 8 * GB, keep=quick(heavy, 8 * GB, method="1f1b").checked).checked
    seen = []

    def plans(function, questions, jobs):
        for question in questions:
            found = function(question)
            seen.append([(one.device, one.layers) for one in found.schedule.schedule.stages])
            yield question, found

    explained = study.explain(kept, instance_of(kept, heavy, "s", 0.2), 1, pool=plans)
    assert len(seen) > 5
    assert all(stages == [(one.device, one.layers) for one in kept.schedule.stages] for stages in seen)
    assert {one.family for one in explained.what_ifs} == {"memory", "link", "messages", "microbatches"}


def test_explain_refuses_another_profile_and_a_schedule_that_breaks_its_promise(run, schedule):  # noqa: F811
    written(schedule)
    Path("profile.json").write_text(canonical(uniform(2, 2, forward_ms=7)))
    sentence = refused(run("explain"), 1)
    assert sentence.startswith("schedule.json: not explained, verify rejects it with profile.json: ")


def test_explain_refuses_bad_input_with_one_sentence(run, schedule):  # noqa: F811
    assert refused(run("explain"), 2) == "schedule.json: cannot be read: No such file or directory"
    written(schedule)
    assert refused(run("explain", "--profile", "no.json"), 2) == "no.json: cannot be read: No such file or directory"
    assert refused(run("explain", "--time-limit", "-1"), 2) == "--time-limit is -1.0, expected seconds, at least 0"
    options = schedule.provenance.options | {"placement": "w"}
    other = structs.replace(schedule, provenance=structs.replace(schedule.provenance, options=options))
    Path("schedule.json").write_text(ir.to_text(other))
    assert refused(run("explain"), 2).startswith("schedule.json: $.provenance.options are none of `compile`: ")
