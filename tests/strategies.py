"""Random planning problems."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from optpipe_compiler.model.problem import Freedom, Problem, Stage, busy_ns
from tests.instances import problem


@st.composite
def problems(
    draw: st.DrawFn, *, devices: int = 3, stages: int = 4, microbatches: int = 4, least: int = 1, ticks: int = 9
) -> Problem:
    """Uneven stages on up to `devices` devices, with caps from very tight to roomy."""
    count = draw(st.integers(1, devices))
    per_device = draw(st.integers(1, max(1, stages // count)))
    placement = draw(st.sampled_from(["loop", "v"]))
    base = problem(count, draw(st.integers(1, microbatches)), 1, per_device=per_device, placement=placement)
    uneven = tuple(_stage(draw, stage, least, ticks) for stage in base.stages)
    largest = [max(uneven[s].saved for s in base.stages_of(d)) for d in range(count)]
    freedom = Freedom(*(draw(st.booleans()) for _ in range(3)))
    links = draw(st.sampled_from([(None,) * count, (0,) * count, tuple(range(count))]))
    return replace(
        base,
        stages=uneven,
        freedom=freedom,
        link_of=links,
        budget=tuple(draw(st.integers(size, 5 * size + 6)) for size in largest),
        host_budget=draw(st.one_of(st.none(), st.integers(0, 3 * sum(largest)))),
        hosts=draw(_hosts(largest)),
    )


@st.composite
def _hosts(draw: st.DrawFn, largest: list[int]) -> tuple[tuple[tuple[int, ...], int], ...]:
    """None, or devices in a row on two hosts, of which one may have no limit."""
    cut = draw(st.integers(0, len(largest)))
    groups = [tuple(range(cut)), tuple(range(cut, len(largest)))] if draw(st.booleans()) else []
    limited = [group for group in groups if group and draw(st.integers(0, 3))]
    return tuple((group, draw(st.integers(0, 3 * sum(largest[d] for d in group)))) for group in limited)


def _stage(draw: st.DrawFn, stage: Stage, least: int, ticks: int) -> Stage:
    def time() -> int:
        return draw(st.integers(least, ticks))

    offload, reload = time(), time()
    longer = st.sampled_from([0, 0, 1, ticks // 2])
    saved, captured, small = draw(st.integers(1, 6)), draw(st.integers(0, 2)), st.integers(0, 2)
    lag = st.integers(0, 3)
    share = draw(st.sampled_from([0, 0, 500, 1000]))
    return replace(
        stage,
        forward=time(),
        backward_input=time(),
        backward_weight=time(),
        backward=draw(st.integers(least, 2 * ticks)),
        recompute=time(),
        offload=offload + draw(longer),
        reload=reload + draw(longer),
        offload_alone=offload,
        reload_alone=reload,
        offload_busy=busy_ns(offload, share),
        reload_busy=busy_ns(reload, share),
        send_activation=draw(lag) if stage.send_activation else 0,
        send_gradient=draw(lag) if stage.send_gradient else 0,
        saved=saved,
        captured=captured,
        residue=draw(st.integers(captured, saved + captured)),
        checkpoint=draw(st.integers(0, saved)),
        forward_extra=draw(small),
        backward_input_extra=draw(small),
        backward_weight_extra=draw(small),
        backward_extra=draw(small),
        staying=draw(st.one_of(st.just(0), st.integers(0, saved))),
    )
