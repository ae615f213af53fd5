// What is said of an op, of idle time and of memory; text only, so that no name in a file can become markup.

function element(name, text = "", properties = {}) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...[text].flat());
  return made;
}

const swatch = (colour) => {
  const made = element("i");
  made.style.background = colour;
  return made;
};

// A table whose rows begin with a heading.
function table(lines, className) {
  const row = ([name, ...rest]) =>
    element("tr", [element("th", name, { scope: "row" }), ...rest.map((cell) => element("td", cell))]);
  return element("table", lines.map(row), { className });
}

function button(name, act) {
  const made = element("button", name, { type: "button" });
  made.addEventListener("click", act);
  return made;
}

// The name of an op that leads to it; in the tip, which cannot be clicked, the name alone.
const link = (op, dead) => (dead ? element("b", nameOf(op)) : button(nameOf(op), () => go(op)));

// What the profile calls layers from first to before end: block.3.mlp, head.0.
function namesOf(first, end) {
  const names = [...new Set([data.names[first], data.names[end - 1]])].filter(Boolean);
  return names.length ? ` (${names.join(" to ")})` : "";
}

function describe(op, dead = false) {
  const { lane, index, chart } = op, kind = kindOf(op), letter = lane.kind[index];
  const badge = element("b", letter), { fill, ink } = styleOf(letter, chart.nth[lane.stage[index]]);
  Object.assign(badge.style, { background: fill, color: ink });
  const [first, end] = chart.layers[numberOf(op)] ?? chart.stages[lane.stage[index]];
  const layers = (end === first + 1 ? `layer ${first}` : `layers ${first} to ${end - 1}`) + namesOf(first, end);
  const facts = [
    ["begin", showTime(beginOf(op), 6)],
    ["end", `${showTime(endOf(op), 6)} (${showTime(endOf(op) - beginOf(op))})`],
    ...measuredFacts(op),
    ...memoryFacts(op),
    ...waitFacts(op, dead),
  ];
  const place = `device ${lane.device}, ${LANES[lane.lane]}`;
  const said = [
    element("h2", [badge, nameOf(op)]),
    element("p", `${textOf(op)}: ${kind.does}; ${place}; ${layers}`, { className: "where" }),
    element("p", whyOf(op, dead), { className: "why" }),
    table(facts, "facts"),
  ];
  return dead ? said : [...said, element("p", button(followWords(op), () => follow(microbatchToFollow(op))))];
}

const microbatchOf = (op) => op.lane.microbatch[op.index];
const microbatchToFollow = (op) => (view.microbatch === microbatchOf(op) ? null : microbatchOf(op));
const followWords = (op) =>
  (view.microbatch === microbatchOf(op) ? "show all microbatches" : `follow microbatch ${microbatchOf(op)}`);

function whyOf(op, dead) {
  const cause = causeOf(op), reason = data.reasons[op.chart.reason[numberOf(op)]];
  if (!cause) return reason;
  const late = beginOf(op) - endOf(cause);
  const where = cause.lane.device === op.lane.device ? "" : `, device ${cause.lane.device}`;
  return [`${reason} `, link(cause, dead), where, late ? `, ${showTime(late)} after its end.` : "."];
}

function measuredFacts(op) {
  const { measured } = op.lane, nth = measured?.at.get(op.index);
  if (!measured) return [];
  if (nth === undefined) return [["measured", "not in the trace"]];
  const took = measured.end[nth] - measured.begin[nth], planned = endOf(op) - beginOf(op);
  const ratio = planned ? `, ${(took / planned).toFixed(2)} x forecast` : "";
  const times = `${showTime(measured.begin[nth], 6)} to ${showTime(measured.end[nth], 6)}`;
  return [["measured", `${times} (${showTime(took)}${ratio})`]];
}

function memoryFacts(op) {
  const curve = op.chart.memory[op.lane.device];
  const from = Math.max(0, firstAbove(curve.time, beginOf(op)) - 1), to = firstAbove(curve.time, endOf(op) - 1);
  const most = curve.bytes.slice(from, Math.max(to, from + 1)).reduce((a, b) => Math.max(a, b), 0);
  return [["memory", `up to ${showBytes(most)} on the device while it runs`]];
}

function waitFacts(op, dead) {
  const waits = op.chart.waits[numberOf(op)];
  const says = (wait) => (typeof wait === "string" ? nameOfDelivery(wait) : link(opAt(op.chart, wait), dead));
  return waits ? [["waits for", waits.map((wait) => element("div", says(wait)))]] : [];
}

function nameOfDelivery(id) {
  const [name, stage, microbatch] = id.split(":");
  return `delivery of ${name}, stage ${stage}, microbatch ${microbatch}`;
}

function describePlace(row, time) {
  if (time < 0 || time > row.chart.makespan_ns) return null;
  if (row.type === "memory") return describeMemory(row, time);
  const gap = gapAt(row, time);
  return gap && describeGap(gap, true);
}

// -- idle time: a gap is { chart, device, nth } ---------------------------------------------------------------------

const gapsOf = ({ chart, device }) => chart.gaps[device];
const laneOfGap = ({ chart, device }) => chart.lanes.find((lane) => lane.device === device && lane.lane === "compute");
const timesOf = (gap) => ({ begin: gapsOf(gap).begin[gap.nth], end: gapsOf(gap).end[gap.nth] });
const lengthOf = (gap) => timesOf(gap).end - timesOf(gap).begin;

function rootOf(gap) {
  const root = gapsOf(gap).root[gap.nth];
  return root < 0 ? null : opAt(gap.chart, root);
}

function gapAt(row, time) {
  if (row.type !== "lane" || row.lane.lane !== "compute") return null;
  const gap = { chart: row.chart, device: row.lane.device };
  gap.nth = firstAbove(gapsOf(gap).end, time);
  return gap.nth < gapsOf(gap).end.length && timesOf(gap).begin <= time ? gap : null;
}

function describeGap(gap, dead = false) {
  const cause = gapsOf(gap).cause[gap.nth], resource = gapsOf(gap).resource[gap.nth], root = rootOf(gap);
  const { begin, end } = timesOf(gap), { says, colour } = data.causes[cause];
  const named = resource ? `${cause} (${resource})` : cause, blamed = root ? [link(root, dead), " "] : [];
  return [
    element("h2", [swatch(colour), `idle for ${showTime(end - begin)}`]),
    element("p", `device ${gap.device}, ${showTime(begin, 6)} to ${showTime(end, 6)}`, { className: "where" }),
    element("p", [`${named}: `, ...blamed, `${says}.`], { className: "why" }),
  ];
}

const LISTED = 8;

// The gaps of a cause in this schedule, the longest first.
function gapsOfCause(cause) {
  const [chart] = charts;
  const all = chart.gaps.flatMap((gaps, device) => gaps.cause.map((_, nth) => ({ chart, device, nth })));
  return all.filter((gap) => gapsOf(gap).cause[gap.nth] === cause).sort((a, b) => lengthOf(b) - lengthOf(a));
}

function describeCause(cause) {
  const found = gapsOfCause(cause), whole = charts[0].makespan_ns * charts[0].devices;
  const time = found.reduce((all, gap) => all + lengthOf(gap), 0);
  const lines = found.slice(0, LISTED).map((gap) => [
    button(showTime(lengthOf(gap)), () => goGap(gap)), `device ${gap.device}`, `at ${showTime(timesOf(gap).begin)}`,
  ]);
  const more = found.length > LISTED ? ` The ${LISTED} longest:` : "";
  const gaps = `${found.length} ${found.length === 1 ? "gap" : "gaps"}`;
  const share = `${((100 * time) / Math.max(1, whole)).toFixed(2)}% of all device time`;
  return [
    element("h2", [swatch(data.causes[cause].colour), cause]),
    element("p", `${data.causes[cause].says}: ${gaps}, ${share}.${more}`, { className: "where" }),
    table(lines, "facts"),
  ];
}
