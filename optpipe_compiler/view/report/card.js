// What is said of an op, of idle time and of memory; text only, so that no name in a file can become markup.

function element(name, text = "", properties = {}) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...[text].flat());
  return made;
}

// The name of an op that leads to it; in the tip, which cannot be clicked, the name alone.
function link(op, dead) {
  if (dead) return element("b", nameOf(op));
  const button = element("button", nameOf(op));
  button.addEventListener("click", () => go(op));
  return button;
}

function describe(op, dead = false) {
  const { lane, index, chart } = op, kind = kindOf(op), letter = lane.kind[index];
  const badge = element("b", letter), { fill, ink } = styleOf(letter, chart.nth[lane.stage[index]]);
  Object.assign(badge.style, { background: fill, color: ink });
  const [first, end] = chart.layers[numberOf(op)] ?? chart.stages[lane.stage[index]];
  const layers = end === first + 1 ? `layer ${first}` : `layers ${first} to ${end - 1}`;
  const facts = [
    ["begin", showTime(beginOf(op), 6)],
    ["end", `${showTime(endOf(op), 6)} (${showTime(endOf(op) - beginOf(op))})`],
    ...measuredFacts(op),
    ...memoryFacts(op),
    ...waitFacts(op, dead),
  ];
  const rowsOf = facts.map(([name, value]) => element("tr", [element("th", name), element("td", value)]));
  const place = `device ${lane.device}, ${LANES[lane.lane]}`;
  return [
    element("h2", [badge, nameOf(op)]),
    element("p", `${kind.does}; ${place}; ${layers}`, { className: "where" }),
    element("p", whyOf(op, dead), { className: "why" }),
    element("table", rowsOf, { className: "facts" }),
  ];
}

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
  if (row.type === "memory") return [element("p", holds(row, time), { className: "where" })];
  if (row.type !== "lane" || row.lane.lane !== "compute") return null;
  const gaps = row.chart.gaps[row.lane.device], nth = firstAbove(gaps.end, time);
  if (nth >= gaps.end.length || gaps.begin[nth] > time) return null;
  const cause = gaps.cause[nth], resource = gaps.resource[nth] ? ` (${gaps.resource[nth]})` : "";
  const root = gaps.root[nth] < 0 ? [] : [link(opAt(row.chart, gaps.root[nth]), true), " "];
  const times = `${showTime(gaps.begin[nth], 6)} to ${showTime(gaps.end[nth], 6)}`;
  return [
    element("h2", `idle for ${showTime(gaps.end[nth] - gaps.begin[nth])}`),
    element("p", `device ${row.lane.device}, ${times}`, { className: "where" }),
    element("p", [`${cause}${resource}: `, ...root, data.causes[cause]], { className: "why" }),
  ];
}

function holds({ curve, device }, time) {
  const bytes = curve.bytes[Math.max(0, firstAbove(curve.time, time) - 1)];
  const part = curve.cap ? `, ${((100 * bytes) / curve.cap).toFixed(1)}% of the cap` : "";
  return `${showBytes(bytes)} ${device === null ? "offloaded to the host" : `on device ${device}`}${part}`;
}
