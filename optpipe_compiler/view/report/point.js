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
  scroller.scrollTop = view.top = Math.min(Math.max(top, 0), Math.max(0, tall - room()));
  redraw();
}

// Bring a lane's time into view, at the present zoom if it is wide enough to be seen.
function reveal(lane, begin, end) {
  const span = Math.min(view.end - view.begin, Math.max(60 * (end - begin), 50)), middle = (begin + end) / 2;
  const outside = middle < view.begin || middle > view.end;
  if (outside || span < view.end - view.begin) show(middle - span / 2, middle + span / 2);
  const row = rowOf(lane);
  if (!row) return;
  if (rowY(row) < AXIS || rowY(row) + row.height > AXIS + room()) scroll(row.y - room() / 2);
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

function gapUnder(x, y) {
  const row = inChart(x, y) && rowAt(y);
  return row ? gapAt(row, toTime(x)) : null;
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

// -- what is chosen: one op or gap, a cause, a microbatch -----------------------------------------------------------

// Say in the card what is chosen.
function tell() {
  const { pinned, gap, cause } = view;
  const says = pinned ? describe(pinned) : gap ? describeGap(gap) : cause ? describeCause(cause) : [hint];
  card.replaceChildren(...says);
}

function pin(op, gap = null) {
  Object.assign(view, { pinned: op, gap });
  tell();
  const id = op && op.chart === charts[0] ? `#${idOf(op)}` : "";
  if (id !== location.hash) history.replaceState(null, "", id || location.pathname + location.search);
  redraw();
}

function go(op) {
  keepFocus(() => pin(op));
  reveal(op.lane, beginOf(op), endOf(op));
}

function goGap(gap) {
  keepFocus(() => pin(null, gap));
  reveal(laneOfGap(gap), timesOf(gap).begin, timesOf(gap).end);
}

// A button of the card goes when the card says something else; the keyboard then belongs to the chart.
function keepFocus(change) {
  const inside = card.contains(document.activeElement);
  change();
  if (inside) canvas.focus({ preventScroll: true });
}

function choose(cause) {
  view.cause = view.cause === cause ? null : cause;
  for (const one of document.querySelectorAll("button.cause")) {
    one.setAttribute("aria-pressed", String(one.dataset.cause === view.cause));
  }
  pin(null);
}

function follow(microbatch) {
  view.microbatch = microbatch;
  document.getElementById("microbatch").value = microbatch ?? "";
  if (!view.range) tell();
  redraw();
}

// Take back the last choice.
function escape() {
  if (view.range) deselect();
  else if (view.pinned || view.gap) pin(null);
  else if (view.cause) choose(view.cause);
  else follow(null);
}

// -- mouse, pen and fingers -------------------------------------------------------------------------------------

const fingers = new Map(); // x of every pointer that is down, by its id
let drag = null, pinch = null;

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
  const x = event.offsetX, y = event.offsetY, { begin, end, top } = view;
  fingers.set(event.pointerId, x);
  drag = fingers.size === 1 ? { x, y, begin, end, top, moved: false, selects: y < AXIS || event.shiftKey } : null;
  pinch = fingers.size === 2 ? [...fingers.values()].map(toTime) : null;
  if (event.isTrusted) canvas.setPointerCapture(event.pointerId);
});

canvas.addEventListener("pointermove", (event) => {
  if (fingers.has(event.pointerId)) fingers.set(event.pointerId, event.offsetX);
  if (pinch) return spread();
  if (!drag || !event.buttons) return point(event.offsetX, event.offsetY);
  const x = event.offsetX - drag.x, y = event.offsetY - drag.y;
  drag.moved ||= Math.hypot(x, y) > 3;
  if (!drag.moved) return;
  if (drag.selects) return select(toTime(drag.x), toTime(event.offsetX));
  const time = (x / (view.width - GUTTER)) * (drag.end - drag.begin);
  show(drag.begin - time, drag.end - time);
  if (event.pointerType !== "touch") scroll(drag.top - y); // a finger that goes up or down scrolls by itself
  leave();
});

// Keep the times that two fingers took hold of under them.
function spread() {
  const [left, right] = fingers.values(), [from, to] = pinch;
  if (Math.abs(right - left) < 20) return;
  const each = (to - from) / (right - left);
  if (each > 0) show(from - (left - GUTTER) * each, from + (view.width - left) * each);
  leave();
}

function lift(event) {
  fingers.delete(event.pointerId);
  if (fingers.size < 2) pinch = null;
  drag = null;
}

canvas.addEventListener("pointerup", (event) => {
  const x = event.offsetX, y = event.offsetY;
  if (drag && !drag.moved) {
    if (drag.selects) deselect();
    else {
      const op = opUnder(x, y);
      pin(op, op ? null : gapUnder(x, y));
    }
  }
  lift(event);
  if (event.pointerType === "touch") leave();
});

canvas.addEventListener("pointercancel", (event) => { lift(event); leave(); });
canvas.addEventListener("pointerleave", leave);
canvas.addEventListener("dblclick", fit);
scroller.addEventListener("scroll", () => { view.top = scroller.scrollTop; redraw(); });

// -- keys -------------------------------------------------------------------------------------------------------

const KEYS = {
  "+": () => zoom(1 / 1.4), "=": () => zoom(1 / 1.4), "-": () => zoom(1.4), 0: fit,
  ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15),
  ArrowUp: () => scroll(view.top - 60), ArrowDown: () => scroll(view.top + 60),
  Enter: () => go(view.hover ?? firstInView()), Escape: escape,
  n: () => step(1), p: () => step(-1), j: () => change(1), k: () => change(-1),
  g: () => stepGap(1), G: () => stepGap(-1),
  f: () => { if (view.pinned) follow(microbatchToFollow(view.pinned)); else follow(null); },
  c: () => { const cause = view.gap ? rootOf(view.gap) : view.pinned && causeOf(view.pinned); if (cause) go(cause); },
  "[": () => select(chosenTime().begin, view.range?.end ?? longest),
  "]": () => select(view.range?.begin ?? 0, chosenTime().end),
  "/": () => document.getElementById("search").focus(),
};

document.addEventListener("keydown", (event) => {
  const { key, target } = event, writes = target.closest("input, select");
  const reads = target.closest("button, summary, aside") && /^(Enter|Arrow)/.test(key);
  if (event.ctrlKey || event.metaKey || event.altKey || writes || reads || !(key in KEYS)) return;
  event.preventDefault();
  KEYS[key]();
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

// The next gap: of the cause that is chosen by length, else of this schedule by device and time.
function stepGap(by) {
  const chart = charts[0], each = (gaps, device) => gaps.cause.map((_, nth) => ({ chart, device, nth }));
  const all = view.cause ? gapsOfCause(view.cause) : chart.gaps.flatMap(each);
  const at = view.gap ? all.findIndex((gap) => gap.device === view.gap.device && gap.nth === view.gap.nth) : -1;
  const next = all[at < 0 ? 0 : at + by];
  if (next) goGap(next);
}

function chosenTime() {
  if (view.pinned) return { begin: beginOf(view.pinned), end: endOf(view.pinned) };
  return view.gap ? timesOf(view.gap) : { begin: Math.max(0, view.begin), end: Math.min(view.end, longest) };
}
