"""Noise: what varies is measured again, the line through messages stays plausible, and what is left is named."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle

import pytest
from click.testing import CliRunner
from msgspec import structs

torch = pytest.importorskip("torch")

from optpipe_compiler.cli import cli  # noqa: E402
from optpipe_compiler.costs.noise import Noisy, noisy  # noqa: E402
from optpipe_compiler.documents.profile import P2P, Layer, Link, Machine, Profile, Quantity, value_of  # noqa: E402
from optpipe_torch.profiler import child as measure_child  # noqa: E402
from optpipe_torch.profiler import copies as measure_copies  # noqa: E402
from optpipe_torch.profiler import spread as measure_spread  # noqa: E402
from optpipe_torch.profiler.allocator import watch  # noqa: E402
from optpipe_torch.profiler.layers import bookkeeping_bench  # noqa: E402
from optpipe_torch.profiler.records import TIMED, Messages, assemble  # noqa: E402
from optpipe_torch.profiler.spread import ENOUGH, MOST, relative_spread, steadiest  # noqa: E402
from optpipe_torch.profiler.timer import Timer  # noqa: E402
from tests.test_measure import TINY, findings  # noqa: E402

QUIET, NOISY, LOUD = [100, 101, 102, 103], [100, 200, 300, 400], [100, 300, 800, 900]


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when told to."""
    now = [0.0]
    monkeypatch.setattr(measure_spread.time, "monotonic", lambda: now[0])
    return now


def turns(*batches, clock=None, seconds=0.0):
    """What `steadiest` is given: the batches one after another, each of which takes so many seconds."""
    taken = []

    def take(turn):
        assert turn == len(taken)
        taken.append(turn)
        if clock is not None:
            clock[0] += seconds
        return batches[min(turn, len(batches) - 1)]

    return take, taken


def test_the_spread_is_the_interquartile_range_over_the_median():
    assert relative_spread([10, 20, 30, 40, 50]) == pytest.approx(20 / 30)
    assert [relative_spread(samples) for samples in ([], [5], [0, 0])] == [0, 0, 0]


def test_what_is_steady_is_measured_once():
    take, taken = turns({"a": QUIET, "b": QUIET})
    assert steadiest(take, bool, ENOUGH) == {"a": QUIET, "b": QUIET}
    assert taken == [0]


def test_of_what_is_noisy_the_steadiest_samples_of_each_are_kept():
    take, taken = turns({"a": QUIET, "b": LOUD}, {"a": LOUD, "b": NOISY}, {"a": NOISY, "b": LOUD})
    assert steadiest(take, bool, ENOUGH) == {"a": QUIET, "b": NOISY}
    assert len(taken) == MOST


def test_it_is_measured_again_only_until_it_is_steady():
    take, taken = turns({"a": LOUD}, {"a": QUIET})
    assert steadiest(take, bool, ENOUGH) == {"a": QUIET}
    assert taken == [0, 1]


def test_who_asks_for_few_samples_is_not_kept_waiting_for_more():
    take, taken = turns({"a": LOUD}, {"a": QUIET})
    assert steadiest(take, bool, ENOUGH - 1) == {"a": LOUD}
    assert taken == [0]


def test_a_process_takes_the_turns_of_those_beside_it():
    take, taken = turns({"a": QUIET})
    said = []
    steadiest(take, lambda mine: said.append(mine) or True, ENOUGH)
    assert (len(taken), said) == (MOST, [False] * (MOST - 1))


def test_there_are_no_more_turns_when_the_time_is_up(clock):
    take, taken = turns({"a": LOUD}, clock=clock, seconds=measure_spread.BUDGET_S / 2 + 1)
    steadiest(take, bool, ENOUGH)
    assert taken == [0, 1]
    take, taken = turns({"a": LOUD}, clock=clock, seconds=measure_spread.BUDGET_S)
    steadiest(take, bool, ENOUGH)
    assert taken == [0]


# -- where it is measured


class Scripted(Timer):
    """Its clock says what it is told to, op by op."""

    def __init__(self, ns):
        super().__init__()
        self._ns = cycle(ns)

    @contextmanager
    def timed(self, into):
        yield
        into.append(next(self._ns))

    @contextmanager
    def busy(self, into):
        yield
        into.append(7)


@pytest.fixture
def one_process(monkeypatch):
    """Decide without others."""
    monkeypatch.setattr(measure_child, "_any_process", bool)
    monkeypatch.setattr(measure_child, "_either", lambda peer, mine: mine)


def test_layers_and_overhead_are_timed_again_where_they_are_noisy(one_process):
    told = []
    bench = bookkeeping_bench(torch.device("cpu"))
    measure_child._time_kind(Scripted(LOUD), [bench], 16, lambda turn, part: told.append((turn, part)))
    assert {turn for turn, _ in told} == set(range(MOST))
    steady = measure_child._time_kind(Scripted([7]), [bench], 16, lambda turn, part: told.append((-1, part)))
    assert steady == {"forward": [7] * 32} | {op: [7] * 16 for op in TIMED if op != "forward"}
    assert all(len(samples) >= 20 for samples in measure_child._overhead(Scripted(NOISY), 4).values())


def test_progress_never_goes_back(one_process):
    said = []
    tell = measure_child._telling(lambda what, part: said.append((what, part)), "times of the x", 0.5, 0.25)
    for turn, part in ((0, 0.5), (0, 1.0), (1, 0.5), (2, 1.0)):
        tell(turn, part)
    assert said == [
        ("times of the x", 0.625),
        ("times of the x", 0.75),
        ("times of the x, again", 0.75),
        ("times of the x, again", 0.75),
    ]


def test_messages_are_timed_again_where_they_are_noisy(one_process, monkeypatch):
    trips = []
    monkeypatch.setattr(measure_child, "_round_trip", lambda timer, rank, peer, data: trips.append(data.numel()))
    found = measure_child.time_messages(Scripted([20, 400]), 0, 1, 5000, 20)
    assert (found.small, found.large, len(trips)) == ([10] * 20, [200] * 20, 3 * 25)
    measure_child.time_messages(Scripted([20, 400, 20, 4000, 20, 40000]), 0, 1, 5000, 20)
    assert len(trips) == 3 * 25 * (1 + MOST)


def test_copies_end_in_time_when_they_take_long(clock, monkeypatch):
    class Slow:
        def run(self, lanes, busy=None):
            clock[0] += measure_copies.MOST_S
            return [1] * 4, [2] * 4

    monkeypatch.setattr(measure_copies.time, "monotonic", lambda: clock[0])
    assert measure_copies._repeat(Slow(), [None], 1000) == {"d2h": [1] * 8, "h2d": [2] * 8}


def test_copies_find_nothing_in_the_caches(monkeypatch):
    """Once, a copy took twice as long in a step as the profile said: what it reads was written long before."""
    ran = []
    monkeypatch.setattr(Timer, "sweep", lambda timer: ran.append("sweep"))
    transfer = measure_copies._Copier._transfer
    monkeypatch.setattr(
        measure_copies._Copier, "_transfer", lambda copier, op: ran.append(op.name) or transfer(copier, op)
    )
    with measure_copies._copier(Timer(), bookkeeping_bench(torch.device("cpu"))) as copier:
        found = measure_copies._alone(copier, measure_copies.MICROBATCHES)
    count = measure_copies.MICROBATCHES
    assert ran == 2 * ["sweep", *["offload"] * count, "sweep", *["reload"] * count]  # the first ones warm up
    assert [len(found[lane]) for lane in ("d2h", "h2d")] == [count, count]


# -- the line through messages, and copies beyond their latency


def messages(small, large, nbytes=101_000):
    found = replace(findings(), messages=Messages(1000, nbytes, small, large))
    (entry,) = assemble(TINY.model(), 2, [found, found]).machine.p2p
    return entry


def test_noise_does_not_make_messages_fast():
    """Once written without a word: 305 GB/s, from two sizes that took the same within their spread."""
    entry = messages([100_000] * 9, [100_300 + 9000 * (index % 3 - 1) for index in range(9)])
    assert value_of(entry.latency_ns) == 0
    assert value_of(entry.bytes_per_s) == pytest.approx(101_000e9 / 100_300, rel=1e-3)
    assert entry.bytes_per_s.spread < entry.bytes_per_s.value


@pytest.mark.parametrize("nbytes", [1000, 64])
def test_messages_no_larger_than_the_small_one_take_what_was_measured(nbytes):
    """Once written without a word: 1 byte per second, from two messages of one size."""
    entry = messages([100_000] * 9, [101_000] * 9, nbytes)
    assert value_of(entry.latency_ns) == 0
    assert value_of(entry.bytes_per_s) == pytest.approx(nbytes * 1e9 / 101_000, rel=1e-3)


@pytest.mark.parametrize("large", [100_300, 150_000, 10_000_000])
def test_a_message_of_the_models_size_takes_what_was_measured(large):
    entry = messages([100_000] * 9, [large + 9000 * (index % 3 - 1) for index in range(9)])
    expected = value_of(entry.latency_ns) + 101_000e9 / value_of(entry.bytes_per_s)
    assert expected == pytest.approx(large, rel=0.01)


def test_a_latency_as_long_as_the_copy_does_not_make_it_fast():
    found = findings()
    for copies in (found.copies, found.copies_alone):
        copies.latency, copies.d2h = [1_000_000] * 3, [900_000, 1_000_100, 1_100_000]
    (link,) = assemble(TINY.model(), 2, [found, found]).machine.links
    assert value_of(link.d2h_bytes_per_s) == pytest.approx(8_000_000e9 / 1_000_100, rel=1e-3)


def test_kinds_of_ops_that_differ_are_no_noise_of_the_overhead():
    found = findings()
    found.overhead["backward"] = [90_000] * 3
    overhead = assemble(TINY.model(), 2, [found, found]).machine.op_overhead_ns
    assert overhead.spread == 0
    found.overhead["backward"] = [80_000, 90_000, 100_000]
    assert assemble(TINY.model(), 2, [found, found]).machine.op_overhead_ns.spread == pytest.approx(17_500, abs=2500)


# -- what is said of it


def measured(value, spread):
    return Quantity(value=value, source="measured", samples=9, spread=spread)


PROFILE = Profile(
    name="noisy",
    machine=Machine(
        devices=2,
        op_overhead_ns=measured(100, 40),
        p2p=[
            P2P(latency_ns=measured(50, 49), bytes_per_s=measured(300_000_000, 150_000_001)),
            P2P(devices=(0, 1), latency_ns=measured(5000, 4999), bytes_per_s=10**9),
        ],
        links=[Link(devices=[0, 1], d2h_bytes_per_s=measured(10**9, 10**9), h2d_bytes_per_s=measured(10**9, 10**8))],
    ),
    layers=[
        Layer(
            name="tiny",
            forward_ns=measured(1, 100),  # nobody would notice
            backward_input_ns=10,
            backward_weight_ns=10,
            saved_bytes=1,
        ),
        Layer(
            name="block",
            count=2,
            forward_ns=measured(10_000, 5051),
            backward_input_ns=measured(10_000, 5050),  # exactly half of it and its overhead
            backward_weight_ns=10_000,
            saved_bytes=1,
        ),
    ],
)


def test_numbers_that_are_noise_are_named_with_path_value_and_spread():
    assert noisy(PROFILE) == [
        Noisy("$.layers[1].forward_ns", "forward of block", 10_000, 5051, "ns"),
        Noisy("$.machine.p2p[0].bytes_per_s", "speed of messages", 300_000_000, 150_000_001, "bytes/s"),
        Noisy("$.machine.p2p[1].latency_ns", "latency of messages of devices 0, 1", 5000, 4999, "ns"),
        Noisy("$.machine.links[0].d2h_bytes_per_s", "speed of d2h copies of devices 0, 1", 10**9, 10**9, "bytes/s"),
    ]
    machine = structs.replace(PROFILE.machine, op_overhead_ns=measured(1000, 501), p2p=[], links=[])
    assert [one.name for one in noisy(structs.replace(PROFILE, machine=machine))] == ["the overhead of an op"]


def test_a_profile_of_given_numbers_has_no_noise():
    assert noisy(assemble(TINY.model(), 2, [findings(), findings()])) == []


def test_the_command_says_what_is_not_to_be_trusted(monkeypatch, tmp_path):
    monkeypatch.setattr("optpipe_torch.profiler.measure.measure", lambda options, on_progress: PROFILE)
    path = str(tmp_path / "profile.json")
    shown = CliRunner().invoke(cli, ["profile", "-o", path], catch_exceptions=False)
    warned = [line for line in shown.stderr.splitlines() if line.startswith("optpipe:")]
    assert warned == [
        "optpipe: not to be trusted, because their spread is more than half of what they say:",
        "optpipe:   forward of block: 10 us ± 5.051 us",
        "optpipe:   speed of messages: 0.3 GB/s ± 0.15 GB/s",
        "optpipe:   latency of messages of devices 0, 1: 5 us ± 4.999 us",
        "optpipe:   speed of d2h copies of devices 0, 1: 1 GB/s ± 1 GB/s",
        "optpipe: profile again when nothing else runs on the machine",
    ]
    told = json.loads(CliRunner().invoke(cli, ["profile", "--json", "-o", path], catch_exceptions=False).stdout)
    assert told["digest"] == PROFILE.digest()
    assert [one["path"] for one in told["noisy"]] == [one.path for one in noisy(PROFILE)]
    assert told["noisy"][0]["spread"] == 5051


@pytest.mark.parametrize("model", [[], ["--model", "gpt2"]], ids=["small GPT", "model"])
def test_the_command_says_how_many_samples_to_take(monkeypatch, tmp_path, model):
    asked = []
    monkeypatch.setattr("optpipe_torch.profiler.measure.measure", lambda options, _: asked.append(options) or PROFILE)
    for samples in ([], ["--samples", "7"]):
        done = CliRunner().invoke(cli, ["profile", *model, *samples, "-o", str(tmp_path / "profile.json")])
        assert done.exit_code == 0, done.output
    assert [options.samples for options in asked] == [60, 7]


def test_the_command_is_silent_about_a_quiet_profile(monkeypatch, tmp_path):
    quiet = assemble(TINY.model(), 2, [findings(), findings()])
    monkeypatch.setattr("optpipe_torch.profiler.measure.measure", lambda options, on_progress: quiet)
    shown = CliRunner().invoke(cli, ["profile", "-o", str(tmp_path / "profile.json")], catch_exceptions=False)
    assert "optpipe:" not in shown.stderr


def test_a_time_of_0_has_no_spread_in_parts_of_it(monkeypatch, tmp_path):
    quiet = assemble(TINY.model(), 2, [findings(), findings()])
    nothing = Quantity(value=0, source="measured", samples=32, spread=648)
    profile = structs.replace(quiet, layers=[structs.replace(quiet.layers[0], backward_ns=nothing), *quiet.layers[1:]])
    monkeypatch.setattr("optpipe_torch.profiler.measure.measure", lambda options, on_progress: profile)
    shown = CliRunner().invoke(cli, ["profile", "-o", str(tmp_path / "profile.json")], catch_exceptions=False)
    assert "64800%" not in shown.stdout
    assert "R: recomputation" in shown.stdout


# -- the allocator of host memory


def test_what_is_older_than_the_first_op_is_not_counted_when_it_is_given_back():
    """Once, a block that the profiler had seen before hid as many bytes of what an op took."""
    kept = []
    assert watch({"take": lambda: kept.append(torch.ones(1000))}) == {"take": [4000]}
    found = watch({"give": kept.clear, "both": lambda: kept.append(torch.ones(500)), "own": kept.clear})
    assert found == {"give": [], "both": [2000], "own": [-2000]}
