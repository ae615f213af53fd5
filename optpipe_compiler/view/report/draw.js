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
    if (row.type === "lane" && row.lane.lane === "compute") drawGaps(row);
    if (row.type === "lane") drawOps(row, row.lane, null);
    if (row.type === "measured") drawOps(row, row.lane.measured, row.lane.measured.op);
    if (row.type === "memory") drawMemory(row);
  }
  if (view.microbatch !== null) shown().forEach(drawFollowed);
  drawMarks();
  drawRange();
  pen.restore();
  for (const row of seen) drawLabel(row);
  drawFoot();
  drawAxis(ticks);
  const to = Math.min(view.end, longest), digits = digitsOf(to, (view.end - view.begin) / 100);
  const from = view.begin > 0 ? showTime(view.begin, digits) : 0;
  document.getElementById("range").textContent = `${from} to ${showTime(to, digits)}`;
}

function drawBackground(row) {
  pen.fillStyle = colours.lane;
  const left = Math.max(GUTTER, toX(0)), right = toX(row.lane.chart.makespan_ns);
  pen.fillRect(left, rowY(row), right - left, row.height);
}

// Idle time stands on the floor of its lane in the colour of its cause, lower than any op; gaps within one pixel are
// drawn as the longest of them. Those of the cause that is looked for are as tall as the lane.
function drawGaps(row) {
  const gaps = row.chart.gaps[row.lane.device];
  let i = firstAbove(gaps.end, view.begin);
  while (i < gaps.begin.length && gaps.begin[i] < view.end) {
    const x = toX(gaps.begin[i]);
    const next = toX(gaps.end[i]) - x < 1 ? Math.max(i + 1, firstAbove(gaps.end, toTime(x + 1))) : i + 1;
    let shown = i;
    for (let j = i; j < next; j++) {
      if (gaps.end[j] - gaps.begin[j] > gaps.end[shown] - gaps.begin[shown]) shown = j;
    }
    drawGap(row, gaps.cause[shown], x, Math.max(1, toX(gaps.end[next - 1]) - x));
    i = next;
  }
}

function drawGap(row, cause, x, width) {
  const wanted = view.cause === cause, height = wanted ? row.height : Math.max(3, row.height * 0.28);
  pen.globalAlpha = !view.cause || wanted ? 1 : 0.3;
  pen.fillStyle = data.causes[cause].colour;
  pen.fillRect(x, rowY(row) + row.height - height, width, height);
  const left = Math.max(x, GUTTER), space = Math.min(x + width, view.width) - left;
  if (row.height >= 16 && space > 7 * cause.length + 6) {
    pen.font = `${Math.min(11, row.height * 0.55)}px ${FONT}`;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.fillStyle = wanted ? colours.paper : colours.ink;
    pen.fillText(cause, left + space / 2, rowY(row) + (row.height - (wanted ? 0 : height)) / 2 + 0.5);
  }
  pen.globalAlpha = 1;
}

// Ops of other microbatches step back while one is followed.
function drawOps(row, times, numbers) {
  pen.globalAlpha = view.microbatch === null ? 1 : 0.3;
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
  pen.globalAlpha = 1;
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
  const { lane } = row, letter = lane.kind[index], number = unitAt(lane, index);
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
