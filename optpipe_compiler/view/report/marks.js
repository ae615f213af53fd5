// What is drawn over the ops: labels, axis, makespans and the bound, and what the op pointed at waited for.

// -- labels, axis, lines --------------------------------------------------------------------------------------

function drawLabel(row) {
  pen.textBaseline = "middle";
  pen.textAlign = "left";
  const y = rowY(row) + row.height / 2;
  pen.fillStyle = colours.ink;
  if (row.type === "title") {
    pen.font = `600 ${NARROW ? 11 : 13}px ${FONT}`;
    const wide = pen.measureText(row.chart.title).width;
    pen.fillStyle = colours.paper;
    pen.fillRect(GUTTER, rowY(row) + 6, Math.max(0, wide + MARGIN + 4 - GUTTER), row.height - 7);
    pen.fillStyle = colours.ink;
    pen.fillText(row.chart.title, MARGIN, y + 3);
  } else if (row.height < (row.type === "memory" ? 16 : 8)) {
    return;
  } else if (row.type === "memory") {
    pen.fillStyle = colours.muted;
    pen.font = `10px ${FONT}`;
    pen.fillText(row.device === null ? "host memory" : "memory", MARGIN, y - (row.height > 22 ? 6 : 0));
    if (row.height > 22) pen.fillText(showBytes(row.curve.peak), MARGIN, y + 6);
  } else {
    const main = row.type === "lane" && row.lane.lane === "compute";
    pen.fillStyle = main ? colours.ink : colours.muted;
    pen.font = main ? `600 12px ${FONT}` : `10px ${FONT}`;
    pen.fillText(row.label, MARGIN, y);
  }
}

function ticksOf() {
  const span = view.end - view.begin, least = (span * 90) / (view.width - GUTTER);
  const power = 10 ** Math.floor(Math.log10(least));
  const step = Math.max(1, [1, 2, 5, 10].map((n) => n * power).find((size) => size >= least));
  const first = Math.max(0, Math.ceil(view.begin / step));
  return Array.from({ length: Math.floor(view.end / step) - first + 1 }, (_, i) => (first + i) * step);
}

function drawGrid(ticks) {
  pen.strokeStyle = colours.grid;
  pen.lineWidth = 1;
  pen.beginPath();
  for (const tick of ticks) {
    const x = Math.round(toX(tick)) + 0.5;
    pen.moveTo(x, AXIS);
    pen.lineTo(x, view.height);
  }
  pen.stroke();
}

function drawAxis(ticks) {
  pen.fillStyle = colours.paper;
  pen.fillRect(0, 0, view.width, AXIS);
  pen.fillStyle = colours.muted;
  pen.font = `11px ${FONT}`;
  pen.textBaseline = "middle";
  pen.textAlign = "center";
  for (const tick of ticks) {
    const x = toX(tick);
    const text = showTime(tick, digitsOf(tick, (view.end - view.begin) / 100));
    if (x > GUTTER + 8 && x < view.width - 20) pen.fillText(text, x, AXIS / 2);
  }
  pen.fillStyle = colours.rule;
  pen.fillRect(0, AXIS - 1, view.width, 1);
  const from = Math.max(0, view.begin / longest), to = Math.min(1, view.end / longest);
  if (to - from < 0.99) {
    pen.fillStyle = colours.critical;
    pen.fillRect(GUTTER + from * (view.width - GUTTER), AXIS - 3, Math.max(3, (to - from) * (view.width - GUTTER)), 3);
  }
  if (view.pointer && view.pointer.x > GUTTER) drawClock(view.pointer.x);
}

function drawClock(x) {
  const digits = Math.max(6, digitsOf(view.end, (view.end - view.begin) / 1000));
  const text = showTime(Math.max(0, toTime(x)), digits), wide = pen.measureText(text).width + 12;
  const left = Math.min(Math.max(x - wide / 2, GUTTER), view.width - wide);
  pen.fillStyle = colours.ink;
  pen.fillRect(left, 5, wide, AXIS - 10);
  pen.fillStyle = colours.paper;
  pen.fillText(text, left + wide / 2, AXIS / 2);
}

// Makespans and the proven bound as verticals, named below the chart.
function drawFoot() {
  pen.fillStyle = colours.paper;
  pen.fillRect(0, view.height - FOOT, view.width, FOOT);
  pen.fillStyle = colours.rule;
  pen.fillRect(0, view.height - FOOT, view.width, 1);
  pen.font = `11px ${FONT}`;
  pen.textBaseline = "middle";
  pen.fillStyle = pen.strokeStyle = colours.ink;
  data.lines.forEach((line, nth) => {
    const x = Math.round(toX(line.at)) + 0.5, y = view.height - FOOT + 12 + 17 * nth;
    if (x < GUTTER || x > view.width) return;
    pen.setLineDash(line.dashed ? [5, 4] : []);
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(x, AXIS);
    pen.lineTo(x, y + 5);
    pen.stroke();
    pen.setLineDash([]);
    pen.textAlign = x > view.width / 2 ? "right" : "left";
    pen.fillText(line.label, x > view.width / 2 ? x - 6 : x + 6, y);
  });
  if (!view.pointer || view.pointer.x <= GUTTER) return;
  pen.globalAlpha = 0.35;
  pen.fillRect(Math.round(view.pointer.x), AXIS, 1, room());
  pen.globalAlpha = 1;
}

// -- what is chosen, and what it waited for ---------------------------------------------------------------------

function drawMarks() {
  for (let op = view.pinned, steps = 0; op && steps < 4000; op = causeOf(op), steps++) {
    drawLink(op, steps ? 0.45 : 1);
    if (steps && !visible(op) && beginOf(op) < view.begin) break;
  }
  if (view.hover && !same(view.hover, view.pinned)) drawLink(view.hover, 1);
  for (const op of [view.hover, view.pinned]) if (op && rowOf(op.lane)) outline(op, colours.ink, 2);
  if (view.gap) drawBlame(view.gap);
}

// The gap that is pinned, and the op it is blamed on.
function drawBlame(gap) {
  const row = rowOf(laneOfGap(gap));
  if (!row) return;
  const { begin, end } = timesOf(gap), root = rootOf(gap);
  pen.strokeStyle = colours.ink;
  pen.lineWidth = 2;
  pen.strokeRect(toX(begin), rowY(row), Math.max(3, toX(end) - toX(begin)), row.height);
  if (root) {
    outline(root, colours.critical, 2);
    drawLink(root, 0.45);
  }
}

// All ops of the microbatch that is followed, and a line from stage to stage: forwards down, gradients back up.
function drawFollowed(chart) {
  const mine = everyOp(chart).filter((op) => op.lane.microbatch[op.index] === view.microbatch);
  for (const op of mine) {
    const row = rowOf(op.lane), x = toX(beginOf(op));
    drawOp(row, op.index, x, Math.max(2, toX(endOf(op)) - x));
  }
  const stage = (op) => op.lane.stage[op.index];
  const of = (letters) => mine.filter((op) => letters.includes(op.lane.kind[op.index]));
  const forwards = of("F").sort((a, b) => stage(a) - stage(b));
  const way = [...forwards, ...of("IB").sort((a, b) => stage(b) - stage(a))];
  way.slice(1).forEach((op, i) => drawCurve(way[i], op, colours.ink));
}

// The part of time that is selected.
function drawRange() {
  if (!view.range) return;
  const [left, right] = [toX(view.range.begin), toX(view.range.end)];
  pen.globalAlpha = 0.16;
  pen.fillStyle = colours.range;
  pen.fillRect(left, AXIS, right - left, room());
  pen.globalAlpha = 1;
  for (const x of [left, right]) pen.fillRect(Math.round(x) - 1, AXIS, 2, room());
}

function causeOf(op) {
  const from = op.lane.chart.cause[numberOf(op)];
  return from < 0 ? null : opAt(op.lane.chart, from);
}

const visible = (op) => endOf(op) >= view.begin && beginOf(op) <= view.end;

function drawLink(op, strength) {
  const cause = causeOf(op);
  if (!cause || !rowOf(cause.lane) || !rowOf(op.lane)) return;
  pen.globalAlpha = strength;
  outline(cause, colours.critical, 2);
  pen.globalAlpha = strength;
  if (cause.lane !== op.lane) drawCurve(cause, op, colours.critical);
  pen.globalAlpha = 1;
}

// An arrow from the end of one op to the begin of another.
function drawCurve(cause, op, colour) {
  const [from, to] = [cause, op].map((one) => rowOf(one.lane));
  const x0 = toX(endOf(cause)), y0 = rowY(from) + from.height / 2, x1 = toX(beginOf(op)), y1 = rowY(to) + to.height / 2;
  const bend = Math.max(14, Math.abs(x1 - x0) / 2);
  for (const [shade, width] of [[colours.paper, 5], [colour, 2]]) {
    pen.strokeStyle = shade;
    pen.lineWidth = width;
    pen.beginPath();
    pen.moveTo(x0, y0);
    pen.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
    pen.stroke();
  }
  pen.fillStyle = colour;
  pen.beginPath();
  pen.moveTo(x1 + 1, y1);
  pen.lineTo(x1 - 6, y1 - 4);
  pen.lineTo(x1 - 6, y1 + 4);
  pen.fill();
}

function outline(op, colour, width) {
  const row = rowOf(op.lane), x = toX(beginOf(op)), wide = Math.max(3, toX(endOf(op)) - x - 1);
  pen.strokeStyle = colour;
  pen.lineWidth = width;
  pen.strokeRect(x, rowY(row), wide, row.height);
  const { measured } = op.lane, nth = measured?.at.get(op.index);
  if (nth === undefined) return;
  const below = rows.find((one) => one.type === "measured" && one.lane === op.lane);
  const left = toX(measured.begin[nth]), right = toX(measured.end[nth]);
  pen.strokeRect(left, rowY(below), Math.max(3, right - left - 1), below.height);
}
