"""The report's page in a browser: it loads without an error, and pointing, zooming and keys do what they say.

Each test opens the page in headless Chromium and runs a script in it that sends events as a person would cause them;
what the page then shows comes back. Typing, fingers and scrolling are real input. tests/browser.py finds the browser.
"""

from __future__ import annotations

from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from optpipe_compiler.documents import ir
from optpipe_compiler.forecast import HOLDERS, Cause, analyse
from optpipe_compiler.view.report import render
from optpipe_compiler.view.report.trace import Measured
from tests.instances import quick, uniform
from tests.report_cases import GB, planned, published

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Page

SCRIPT = """(() => {
const seen = {};
const send = (type, x, y, more = {}) => {
  const box = canvas.getBoundingClientRect(), kind = type === "wheel" ? WheelEvent : PointerEvent;
  const place = { clientX: box.left + x, clientY: box.top + y };
  canvas.dispatchEvent(new kind(type, { ...place, bubbles: true, cancelable: true, ...more }));
};
const click = (x, y) => { send("pointerdown", x, y); send("pointerup", x, y); send("pointerleave", 0, 0); };
const press = (key) => document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const laneOf = (chart, device, name) => charts[chart].lanes.find((one) => one.device === device && one.lane === name);
const at = (op) => {
  const row = rowOf(op.lane);
  return [(toX(beginOf(op)) + toX(endOf(op))) / 2, rowY(row) + row.height / 2];
};
const range = () => { draw(); return document.getElementById("range").textContent; };
const image = (x, y, width, height) => {
  draw();
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  return [...copy.getImageData(x, y, width, height).data];
};
const pixel = (x, y) => image(x * devicePixelRatio, y * devicePixelRatio, 1, 1).join();
const rgba = (colour) => [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16)).join() + ",255";
const painted = (colour) => {
  const data = image(0, 0, canvas.width, canvas.height), wanted = rgba(colour);
  let count = 0;
  for (let i = 0; i < data.length; i += 4) count += data.slice(i, i + 4).join() === wanted;
  return count;
};
%s
return seen;
})()"""


@pytest.fixture(scope="module")
def schedule():
    """Two devices with two stages each, some of whose activations are offloaded."""
    return planned()


@pytest.fixture
def opened(browser, tmp_path):
    """Open a page in a window of its own; fails if it says or asks for anything."""

    @contextmanager
    def open_page(
        page: str, *, dark: bool = False, size: str = "1400,900", hash: str = "", **more: Any
    ) -> Iterator[Page]:
        path = tmp_path / "page.html"
        path.write_text(page)
        width, height = map(int, size.split(","))
        scheme = "dark" if dark else "light"
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, **more)
        window, wrong = context.new_page(), []
        window.on("console", lambda message: wrong.append(message.text))
        window.on("pageerror", lambda error: wrong.append(str(error)))
        window.on(
            "request", lambda request: None if request.url.startswith(path.as_uri()) else wrong.append(request.url)
        )
        window.goto(path.as_uri() + hash)
        yield window
        context.close()
        assert wrong == []

    return open_page


@pytest.fixture
def look(opened):
    """Open a page, run a script in it and return what it put into `seen`."""

    def open_page(page: str, script: str, **options: Any) -> dict:
        with opened(page, **options) as window:
            return window.evaluate(SCRIPT % script)

    return open_page


def test_an_op_has_the_names_of_its_layers_where_they_are_known(schedule, look):
    names = ["embedding", *(f"block.<{index}>" for index in range(schedule.setup.layers - 2)), "head.0"]
    script = """
        const op = { chart: charts[0], lane: laneOf(0, 1, "compute"), index: 0 };
        seen.said = [describe(op)[1].textContent, namesOf(0, 2), namesOf(data.names.length - 1, data.names.length)];
    """
    assert look(render(schedule, names=names), script)["said"] == [
        "1F0: forward; device 1, compute; layer 1 (block.<0>)",
        " (embedding to block.<0>)",
        " (head.0)",
    ]


def test_pointing_at_an_op_says_what_it_is_and_why_it_is_not_earlier_and_a_click_pins_it(schedule, look):
    seen = look(
        render(schedule),
        """
        const op = { chart: charts[0], lane: laneOf(0, 1, "compute"), index: 0 };
        seen.before = tip.hidden;
        send("pointermove", ...at(op));
        seen.tip = tip.textContent;
        seen.card = card.textContent;
        send("pointerdown", ...at(op));
        send("pointerup", ...at(op));
        send("pointerleave", 0, 0);
        seen.after = tip.hidden;
        seen.pinned = card.textContent;
        press("c");
        seen.cause = card.textContent;
        press("Escape");
        seen.unpinned = card.textContent;
        """,
    )
    assert seen["before"] is seen["after"] is True
    assert seen["tip"].startswith("Fforward, stage 1, microbatch 0")
    assert "1F0: forward; device 1, compute; layer 1" in seen["tip"]
    assert (
        "Its input has just arrived from forward, stage 0, microbatch 0, device 0, 50 us after its end." in seen["tip"]
    )
    assert "begin550 us" in seen["tip"]
    assert "Point at an op" in seen["card"]
    assert seen["pinned"] == seen["tip"] + "follow microbatch 0"
    assert seen["cause"].startswith("Fforward, stage 0, microbatch 0")
    assert "It starts when the schedule begins." in seen["cause"]
    assert seen["unpinned"] == seen["card"]


def test_every_op_can_be_pointed_at_and_says_its_own_times(schedule, look):
    seen = look(
        render(schedule),
        """
        seen.found = charts[0].lanes.flatMap((lane) => [...lane.kind].map((_, index) => {
          const op = { chart: charts[0], lane, index };
          point(...at(op));
          return [same(view.hover, op), nameOf(op), tip.textContent.includes(`begin${showTime(beginOf(op), 6)}`)];
        }));
        """,
    )
    ops = sum(not isinstance(op, ir.MessageOp) for d in schedule.devices for op in (*d.compute, *d.d2h, *d.h2d))
    assert len(seen["found"]) == ops
    assert [entry for entry in seen["found"] if not (entry[0] and entry[2])] == []


def test_wheel_drag_keys_and_buttons_zoom_and_pan(schedule, look):
    seen = look(
        render(schedule),
        """
        const times = () => [view.begin, view.end];
        seen.all = times(); seen.words = range();
        const x = 600, fixed = toTime(x);
        send("wheel", x, 100, { deltaY: -400 });
        seen.zoomed = times(); seen.still = toTime(x) - fixed;
        seen.zoomedWords = range();
        send("pointerdown", x, 100); send("pointermove", x - 200, 100, { buttons: 1 }); send("pointerup", x - 200, 100);
        seen.dragged = times(); seen.pinnedByDrag = view.pinned;
        press("ArrowLeft"); seen.panned = times();
        press("-"); seen.out = times();
        press("0"); seen.fit = times();
        document.getElementById("in").click(); seen.button = times();
        canvas.dispatchEvent(new MouseEvent("dblclick")); seen.double = times();
        """,
    )
    makespan = schedule.forecast.makespan_ns
    span = {name: value[1] - value[0] for name, value in seen.items() if isinstance(value, list)}
    assert seen["all"][0] <= 0 < makespan <= seen["all"][1]
    assert span["zoomed"] < 0.6 * span["all"]
    assert abs(seen["still"]) < 1
    assert seen["words"] != seen["zoomedWords"]
    assert seen["dragged"][0] > seen["zoomed"][0]
    assert span["dragged"] == pytest.approx(span["zoomed"]) == pytest.approx(span["panned"])
    assert seen["pinnedByDrag"] is None
    assert seen["panned"][0] < seen["dragged"][0]
    assert span["out"] > span["panned"]
    assert seen["fit"] == seen["all"] == seen["double"]
    assert span["button"] < span["all"]


def test_keys_walk_along_a_lane_and_from_lane_to_lane(schedule, look):
    seen = look(
        render(schedule),
        """
        const where = () => [view.pinned.lane.device, view.pinned.lane.lane, view.pinned.index];
        press("Enter"); seen.first = where();
        press("n"); press("n"); seen.third = where();
        press("p"); seen.second = where();
        press("j"); seen.below = where();
        press("k"); seen.above = where()[1];
        for (let i = 0; i < 500; i++) press("n");
        seen.last = where(); seen.count = view.pinned.lane.count; seen.visible = visible(view.pinned);
        """,
    )
    assert seen["first"] == [0, "compute", 0]
    assert seen["third"] == [0, "compute", 2]
    assert seen["second"] == [0, "compute", 1]
    assert seen["below"][:2] == [0, "d2h"]
    assert seen["above"] == "compute"
    assert seen["last"] == [0, "compute", seen["count"] - 1]
    assert seen["visible"]


def test_ops_are_painted_where_they_are_and_idle_time_is_low_and_in_the_colour_of_its_cause(schedule, look):
    seen = look(
        render(schedule),
        """
        const lane = laneOf(0, 1, "compute"), op = { chart: charts[0], lane, index: 0 }, [, y] = at(op);
        seen.op = pixel(toX(beginOf(op)) + 3, y - 8);
        seen.fill = styleOf("F", 0).fill.match(/\\d+/g).join() + ",255";
        const x = toX(beginOf(op) / 2), row = rowOf(lane);
        seen.idle = [pixel(x, y - 8), pixel(x, rowY(row) + row.height - 1)];
        seen.expected = [rgba(colours.lane), rgba(data.causes.fill.colour)];
        point(x, y);
        seen.tip = tip.textContent;
        """,
    )
    assert seen["op"] == seen["fill"]
    assert seen["idle"] == seen["expected"]
    assert seen["tip"].startswith("idle for 550 usdevice 1, 0 ns to 550 us")
    assert "fill: the pipeline has not come this far." in seen["tip"]


def test_what_kept_an_op_waiting_is_connected_with_it_by_a_line(schedule, look):
    seen = look(
        render(schedule),
        """
        const op = { chart: charts[0], lane: laneOf(0, 1, "compute"), index: 0 };
        seen.before = painted(colours.critical);
        pin(op);
        seen.pinned = painted(colours.critical);
        """,
    )
    assert seen["before"] == 0
    assert seen["pinned"] > 100


def test_memory_rows_can_be_hidden_and_say_how_much_is_held(schedule, look):
    seen = look(
        render(schedule),
        """
        const row = rows.find((one) => one.type === "memory" && one.device === 0);
        point(toX(charts[0].makespan_ns / 2), rowY(row) + row.height / 2);
        const line = (row) => [...row.children].slice(0, 2).map((cell) => cell.textContent).join(" ");
        seen.tip = [tip.querySelector("p").textContent, ...[...tip.querySelectorAll("tr")].map(line)];
        seen.before = rows.filter((one) => one.type === "memory").length;
        document.getElementById("memory").click();
        seen.after = rows.filter((one) => one.type === "memory").length;
        """,
    )
    found, half = analyse(schedule), schedule.forecast.makespan_ns / 2
    held = [size for time, size in found.memory[0] if time <= half][-1]
    parts = [holds for time, holds in found.holders[0] if time <= half][-1]
    assert seen["tip"][0] == f"{held / 1e6:g} MB on device 0, {100 * held / schedule.setup.cap_bytes:.1f}% of the cap"
    shown = {name: size for name, size in zip(HOLDERS, parts, strict=True) if size}
    assert seen["tip"][1:] == [f"{name} {size / 1e6:g} MB" for name, size in reversed(shown.items())]
    assert len(shown) > 1
    assert (seen["before"], seen["after"]) == (3, 0)  # two devices and the host


def test_published_and_measured_are_on_the_same_axis_also_in_the_dark(schedule, look):
    measured = {"forward:0:0": (1000, 700_000), "backward_input:0:0": (9_000_000, 20_000_000)}
    seen = look(
        render(schedule, [published("gpipe")], Measured(measured)),
        """
        seen.titles = rows.filter((row) => row.type === "title").map((row) => row.chart.title);
        seen.longest = longest;
        const row = rows.find((one) => one.type === "measured");
        point(toX(400000), rowY(row) + row.height / 2);
        seen.tip = tip.textContent;
        seen.paper = pixel(view.width - 3, 60);
        """,
        dark=True,
    )
    assert [title.split(" (")[0] for title in seen["titles"]] == ["this schedule", "baseline"]
    assert seen["longest"] == 20_000_000
    assert "measured1 us to 700 us (699 us, 1.40 x forecast)" in seen["tip"]
    assert max(map(int, seen["paper"].split(",")[:3])) < 60


def test_a_cause_that_is_clicked_lists_its_gaps_and_keys_lead_through_them_to_what_is_to_blame(opened):
    made = published("interleaved-zb")
    found = analyse(made)
    cause = next(cause for cause, _ in found.shares() if cause not in (Cause.FILL, Cause.DRAIN))
    mine = sorted((gap for gap in found.gaps if gap.cause is cause), key=lambda gap: -gap.length_ns)
    with opened(render(made)) as window:
        window.click(f"button[data-cause={cause.value}]")
        card = window.inner_text("#card")
        assert card.startswith(cause.value)
        assert len(mine) == 1
        assert ": 1 gap, " in card
        window.click(f"button[data-cause={Cause.FILL.value}]")
        assert ": 4 gaps, " in window.inner_text("#card")
        window.click(f"button[data-cause={cause.value}]")
        pressed = window.get_attribute(f"button[data-cause={cause.value}]", "aria-pressed")
        window.keyboard.press("g")
        length = window.evaluate("showTime(lengthOf(view.gap))")
        first = window.inner_text("#card")
        window.keyboard.press("c")
        blamed = window.evaluate("view.pinned && idOf(view.pinned)")
        for _ in range(2):
            window.keyboard.press("Escape")
        assert window.evaluate("[view.cause, view.gap, view.pinned]") == [None, None, None]
    assert pressed == "true"
    assert first.startswith(f"idle for {length}")
    assert mine[0].length_ns == max(gap.length_ns for gap in mine)
    assert blamed in {found.items[gap.root].op.id for gap in mine if gap.length_ns == mine[0].length_ns}


def test_a_click_on_idle_time_keeps_its_cause_in_the_card(schedule, look):
    seen = look(
        render(schedule),
        """
        const row = rowOf(laneOf(0, 1, "compute"));
        click(toX(100000), rowY(row) + row.height / 2);
        seen.card = card.textContent;
        press("Escape");
        seen.after = card.textContent;
        """,
    )
    assert seen["card"].startswith("idle for 550 us")
    assert "Point at an op" in seen["after"]


def test_a_microbatch_is_followed_from_device_to_device_and_the_others_step_back(schedule, opened):
    with opened(render(schedule)) as window:
        other = "{ chart: charts[0], lane: charts[0].lanes[0], index: 1 }"
        where = f"const op = {other}, [x, y] = at(op); seen.colour = pixel(toX(beginOf(op)) + 3, y - 8);"
        before = window.evaluate(SCRIPT % (where + "seen.ink = painted(colours.ink);"))
        window.fill("#microbatch", "3")
        after = window.evaluate(SCRIPT % (where + "seen.ink = painted(colours.ink); seen.number = microbatchOf(op);"))
        assert window.evaluate("view.microbatch") == 3 != after["number"]
        assert after["colour"] != before["colour"]
        assert after["ink"] > before["ink"] + 200
        window.fill("#microbatch", "99")
        assert window.evaluate("view.microbatch") is None
        assert window.evaluate(SCRIPT % where)["colour"] == before["colour"]


def test_a_range_of_the_time_axis_has_its_busy_and_idle_sums(schedule, look):
    seen = look(
        render(schedule),
        """
        const [begin, end] = [2e6, 7e6];
        send("pointerdown", toX(begin), 10); send("pointermove", toX(end), 10, { buttons: 1 });
        seen.card = card.textContent;
        select(begin, end);
        seen.sums = sumsOf(charts[0], view.range);
        press("Escape");
        seen.after = view.range;
        """,
    )
    found = analyse(schedule)

    def inside(spans) -> int:
        return sum(max(0, min(one.end_ns, 7_000_000) - max(one.begin_ns, 2_000_000)) for one in spans)

    for device, sums in enumerate(seen["sums"]["devices"]):
        assert sums == {"busy": inside(found.lane(device, "compute")), "idle": inside(found.gaps_of(device))}
        assert sums["busy"] + sums["idle"] == 5_000_000
    assert sum(seen["sums"]["kinds"].values()) == sum(sums["busy"] for sums in seen["sums"]["devices"])
    assert sum(seen["sums"]["causes"].values()) == sum(sums["idle"] for sums in seen["sums"]["devices"])
    assert seen["card"].startswith(("5 ms selected", "4.9", "5.0"))
    assert seen["after"] is None


def test_ops_are_found_by_their_names(schedule, opened):
    stages = len(schedule.stages)
    with opened(render(schedule)) as window:
        window.keyboard.press("/")
        window.keyboard.type("2f1")
        window.keyboard.press("Enter")
        assert window.evaluate("idOf(view.pinned)") == "forward:2:1"
        assert window.evaluate("location.hash") == "#forward:2:1"
        window.fill("#search", "F1")
        found = []
        for _ in range(stages):
            window.press("#search", "Enter")
            found.append(window.evaluate("idOf(view.pinned)"))
        assert sorted(found) == [f"forward:{stage}:1" for stage in range(stages)]
        assert window.inner_text("#found") == f"{stages} of {stages}"
        window.fill("#search", "9F9")
        assert window.inner_text("#found") == "no such op"
        assert window.evaluate("opsNamed('forward:2:1').length") == 1


def test_without_a_slice_an_op_is_found_in_all_of_its_slices(look):
    sliceable = uniform(2, 2, d2h_ms=0.3, h2d_ms=0.3, sliceable=True, sequence_length=8)
    sliced = quick(sliceable, 3 * GB, microbatches=11, slices=2, method="seq1f1b").schedule
    found = look(
        render(sliced),
        """
        for (const name of ["1F0", "F0", "1F0.1", "F0.1", "1f1", "forward:1:0.1", "1F"]) {
            seen[name] = opsNamed(name).map(idOf);
        }
        """,
        hash="#1F0",
    )
    both = ["forward:1:0.0", "forward:1:0.1"]
    every = ["forward:0:0.0", "forward:0:0.1", *both]
    assert found["1F0"] == both
    assert sorted(found["F0"]) == every
    assert (found["1F0.1"], sorted(found["F0.1"])) == (both[1:], every[1::2])
    assert found["1f1"] == ["forward:1:1.0", "forward:1:1.1"]  # and none of microbatch 10
    assert (found["forward:1:0.1"], found["1F"]) == (both[1:], [])


@pytest.mark.parametrize("dark", [False, True])
def test_later_stages_differ_more_from_the_paper_than_the_first_so_that_none_looks_idle(schedule, look, dark):
    seen = look(
        render(schedule),
        """
        seen.lane = colours.lane;
        seen.fills = Object.keys(KINDS).map((letter) => [0, 1, 2, 3].map((nth) => styleOf(letter, nth).fill));
        """,
        dark=dark,
    )
    lane = luminance([int(seen["lane"][at : at + 2], 16) for at in (1, 3, 5)])
    for fills in seen["fills"]:
        away = [luminance(map(int, fill[4:-1].split(","))) - lane for fill in fills]
        assert all(abs(more) > abs(less) and more * less > 0 for less, more in pairwise(away))


def luminance(rgb) -> float:
    red, green, blue = ((value / 255) ** 2.2 for value in rgb)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


SLOWER = ("gis-h-offload", "interleaved-1f1b-recompute")


def test_the_baseline_below_is_chosen_and_this_schedule_stays_on_top(schedule, opened):
    with opened(render(schedule, [published(name) for name in SLOWER])) as window:
        titles = "rows.filter((row) => row.type === 'title').map((row) => row.chart.name)"
        assert window.evaluate(titles) == ["windows", SLOWER[0]]
        window.click("button[data-chart='2']")
        assert window.evaluate(titles) == ["windows", SLOWER[1]]
        assert window.input_value("#baseline") == "2"
        window.select_option("#baseline", "0")
        assert window.evaluate(titles) == ["windows"]


PHONE = {"size": "390,844", "has_touch": True, "is_mobile": True, "device_scale_factor": 2}


def test_on_a_phone_a_tap_keeps_an_op_two_fingers_zoom_and_one_scrolls(schedule, opened):
    with opened(render(schedule), **PHONE) as window:
        window.locator("#frame").scroll_into_view_if_needed()
        box = window.locator("#canvas").bounding_box()
        x, y = window.evaluate(SCRIPT % "seen.at = at({ chart: charts[0], lane: charts[0].lanes[0], index: 0 });")["at"]
        window.touchscreen.tap(box["x"] + x, box["y"] + y)
        assert window.evaluate("idOf(view.pinned)") == "forward:0:0"
        assert window.evaluate("tip.hidden")
        fingers = window.context.new_cdp_session(window)

        def touch(kind: str, *points: tuple[float, float]) -> None:
            places = [{"x": box["x"] + x, "y": box["y"] + y, "id": nth} for nth, (x, y) in enumerate(points)]
            fingers.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": places})

        middle = box["height"] / 2
        span = window.evaluate("view.end - view.begin")
        held = window.evaluate("[toTime(180), toTime(240)]")
        touch("touchStart", (180, middle))
        touch("touchStart", (180, middle), (240, middle))
        for step in (1, 2, 3):
            touch("touchMove", (180 - 20 * step, middle), (240 + 20 * step, middle))
        window.wait_for_timeout(100)  # moves are handed on once per frame
        zoomed = window.evaluate("view.end - view.begin")
        assert zoomed == pytest.approx(span / 3, rel=0.02)
        assert window.evaluate("[toTime(120), toTime(300)]") == pytest.approx(held, rel=0.02)
        touch("touchEnd")
        assert window.evaluate("visualViewport.scale") == 1

        before = window.evaluate("scrollY + scroller.scrollTop")
        touch("touchStart", (200, middle))
        for step in range(1, 11):
            touch("touchMove", (200, middle - 15 * step))
            window.wait_for_timeout(16)
        touch("touchEnd")
        window.wait_for_timeout(100)
        assert window.evaluate("scrollY + scroller.scrollTop") > before + 50
        assert window.evaluate("view.end - view.begin") == pytest.approx(zoomed)


def test_many_ops_are_merged_where_they_are_narrower_than_a_pixel(look):
    made = quick(uniform(2, 1), 2 * GB, microbatches=600, method="1f1b").schedule
    seen = look(
        render(made),
        """
        const lane = laneOf(0, 0, "compute"), row = rowOf(lane);
        let drawn = 0;
        const paint = CanvasRenderingContext2D.prototype.fillRect;
        CanvasRenderingContext2D.prototype.fillRect = function (...box) { drawn++; return paint.apply(this, box); };
        drawOps(row, lane, null);
        seen.all = drawn; seen.count = lane.count; seen.width = view.width;
        drawn = 0;
        draw();
        seen.whole = drawn;
        show(0, longest / 100);
        drawn = 0;
        drawOps(row, lane, null);
        seen.zoomed = drawn;
        """,
    )
    assert seen["count"] == 1200
    assert seen["all"] < 2.5 * seen["width"]
    assert seen["whole"] < 10 * seen["width"]  # two lanes and two memory rows, of two holders each
    assert 10 <= seen["zoomed"] <= 20


def test_a_page_without_any_time_opens(look):
    from optpipe_compiler.documents.profile import Layer, Machine, Profile

    layer = Layer(name="free", count=2, forward_ns=0, backward_input_ns=0, backward_weight_ns=0, saved_bytes=1)
    costs = Profile(name="free", machine=Machine(devices=2), layers=[layer])
    seen = look(
        render(quick(costs, GB, method="gpipe").schedule), 'press("Enter"); press("j"); seen.card = card.textContent;'
    )
    assert "microbatch" in seen["card"]


def test_times_that_differ_in_view_are_written_so_and_no_digit_before_the_point_is_lost(look):
    long = quick(uniform(2, 1, forward_ms=6e6), 100 * GB, method="gpipe").schedule
    seen = look(
        render(long),
        """
        seen.whole = [showTime(85_268e9), showBytes(12_345e9)];
        seen.written = [];
        const write = pen.fillText;
        pen.fillText = (text, x, y) => { if (y === AXIS / 2) seen.written.push(text); };
        show(12_345.678e9, 12_345.678e9 + 1e6);
        draw();
        pen.fillText = write;
        seen.range = document.getElementById("range").textContent;
        """,
    )
    assert seen["whole"] == ["85268 s", "12345 GB"]
    assert seen["range"] == "12345.678 s to 12345.679 s"
    assert len(set(seen["written"])) == len(seen["written"]) > 3


@pytest.mark.parametrize("size", ["1600,900", "500,800"])
def test_the_page_is_for_any_size_of_window(schedule, look, size):
    seen = look(
        render(schedule),
        """
        const box = frame.getBoundingClientRect();
        seen.chart = [box.width, box.height];
        seen.wide = document.documentElement.scrollWidth - innerWidth;
        """,
        size=size,
    )
    assert min(seen["chart"]) >= 320
    assert seen["wide"] <= 0


def test_an_address_with_the_id_of_an_op_leads_to_it(schedule, look):
    offload = next(op.id for op in schedule.devices[1].d2h)
    script = """
        seen.pinned = view.pinned && idOf(view.pinned);
        press("n"); press("p"); seen.hash = location.hash;
        press("Escape"); seen.none = location.hash;
        """
    assert look(render(schedule), script, hash=f"#{offload}") == {"pinned": offload, "hash": f"#{offload}", "none": ""}
    assert look(render(schedule), "seen.pinned = view.pinned;", hash="#nothing:1:2") == {"pinned": None}


def test_an_address_that_is_no_text_leaves_a_page_that_follows_its_window(schedule, opened):
    with opened(render(schedule), hash="#%") as window:
        window.set_viewport_size({"width": 700, "height": 900})
        window.wait_for_timeout(300)
        assert window.evaluate("view.width === scroller.clientWidth && view.width <= 700")
        assert window.evaluate("view.pinned") is None
