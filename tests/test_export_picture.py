"""The SVG: that every op is drawn in its lane, at its time, in its colour."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest
from small_schedules import Shape, build

from optpipe_compiler.documents.units import show_ns
from optpipe_compiler.forecast import HOLDERS, analyse
from optpipe_compiler.view import svg
from optpipe_compiler.view.look import LOOKS
from tests.instances import quick
from tests.report_cases import PROFILE, planned

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
    found = {name: bar for name, bar in found.items() if not name.startswith("idle")}
    scale = (svg.WIDTH - svg.LEFT - svg.RIGHT) / schedule.forecast.makespan_ns
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
    assert len([name for name in bars(svg.render(schedule)) if not name.startswith("idle")]) == 12


def words(text):
    return [element.text for element in ET.fromstring(text).iter(f"{NAMESPACE}text")]


def test_the_time_axis_has_units_and_the_bound_is_a_line_at_its_time():
    schedule = planned()
    text, forecast = svg.render(schedule), schedule.forecast
    assert [word for word in words(text) if word.endswith(" ms")][:3] == ["0 ms", "2 ms", "4 ms"]
    (label,) = (word for word in words(text) if word.startswith("proven bound"))
    assert label == f"proven bound {show_ns(forecast.lower_bound_ns)} ({forecast.bound})"
    scale = (svg.WIDTH - svg.LEFT - svg.RIGHT) / forecast.makespan_ns
    dashed = [line for line in ET.fromstring(text).iter(f"{NAMESPACE}line") if line.get("stroke-dasharray") == "5 4"]
    assert [float(line.get("x1")) for line in dashed] == pytest.approx(
        [svg.LEFT + forecast.lower_bound_ns * scale], abs=0.1
    )


def test_a_bound_on_one_devices_span_is_no_line():
    made = quick(PROFILE, 9 * 10**9, method="1f1b", objective="span").schedule
    assert not [word for word in words(svg.render(made)) if word.startswith("proven bound")]


def test_memory_is_stacked_by_holder_and_reaches_the_cap_where_the_forecast_does():
    schedule = planned()
    found, tree = analyse(schedule), ET.fromstring(svg.render(schedule))
    areas = [(area.find(f"{NAMESPACE}title").text, corners(area)) for area in tree.iter(f"{NAMESPACE}polygon")]
    caps = [float(line.get("y1")) for line in tree.iter(f"{NAMESPACE}line") if is_cap(line)]
    assert len(caps) == len(schedule.devices)
    assert {name for name, _ in areas} == {
        name for nth, name in enumerate(HOLDERS) if any(holds[nth] for stack in found.holders for _, holds in stack)
    }
    for curve, cap, base in zip(
        found.memory, caps, sorted({max(y for _, y in area) for _, area in areas}), strict=True
    ):
        tops = [min(y for _, y in area) for _, area in areas if max(y for _, y in area) == base]
        share = max(held for _, held in curve) / schedule.setup.cap_bytes
        assert (base - min(tops)) / (base - cap) == pytest.approx(share, abs=0.01)


def corners(area):
    return [tuple(map(float, corner.split(","))) for corner in area.get("points").split()]


def is_cap(line):
    """Whether a line is a cap, and not its sample in the legend."""
    return line.get("stroke-dasharray") == "4 3" and float(line.get("x1")) == svg.LEFT
