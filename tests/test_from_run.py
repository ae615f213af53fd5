"""`profile --from-run`: the times of a run's ops become a profile's numbers."""

from __future__ import annotations

import json
from random import Random

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from small_schedules import Builder, Shape

from optpipe_compiler.cli import cli
from optpipe_compiler.costs.from_run import Run, RunOp, profile_from_run, read_run, without_each_other
from optpipe_compiler.documents import ir
from optpipe_compiler.documents import profile as profiles
from optpipe_compiler.documents.files import canonical
from optpipe_compiler.documents.profile import (
    Layer,
    Link,
    Machine,
    Profile,
    Quantity,
    Sliceable,
    of_unit,
    on_device,
    value_of,
)
from optpipe_compiler.documents.profile import load as load_profile
from optpipe_compiler.documents.traces import About, RunStage
from optpipe_compiler.errors import BadInput

BASE = Profile(
    name="hand",
    machine=Machine(devices=2, op_overhead_ns=100, links=[Link(d2h_bytes_per_s=10**9, h2d_bytes_per_s=10**9)]),
    layers=[
        Layer(
            name=f"layer{index}",
            forward_ns=1000 * (1 + index % 2),
            backward_input_ns=3000,
            backward_weight_ns=2000,
            saved_bytes=1000,
        )
        for index in range(4)
    ],
)
FORMAT = {
    "format": "optpipe-trace",
    "profile_digest": BASE.digest(),
    "real": True,
    "time_scale": 1.0,
    "stages": [{"stage": stage, "device": stage, "layers": [2 * stage, 2 * stage + 2]} for stage in (0, 1)],
}


def event(kind, stage, step, begin_us, microseconds, **more):
    args = {"op": f"{kind}:{stage}", "stage": stage, "step": step, **more}
    return {"ph": "X", "cat": kind, "ts": begin_us, "dur": microseconds, "args": args}


def written(tmp_path, events, **about):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"otherData": FORMAT | about, "traceEvents": events}))
    return path


def from_run(tmp_path, events):
    return profile_from_run(BASE, "base.json", read_run(written(tmp_path, events)))


def test_a_stages_median_is_shared_among_its_layers_as_the_base_shares_it(tmp_path):
    warming = [event("forward", 0, 0, 0, 999)]
    times = [6.1, 6.1, 9.1]  # the layers say 3 us, and 0.1 us is the overhead
    found = from_run(tmp_path, warming + [event("forward", 0, 1, 0, time) for time in times])
    first, second, *rest = found.profile.expanded_layers()
    assert first.forward_ns == Quantity(value=2000, source="measured", samples=3, spread=500)
    assert second.forward_ns == Quantity(value=4000, source="measured", samples=3, spread=1000)
    assert [layer.forward_ns for layer in rest] == [1000, 2000]
    assert first.backward_input_ns == 3000  # not seen in the run
    (change,) = found.changes
    assert (change.what, change.base, change.measured.value) == ("forward of stage 0", 3000, 6000)


def test_defaults_of_the_format_become_numbers_where_they_were_measured(tmp_path):
    events = [event("backward", 1, 0, 0, 20.1), event("recompute", 1, 0, 30, 4.1, layers=[3, 4])]
    *_, layer, last = from_run(tmp_path, events).profile.expanded_layers()
    assert [value_of(layer.backward_ns), value_of(last.backward_ns)] == [10_000, 10_000]
    assert [value_of(layer.recompute_ns), value_of(last.recompute_ns)] == [2000, 4000]


def test_copies_give_the_bandwidth_alone_and_against_the_other_direction(tmp_path):
    copies = [
        event("offload", 0, 0, 0, 2, bytes=1000),
        event("offload", 0, 0, 10, 4, bytes=1000),
        event("reload", 0, 0, 12, 5, bytes=1000),
        event("reload", 1, 0, 1, 2, bytes=500),  # another device's link
    ]
    (link,) = from_run(tmp_path, copies).profile.machine.links
    assert value_of(link.d2h_bytes_per_s) == 500_000_000
    assert value_of(link.duplex_d2h_bytes_per_s) == 250_000_000
    assert value_of(link.duplex_h2d_bytes_per_s) == 200_000_000
    assert value_of(link.h2d_bytes_per_s) == 250_000_000


def sharing(tmp_path, copies):
    """The speeds of a link of both devices."""
    machine = structs.replace(BASE.machine, links=[structs.replace(BASE.machine.links[0], devices=[0, 1])])
    profile = structs.replace(BASE, machine=machine)
    path = written(tmp_path, copies, profile_digest=profile.digest())
    (link,) = profile_from_run(profile, "base.json", read_run(path)).profile.machine.links
    return value_of(link.d2h_bytes_per_s), value_of(link.h2d_bytes_per_s)


def test_copies_at_once_through_one_link_have_a_part_of_its_time_each(tmp_path):
    at_once = [event("offload", stage, 0, begin, 3, bytes=2000) for stage, begin in ((0, 0), (1, 1))]
    assert sharing(tmp_path, at_once) == (10**9, 10**9)  # 2 us each: 2 beside the other, 1 without
    reload = event("reload", 0, 0, 20, 4, bytes=2000)
    assert sharing(tmp_path, [*at_once, reload, event("offload", 0, 0, 30, 2.5, bytes=2000)]) == (8 * 10**8, 5 * 10**8)


def test_the_copies_of_a_long_run_are_not_held_against_each_other():
    """With time that grows with their square it would not end."""
    copies = [
        RunOp(kind, stage, number // 64, 1000 * number, 1000 * number + 900, (2 * stage, 2 * stage + 2), 1000)
        for number in range(10_000)
        for stage in (0, 1)
        for kind in ("offload", "reload")
    ]
    (link,) = profile_from_run(BASE, "base", of_stages(BASE, copies)).profile.machine.links
    assert value_of(link.duplex_d2h_bytes_per_s) == round(1000e9 / 900)


def test_what_copies_took_from_compute_is_not_the_ops(tmp_path):
    """A forward that runs 4 us beside an offload that takes all of its time from compute: each lost 2 us."""
    events = [event("forward", 0, 0, 0, 8.1), event("offload", 0, 0, 4.1, 6, bytes=1000)]
    links = [structs.replace(BASE.machine.links[0], compute_permille=1000)]
    profile = structs.replace(BASE, machine=structs.replace(BASE.machine, links=links))
    path = written(tmp_path, events, profile_digest=profile.digest())
    found = profile_from_run(profile, "base.json", read_run(path)).profile
    assert sum(value_of(layer.forward_ns) for layer in found.expanded_layers()[:2]) == 6000
    assert value_of(found.machine.links[0].d2h_bytes_per_s) == 250_000_000


@pytest.mark.parametrize(("share", "op", "copy"), [(0.0, 100, 80), (0.5, 80, 60), (1.0, 70, 50)])
def test_two_that_share_a_core_are_told_apart(share, op, copy):
    ops, copies = [(0, 100), (200, 300)], {"d2h": [(40, 120)], "h2d": []}
    assert without_each_other(ops, copies, share) == ([op, 100], {"d2h": [copy], "h2d": []})


def test_wrong_files_are_one_sentence(tmp_path):
    one = [event("forward", 0, 0, 0, 1)]
    with pytest.raises(BadInput, match="is of a rehearsal"):
        read_run(written(tmp_path, one, real=False))
    with pytest.raises(BadInput, match="has no measured op"):
        read_run(written(tmp_path, []))
    with pytest.raises(BadInput, match="is not the profile that the run of"):
        profile_from_run(BASE, "base.json", read_run(written(tmp_path, one, profile_digest="sha256:0")))
    with pytest.raises(BadInput, match=r"has ops of stage 2, which \$.otherData.stages does not have"):
        read_run(written(tmp_path, [event("forward", 2, 0, 0, 1)]))
    with pytest.raises(BadInput, match=r"stages\[0\].device"):
        read_run(written(tmp_path, one, stages=[{"stage": 0, "device": 2**62, "layers": [0, 2]}]))
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    with pytest.raises(BadInput, match="is no trace of optpipe run --trace"):
        read_run(tmp_path / "other.json")


def invoke(*arguments):
    return CliRunner().invoke(cli, ["profile", *map(str, arguments)])


def test_the_command_writes_a_profile_and_never_over_its_base(tmp_path):
    base, output = tmp_path / "profile.json", tmp_path / "measured.json"
    base.write_text(canonical(BASE))
    trace = written(tmp_path, [event("forward", 0, 0, 0, 6.1)])
    done = invoke("--from-run", trace, "--profile", base, "-o", output)
    assert done.exit_code == 0, done.output
    assert "forward of stage 0" in done.output
    assert value_of(load_profile(output).layers[0].forward_ns) == 2000
    assert "expected another file" in str(invoke("--from-run", trace, "--profile", base, "-o", base).exception)
    assert "--layers is 3" in str(invoke("--from-run", trace, "--layers", 3, "-o", output).exception)


@pytest.mark.runtime
def test_the_readmes_sequence_runs_with_its_defaults_in_an_empty_folder(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    small = "--devices 2 --layers 2 --hidden 32 --heads 2 --seq 16 --microbatch-size 2 --samples 4"
    for command in (
        f"profile {small}",
        "compile --time-limit 1",
        "run --trace run.json --steps 2",
        "profile --from-run run.json",
        "compile measured.json --time-limit 1",
        "run schedule.json --steps 1",
    ):
        done = CliRunner().invoke(cli, command.split(), catch_exceptions=False)
        assert done.exit_code == 0, (command, done.output)
    assert {path.name for path in tmp_path.iterdir()} == {
        "profile.json",
        "schedule.json",
        "run.json",
        "measured.json",
    }
    base, measured = load_profile(tmp_path / "profile.json"), load_profile(tmp_path / "measured.json")
    assert measured.digest() != base.digest()
    assert measured.model == base.model


@pytest.mark.runtime
def test_the_trace_of_a_real_run_is_read(tmp_path):
    pytest.importorskip("torch")
    import msgspec
    from runtime_cases import MODEL, TEXT, tiny_profile

    shape = Shape(ranges=lambda stage, _: [("offload", 2 * stage, 2 * stage + 1)])
    model = msgspec.structs.replace(MODEL, config={**MODEL.config, "layers": 2})
    base = tiny_profile(model)
    plan = Builder(shape, base, Random(0)).build()
    provenance = msgspec.structs.replace(plan.provenance, profile_digest=base.digest())
    plan = ir.seal(msgspec.structs.replace(plan, model=model, provenance=provenance))
    path, trace = tmp_path / "schedule.json", tmp_path / "trace.json"
    path.write_text(ir.to_text(plan))
    ran = CliRunner().invoke(
        cli, ["run", str(path), "--data", str(TEXT), "--steps", "2", "--trace", str(trace)], catch_exceptions=False
    )
    assert ran.exit_code == 0
    found = profile_from_run(base, "base", read_run(trace)).profile
    for layer in found.expanded_layers():
        assert layer.forward_ns.source == "measured"
        assert layer.forward_ns.samples == 2
    assert found.machine.links[0].d2h_bytes_per_s.source == "measured"


def test_layers_whose_ops_were_faster_than_their_attention_can_still_be_read(tmp_path):
    slow = Sliceable(carry_bytes=1, forward_attention_ns=900, backward_input_attention_ns=2000)
    layers = [structs.replace(layer, backward_ns=4000, slices=slow) for layer in BASE.layers]
    base = structs.replace(BASE, layers=layers, sequence_length=8)
    ops = [RunOp("forward", 0, 0, 0, 400), RunOp("backward_input", 0, 0, 0, 500), RunOp("backward", 0, 0, 0, 700)]
    found = profile_from_run(base, "base", of_stages(base, ops)).profile
    assert profiles.parse(canonical(found), "found") == found
    assert value_of(found.layers[0].slices.forward_attention_ns) == 90  # a tenth, as all of the forward


# -- units of several lengths


def of_stages(base, ops, units=None):
    """A run of two stages of two layers."""
    stages = [RunStage(stage, stage, (2 * stage, 2 * stage + 2)) for stage in (0, 1)]
    return Run("a run", About(base.digest(), True, 1.0, stages, units=units), ops)


KINDS = ("forward", "backward_input", "backward_weight", "backward")
TOKENS = 64
LAYER = Layer(
    name="layer",
    forward_ns=40_000,
    backward_input_ns=50_000,
    backward_weight_ns=30_000,
    backward_ns=75_000,
    saved_bytes=1000,
    slices=Sliceable(
        forward_attention_ns=10_000,
        backward_input_attention_ns=20_000,
        forward_overhead_ns=2000,
        backward_input_overhead_ns=3000,
        backward_weight_overhead_ns=1000,
        backward_overhead_ns=3500,
    ),
)


def faster(layer, linear, attention):
    """The layer with what grows with the tokens, by kind, and attention, of forwards and backwards, so much faster."""
    two = structs.asdict(layer.slices)
    named = {"forward": "forward", "backward_input": "backward_input", "backward": "backward_input"}
    times, slices = {}, {}
    for kind in KINDS:
        part = two[f"{named[kind]}_attention_ns"] if kind in named else 0
        rest = round((getattr(layer, f"{kind}_ns") - part) / linear[kind])
        quick = round(part / attention[kind == "forward"])
        times[f"{kind}_ns"] = rest + quick
        slices[f"{kind}_overhead_ns"] = round(two[f"{kind}_overhead_ns"] / linear[kind])
        if kind in named:
            slices[f"{named[kind]}_attention_ns"] = quick
    return structs.replace(layer, **times, slices=structs.replace(layer.slices, **slices))


def sized(layers, **machine):
    return structs.replace(
        BASE, layers=list(layers), sequence_length=TOKENS, machine=structs.replace(BASE.machine, **machine)
    )


def times_of(profile, units, device=1):
    """What each kind of op of the two last layers takes, by kind and unit, with the overhead of an op."""

    def of(layer, tokens):
        return on_device(of_unit(layer, tokens, TOKENS, is_cut=units.slices > 1), profile.machine, device)

    overhead = value_of(profile.machine.op_overhead_ns)
    return {
        (kind, microbatch, number): overhead
        + sum(getattr(of(layer, tokens), f"{kind}_ns") for layer in profile.expanded_layers()[2:])
        for kind in KINDS
        for microbatch in range(len(units.shape_of))
        for number in range(units.slices)
        for tokens in [units.tokens_of(microbatch, number)]
    }


def ran(truth, units, kinds=KINDS):
    """A run in which every op takes what the truth says."""
    return [
        RunOp(kind, 1, 0, 0, took, tokens=units.tokens_of(microbatch, number))
        for (kind, microbatch, number), took in times_of(truth, units).items()
        if kind in kinds
    ]


SLICED = ir.Units(tokens=TOKENS, cuts=[[0, 16, 32, 48, 64]], shape_of=[0, 0])
UNEVEN = ir.Units(tokens=TOKENS, cuts=[[0, 30, 50, 64]], shape_of=[0])
LENGTHS = ir.Units(tokens=TOKENS, cuts=[[0, 64], [0, 40], [0, 16]], shape_of=[0, 1, 2, 1])
FACTOR = st.floats(0.3, 3)


@given(st.sampled_from([SLICED, UNEVEN, LENGTHS]), st.tuples(*[FACTOR] * 4), st.tuples(FACTOR, FACTOR))
def test_linear_and_attention_parts_are_told_from_units_of_several_lengths(units, linear, attention):
    truth = sized([LAYER] * 4)
    base = sized([faster(LAYER, dict(zip(KINDS, linear, strict=True)), attention)] * 4)
    found = profile_from_run(base, "base", of_stages(base, ran(truth, units), units)).profile
    assert profiles.parse(canonical(found), "found") == found
    for other in (SLICED, UNEVEN, LENGTHS):
        for place, expected in times_of(truth, other).items():
            assert times_of(found, other)[place] == pytest.approx(expected, abs=8, rel=2e-3), (place, other)
    assert found.layers[0] == structs.replace(base.layers[0], count=2)  # another stage, of which nothing ran


def test_ops_that_did_not_run_are_as_much_faster_as_those_that_do_the_same_work():
    truth, base = sized([LAYER] * 4), sized([faster(LAYER, dict.fromkeys(KINDS, 2.0), (2.0, 2.0))] * 4)
    for kinds in (("forward", "backward"), ("forward", "backward_input", "backward_weight")):
        found = profile_from_run(base, "base", of_stages(base, ran(truth, SLICED, kinds), SLICED)).profile
        assert times_of(found, SLICED) == pytest.approx(times_of(truth, SLICED), abs=8)
        last = found.expanded_layers()[-1]
        sources = {kind: getattr(last, f"{kind}_ns").source for kind in KINDS}
        assert sources == {kind: "measured" if kind in kinds else "estimated" for kind in KINDS}


def test_a_devices_own_speed_is_not_counted_twice():
    base = sized([LAYER] * 4, time_permille=[1000, 1500])
    whole = ir.Units(tokens=TOKENS, cuts=[[0, TOKENS]], shape_of=[0])
    ops = [structs.replace(op, tokens=None) for op in ran(base, whole)]
    found = profile_from_run(base, "base", of_stages(base, ops))
    assert [value_of(getattr(found.profile.expanded_layers()[-1], f"{kind}_ns")) for kind in KINDS] == [
        getattr(LAYER, f"{kind}_ns") for kind in KINDS
    ]
    assert all(change.base == change.measured.value for change in found.changes)


def test_what_a_profile_cannot_say_is_noted():
    """Layers that need whole sequences have no attention of their own in the format: half the tokens, half the time."""
    truth = sized([structs.replace(LAYER, slices=structs.replace(LAYER.slices, forward_attention_ns=40_000))] * 4)
    base = sized([structs.replace(LAYER, slices=None)] * 4)
    found = profile_from_run(base, "base", of_stages(base, ran(truth, LENGTHS, ("forward",)), LENGTHS))
    (note,) = found.notes
    assert note.startswith("forward of stage 1: the ops of one unit are ")
    truth = sized([structs.replace(LAYER, slices=None)] * 4)
    assert profile_from_run(base, "base", of_stages(base, ran(truth, LENGTHS), LENGTHS)).notes == []


def test_a_trace_says_where_slices_are_cut(tmp_path):
    ops = [event("forward", 1, 0, 0, 9, microbatch=1, slice=2)]
    about = {"units": msgspec.to_builtins(UNEVEN)}
    with pytest.raises(BadInput, match="has an op that is none of its schedule"):
        read_run(written(tmp_path, ops, **about))
    with pytest.raises(BadInput, match="is of a schedule with slices and does not say where they are cut"):
        read_run(written(tmp_path, ops))
    ops[0]["args"]["microbatch"] = 0
    (op,) = read_run(written(tmp_path, ops, **about)).ops
    assert op.tokens == (50, 64)
