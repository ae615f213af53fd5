// Memory rows: what each holder holds, stacked from the floor, against the cap.

const colourOf = (holder) => data.holders[holder].colour;

function drawMemory(row) {
  const { curve } = row, top = Math.max(curve.peak, curve.cap ?? 0, 1), base = rowY(row) + row.height;
  const columns = columnsOf(row), scale = (row.height - 3) / top;
  const floor = columns.map(() => 0);
  for (const [holder, held] of Object.entries(curve.held)) {
    const ceiling = columns.map(({ step }, i) => floor[i] + held[step]);
    drawLayer(row, columns, floor, ceiling, base, scale, holder);
    ceiling.forEach((bytes, i) => { floor[i] = bytes; });
  }
  if (curve.cap !== null) drawCap(row, Math.round(base - curve.cap * scale) + 0.5);
}

// The steps in view from left to right, at whole pixels; of those within one the step that holds most.
function columnsOf({ curve, chart }) {
  const columns = [], { time, bytes } = curve, pixel = (moment) => Math.round(Math.max(toX(moment), GUTTER - 9));
  let i = Math.max(0, firstAbove(time, view.begin) - 1);
  while (i < time.length && time[i] <= view.end) {
    const x = pixel(time[i]), next = Math.max(i + 1, firstAbove(time, toTime(x + 0.5)));
    let step = i;
    for (let j = i; j < next; j++) if (bytes[j] > bytes[step]) step = j;
    columns.push({ step, x, right: pixel(next < time.length ? time[next] : chart.makespan_ns) });
    i = next;
  }
  return columns;
}

function drawLayer(row, columns, floor, ceiling, base, scale, holder) {
  pen.fillStyle = colourOf(holder);
  columns.forEach(({ x, right }, i) => {
    const height = (ceiling[i] - floor[i]) * scale;
    if (height > 0) pen.fillRect(x, base - ceiling[i] * scale, right - x, height);
  });
  nameLayer(columns, floor, ceiling, base, scale, row.device === null ? "activations on the host" : holder);
}

// The holder's name where its layer is thick enough for the longest time.
function nameLayer(columns, floor, ceiling, base, scale, name) {
  let best = { wide: 0 }, run = null;
  columns.forEach(({ x, right }, i) => {
    const low = floor[i] * scale, high = ceiling[i] * scale;
    const both = run && { left: run.left, low: Math.max(run.low, low), high: Math.min(run.high, high) };
    const alone = high - low >= 11 ? { left: Math.max(x, GUTTER), low, high } : null;
    run = both && both.high - both.low >= 11 ? both : alone;
    const wide = run ? Math.min(right, view.width) - run.left : 0;
    if (wide > best.wide) best = { ...run, wide };
  });
  pen.font = `10px ${FONT}`;
  if (best.wide < pen.measureText(name).width + 8) return;
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  pen.fillStyle = "#11151a";
  pen.fillText(name, best.left + best.wide / 2, base - (best.low + best.high) / 2 + 0.5);
}

function drawCap(row, y) {
  pen.strokeStyle = colours.cap;
  pen.setLineDash([4, 3]);
  pen.lineWidth = 1;
  pen.beginPath();
  pen.moveTo(Math.max(GUTTER, toX(0)), y);
  pen.lineTo(toX(row.chart.makespan_ns), y);
  pen.stroke();
  pen.setLineDash([]);
}

// What is held at a moment, in a sentence and by holder.
function describeMemory({ curve, device }, time) {
  const step = Math.max(0, firstAbove(curve.time, time) - 1), bytes = curve.bytes[step];
  const part = curve.cap ? `, ${((100 * bytes) / curve.cap).toFixed(1)}% of the cap` : "";
  const where = device === null ? "offloaded to the host" : `on device ${device}`;
  const says = element("p", `${showBytes(bytes)} ${where}${part}`, { className: "where" });
  if (device === null) return [says];
  const held = Object.entries(curve.held).filter(([, sizes]) => sizes[step]);
  return [says, table(held.map(([holder, sizes]) => [
    [swatch(colourOf(holder)), holder], showBytes(sizes[step]), data.holders[holder].says,
  ]).reverse(), "facts")];
}
