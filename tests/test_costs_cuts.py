"""Runs under several cuts tell slow layers from slow devices."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe_compiler.costs.cuts import seen, told_apart
from optpipe_compiler.costs.from_run import Run, RunOp, profile_from_run, times_of
from optpipe_compiler.documents.profile import Layer, Machine, Profile
from optpipe_compiler.documents.traces import About, RunStage

LAYERS = 6
KINDS = ("forward", "backward_input", "backward_weight")
BASE = Profile(
    name="hand",
    machine=Machine(devices=2),
    layers=[
        Layer(
            name="block",
            count=LAYERS,
            forward_ns=10**6,
            backward_input_ns=2 * 10**6,
            backward_weight_ns=10**6,
            saved_bytes=1000,
        )
    ],
)
EACH = [(layer % 2, layer, layer + 1) for layer in range(LAYERS)]
"""Stages as device, first layer and end."""
OTHERS = [(1 - device, *layers) for device, *layers in EACH]


def ran(stages, speeds, factors, pace=1.0, kinds=KINDS) -> Run:
    """A run of BASE in which ops take so many times what it says, by device, by layer and kind, and by run."""
    about = About(BASE.digest(), True, 1.0, [RunStage(n, one[0], one[1:]) for n, one in enumerate(stages)])
    ops = []
    for number, (device, first, end) in enumerate(stages):
        for kind in kinds:
            takes = times_of(BASE.layers[0])[kind]
            ns = sum(takes * factors[layer].get(kind, 1.0) for layer in range(first, end))
            ops.append(RunOp(kind, number, 1, 0, round(pace * speeds[device] * ns)))
    return Run("a run", about, ops)


def told(*runs: Run) -> Profile:
    return told_apart(BASE, [seen(BASE, run) for run in runs])


def taken(profile: Profile, kind: str, device: int, layers: range) -> float:
    """What a stage takes, by a profile."""
    speed = profile.machine.time_permille[device] / 1000
    return speed * sum(times_of(layer)[kind] for layer in profile.expanded_layers()[slice(layers.start, layers.stop)])


def equal(factor: float = 1.0) -> list[dict[str, float]]:
    return [dict.fromkeys(KINDS, factor)] * LAYERS


off = st.floats(0.75, 1.33)


@settings(max_examples=30, deadline=None)
@given(
    st.tuples(off, off),
    st.lists(st.fixed_dictionaries(dict.fromkeys(KINDS, off)), min_size=LAYERS, max_size=LAYERS),
    off,
)
def test_every_layer_on_every_device_tells_what_any_stage_takes_anywhere(speeds, factors, pace):
    found = told(ran(EACH, speeds, factors), ran(OTHERS, speeds, factors, pace))
    for device in range(2):
        for first in range(LAYERS):
            for end in range(first + 1, LAYERS + 1):
                for kind in KINDS:
                    takes = times_of(BASE.layers[0])[kind]
                    real = pace * speeds[device] * sum(takes * factors[layer][kind] for layer in range(first, end))
                    assert taken(found, kind, device, range(first, end)) == pytest.approx(real, rel=0.03)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, LAYERS - 1), st.tuples(off, off), off)
def test_stages_that_ran_last_take_what_they_took_even_if_devices_have_changed_their_speed(cut, speeds, pace):
    stages = [(0, 0, cut), (1, cut, LAYERS)]
    run = ran(stages, speeds, equal(), pace)
    base = told(ran(EACH, (1.0, 1.0), equal()), run)
    again = Run(run.name, msgspec.structs.replace(run.about, profile_digest=base.digest()), run.ops)
    found = profile_from_run(base, "the base", again).profile
    for op in run.ops:
        device, first, end = stages[op.stage]
        assert taken(found, op.kind, device, range(first, end)) == pytest.approx(op.end_ns, rel=1e-4)


def test_what_one_cut_shows_is_layers_more_than_devices_and_other_cuts_tell():
    one = ran([(0, 0, 3), (1, 3, 6)], (1.0, 1.2), equal())
    other = ran([(1, 0, 3), (0, 3, 6)], (1.0, 1.2), equal())
    for found, least, most in ((told(one), 1.02, 1.08), (told(one, other), 1.15, 1.21)):
        slow = found.machine.time_permille[1] / found.machine.time_permille[0]
        assert least < slow < most


def test_a_layer_that_is_slow_on_both_devices_is_slow():
    slow = equal()
    slow[3] = dict.fromkeys(KINDS, 1.5)
    stages = [(0, 0, 3), (1, 3, 4), (0, 4, 6)]
    one = told(ran(stages, (1.0, 1.0), slow))
    both = told(ran(stages, (1.0, 1.0), slow), ran([(1, 0, 3), (0, 3, 4), (1, 4, 6)], (1.0, 1.0), slow))
    ratios = []
    for profile in (one, both):
        times = [times_of(layer)["forward"] for layer in profile.expanded_layers()]
        ratios.append(times[3] / times[0])
    assert ratios[1] == pytest.approx(1.5, rel=0.03)
    assert ratios[0] < ratios[1]


def test_an_op_that_never_ran_is_as_much_slower_as_those_that_do_the_same_work():
    found = told(ran(EACH, (1.0, 1.0), equal(2.0)))
    layer = found.expanded_layers()[0]
    assert (layer.backward_ns, layer.recompute_ns) == (None, None)
    given_ns = msgspec.structs.replace(BASE.layers[0], backward_ns=10**6, recompute_ns=10**6)
    base = msgspec.structs.replace(BASE, layers=[given_ns])
    run = ran(EACH, (1.0, 1.0), equal(2.0))
    run = Run(run.name, msgspec.structs.replace(run.about, profile_digest=base.digest()), run.ops)
    layer = told_apart(base, [seen(base, run)]).expanded_layers()[0]
    assert [layer.backward_ns, layer.recompute_ns] == pytest.approx([2 * 10**6, 2 * 10**6], rel=0.01)
