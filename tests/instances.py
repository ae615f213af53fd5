"""Small planning instances."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from optpipe_compiler.compiler import Options, Result, compile_schedule
from optpipe_compiler.costs.uniform import UniformOptions, uniform_profile
from optpipe_compiler.documents.files import canonical
from optpipe_compiler.documents.profile import P2P, Layer, Link, Machine, Profile
from optpipe_compiler.model.placement import stage_devices
from optpipe_compiler.model.problem import Freedom, Problem, Stage

ANYTHING = Freedom()

UNIT = Stage(
    device=0,
    forward=10,
    backward_input=10,
    backward_weight=10,
    backward=20,
    recompute=10,
    offload=12,
    reload=12,
    offload_alone=12,
    reload_alone=12,
    send_activation=1,
    send_gradient=1,
    saved=4,
    residue=2,
    captured=0,
    checkpoint=0,
    forward_extra=0,
    backward_input_extra=0,
    backward_weight_extra=0,
    backward_extra=0,
)


def problem(
    devices: int,
    microbatches: int,
    cap: int,
    *,
    per_device: int = 1,
    placement: str = "v",
    freedom: Freedom = ANYTHING,
    links: bool = True,
    **changes: int,
) -> Problem:
    """Equal stages; `cap` in units of memory per device (a stage's activation has 4).

    Transfers take as long while the other direction of their link is busy as alone, if not said otherwise.
    """
    places = stage_devices("linear" if per_device == 1 else placement, devices, per_device)
    alone = {f"{name}_alone": changes.get(name, getattr(UNIT, name)) for name in ("offload", "reload")}
    stage = replace(UNIT, **(alone | changes))
    return Problem(
        devices,
        microbatches,
        tuple(_placed(stage, index, places) for index in range(len(places))),
        tuple(device if links else None for device in range(devices)),
        (cap,) * devices,
        None,
        freedom,
    )


def _placed(stage: Stage, index: int, places: tuple[int, ...]) -> Stage:
    """The stage on its device; messages take time between different devices only."""
    here = places[index]
    sends = index + 1 < len(places) and places[index + 1] != here
    returns = index > 0 and places[index - 1] != here
    return replace(
        stage,
        device=here,
        send_activation=stage.send_activation if sends else 0,
        send_gradient=stage.send_gradient if returns else 0,
    )


def uniform(devices: int = 2, layers: int = 2, **options: object) -> Profile:
    """A profile of equal layers."""
    return uniform_profile(UniformOptions(devices=devices, layers_per_device=layers, **options))


QUICK: dict[str, object] = {"microbatches": 4, "time_limit_s": 0.2, "search": False, "reproducible": True}
KEPT: dict[tuple[str, str], Result] = {}
"""What `quick` has found for which profile and options."""


def quick(profile: Profile, mem_bytes: int, **options: object) -> Result:
    """Compile with heuristics alone; what has been asked before in this process is answered as it was then."""
    chosen = Options(mem_bytes=mem_bytes, **(QUICK | options))
    if not chosen.reproducible or chosen.seeds or chosen.keep:
        return compile_schedule(profile, chosen)
    question = (canonical(profile), repr(chosen))
    if question not in KEPT:
        KEPT[question] = compile_schedule(profile, chosen)
    return KEPT[question]


def anew(profile: Profile, mem_bytes: int, **options: object) -> Result:
    """Compile as `quick` does, whatever has been asked before."""
    return compile_schedule(profile, Options(mem_bytes=mem_bytes, **(QUICK | options)))


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Uneven layers with messages, residues, captured gradients and transient bytes, on two or three devices."""
    devices = draw(st.integers(2, 3))
    layers = [_layer(draw, index) for index in range(draw(st.integers(devices, 2 * devices + 1)))]
    link = Link(
        devices=draw(st.sampled_from([None, [0, 1]])),
        d2h_bytes_per_s=draw(st.integers(1, 20)) * 10**9,
        h2d_bytes_per_s=draw(st.integers(1, 20)) * 10**9,
        compute_permille=draw(st.sampled_from([0, 300, 1000])),
    )
    machine = Machine(
        devices=devices,
        p2p=[P2P(latency_ns=draw(st.integers(0, 30)), overhead_ns=draw(st.integers(0, 9)))],
        links=[link],
        op_overhead_ns=draw(st.integers(0, 5)),
    )
    return Profile(name="drawn", machine=machine, layers=layers)


def _layer(draw: st.DrawFn, index: int) -> Layer:
    saved = draw(st.integers(0, 900))
    captured = draw(st.integers(0, 200))
    time = st.integers(0, 300)
    size = st.integers(0, 60)
    return Layer(
        name=f"layer{index}",
        forward_ns=draw(time),
        backward_input_ns=draw(time),
        backward_weight_ns=draw(time),
        saved_bytes=saved,
        captured_bytes=captured,
        residue_bytes=draw(st.integers(captured, saved + captured)),
        checkpoint_bytes=draw(st.integers(0, saved)),
        output_bytes=draw(size),
        static_bytes=draw(size),
        forward_transient_bytes=draw(size),
        backward_input_transient_bytes=draw(size),
        backward_weight_transient_bytes=draw(size),
        backward_transient_bytes=draw(size),
    )
