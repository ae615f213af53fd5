"""`optpipe profile uniform`: a handful of numbers becomes a profile whose sums are those numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from optpipe_compiler.costs.uniform import UniformOptions, parse_ratio, parse_triple, uniform_profile
from optpipe_compiler.documents.files import canonical
from optpipe_compiler.documents.profile import Layer, Profile, Quantity, parse, value_of
from optpipe_compiler.errors import BadInput


def total(profile: Profile, field: str, device: int, layers: int) -> int:
    mine = profile.expanded_layers()[device * layers : (device + 1) * layers]
    return sum(value_of(getattr(layer, field)) for layer in mine)


def transfer_ns(size: int, bandwidth: Any) -> int:
    return math.floor(size * 10**9 / value_of(bandwidth) + 0.5)


def test_the_defaults_are_a_profile_that_reads_back():
    profile = uniform_profile(UniformOptions())
    assert profile.name == "uniform-4x4"
    assert parse(canonical(profile), "p.json") == profile
    assert len(profile.expanded_layers()) == 16
    assert profile.model is None


def test_each_device_costs_what_was_asked():
    options = UniformOptions(
        devices=3,
        layers_per_device=2,
        forward_ms=18.5,
        backward_input_ms=18.1,
        backward_weight_ms=9.3,
        recompute_ms=17.0,
        activation_gb=1.6,
        residue_fraction=0.25,
        boundary_fraction=0.125,
        static_gb=7.0,
        p2p_ms=0.6,
    )
    profile = uniform_profile(options)
    wanted = {
        "forward_ns": 18_500_000,
        "backward_input_ns": 18_100_000,
        "backward_weight_ns": 9_300_000,
        "recompute_ns": 17_000_000,
        "saved_bytes": 1_600_000_000,
        "residue_bytes": 400_000_000,
        "checkpoint_bytes": 200_000_000,
        "static_bytes": 7_000_000_000,
        "captured_bytes": 0,
        "output_bytes": 0,
    }
    for device in range(3):
        assert {field: total(profile, field, device, 2) for field in wanted} == wanted
    assert [value_of(entry.latency_ns) for entry in profile.machine.p2p] == [600_000]
    assert profile.machine.p2p[0].bytes_per_s is None


def test_what_does_not_divide_is_rounded_to_the_nearest():
    layer = uniform_profile(UniformOptions(layers_per_device=3, backward_input_ms=2, activation_gb=2e-9 * 4)).layers[0]
    assert (layer.forward_ns, layer.backward_input_ns, layer.saved_bytes) == (333_333, 666_667, 3)


def test_decimals_are_taken_as_written():
    layer = uniform_profile(UniformOptions(layers_per_device=1, forward_ms=0.29, activation_gb=0.57)).layers[0]
    assert (layer.forward_ns, layer.saved_bytes) == (290_000, 570_000_000)


def test_a_gradient_takes_as_long_as_the_forward_unless_it_is_said():
    layer = uniform_profile(UniformOptions(layers_per_device=1, forward_ms=30, backward_weight_ms=20)).layers[0]
    assert (layer.backward_input_ns, layer.backward_weight_ns) == (30_000_000, 20_000_000)


@pytest.mark.parametrize(
    ("activation_gb", "d2h_ms"), [(1.0, 1.0), (1.6, 0.07), (0.333, 33.3), (80.0, 333.3), (7e-6, 0.07), (0.02, 1.5)]
)
@pytest.mark.parametrize("layers", [1, 3, 7])
def test_the_whole_activation_takes_the_transfer_time_to_a_nanosecond(activation_gb, d2h_ms, layers):
    options = UniformOptions(
        layers_per_device=layers, activation_gb=activation_gb, d2h_ms=d2h_ms, h2d_ms=2 * d2h_ms, duplex_slowdown=1 / 0.7
    )
    profile = uniform_profile(options)
    size = total(profile, "saved_bytes", 0, layers)
    link = profile.machine.links[0]
    ns = 1_000_000 * d2h_ms
    assert transfer_ns(size, link.d2h_bytes_per_s) == pytest.approx(ns, abs=1, rel=0)
    assert transfer_ns(size, link.h2d_bytes_per_s) == pytest.approx(2 * ns, abs=1, rel=0)
    assert transfer_ns(size, link.duplex_d2h_bytes_per_s) == pytest.approx(ns / 0.7, abs=1, rel=0)
    assert transfer_ns(size, link.duplex_h2d_bytes_per_s) == pytest.approx(2 * ns / 0.7, abs=1, rel=0)


def test_without_a_slowdown_both_directions_run_as_alone():
    link = uniform_profile(UniformOptions()).machine.links[0]
    assert link.duplex_d2h_bytes_per_s is None
    assert link.duplex_h2d_bytes_per_s is None


@pytest.mark.parametrize(
    ("devices", "behind"),
    [(1, [[0]]), (2, [[0, 1]]), (4, [[0, 1], [2, 3]]), (5, [[0, 1], [2, 3], [4]])],
)
def test_pairs_share_a_link_and_an_odd_last_device_has_its_own(devices, behind):
    profile = uniform_profile(UniformOptions(devices=devices, shared_links="pairs"))
    assert [link.devices for link in profile.machine.links] == behind
    assert parse(canonical(profile), "p.json") == profile


def test_links_of_their_own_take_one_entry():
    assert [link.devices for link in uniform_profile(UniformOptions(devices=5)).machine.links] == [None]


def test_parts_of_head_and_embedding_are_equal_layers_that_share_their_times():
    parts = UniformOptions(devices=2, embedding_ms=(0.1, 0, 0.2), embedding_parts=2, head_ms=(3, 1.5, 1), head_parts=4)
    layers = uniform_profile(parts).expanded_layers()
    assert [layer.name for layer in layers] == ["embedding-part"] * 2 + ["layer"] * 8 + ["head-part"] * 4
    assert [layers[0].forward_ns, layers[0].backward_weight_ns] == [50_000, 100_000]
    assert [layers[-1].forward_ns, layers[-1].backward_input_ns] == [750_000, 375_000]


@pytest.mark.parametrize("name", ["embedding", "head"])
def test_parts_of_what_is_not_there_or_no_parts_are_refused(name):
    with pytest.raises(BadInput, match=f"--{name}-parts is 2 without --{name}-ms"):
        uniform_profile(UniformOptions(**{f"{name}_parts": 2}))
    with pytest.raises(BadInput, match=f"--{name}-parts is 0, expected 1 to 10000"):
        uniform_profile(UniformOptions(**{f"{name}_ms": (1, 1, 1), f"{name}_parts": 0}))


def test_embedding_and_head_are_extra_layers_without_activation():
    profile = uniform_profile(UniformOptions(devices=2, embedding_ms=(0.1, 0, 0.2), head_ms=(1.5, 1.25, 1.0)))
    layers = profile.expanded_layers()
    assert [layer.name for layer in (layers[0], layers[-1])] == ["embedding", "head"]
    assert len(layers) == 2 * 4 + 2
    assert _times(layers[0]) == (100_000, 0, 200_000)
    assert _times(layers[-1]) == (1_500_000, 1_250_000, 1_000_000)
    assert layers[0].saved_bytes == layers[-1].saved_bytes == 0
    assert parse(canonical(profile), "p.json") == profile


def _times(layer: Layer) -> tuple[object, object, object]:
    return layer.forward_ns, layer.backward_input_ns, layer.backward_weight_ns


def test_every_number_is_manual():
    assert "source" not in canonical(uniform_profile(UniformOptions(shared_links="pairs")))
    assert not isinstance(uniform_profile(UniformOptions()).layers[0].forward_ns, Quantity)


@pytest.mark.parametrize(
    ("option", "field", "value"),
    [
        ("--devices", "devices", 0),
        ("--layers-per-device", "layers_per_device", -1),
        ("--forward-ms", "forward_ms", 0.0),
        ("--forward-ms", "forward_ms", math.nan),
        ("--forward-ms", "forward_ms", math.inf),
        ("--backward-input-ms", "backward_input_ms", -0.5),
        ("--backward-weight-ms", "backward_weight_ms", -1),
        ("--recompute-ms", "recompute_ms", -1),
        ("--p2p-ms", "p2p_ms", -1),
        ("--activation-gb", "activation_gb", 0),
        ("--static-gb", "static_gb", -3),
        ("--residue-fraction", "residue_fraction", 1.5),
        ("--boundary-fraction", "boundary_fraction", -0.1),
        ("--d2h-ms", "d2h_ms", 0),
        ("--h2d-ms", "h2d_ms", math.nan),
        ("--duplex-slowdown", "duplex_slowdown", 0.7),
        ("--copy-share", "copy_share", 1.5),
        ("--shared-links", "shared_links", "triples"),
        ("--embedding-ms", "embedding_ms", (1, -1, 1)),
        ("--head-ms", "head_ms", (1, 1, math.nan)),
    ],
)
def test_a_bad_value_is_refused_with_option_value_and_expectation(option, field, value):
    with pytest.raises(BadInput) as caught:
        uniform_profile(replace(UniformOptions(), **{field: value}))
    bad = value[1] if option == "--embedding-ms" else value[2] if option == "--head-ms" else value
    shown = repr(bad) if isinstance(bad, str) else f"{bad:g}"
    assert str(caught.value).startswith(f"{option} is {shown}, expected ")


def test_a_transfer_too_slow_for_its_bytes_is_refused():
    with pytest.raises(BadInput, match="--d2h-ms asks for 70000 ms per 1000 bytes, expected "):
        uniform_profile(UniformOptions(activation_gb=1e-6, d2h_ms=70_000))


@pytest.mark.parametrize(("option", "field"), [("--d2h-ms", "d2h_ms"), ("--h2d-ms", "h2d_ms")])
def test_a_transfer_too_fast_for_a_profile_is_refused(option, field):
    fastest = uniform_profile(UniformOptions(activation_gb=0.009, d2h_ms=1e-6, h2d_ms=1e-6))
    assert parse(canonical(fastest), "fastest").machine.links[0].d2h_bytes_per_s == 9 * 10**15
    with pytest.raises(BadInput, match=rf"^{option} asks for 0\.0001 ms per 1000000000 bytes, expected .* 1 to 2\^53 "):
        uniform_profile(UniformOptions(**{field: 1e-4}))


def test_more_layers_than_a_profile_has_are_refused():
    most = uniform_profile(UniformOptions(devices=100, layers_per_device=99, head_ms=(1, 1, 1), head_parts=100))
    assert len(parse(canonical(most), "most").expanded_layers()) == 10_000
    with pytest.raises(
        BadInput, match=r"^--layers-per-device is 100 on 100 devices, .* 10001 layers, expected at most"
    ):
        uniform_profile(UniformOptions(devices=100, layers_per_device=100, embedding_ms=(1, 1, 1)))


def test_triples_and_ratios_are_read_as_people_write_them():
    assert parse_triple("1,0.5, 2", "--head-ms") == (1, 0.5, 2)
    assert parse_ratio("1/0.7", "--duplex-slowdown") == 1 / 0.7
    assert parse_ratio("1.5", "--duplex-slowdown") == 1.5
    for text in ("1,2", "1,2,x", ""):
        with pytest.raises(BadInput, match=r"--head-ms is .* expected three numbers"):
            parse_triple(text, "--head-ms")
    for text in ("1/0", "fast", "1/"):
        with pytest.raises(BadInput, match=r"--duplex-slowdown is .* expected a number"):
            parse_ratio(text, "--duplex-slowdown")
