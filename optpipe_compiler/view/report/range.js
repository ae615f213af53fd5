// A selected part of the time axis: for how long each device is busy and idle in it, with what, and why.

function sumsOf(chart, { begin, end }) {
  const inside = (columns, nth) => Math.max(0, Math.min(columns.end[nth], end) - Math.max(columns.begin[nth], begin));
  const devices = [], kinds = {}, causes = {};
  for (let device = 0; device < chart.devices; device++) {
    const lane = laneOfGap({ chart, device }), gaps = chart.gaps[device], sums = { busy: 0, idle: 0 };
    for (let i = firstAbove(lane.end, begin); i < lane.count && lane.begin[i] < end; i++) {
      sums.busy += inside(lane, i);
      kinds[lane.kind[i]] = (kinds[lane.kind[i]] ?? 0) + inside(lane, i);
    }
    for (let i = firstAbove(gaps.end, begin); i < gaps.begin.length && gaps.begin[i] < end; i++) {
      sums.idle += inside(gaps, i);
      causes[gaps.cause[i]] = (causes[gaps.cause[i]] ?? 0) + inside(gaps, i);
    }
    devices.push(sums);
  }
  return { devices, kinds, causes };
}

function describeRange(range) {
  const digits = Math.max(6, digitsOf(range.end, (range.end - range.begin) / 100));
  const made = [
    element("h2", `${showTime(range.end - range.begin)} selected`),
    element("p", `${showTime(range.begin, digits)} to ${showTime(range.end, digits)}`, { className: "where" }),
  ];
  for (const chart of shown()) made.push(...describeSums(chart, sumsOf(chart, range)));
  return made;
}

function describeSums(chart, { devices, kinds, causes }) {
  const all = { busy: 0, idle: 0 };
  for (const { busy, idle } of devices) { all.busy += busy; all.idle += idle; }
  const share = ({ busy, idle }) => `${((100 * idle) / Math.max(1, busy + idle)).toFixed(1)}%`;
  const line = (name, sums) => [name, `busy ${showTime(sums.busy)}`, `idle ${showTime(sums.idle)}`, share(sums)];
  const sorted = (sums) => Object.entries(sums).sort((a, b) => b[1] - a[1]);
  return [
    element("h3", chart.title.split(":")[0]),
    table([...devices.map((sums, device) => line(`device ${device}`, sums)), line("all", all)], "sums"),
    table([
      ...sorted(kinds).map(([letter, time]) => [[swatch(KINDS[letter].colour), KINDS[letter].does], showTime(time)]),
      ...sorted(causes).map(([cause, time]) => [[swatch(data.causes[cause].colour), `idle: ${cause}`], showTime(time)]),
    ], "sums"),
  ];
}

function select(begin, end) {
  const [from, to] = [Math.min(begin, end), Math.max(begin, end)];
  view.range = { begin: Math.max(0, from), end: Math.min(to, longest) };
  if (view.range.end > view.range.begin) card.replaceChildren(...describeRange(view.range));
  else deselect();
  redraw();
}

function deselect() {
  view.range = null;
  tell();
  redraw();
}
