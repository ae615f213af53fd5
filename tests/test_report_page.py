"""The report's page in a browser: it loads without an error, and pointing, zooming and keys do what they say.

Each test opens the page in headless Chromium with a script appended that sends events as a person would cause them and
writes down what the page then shows. A browser is not needed to use the project, so without one the tests are skipped.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape

import pytest

from optpipe_compiler.documents import ir
from optpipe_compiler.forecast import analyse
from optpipe_compiler.view.report import render
from tests.instances import quick, uniform
from tests.report_cases import GB, planned, published

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on the path")

WATCH = """<script>
const wrong = [];
addEventListener("error", (event) => wrong.push(event.message));
addEventListener("securitypolicyviolation", (event) => wrong.push(event.violatedDirective));
console.error = console.warn = (...words) => wrong.push(words.join(" "));
</script>"""

REPORT = """<script>
const seen = {};
const send = (type, x, y, more = {}) => {
  const box = canvas.getBoundingClientRect(), kind = type === "wheel" ? WheelEvent : PointerEvent;
  const place = { clientX: box.left + x, clientY: box.top + y };
  canvas.dispatchEvent(new kind(type, { ...place, bubbles: true, cancelable: true, ...more }));
};
const press = (key) => document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const laneOf = (chart, device, name) => charts[chart].lanes.find((one) => one.device === device && one.lane === name);
const at = (op) => {
  const row = rowOf(op.lane);
  return [(toX(beginOf(op)) + toX(endOf(op))) / 2, rowY(row) + row.height / 2];
};
const range = () => { draw(); return document.getElementById("range").textContent; };
const pixel = (x, y) => {
  draw();
  return [...pen.getImageData(x * devicePixelRatio, y * devicePixelRatio, 1, 1).data].join();
};
try { %s } catch (error) { wrong.push(String(error)); }
const note = document.createElement("pre");
note.id = "seen";
note.textContent = JSON.stringify({ seen, wrong });
document.body.append(note);
</script>"""


@pytest.fixture(scope="module")
def schedule():
    """Two devices with two stages each, some of whose activations are offloaded."""
    return planned()


@pytest.fixture
def look(tmp_path):
    """Open a page, run a script in it and return what it put into `seen`; fails if anything went wrong."""

    def open_page(page: str, script: str, *, dark: bool = False, size: str = "1400,900", hash: str = "") -> dict:
        path = tmp_path / "page.html"
        page = page.replace("<head>", "<head>" + WATCH).replace("</body>", REPORT % script + "</body>")
        path.write_text(page)
        command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={size}", "--dump-dom"]
        command += [f"--user-data-dir={tmp_path / 'browser'}", "--virtual-time-budget=2000"]
        command += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", path.as_uri() + hash]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
        found = re.search(r'<pre id="seen">(.*?)</pre>', ended.stdout, re.DOTALL)
        assert found is not None, ended.stderr[-2000:]
        result = json.loads(unescape(found[1]))
        assert result["wrong"] == []
        return result["seen"]

    return open_page


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
    assert "device 1, compute; layer 1" in seen["tip"]
    assert (
        "Its input has just arrived from forward, stage 0, microbatch 0, device 0, 50 us after its end." in seen["tip"]
    )
    assert "begin550 us" in seen["tip"]
    assert "Point at an op" in seen["card"]
    assert seen["pinned"] == seen["tip"]
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


def test_ops_are_painted_where_they_are_and_idle_time_is_not(schedule, look):
    seen = look(
        render(schedule),
        """
        const lane = laneOf(0, 1, "compute"), op = { chart: charts[0], lane, index: 0 }, [, y] = at(op);
        seen.op = pixel(toX(beginOf(op)) + 3, y - 8);
        seen.fill = styleOf("F", 0).fill.match(/\\d+/g).join() + ",255";
        seen.idle = pixel(toX(beginOf(op) / 2), y);
        seen.lane = colours.lane;
        point(toX(beginOf(op) / 2), y);
        seen.tip = tip.textContent;
        """,
    )
    assert seen["op"] == seen["fill"]
    assert seen["idle"] == ",".join(str(int(seen["lane"][i : i + 2], 16)) for i in (1, 3, 5)) + ",255"
    assert seen["tip"].startswith("idle for 550 usdevice 1, 0 ns to 550 us")
    assert "fill: the pipeline has not come this far." in seen["tip"]


def test_what_kept_an_op_waiting_is_connected_with_it_by_a_line(schedule, look):
    seen = look(
        render(schedule),
        """
        const lane = laneOf(0, 1, "compute"), op = { chart: charts[0], lane, index: 0 };
        const image = () => { draw(); return pen.getImageData(0, 0, canvas.width, canvas.height).data; };
        const painted = () => {
          const data = image(), [r, g, b] = [1, 3, 5].map((i) => parseInt(colours.critical.slice(i, i + 2), 16));
          let count = 0;
          for (let i = 0; i < data.length; i += 4) count += data[i] === r && data[i + 1] === g && data[i + 2] === b;
          return count;
        };
        seen.before = painted();
        pin(op);
        seen.pinned = painted();
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
        seen.tip = tip.textContent;
        seen.before = rows.filter((one) => one.type === "memory").length;
        document.getElementById("memory").click();
        seen.after = rows.filter((one) => one.type === "memory").length;
        """,
    )
    curve = analyse(schedule).memory[0]
    held = [size for time, size in curve if time <= schedule.forecast.makespan_ns / 2][-1]
    assert seen["tip"] == f"{held / 1e6:g} MB on device 0, {100 * held / schedule.setup.cap_bytes:.1f}% of the cap"
    assert (seen["before"], seen["after"]) == (3, 0)  # two devices and the host


def test_published_and_measured_are_on_the_same_axis_also_in_the_dark(schedule, look):
    measured = {"forward:0:0": (1000, 700_000), "backward_input:0:0": (9_000_000, 20_000_000)}
    seen = look(
        render(schedule, published("gpipe"), measured),
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
    assert [title.split(" (")[0] for title in seen["titles"]] == ["best baseline", "this schedule"]
    assert seen["longest"] == 20_000_000
    assert "measured1 us to 700 us (699 us, 1.40 x forecast)" in seen["tip"]
    assert max(map(int, seen["paper"].split(",")[:3])) < 60


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
        show(0, longest / 100);
        drawn = 0;
        drawOps(row, lane, null);
        seen.zoomed = drawn;
        """,
    )
    assert seen["count"] == 1200
    assert seen["all"] < 2.5 * seen["width"]
    assert 10 <= seen["zoomed"] <= 20


def test_a_page_without_any_time_opens(look):
    from optpipe_compiler.documents.profile import Layer, Machine, Profile

    layer = Layer(name="free", count=2, forward_ns=0, backward_input_ns=0, backward_weight_ns=0, saved_bytes=1)
    costs = Profile(name="free", machine=Machine(devices=2), layers=[layer])
    seen = look(
        render(quick(costs, GB, method="gpipe").schedule), 'press("Enter"); press("j"); seen.card = card.textContent;'
    )
    assert "microbatch" in seen["card"]


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
