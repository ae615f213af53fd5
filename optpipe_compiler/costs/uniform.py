"""A profile from a handful of numbers: equal layers, given per device and microbatch as schedule playgrounds ask."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from msgspec import UNSET, structs

from optpipe_compiler.documents.profile import (
    LARGEST,
    MOST_LAYERS,
    P2P,
    Layer,
    Link,
    Machine,
    Profile,
    Sliceable,
    value_of,
)
from optpipe_compiler.documents.units import counted
from optpipe_compiler.errors import BadInput

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000
BYTES_PER_GB = 1_000_000_000

Triple = tuple[float, float, float]
"""F, I and W of one extra layer, in ms."""


@dataclass(frozen=True)
class UniformOptions:
    """What `optpipe profile uniform` asks for; the defaults are the unit costs of the zero-bubble papers (F = I = W).

    Times are in ms and sizes in GB (10^9 bytes), for one device's whole share of one microbatch. None of
    `backward_input_ms`, `backward_weight_ms` and `recompute_ms` means the forward time. `embedding_ms` and `head_ms`
    add first and last layers that hold no activation: as many as they have parts, equal ones, which share the given
    times.
    """

    devices: int = 4
    layers_per_device: int = 4
    forward_ms: float = 1.0
    backward_input_ms: float | None = None
    backward_weight_ms: float | None = None
    recompute_ms: float | None = None
    p2p_ms: float = 0.05
    activation_gb: float = 1.0
    residue_fraction: float = 0.5
    """Share of the activation that stays between backward_input and backward_weight."""
    boundary_fraction: float = 0.0
    """Share of a layer's activation that a recomputation which starts at this layer keeps."""
    d2h_ms: float = 1.0
    h2d_ms: float = 1.0
    static_gb: float = 0.0
    shared_links: Literal["pairs", "none"] = "none"
    """`pairs`: devices 2i and 2i + 1 share one host link; an odd last device has one of its own."""
    duplex_slowdown: float = 1.0
    """How much longer a transfer takes while the other direction of its link is busy."""
    copy_share: float = 0.0
    """Share of a transfer's time that is taken from the compute of its device."""
    embedding_ms: Triple | None = None
    head_ms: Triple | None = None
    embedding_parts: int = 1
    head_parts: int = 1
    device_times: tuple[float, ...] | None = None
    """By device, how long its ops take as a multiple of the times above; None: all alike."""
    sliceable: bool = False
    """Whether layers can run slice by slice of a sequence."""
    sequence_length: int = 32768
    """Tokens, where layers are sliceable."""
    attention_share: float = 0.0
    """Share of forward and input gradient that grows with the square of the tokens."""
    kv_fraction: float = 0.0
    """Share of the activation that later slices read: keys and values."""
    slice_overhead_ms: float = 0.0
    """Added to the forward, the input gradient and the weight gradient of every slice."""

    def halves_ms(self) -> tuple[float, float]:
        """Return the times of input and weight gradient."""
        given = self.backward_input_ms, self.backward_weight_ms
        first, second = (self.forward_ms if one is None else one for one in given)
        return first, second


def parse_triple(text: str, option: str) -> Triple:
    """Read `F,I,W` in ms; raise BadInput naming `option`."""
    try:
        forward, backward_input, backward_weight = (float(part) for part in text.split(","))
    except ValueError as error:
        raise BadInput(f"{option} is {text!r}, expected three numbers F,I,W in ms, such as 1,0,0.5") from error
    return forward, backward_input, backward_weight


def parse_ratio(text: str, option: str) -> float:
    """Read a number or a quotient such as `1/0.7`; raise BadInput naming `option`."""
    try:
        above, slash, below = text.partition("/")
        return float(above) / float(below) if slash else float(above)
    except (ValueError, ZeroDivisionError) as error:
        raise BadInput(f"{option} is {text!r}, expected a number or a quotient such as 1/0.7") from error


def uniform_profile(options: UniformOptions) -> Profile:
    """Return the profile of `devices` x `layers_per_device` equal layers; all its numbers are manual.

    A layer's time and bytes are the device's divided by `layers_per_device`, each rounded to the nearest ns or byte.
    Raise BadInput for a value that cannot be meant, naming the option, the value and what was expected.
    """
    _check(options)
    block = _block(options)
    layers = [block]
    if options.embedding_ms is not None:
        layers.insert(0, _extra("embedding", options.embedding_ms, options.embedding_parts, options.sliceable))
    if options.head_ms is not None:
        layers.append(_extra("head", options.head_ms, options.head_parts, options.sliceable))
    return Profile(
        name=f"uniform-{options.devices}x{options.layers_per_device}",
        sequence_length=options.sequence_length if options.sliceable else UNSET,
        machine=Machine(
            devices=options.devices,
            kind="uniform",
            time_permille=_permille(options),
            p2p=[P2P(latency_ns=_nearest(_exact(options.p2p_ms) * NS_PER_MS))],
            links=_links(options, value_of(block.saved_bytes) * options.layers_per_device),
        ),
        layers=layers,
    )


def parse_factors(text: str, option: str) -> tuple[float, ...]:
    """Read `1,1,1.5`; raise BadInput naming `option`."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise BadInput(f"{option} is {text!r}, expected a number for each device, such as 1,1,1.5") from error


def _permille(options: UniformOptions) -> list[int] | None:
    times = options.device_times
    if times is None:
        return None
    if len(times) != options.devices:
        raise BadInput(f"--device-times has {len(times)} numbers, expected one for each of {options.devices} devices")
    for one in times:
        _check_range("--device-times", one, 0.001, 1000)
    return [_nearest(_exact(one) * 1000) for one in times]


def _block(options: UniformOptions) -> Layer:
    def share_ns(ms: float) -> int:
        return _nearest(_exact(ms) * NS_PER_MS / options.layers_per_device)

    def share_bytes(gb: float, fraction: float = 1.0) -> int:
        return _nearest(_exact(gb) * _exact(fraction) * BYTES_PER_GB / options.layers_per_device)

    backward_input_ms, backward_weight_ms = options.halves_ms()
    return Layer(
        name="layer",
        count=options.devices * options.layers_per_device,
        forward_ns=share_ns(options.forward_ms),
        backward_input_ns=share_ns(backward_input_ms),
        backward_weight_ns=share_ns(backward_weight_ms),
        recompute_ns=None if options.recompute_ms is None else share_ns(options.recompute_ms),
        saved_bytes=share_bytes(options.activation_gb),
        residue_bytes=share_bytes(options.activation_gb, options.residue_fraction),
        checkpoint_bytes=share_bytes(options.activation_gb, options.boundary_fraction),
        static_bytes=share_bytes(options.static_gb),
        slices=_sliceable(options) if options.sliceable else None,
    )


def _sliceable(options: UniformOptions) -> Sliceable:
    share, count = _exact(options.attention_share), options.layers_per_device
    carry = math.floor(_exact(options.activation_gb) * _exact(options.kv_fraction) * BYTES_PER_GB / count)
    overhead = _nearest(_exact(options.slice_overhead_ms) * NS_PER_MS / count)
    return Sliceable(
        forward_attention_ns=math.floor(_exact(options.forward_ms) * share * NS_PER_MS / count),
        backward_input_attention_ns=math.floor(_exact(options.halves_ms()[0]) * share * NS_PER_MS / count),
        forward_overhead_ns=overhead,
        backward_input_overhead_ns=overhead,
        backward_weight_overhead_ns=overhead,
        carry_bytes=carry,
    )


def _extra(name: str, triple: Triple, parts: int, sliceable: bool) -> Layer:
    forward, backward_input, backward_weight = (_nearest(_exact(ms) * NS_PER_MS / parts) for ms in triple)
    return Layer(
        name=name if parts == 1 else f"{name}-part",
        count=parts,
        forward_ns=forward,
        backward_input_ns=backward_input,
        backward_weight_ns=backward_weight,
        saved_bytes=0,
        slices=Sliceable() if sliceable else None,
    )


def _links(options: UniformOptions, device_bytes: int) -> list[Link]:
    """Return the host links; `device_bytes` is what one device's layers save together, after their rounding."""
    slow = _exact(options.duplex_slowdown)
    d2h, h2d = _exact(options.d2h_ms), _exact(options.h2d_ms)
    link = Link(
        d2h_bytes_per_s=_bandwidth("--d2h-ms", d2h, device_bytes),
        h2d_bytes_per_s=_bandwidth("--h2d-ms", h2d, device_bytes),
        duplex_d2h_bytes_per_s=None if slow == 1 else _bandwidth("--d2h-ms", d2h * slow, device_bytes),
        duplex_h2d_bytes_per_s=None if slow == 1 else _bandwidth("--h2d-ms", h2d * slow, device_bytes),
        compute_permille=_nearest(1000 * _exact(options.copy_share)),
    )
    if options.shared_links == "none":
        return [link]
    pairs = (list(range(first, min(first + 2, options.devices))) for first in range(0, options.devices, 2))
    return [structs.replace(link, devices=pair) for pair in pairs]


def _bandwidth(option: str, ms: Fraction, size: int) -> int:
    """Return the whole bytes per second at which `size` bytes take `ms`, to 1 ns or one part in a million.

    With t in ns the nearest bandwidth b is off by at most 1/2, hence the time by t^2 / (2 * 10^9 * size) ns: below
    1 ns for every transfer at 10^9 bytes and up to a second. Only absurdly slow transfers of few bytes are refused.
    """
    wanted = ms * NS_PER_MS
    bandwidth = _nearest(size * NS_PER_S / wanted)
    tolerated = max(Fraction(1), wanted / 10**6)
    if not 1 <= bandwidth <= LARGEST or abs(Fraction(size * NS_PER_S, bandwidth) - wanted) > tolerated:
        raise BadInput(
            f"{option} asks for {float(ms):g} ms per {size} bytes, expected a time that a bandwidth of 1 to 2^53 whole "
            "bytes per second can give"
        )
    return bandwidth


def _exact(value: float) -> Fraction:
    """Return the decimal number that a person wrote: 0.1 is one tenth, not the nearest binary fraction."""
    return Fraction(str(value))


def _nearest(value: Fraction) -> int:
    """Round half up, as the schedule file rounds transfer times."""
    return math.floor(value + Fraction(1, 2))


def _check(options: UniformOptions) -> None:
    counts = {
        "--devices": options.devices,
        "--layers-per-device": options.layers_per_device,
        "--embedding-parts": options.embedding_parts,
        "--head-parts": options.head_parts,
    }
    for option, count in counts.items():
        if not 1 <= count <= MOST_LAYERS:
            raise BadInput(f"{option} is {count}, expected 1 to {MOST_LAYERS}")
    layers = options.devices * options.layers_per_device
    for name, parts, times in (
        ("embedding", options.embedding_parts, options.embedding_ms),
        ("head", options.head_parts, options.head_ms),
    ):
        if parts > 1 and times is None:
            raise BadInput(f"--{name}-parts is {parts} without --{name}-ms, expected the times that the parts share")
        layers += 0 if times is None else parts
    if layers > MOST_LAYERS:
        raise BadInput(
            f"--layers-per-device is {options.layers_per_device} on {counted(options.devices, 'device')}, with "
            f"embedding and head {counted(layers, 'layer')}, expected at most {MOST_LAYERS}"
        )
    _check_range("--forward-ms", options.forward_ms, options.layers_per_device / NS_PER_MS, 1e9)
    for option, value in _times(options):
        _check_range(option, value, 0, 1e9)
    _check_range("--activation-gb", options.activation_gb, options.layers_per_device / BYTES_PER_GB, 1e6)
    _check_range("--static-gb", options.static_gb, 0, 1e6)
    _check_range("--residue-fraction", options.residue_fraction, 0, 1)
    _check_range("--boundary-fraction", options.boundary_fraction, 0, 1)
    _check_slices(options)
    for option, value in (("--d2h-ms", options.d2h_ms), ("--h2d-ms", options.h2d_ms)):
        _check_range(option, value, 1 / NS_PER_MS, 1e9)
    _check_range("--duplex-slowdown", options.duplex_slowdown, 1, 1000)
    _check_range("--copy-share", options.copy_share, 0, 1)
    if options.shared_links not in ("pairs", "none"):
        raise BadInput(f"--shared-links is {options.shared_links!r}, expected 'pairs' or 'none'")


def _check_slices(options: UniformOptions) -> None:
    for name in ("sequence_length", "attention_share", "kv_fraction", "slice_overhead_ms"):
        value = getattr(options, name)
        if value != getattr(UniformOptions, name) and not options.sliceable:
            raise BadInput(f"--{name.replace('_', '-')} is {value:.15g} without --sliceable, expected both")
    _check_range("--attention-share", options.attention_share, 0, 1)
    _check_range("--kv-fraction", options.kv_fraction, 0, 1)
    _check_range("--slice-overhead-ms", options.slice_overhead_ms, 0, 1e9)
    if not 1 <= options.sequence_length <= 2**30:
        raise BadInput(f"--sequence-length is {options.sequence_length}, expected 1 to {2**30}")
    if options.kv_fraction + options.boundary_fraction > 1:
        together = f"{options.kv_fraction:g} beside a --boundary-fraction of {options.boundary_fraction:g}"
        raise BadInput(f"--kv-fraction is {together}, expected at most 1 together")


def _times(options: UniformOptions) -> list[tuple[str, float]]:
    """Return the times that may be 0, with the option that set each."""
    given = [
        ("--backward-input-ms", options.backward_input_ms),
        ("--backward-weight-ms", options.backward_weight_ms),
        ("--recompute-ms", options.recompute_ms),
        ("--p2p-ms", options.p2p_ms),
    ]
    times = [(option, value) for option, value in given if value is not None]
    for option, triple in (("--embedding-ms", options.embedding_ms), ("--head-ms", options.head_ms)):
        times.extend((option, value) for value in triple or ())
    return times


def _check_range(option: str, value: float, low: float, high: float) -> None:
    """Refuse what is outside [low, high]; NaN is outside everything."""
    if not low <= value <= high:
        raise BadInput(f"{option} is {value:g}, expected {low:g} to {high:g}")
