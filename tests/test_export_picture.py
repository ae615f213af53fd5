"""The SVG: that every op is drawn in its lane, at its time, in its colour."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest
from small_schedules import Shape, build

from optpipe_compiler.view import svg
from optpipe_compiler.view.look import LOOKS

NAMESPACE = "{http://www.w3.org/2000/svg}"


def offload(stage, microbatch):
    return [("offload", 2 * stage, 2 * stage + 2)]


def bars(text):
    """The x and colour of every op's bar, by the first words of its title."""
    found = {}
    for rect in ET.fromstring(text).iter(f"{NAMESPACE}rect"):
        title = rect.find(f"{NAMESPACE}title")
        if title is not None:
            found[title.text.split(":")[0]] = float(rect.get("x")), rect.get("fill")
    return found


def test_equal_schedules_give_equal_bytes():
    assert svg.render(build(Shape((0, 1)))) == svg.render(build(Shape((0, 1))))


@pytest.mark.parametrize("ranges", [lambda stage, microbatch: [], offload])
def test_every_op_is_drawn_at_its_time_in_its_colour(ranges):
    schedule = build(Shape((0, 1, 1, 0), microbatches=3, ranges=ranges))
    found = bars(svg.render(schedule))
    scale = (svg.WIDTH - svg.LEFT - 10) / schedule.forecast.makespan_ns
    begin = min(min(times.start_ns) for times in schedule.forecast.times if times.start_ns)
    expected = {
        f"{op.name} stage {op.stage} microbatch {op.microbatch}": (start, LOOKS[op.name].colour)
        for times in schedule.forecast.times
        for op, start in zip(getattr(schedule.devices[times.device], times.lane), times.start_ns, strict=True)
        if op.name in LOOKS
    }
    assert {name: colour for name, (_, colour) in found.items()} == {name: one for name, (_, one) in expected.items()}
    for name, (start, _) in expected.items():
        assert found[name][0] == pytest.approx(svg.LEFT + (start - begin) * scale, abs=0.01)


def test_a_lane_without_ops_is_no_obstacle():
    schedule = build(Shape((0, 1)))
    assert [] in [times.start_ns for times in schedule.forecast.times]
    assert svg.render(schedule).count("<title>") == 12
