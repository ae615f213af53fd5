// Painting of what is in view: each row by binary search in its times, many ops in one pixel as one column.

const MERGED = 0.8; // ops narrower than this many pixels are drawn as the shares of their kinds

function redraw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; draw(); });
}

function draw() {
  pen.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
  pen.fillStyle = colours.paper;
  pen.fillRect(0, 0, view.width, view.height);
  const ticks = ticksOf();
  const seen = rows.filter((row) => rowY(row) < view.height - FOOT && rowY(row) + row.height > AXIS);
  pen.save();
  pen.beginPath();
  pen.rect(GUTTER, AXIS, view.width - GUTTER, room());
  pen.clip();
  for (const row of seen) if (row.type === "lane") drawBackground(row);
  drawGrid(ticks);
  for (const row of seen) {
    if (row.type === "lane") drawOps(row, row.lane, null);
    if (row.type === "measured") drawOps(row, row.lane.measured, row.lane.measured.op);
    if (row.type === "memory") drawMemory(row);
  }
  drawMarks();
  pen.restore();
  for (const row of seen) drawLabel(row);
  drawFoot();
  drawAxis(ticks);
  drawScrollbar();
  document.getElementById("range").textContent =
    `${view.begin > 0 ? showTime(view.begin) : 0} to ${showTime(Math.min(view.end, longest))}`;
}

function drawBackground(row) {
  pen.fillStyle = colours.lane;
  const left = Math.max(GUTTER, toX(0)), right = toX(row.lane.chart.makespan_ns);
  pen.fillRect(left, rowY(row), right - left, row.height);
}

function drawOps(row, times, numbers) {
  const { begin, end } = times;
  let i = firstAbove(end, view.begin);
  while (i < begin.length && begin[i] < view.end) {
    const x = toX(begin[i]), width = toX(end[i]) - x;
    if (width >= MERGED) {
      drawOp(row, numbers ? numbers[i] : i, x, width);
      i++;
    } else {
      const next = Math.max(i + 1, firstAbove(end, toTime(x + 1)));
      drawShares(row, i, next, numbers, times, x);
      i = next;
    }
  }
}

function drawOp(row, index, x, width) {
  const { lane } = row, letter = lane.kind[index], style = styleOf(letter, lane.chart.nth[lane.stage[index]]);
  const y = rowY(row), wide = width > 3 ? width - 1 : width;
  pen.fillStyle = style.fill;
  pen.fillRect(x, y, wide, row.height);
  if (width <= 4) return;
  if (KINDS[letter].hatch) {
    pen.fillStyle = hatchOf(style.ink);
    pen.fillRect(x, y, wide, row.height);
  }
  const left = Math.max(x, GUTTER), right = Math.min(x + wide, view.width);
  if (width > 8 && row.height >= 8) drawName(row, index, style.ink, left, right);
}

// The longest name for which such lanes' mean op has room, if this one has: 2F3 (stage, kind, microbatch), F3, 3.
function drawName(row, index, ink, left, right) {
  const { lane } = row, letter = lane.kind[index], number = lane.microbatch[index];
  const size = Math.min(11, Math.max(8, row.height * 0.6)), mean = toX(lane.mean) - toX(0);
  const names = [`${letter}${number}`, `${number}`];
  if (lane.chart.several) names.unshift(`${lane.stage[index]}${letter}${number}`);
  const name = names.find(({ length }) => length * 7 + 4 <= mean && length * size * 0.62 + 2 <= right - left);
  if (!name) return;
  pen.font = `${size}px ${FONT}`;
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  pen.fillStyle = ink;
  pen.fillText(name, (left + right) / 2, rowY(row) + row.height / 2 + 0.5);
}

// Many ops in one pixel: a column with each kind's share of the time, idle time left empty.
function drawShares(row, from, to, numbers, times, x) {
  const { lane } = row, shares = new Map();
  for (let i = from; i < to; i++) {
    const index = numbers ? numbers[i] : i;
    const { fill } = styleOf(lane.kind[index], lane.chart.nth[lane.stage[index]]);
    shares.set(fill, (shares.get(fill) ?? 0) + times.end[i] - times.begin[i]);
  }
  const whole = Math.max(times.end[to - 1] - times.begin[from], 1);
  const wide = Math.max(1, toX(times.end[to - 1]) - x);
  let y = rowY(row) + row.height;
  for (const [fill, time] of shares) {
    const height = (row.height * time) / whole;
    y -= height;
    pen.fillStyle = fill;
    pen.fillRect(x, y, wide, height);
  }
}

function drawMemory(row) {
  const { curve } = row, top = Math.max(curve.peak, curve.cap ?? 0, 1), base = rowY(row) + row.height;
  const yOf = (bytes) => base - (row.height - 3) * (bytes / top);
  let i = Math.max(0, firstAbove(curve.time, view.begin) - 1);
  pen.fillStyle = colours.held;
  pen.beginPath();
  pen.moveTo(toX(curve.time[i]), base);
  while (i < curve.time.length && curve.time[i] <= view.end) {
    const x = toX(curve.time[i]);
    const next = Math.max(i + 1, firstAbove(curve.time, toTime(x + 0.5)));
    let most = 0;
    for (let j = i; j < next; j++) most = Math.max(most, curve.bytes[j]);
    const right = next < curve.time.length ? toX(curve.time[next]) : toX(row.chart.makespan_ns);
    pen.lineTo(x, yOf(most));
    pen.lineTo(right, yOf(most));
    i = next;
  }
  pen.lineTo(Math.min(toX(row.chart.makespan_ns), view.width + 9), base);
  pen.fill();
  if (curve.cap === null) return;
  pen.strokeStyle = colours.cap;
  pen.setLineDash([4, 3]);
  pen.lineWidth = 1;
  pen.beginPath();
  pen.moveTo(Math.max(GUTTER, toX(0)), Math.round(yOf(curve.cap)) + 0.5);
  pen.lineTo(toX(row.chart.makespan_ns), Math.round(yOf(curve.cap)) + 0.5);
  pen.stroke();
  pen.setLineDash([]);
}
