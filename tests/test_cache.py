"""Plans that are kept: equal questions have equal answers at once, near ones start there, broken ones are removed."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from optpipe_compiler import cache, compiler
from optpipe_compiler.compiler import Options
from optpipe_compiler.documents import ir
from optpipe_compiler.study.planned import Instance, plan
from tests.instances import uniform
from tests.test_cli import FAST, refused, run  # noqa: F401  (run is a fixture)

GB = 10**9
COSTS = uniform(2, 4, d2h_ms=0.5, h2d_ms=0.5)
SOON = Options(mem_bytes=GB, microbatches=4, time_limit_s=0.3, search=False, workers=1)


@pytest.fixture
def kept(tmp_path, monkeypatch) -> cache.Cache:
    """An empty folder for plans, also for commands."""
    monkeypatch.setenv(cache.FOLDER, str(tmp_path / "plans"))
    found = cache.users()
    assert found is not None
    return found


@pytest.fixture
def searches(monkeypatch) -> list[Options]:
    """The options of every search that was needed."""
    seen: list[Options] = []
    real = compiler.compile_schedule

    def compile_schedule(profile, options, *others):
        seen.append(options)
        return real(profile, options, *others)

    monkeypatch.setattr(compiler, "compile_schedule", compile_schedule)
    return seen


def planned(options: Options, kept: cache.Cache, profile=COSTS) -> compiler.Result:
    return cache.compile_schedule(profile, options, cache=kept)


def value(result: compiler.Result) -> int:
    return result.schedule.forecast.makespan_ns


def test_the_same_question_is_answered_at_once_with_the_same_bytes(kept, searches):
    first = planned(SOON, kept)
    again = planned(SOON, kept)
    assert (len(searches), first.is_cached, again.is_cached) == (1, False, True)
    assert again.checked.text == ir.to_text(again.schedule) == first.checked.text
    assert (again.placement, again.options) == (first.placement, first.options)


def without_digest(line: str, text: str) -> tuple[str, str]:
    """As earlier versions have written a plan."""
    about = json.loads(line)
    del about["text_digest"]
    return json.dumps(about), text


def spaced(line: str, text: str) -> tuple[str, str]:
    """As somebody may have saved a plan."""
    return line, text.replace('": ', '":  ')


@pytest.mark.parametrize("changed", [without_digest, spaced])
def test_an_answer_has_the_same_bytes_however_its_plan_was_written(kept, searches, changed):
    first = planned(SOON, kept)
    (entry,) = kept.entries()
    line, _, text = entry.path.read_text().partition("\n")
    assert changed(line, text) != (line, text)
    entry.path.write_text("\n".join(changed(line, text)))
    again = planned(SOON, kept)
    assert (len(searches), again.is_cached) == (1, True)
    assert again.checked.text == first.checked.text


@pytest.mark.parametrize(
    "other",
    [{"mem_bytes": 2 * GB}, {"microbatches": 5}, {"offload": False}, {"seed": 1}, {"time_limit_s": 0.2}],
    ids=str,
)
def test_another_question_is_planned(kept, searches, other):
    planned(SOON, kept)
    assert not planned(replace(SOON, **other), kept).is_cached
    assert len(searches) == 2


def test_another_planner_plans_anew(kept, searches, monkeypatch):
    planned(SOON, kept)
    monkeypatch.setattr(cache, "planner", lambda: "another")
    assert not planned(SOON, kept).is_cached


def test_an_answer_that_was_kept_tells_again_what_the_profile_leaves_out(kept):
    links = [structs.replace(link, devices=[0]) for link in COSTS.machine.links]
    partly = structs.replace(COSTS, machine=structs.replace(COSTS.machine, links=links))
    told = "the profile's $.machine.links has no host link of device 1: nothing is offloaded there"
    first, again = (planned(SOON, kept, partly) for _ in range(2))
    assert (again.is_cached, again.notes) == (True, (told,))
    assert first.notes[-1] == told


def test_an_answer_that_was_kept_says_again_which_start_was_not_taken_over(kept):
    start = compiler.compile_schedule(uniform(2, 3, d2h_ms=0.5, h2d_ms=0.5), SOON).checked
    first, again = (planned(replace(SOON, seeds=(start,)), kept) for _ in range(2))
    assert again.is_cached
    assert again.notes == first.notes
    assert [note for note in again.notes if note.startswith(f"start 1 ({start.schedule.digest[:15]})")]


def test_an_answer_that_was_kept_says_again_which_forecast_was_left(kept, monkeypatch):
    best, slow = (compiler.compile_schedule(COSTS, replace(SOON, method=name)) for name in (None, "1f1b-recompute"))
    found = replace(slow, considered=(best.checked, slow.checked))
    monkeypatch.setattr(compiler, "compile_schedule", lambda *_: found)
    first, again = (planned(SOON, kept) for _ in range(2))
    assert (first.is_cached, again.is_cached) == (False, True)
    assert again.left_ns == first.left_ns == value(best) < value(again)


def test_near_questions_start_from_the_nearest_plans(kept, searches):
    near, far = uniform(2, 4, d2h_ms=0.52, h2d_ms=0.5), uniform(2, 4, d2h_ms=0.5, h2d_ms=0.5, forward_ms=9)
    first = planned(SOON, kept)
    planned(SOON, kept, near)
    planned(replace(SOON, microbatches=6), kept)
    planned(SOON, kept, far)
    planned(replace(SOON, offload=False), kept)
    digests = [[seed.schedule.digest for seed in one.kept] for one in searches]
    assert digests[0] == digests[3] == digests[4] == []
    assert digests[1] == [first.schedule.digest]
    assert digests[2][0] == first.schedule.digest  # its costs are equal
    assert len(digests[2]) == 2


def test_nothing_is_said_of_a_kept_plan_that_is_no_start(kept, searches):
    sliced = replace(SOON, slices=2)
    for tokens in (256, 512):
        plan = planned(sliced, kept, uniform(2, 4, sliceable=True, sequence_length=tokens))
        assert not plan.notes
    assert [len(one.kept) for one in searches] == [0, 1]


def test_more_memory_is_never_worse_than_less_in_whatever_order_it_is_asked(kept):
    roomy = planned(replace(SOON, mem_bytes=4 * GB, method=None, time_limit_s=0.0), kept)
    tight = planned(replace(SOON, time_limit_s=1.0, search=True), kept)
    again = planned(replace(SOON, mem_bytes=4 * GB, time_limit_s=0.0), kept)
    assert value(again) <= min(value(roomy), value(tight))
    assert value(planned(replace(SOON, mem_bytes=2 * GB, time_limit_s=0.0), kept)) <= value(tight)


def test_a_better_plan_for_less_memory_takes_the_place_of_an_answer(kept, searches):
    tight = planned(SOON, kept)
    roomy = planned(replace(SOON, mem_bytes=4 * GB), kept)
    entry = next(one for one in kept.entries() if one.about.mem_bytes == 4 * GB)
    about = structs.replace(entry.about, value_ns=value(tight) + 1, starts=[])
    kept.write(entry.path.stem, about, roomy.checked)
    again = planned(replace(SOON, mem_bytes=4 * GB), kept)
    assert not again.is_cached
    assert searches[-1].kept[0].schedule == tight.schedule
    assert value(again) <= value(tight)


def test_an_answer_with_a_longer_forecast_that_was_chosen_for_its_noise_stays_an_answer(kept, searches):
    tight = planned(replace(SOON, noise=0.2), kept)
    asked = replace(SOON, noise=0.2, mem_bytes=4 * GB)
    roomy = planned(asked, kept)
    assert tight.schedule.digest in [seed.schedule.digest for seed in searches[-1].kept]
    entry = next(one for one in kept.entries() if one.about.mem_bytes == 4 * GB)
    kept.write(entry.path.stem, structs.replace(entry.about, value_ns=value(tight) + 1), roomy.checked)
    again = planned(asked, kept)
    assert again.is_cached
    assert again.quantiles == roomy.quantiles is not None


def test_a_reproducible_answer_does_not_depend_on_what_is_kept(kept, searches, tmp_path):
    options = replace(SOON, reproducible=True)
    alone = planned(options, cache.Cache(tmp_path / "empty"))
    planned(replace(SOON, mem_bytes=GB + 1, time_limit_s=1.0), kept)
    among = planned(options, kept)
    assert searches[-1].kept == ()
    assert ir.to_text(among.schedule) == ir.to_text(alone.schedule)
    assert planned(options, kept).is_cached


def test_what_does_not_hold_is_removed_and_planned_again(kept, searches):
    planned(SOON, kept)
    (entry,) = kept.entries()
    text = entry.path.read_text()
    for broken in (text.replace('"op": "forward"', '"op": "backward"', 1), text[: len(text) // 2], ""):
        entry.path.write_text(broken)
        assert not planned(SOON, kept).is_cached
        assert planned(SOON, kept).is_cached


UNREADABLE = {"bytes": b'{"version": "\xff"}', "deep": b'{"more": ' + b"[" * 10**5, "cut": b"{", "nul": b"\0"}


@pytest.mark.parametrize("line", UNREADABLE.values(), ids=UNREADABLE)
def test_a_file_whose_first_line_cannot_be_read_is_no_plan(kept, line):
    planned(SOON, kept)
    (entry,) = kept.entries()
    entry.path.write_bytes(line + b"\n")
    entry.path.with_name(f"0a1b-2c3d{cache.SUFFIX}").write_bytes(line + b"\n")
    assert kept.entries() == []
    assert not planned(SOON, kept).is_cached
    assert planned(SOON, kept).is_cached
    assert kept.clear() == 2


def test_a_plan_whose_forecast_was_changed_is_not_an_answer(kept):
    fixed = replace(SOON, reproducible=True)  # by the clock, another search may find another plan
    first = planned(fixed, kept)
    (entry,) = kept.entries()
    entry.path.write_text(entry.path.read_text().replace(f'"makespan_ns": {value(first)}', '"makespan_ns": 1', 1))
    again = planned(fixed, kept)
    assert not again.is_cached
    assert value(again) == value(first)


def test_the_folder_stays_within_its_size_and_loses_what_was_not_used_for_longest(kept):
    fixed = replace(SOON, reproducible=True)  # by the clock, plans of other sizes may be found
    size = len(ir.to_text(planned(fixed, kept).schedule))
    small = cache.Cache(kept.folder, most_bytes=int(2.9 * size))
    for seed in (1, 2):
        planned(replace(fixed, seed=seed, time_limit_s=0.0), small)
        assert planned(fixed, small).is_cached  # used, so it stays
    assert len(small.entries()) == 2
    assert sum(entry.size_bytes for entry in small.entries()) <= small.most_bytes


def test_many_at_a_time_read_write_and_clear(kept):
    result = planned(SOON, kept)
    (entry,) = kept.entries()

    def work(number: int) -> None:
        if number % 7 == 0:
            kept.clear()
        kept.write(entry.path.stem, entry.about, result.checked)
        for one in kept.entries():
            found = kept.read(one, COSTS)
            assert found is None or found.schedule == result.schedule

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(40)))
    assert [path.suffix for path in kept.folder.iterdir()] == [cache.SUFFIX]


def test_a_folder_that_cannot_be_written_keeps_nothing_and_says_nothing(tmp_path, searches):
    (tmp_path / "file").write_text("")
    nowhere = cache.Cache(tmp_path / "file" / "plans")
    assert not planned(SOON, nowhere).is_cached
    assert not planned(SOON, nowhere).is_cached


def test_a_folder_that_cannot_be_looked_into_keeps_nothing_and_says_nothing(tmp_path, searches):
    nowhere = cache.Cache(tmp_path / ("long" * 100) / "plans")  # as well as one below a folder of others
    assert not planned(SOON, nowhere).is_cached
    assert nowhere.clear() == 0


def test_studies_ask_the_cache_and_hear_whether_a_plan_is_finished(kept, searches):
    instance = Instance(COSTS, compiler.settled(COSTS, SOON), cached=True)
    first = plan(instance)
    count = len(searches)
    again = plan(instance)
    assert len(searches) == count
    assert (again.value_ns, again.finished, again.outcome) == (first.value_ns, first.finished, first.outcome)


def test_a_kept_plan_that_was_still_getting_better_is_searched_on(kept, searches):
    far = replace(SOON, mem_bytes=2 * GB // 5)  # from its bound
    instance = Instance(COSTS, compiler.settled(COSTS, far), cached=True)
    assert planned(instance.options, kept).schedule.forecast.outcome == "feasible"
    (entry,) = kept.entries()
    about = structs.replace(entry.about, halfway_ns=2 * entry.about.value_ns, wall_s=SOON.time_limit_s)
    text = entry.path.read_bytes().partition(b"\n")[2]
    entry.path.write_bytes(msgspec.json.encode(about) + b"\n" + text)
    plan(instance)
    assert len(searches) > 1


def test_commands_use_list_and_clear_the_cache(run, kept):  # noqa: F811
    first = json.loads(run("compile", "--mem", "2GB", "--json", *FAST).out)
    text = Path("schedule.json").read_text()
    again = json.loads(run("compile", "--mem", "2GB", "--json", *FAST).out)
    assert (first["cached"], again["cached"]) == (False, True)
    assert Path("schedule.json").read_text() == text
    assert "as planned before" in run("compile", "--mem", "2GB", *FAST).out
    assert not json.loads(run("compile", "--mem", "2GB", "--json", "--no-cache", *FAST).out)["cached"]
    listed = json.loads(run("cache", "list", "--json").out)
    assert [one["value_ns"] for one in listed["plans"]] == [first["makespan_ns"]]
    assert "1 plan, " in run("cache", "list").out
    assert json.loads(run("cache", "clear", "--json").out)["removed"] == 1
    assert "0 plans" in run("cache", "list").out


def test_files_of_others_in_the_folder_are_left_alone(run, kept):  # noqa: F811
    kept.folder.mkdir()
    others = [kept.folder / name for name in (f"notes{cache.SUFFIX}", f"my-own{cache.SUFFIX}", "0a1b-2c3d.txt")]
    for path in others:
        path.write_text("mine")
        os.utime(path, (0, 0))
    small = cache.Cache(kept.folder, most_bytes=1)
    planned(SOON, small)  # which makes room
    assert json.loads(run("cache", "list", "--json").out)["bytes"] > 1
    assert json.loads(run("cache", "clear", "--json").out)["removed"] == 1
    assert sorted(kept.folder.iterdir()) == sorted(others)


@pytest.mark.parametrize("command", ["list", "clear"])
def test_a_folder_that_cannot_be_looked_into_is_said_to_be_such(run, kept, monkeypatch, tmp_path, command):  # noqa: F811
    assert run("cache", command).code == 0  # of a folder that is not there yet
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.FOLDER, str(tmp_path / "file"))
    sentence = refused(run("cache", command), 2)
    assert sentence.startswith(f"{tmp_path / 'file'}: cannot be read: Not a directory; ")


def test_an_empty_variable_keeps_nothing(run, monkeypatch):  # noqa: F811
    monkeypatch.setenv(cache.FOLDER, "")
    assert cache.users() is None
    outcome = run("cache", "list")
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
