// Pointing, zooming and keys.

const tip = document.getElementById("tip");
const card = document.getElementById("card");
const hint = card.firstElementChild;

// -- what is seen ---------------------------------------------------------------------------------------------

function show(begin, end) {
  const span = Math.min(Math.max(end - begin, 50), longest * 1.25);
  view.begin = Math.min(Math.max(begin, -0.1 * span), longest - 0.5 * span);
  if (span >= longest * 1.02) view.begin = Math.max(view.begin, -0.04 * span);
  view.end = view.begin + span;
  redraw();
}

function zoom(factor, x = (GUTTER + view.width) / 2) {
  const at = toTime(Math.max(x, GUTTER));
  show(at - (at - view.begin) * factor, at + (view.end - at) * factor);
}

const pan = (part) => show(view.begin + part * (view.end - view.begin), view.end + part * (view.end - view.begin));

function fit() {
  view.begin = 0;
  view.end = longest * (1 + RIGHT / (view.width - GUTTER));
  scroll(0);
}

function scroll(top) {
  view.top = Math.min(Math.max(top, 0), Math.max(0, tall - room()));
  redraw();
}

// Bring an op into view, at the present zoom if it is wide enough to be seen.
function reveal(op) {
  const span = Math.min(view.end - view.begin, Math.max(60 * (endOf(op) - beginOf(op)), 50));
  const middle = (beginOf(op) + endOf(op)) / 2;
  const outside = middle < view.begin || middle > view.end;
  if (outside || span < view.end - view.begin) show(middle - span / 2, middle + span / 2);
  const row = rowOf(op.lane), y = rowY(row);
  if (y < AXIS || y + row.height > AXIS + room()) scroll(row.y - room() / 2);
}

// -- what is pointed at -----------------------------------------------------------------------------------------

const inChart = (x, y) => x >= GUTTER && y >= AXIS && y <= AXIS + room();

function opUnder(x, y) {
  const row = inChart(x, y) && rowAt(y);
  if (!row || (row.type !== "lane" && row.type !== "measured")) return null;
  const times = row.type === "lane" ? row.lane : row.lane.measured;
  const slack = (1.5 * (view.end - view.begin)) / (view.width - GUTTER);
  const i = firstAbove(times.end, toTime(x) - slack);
  if (i >= times.begin.length || times.begin[i] > toTime(x) + slack) return null;
  const next = i + 1 < times.begin.length && times.begin[i + 1] <= toTime(x) ? i + 1 : i;
  return { chart: row.lane.chart, lane: row.lane, index: row.type === "lane" ? next : times.op[next] };
}

function point(x, y) {
  view.pointer = { x, y };
  view.hover = opUnder(x, y);
  const row = inChart(x, y) && rowAt(y);
  const says = view.hover ? describe(view.hover, true) : row ? describePlace(row, toTime(x)) : null;
  tip.hidden = !says;
  if (says) {
    tip.replaceChildren(...says);
    const left = x + 18 + tip.offsetWidth > view.width ? x - 18 - tip.offsetWidth : x + 18;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.max(4, Math.min(y + 16, view.height - tip.offsetHeight - 8))}px`;
  }
  redraw();
}

function leave() {
  view.pointer = view.hover = null;
  tip.hidden = true;
  redraw();
}

function pin(op) {
  view.pinned = op;
  if (op) card.replaceChildren(...describe(op)); else card.replaceChildren(hint);
  const id = op && op.chart === charts.at(-1) ? `#${idOf(op)}` : "";
  if (id !== location.hash) history.replaceState(null, "", id || location.pathname + location.search);
  redraw();
}

function go(op) {
  pin(op);
  reveal(op);
}

// -- events -----------------------------------------------------------------------------------------------------

let drag = null;

canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  const size = event.deltaMode === 1 ? 16 : 1;
  const [across, along] = event.shiftKey ? [event.deltaY + event.deltaX, 0] : [event.deltaX, event.deltaY];
  if (event.offsetX < GUTTER && along) scroll(view.top + along * size);
  else if (Math.abs(across) > Math.abs(along)) pan((across * size) / (view.width - GUTTER));
  else zoom(Math.exp(along * size * 0.0018), event.offsetX);
  point(event.offsetX, event.offsetY);
}, { passive: false });

canvas.addEventListener("pointerdown", (event) => {
  drag = { x: event.offsetX, y: event.offsetY, begin: view.begin, end: view.end, top: view.top, moved: false };
  if (event.isTrusted) canvas.setPointerCapture(event.pointerId);
});

canvas.addEventListener("pointermove", (event) => {
  if (!drag || !event.buttons) return point(event.offsetX, event.offsetY);
  const x = event.offsetX - drag.x, y = event.offsetY - drag.y;
  drag.moved ||= Math.hypot(x, y) > 3;
  if (!drag.moved) return;
  const time = (x / (view.width - GUTTER)) * (drag.end - drag.begin);
  show(drag.begin - time, drag.end - time);
  scroll(drag.top - y);
  leave();
});

canvas.addEventListener("pointerup", (event) => {
  if (drag && !drag.moved) pin(opUnder(event.offsetX, event.offsetY));
  drag = null;
});

canvas.addEventListener("pointerleave", leave);
canvas.addEventListener("dblclick", fit);

const KEYS = {
  "+": () => zoom(1 / 1.4), "=": () => zoom(1 / 1.4), "-": () => zoom(1.4), 0: fit,
  ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15),
  ArrowUp: () => scroll(view.top - 60), ArrowDown: () => scroll(view.top + 60),
  Enter: () => go(view.hover ?? firstInView()), Escape: () => pin(null),
  n: () => step(1), p: () => step(-1), j: () => change(1), k: () => change(-1),
  c: () => { const cause = view.pinned && causeOf(view.pinned); if (cause) go(cause); },
};

document.addEventListener("keydown", (event) => {
  const busy = event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, button, summary, aside");
  if (busy || !(event.key in KEYS)) return;
  event.preventDefault();
  KEYS[event.key]();
});

function firstInView() {
  const lanes = rows.filter((row) => row.type === "lane");
  const { lane } = lanes.find((row) => rowY(row) >= AXIS) ?? lanes[0];
  return { chart: lane.chart, lane, index: Math.min(firstAbove(lane.end, view.begin), lane.count - 1) };
}

function step(by) {
  const op = view.pinned ?? firstInView(), index = op.index + (view.pinned ? by : 0);
  if (index >= 0 && index < op.lane.count) go({ ...op, index });
}

// The op that runs at the same time on the lane above or below.
function change(by) {
  const op = view.pinned ?? firstInView(), lanes = rows.filter((row) => row.type === "lane").map((row) => row.lane);
  const lane = lanes[lanes.indexOf(op.lane) + by];
  if (lane) go({ chart: lane.chart, lane, index: Math.min(firstAbove(lane.end, beginOf(op)), lane.count - 1) });
}

function follow() {
  const op = opOf(decodeURIComponent(location.hash.slice(1)));
  if (op) go(op);
}

addEventListener("hashchange", follow);
document.getElementById("in").addEventListener("click", () => zoom(1 / 1.4));
document.getElementById("out").addEventListener("click", () => zoom(1.4));
document.getElementById("fit").addEventListener("click", fit);
document.getElementById("memory").addEventListener("change", resize);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);

// -- start ------------------------------------------------------------------------------------------------------

function resize() {
  view.width = frame.clientWidth;
  view.height = frame.clientHeight;
  canvas.width = Math.round(view.width * devicePixelRatio);
  canvas.height = Math.round(view.height * devicePixelRatio);
  arrange();
  scroll(view.top);
}

function repaint() {
  readColours();
  drawLegend();
  redraw();
}

function drawLegend() {
  const present = new Set(charts.flatMap((chart) => chart.lanes.flatMap((lane) => [...lane.kind])));
  const several = charts.some((chart) => chart.several);
  const items = Object.keys(KINDS).filter((letter) => present.has(letter)).map((letter) => {
    const swatch = element("canvas"), size = 18, { fill, ink } = styleOf(letter, 0);
    swatch.width = swatch.height = size * devicePixelRatio;
    swatch.style.width = swatch.style.height = `${size}px`;
    const brush = swatch.getContext("2d");
    brush.scale(devicePixelRatio, devicePixelRatio);
    for (const style of KINDS[letter].hatch ? [fill, hatchOf(ink)] : [fill]) {
      brush.fillStyle = style;
      brush.fillRect(0, 0, size, size);
    }
    brush.fillStyle = ink;
    brush.font = `600 11px ${FONT}`;
    brush.textAlign = "center";
    brush.textBaseline = "middle";
    brush.fillText(letter, size / 2, size / 2 + 0.5);
    return element("li", [swatch, KINDS[letter].does]);
  });
  if (several) items.push(element("li", "paler: later stages of a device", { className: "note" }));
  document.getElementById("legend").replaceChildren(...items);
}

readColours();
drawLegend();
resize();
fit();
follow();
new ResizeObserver(resize).observe(frame);
