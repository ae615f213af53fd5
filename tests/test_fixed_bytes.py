"""Transient bytes that do not shrink with the tokens of a slice: weight gradients before they are added."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from optpipe_compiler.compiler import Options, compile_schedule
from optpipe_compiler.costs.uniform import UniformOptions, uniform_profile
from optpipe_compiler.diff import compare
from optpipe_compiler.documents import ir
from optpipe_compiler.documents.files import canonical
from optpipe_compiler.documents.profile import Profile, parse, version_of
from optpipe_compiler.errors import BadInput
from optpipe_compiler.verify import verify

PLENTY, GRADIENT, REST = 10**12, 5_000_000, 1_000_000
WHOLE = Options(PLENTY, 4, method="1f1b")
EIGHT = replace(WHOLE, method="seq1f1b", slices=8)


def costs(fixed: int) -> Profile:
    """Layers whose weight gradients take much while they are computed, in whole microbatches and in slices."""
    profile = uniform_profile(UniformOptions(devices=2, layers_per_device=1, sliceable=True))
    (layer,) = profile.layers
    slices = msgspec.structs.replace(layer.slices, backward_weight_fixed_bytes=fixed, backward_fixed_bytes=fixed)
    heavy = {f"{op}_transient_bytes": GRADIENT + REST for op in ("backward_weight", "backward")}
    layers = [msgspec.structs.replace(layer, slices=slices, **heavy)]
    return msgspec.structs.replace(profile, layers=layers, version=version_of(layers))


def peak(profile: Profile, options: Options) -> int:
    schedule = compile_schedule(profile, options).schedule
    assert verify(schedule, profile) == []
    assert verify(ir.parse(ir.to_text(schedule), "schedule.json"), profile) == []
    return max(device.peak_bytes for device in schedule.devices)


def test_a_slice_needs_all_that_does_not_shrink_and_its_share_of_the_rest():
    assert peak(costs(GRADIENT), EIGHT) - peak(costs(0), EIGHT) == GRADIENT - GRADIENT // 8


def test_whole_microbatches_need_what_they_needed():
    assert peak(costs(GRADIENT), WHOLE) == peak(costs(0), WHOLE)
    schedule = compile_schedule(costs(GRADIENT), WHOLE).schedule
    assert schedule.version == 1
    assert all(stage.fixed is msgspec.UNSET for stage in schedule.stages)


def test_a_shorter_microbatch_needs_all_that_does_not_shrink():
    tokens = costs(0).tokens
    assert tokens is not None
    short = replace(WHOLE, lengths=(tokens // 4,) * 4)
    found = [peak(costs(fixed), short) for fixed in (GRADIENT, 0)]
    assert found[0] - found[1] == GRADIENT - GRADIENT // 4
    assert compile_schedule(costs(GRADIENT), short).schedule.version == 5


def changed(**fields: object) -> ir.Schedule:
    """A schedule in slices with other fixed bytes on its first stage."""
    schedule = compile_schedule(costs(GRADIENT), EIGHT).schedule
    first, *others = schedule.stages
    fixed = msgspec.structs.replace(first.fixed, **fields) if fields else msgspec.UNSET
    first = msgspec.structs.replace(first, fixed=fixed)
    return ir.seal(msgspec.structs.replace(schedule, stages=[first, *others]))


@pytest.mark.parametrize(
    ("fields", "rule", "said"),
    [
        (
            {"backward_transient_bytes": [GRADIENT + REST + 1]},
            "stages",
            "6000001 fixed bytes in backward_transient_bytes",
        ),
        (
            {"backward_transient_bytes": []},
            "stages",
            "fixed.backward_transient_bytes of stage 0 has 0 entries, expected 1",
        ),
        ({"backward_transient_bytes": [GRADIENT - 1]}, "profile-bytes", "fixed.backward_transient_bytes"),
        ({}, "profile-bytes", "fixed.backward"),
    ],
)
def test_the_judge_refuses_other_figures(fields, rule, said):
    found = verify(changed(**fields), costs(GRADIENT))
    assert any(one.rule == rule and said in str(one) for one in found), found


def test_the_judge_counts_them_without_a_profile():
    schedule = changed(backward_weight_transient_bytes=[GRADIENT + REST], backward_transient_bytes=[GRADIENT + REST])
    assert any(one.rule == "device-memory" for one in verify(schedule))


def test_fixed_bytes_without_units_are_refused():
    schedule = compile_schedule(costs(0), WHOLE).schedule
    none = {name: [0] for name in ir.Fixed.__struct_fields__}
    stages = [msgspec.structs.replace(stage, fixed=ir.Fixed(**none)) for stage in schedule.stages]
    found = verify(ir.seal(msgspec.structs.replace(schedule, stages=stages)))
    assert [str(one) for one in found if "setup.units is not there" in str(one)]


def test_a_file_of_an_older_version_cannot_have_them():
    text = ir.to_text(compile_schedule(costs(GRADIENT), EIGHT).schedule).replace('"version": 5', '"version": 4')
    with pytest.raises(BadInput, match=r"\$\.stages\[0\]\.fixed: is not a field of version 4, expected \$\.version 5"):
        ir.parse(text, "schedule.json")


def test_a_profile_says_no_more_than_the_layers_own():
    profile = costs(GRADIENT + REST + 1)
    with pytest.raises(BadInput, match="backward_weight_fixed_bytes is 6000001, expected at most backward_w"):
        parse(canonical(profile), "profile.json")
    assert parse(canonical(costs(GRADIENT)), "profile.json") == costs(GRADIENT)
    assert [costs(fixed).version for fixed in (0, GRADIENT)] == [1, 2]
    old = canonical(costs(GRADIENT)).replace('"version": 2', '"version": 1')
    with pytest.raises(BadInput, match=r"\$\.layers\[0\]\.slices has fixed bytes, no fields of version 1, expected"):
        parse(old, "profile.json")


def test_diff_names_them():
    found = compare(compile_schedule(costs(GRADIENT), EIGHT).schedule, changed(backward_transient_bytes=[1]))
    assert [change.of for change in found.stages] == ["stage 0"]
    assert "fixed" in str(found.stages[0])
