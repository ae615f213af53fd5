// The payload as the other scripts see it: lanes with typed arrays, ops by number, names, times and searches.

const data = JSON.parse(document.getElementById("data").textContent);
const KINDS = data.kinds; // by letter: name, what it does, colour, hatch (view/look.py)
const charts = data.charts.map(readChart); // the schedule, then the baselines that can be shown below it

function readChart(raw) {
  const chart = { ...raw, ops: 0 };
  chart.lanes = raw.lanes.map((lane) => {
    const first = chart.ops;
    chart.ops += lane.kind.length;
    return { ...lane, ...readTimes(lane), chart, first, count: lane.kind.length, measured: readMeasured(lane) };
  });
  for (const lane of chart.lanes) lane.mean = meanLength(chart.lanes.filter((one) => one.lane === lane.lane));
  chart.gaps = raw.gaps.map((gaps) => ({ ...gaps, ...readTimes(gaps) }));
  chart.memory = raw.memory.map(readStack);
  chart.host = raw.host && readStack(raw.host);
  chart.moments = chart.lanes.flatMap(lastMoments);
  return chart;
}

function readTimes(columns) {
  return { begin: Float64Array.from(columns.begin), end: Float64Array.from(columns.end) };
}

function meanLength(lanes) {
  const length = (lane) => lane.end.reduce((all, end, i) => all + end - lane.begin[i], 0);
  const sum = (number) => lanes.reduce((all, lane) => all + number(lane), 0);
  return sum(length) / Math.max(1, sum((lane) => lane.count));
}

// What a trace says of a lane: its own times, `op` holds the index in the lane of each, `at` the inverse.
function readMeasured(lane) {
  if (!lane.measured) return null;
  return { ...lane.measured, ...readTimes(lane.measured), at: new Map(lane.measured.op.map((op, i) => [op, i])) };
}

// A curve of memory: `held` has a column for each holder, `bytes` is their sum at each step.
function readStack(raw) {
  const bytes = new Float64Array(raw.time.length), held = {};
  for (const [holder, changes] of Object.entries(raw.held)) {
    const column = held[holder] = new Float64Array(bytes.length);
    changes.step.forEach((step, i) => column.fill(changes.bytes[i], step, changes.step[i + 1] ?? bytes.length));
    column.forEach((size, step) => { bytes[step] += size; });
  }
  return { ...raw, time: Float64Array.from(raw.time), held, bytes, peak: bytes.reduce((a, b) => Math.max(a, b), 0) };
}

function lastMoments(lane) {
  return [lane.end.at(-1) ?? 0, lane.measured?.end.at(-1) ?? 0];
}

// First index whose value is above the limit; values do not decrease.
function firstAbove(values, limit) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > limit) high = middle; else low = middle + 1;
  }
  return low;
}

function opAt(chart, number) {
  const lane = chart.lanes.findLast((one) => one.first <= number);
  return { chart, lane, index: number - lane.first };
}

const numberOf = (op) => op.lane.first + op.index;
const LANES = { compute: "compute", d2h: "to host", h2d: "from host" };
const same = (a, b) => a === b || (a && b && a.lane === b.lane && a.index === b.index);
const beginOf = (op) => op.lane.begin[op.index];
const endOf = (op) => op.lane.end[op.index];
const kindOf = (op) => KINDS[op.lane.kind[op.index]];

// A microbatch, or a slice of one: 0, 0.1.
const unitAt = (lane, index) => {
  const slice = lane.slice?.[index] ?? null;
  return slice === null ? lane.microbatch[index] : `${lane.microbatch[index]}.${slice}`;
};

function nameOf(op) {
  return `${kindOf(op).name}, stage ${op.lane.stage[op.index]}, microbatch ${unitAt(op.lane, op.index)}`;
}

// The op's id as docs/IR.md defines it; it is also the page's fragment, so an address can lead to an op.
function idOf(op) {
  const layers = op.chart.layers[numberOf(op)];
  const id = `${kindOf(op).name}:${op.lane.stage[op.index]}:${unitAt(op.lane, op.index)}`;
  return layers ? `${id}:${layers.join("-")}` : id;
}

// The op as people write it: 2F0 is the forward of stage 2 and microbatch 0, 2D0:3-5 offloads layers of it.
function textOf(op) {
  const layers = op.chart.layers[numberOf(op)];
  const name = `${op.lane.stage[op.index]}${op.lane.kind[op.index]}${unitAt(op.lane, op.index)}`;
  return layers ? `${name}:${layers.join("-")}` : name;
}

const everyOp = (chart) => chart.lanes.flatMap((lane) => Array.from(lane.kind, (_, index) => ({ chart, lane, index })));

// The ops of this schedule that a text names: by id, by 2F0, or by F0, which are those of all stages. Without a slice or
// layers those of all of them.
function opsNamed(text) {
  const wanted = text.trim(), short = wanted.toUpperCase();
  if (!wanted) return [];
  const begins = (name) => name === short || /^[.:]/.test(name.startsWith(short) ? name.slice(short.length) : "");
  const hit = (name) => begins(name) || (/^[A-Z]/.test(short) && begins(name.replace(/^\d+/, "")));
  return everyOp(charts[0]).filter((op) => idOf(op) === wanted || hit(textOf(op)));
}

// A number of so many digits, or of all before the point where these are more.
const rounded = (value, digits) =>
  (Math.abs(value) < 10 ** digits ? Number(value.toPrecision(digits)) : Math.round(value));

// The digits that tell times apart that are `step` apart.
const digitsOf = (time, step) => Math.min(15, Math.max(4, Math.ceil(Math.log10(Math.max(1, time / step))) + 1));

function showTime(time, digits = 4) {
  const size = Math.abs(time);
  for (const [factor, unit] of [[1e9, "s"], [1e6, "ms"], [1e3, "us"]]) {
    if (size >= factor) return `${rounded(time / factor, digits)} ${unit}`;
  }
  return `${Math.round(time)} ns`;
}

function showBytes(size) {
  for (const [factor, unit] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (size >= factor) return `${rounded(size / factor, 4)} ${unit}`;
  }
  return `${size} B`;
}
