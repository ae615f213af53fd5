// What is in view: the window of time, the rows from top to bottom, and the colours of the light or dark theme.

const canvas = document.getElementById("canvas");
const frame = document.getElementById("frame");
const scroller = document.getElementById("scroller");
const pen = canvas.getContext("2d");
const NARROW = innerWidth < 600;
const GUTTER = NARROW ? 72 : 104, MARGIN = NARROW ? 6 : 20, RIGHT = 18, AXIS = 30, FOOT = 17 * data.lines.length + 4;
const FONT = getComputedStyle(document.body).fontFamily;

// `pinned` is an op, `gap` idle time, `range` a part of the time axis, `cause` one whose gaps are shown, `microbatch`
// one that is followed, `below` the number of the chart that is drawn below the schedule, 0 for none.
const view = {
  begin: 0, end: 1, top: 0, width: 0, height: 0, hover: null, pointer: null,
  pinned: null, gap: null, range: null, cause: null, microbatch: null, below: charts.length > 1 ? 1 : 0,
};
let rows = [], rowsOf = new Map(), tall = 0, longest = 1, colours = {}, styles = {}, hatches = {}, waiting = false;

const toX = (time) => GUTTER + ((time - view.begin) / (view.end - view.begin)) * (view.width - GUTTER);
const toTime = (x) => view.begin + ((x - GUTTER) / (view.width - GUTTER)) * (view.end - view.begin);
const rowY = (row) => AXIS + row.y - view.top;
const shown = () => (view.below ? [charts[0], charts[view.below]] : [charts[0]]);

// -- rows -----------------------------------------------------------------------------------------------------

const COMPUTE = 26, COPIES = 10, MEASURED = 18, MEMORY = 40; // pixels of a row where there is room for all

// The size of rows at which all of them are in view, within what can be read.
function scaleOf(memory) {
  let fixed = 0, scaled = 0;
  for (const chart of shown()) {
    fixed += 44;
    scaled += chart.devices * 10 + (memory ? MEMORY * (chart.devices + (chart.host ? 1 : 0)) : 0);
    for (const lane of chart.lanes.filter((one) => one.count)) {
      fixed += 2;
      scaled += lane.lane === "compute" ? COMPUTE : COPIES;
      if (lane.measured) scaled += lane.lane === "compute" ? MEASURED : COPIES;
    }
  }
  return Math.min(1.5, Math.max(0.65, (room() - fixed) / scaled));
}

function arrange() {
  const memory = document.getElementById("memory").checked;
  const scale = scaleOf(memory);
  rows = [];
  rowsOf = new Map();
  longest = [...shown().flatMap((chart) => chart.moments), ...data.lines.map((line) => line.at)]
    .reduce((a, b) => Math.max(a, b), 1);
  let y = 0;
  const add = (height, row) => { rows.push({ y, height, ...row }); y += height; };
  for (const chart of shown()) {
    add(30, { type: "title", chart });
    for (const device of chart.pipeline) {
      for (const lane of chart.lanes.filter((one) => one.device === device)) {
        const compute = lane.lane === "compute";
        if (!compute && !lane.count) continue;
        const label = compute ? `device ${device}` : LANES[lane.lane];
        add(Math.max(5, Math.round((compute ? COMPUTE : COPIES) * scale)), { type: "lane", chart, lane, label });
        rowsOf.set(lane, rows.at(-1));
        const below = { type: "measured", chart, lane, label: "measured" };
        if (lane.measured) add(Math.max(5, Math.round((compute ? MEASURED : COPIES) * scale)), below);
        y += 2;
      }
      if (memory) add(Math.round(MEMORY * scale), { type: "memory", curve: chart.memory[device], chart, device });
      y += Math.round(10 * scale);
    }
    const host = { type: "memory", curve: chart.host, chart, device: null };
    if (memory && chart.host) add(Math.round(MEMORY * scale), host);
    y += 14;
  }
  tall = y;
}

const room = () => view.height - AXIS - FOOT;
const rowOf = (lane) => rowsOf.get(lane);
const rowAt = (y) => rows.find((row) => y >= rowY(row) - 1 && y < rowY(row) + row.height + 1);

// -- colours ---------------------------------------------------------------------------------------------------

function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["paper", "ink", "muted", "rule", "lane", "grid", "cap", "critical", "range", "shade"]) {
    colours[name] = style.getPropertyValue(`--${name}`).trim();
  }
  styles = {};
}

// How a kind is painted on the device's n-th stage: `fill`, and `ink` for what is written on it.
function styleOf(letter, nth) {
  styles[letter] ??= [];
  return (styles[letter][nth] ??= styleFrom(KINDS[letter].colour, Math.min(0.45, 0.16 * nth)));
}

// Later stages are mixed with `shade`, away from the paper: what is busy never looks like what idles. The ink is dark
// or light, whichever differs more from the fill.
function styleFrom(colour, part) {
  const mixed = [1, 3, 5].map((i) => {
    const [own, shade] = [colour, colours.shade].map((one) => parseInt(one.slice(i, i + 2), 16));
    return Math.round(own * (1 - part) + shade * part);
  });
  const [r, g, b] = mixed.map((value) => (value / 255) ** 2.2);
  return { fill: `rgb(${mixed})`, ink: 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.2 ? "#11151a" : "#ffffff" };
}

function hatchOf(ink) {
  if (!hatches[ink]) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const brush = tile.getContext("2d");
    brush.strokeStyle = ink;
    brush.globalAlpha = 0.22;
    brush.beginPath();
    for (const x of [-6, 0, 6]) { brush.moveTo(x, 6); brush.lineTo(x + 6, 0); }
    brush.stroke();
    hatches[ink] = pen.createPattern(tile, "repeat");
  }
  return hatches[ink];
}
