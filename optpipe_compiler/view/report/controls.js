// What stands above and beside the chart: search, the microbatch to follow, the baseline below, causes; and the start.

const searchBox = document.getElementById("search");
const foundHow = document.getElementById("found");
const microbatchBox = document.getElementById("microbatch");
const baselineBox = document.getElementById("baseline");

// -- search -----------------------------------------------------------------------------------------------------

let hits = [], hit = -1;

function search() {
  hits = opsNamed(searchBox.value);
  hit = -1;
  foundHow.textContent = hits.length || !searchBox.value.trim() ? "" : "no such op";
}

// To the next op that was found.
function nextHit() {
  if (!hits.length) return;
  hit = (hit + 1) % hits.length;
  foundHow.textContent = `${hit + 1} of ${hits.length}`;
  const op = hits[hit];
  pin(op);
  reveal(op.lane, beginOf(op), endOf(op));
}

searchBox.addEventListener("input", search);
searchBox.addEventListener("keydown", (event) => {
  if (event.key === "Enter") nextHit();
  if (event.key === "Escape") canvas.focus({ preventScroll: true });
});

// -- what is drawn ----------------------------------------------------------------------------------------------

microbatchBox.max = data.microbatches - 1;
microbatchBox.addEventListener("input", () => {
  const number = microbatchBox.value.trim() === "" ? NaN : Number(microbatchBox.value);
  const exists = Number.isInteger(number) && number >= 0 && number < data.microbatches;
  view.microbatch = exists ? number : null;
  redraw();
});

function compareWith(number) {
  view.below = number;
  baselineBox.value = String(number);
  if (view.pinned && !shown().includes(view.pinned.chart)) pin(null);
  if (view.gap && !shown().includes(view.gap.chart)) pin(null);
  view.hover = null;
  if (view.range) card.replaceChildren(...describeRange(view.range));
  repaint();
  resize();
  fit();
}

charts.forEach((chart, number) => {
  const name = number ? chart.name : "nothing";
  baselineBox.append(element("option", name, { value: String(number), selected: number === view.below }));
});
baselineBox.parentElement.hidden = charts.length < 2;
baselineBox.addEventListener("change", () => compareWith(Number(baselineBox.value)));
for (const one of document.querySelectorAll("button[data-chart]")) {
  one.addEventListener("click", () => compareWith(Number(one.dataset.chart)));
}
for (const one of document.querySelectorAll("button.cause")) {
  one.setAttribute("aria-pressed", "false");
  one.addEventListener("click", () => choose(one.dataset.cause));
}
document.getElementById("in").addEventListener("click", () => zoom(1 / 1.4));
document.getElementById("out").addEventListener("click", () => zoom(1.4));
document.getElementById("fit").addEventListener("click", fit);
document.getElementById("memory").addEventListener("change", () => { drawLegend(); resize(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);

function resize() {
  view.width = scroller.clientWidth;
  view.height = scroller.clientHeight;
  canvas.width = Math.round(view.width * devicePixelRatio);
  canvas.height = Math.round(view.height * devicePixelRatio);
  canvas.style.height = `${view.height}px`;
  arrange();
  document.getElementById("rows").style.height = `${tall + AXIS + FOOT}px`;
  scroll(view.top);
}

function repaint() {
  readColours();
  drawLegend();
  redraw();
}

// -- legend -----------------------------------------------------------------------------------------------------

function drawLegend() {
  const letters = new Set(shown().flatMap((chart) => chart.lanes.flatMap((lane) => [...lane.kind])));
  const items = Object.keys(KINDS).filter((letter) => letters.has(letter)).map(legendOf);
  const deeper = matchMedia("(prefers-color-scheme: dark)").matches ? "lighter" : "darker";
  if (shown().some((chart) => chart.several)) {
    items.push(element("li", `${deeper}: later stages of a device`, { className: "note" }));
  }
  document.getElementById("legend").replaceChildren(...items);
  const held = new Set(shown().flatMap((chart) => chart.memory.flatMap((curve) => Object.keys(curve.held))));
  const named = [...held].map((holder) => {
    return element("li", [swatch(colourOf(holder)), holder], { title: data.holders[holder].says });
  });
  const holders = document.getElementById("holders");
  holders.replaceChildren(element("li", "memory:", { className: "note" }), ...named);
  holders.hidden = !document.getElementById("memory").checked;
}

function legendOf(letter) {
  const square = element("canvas"), size = 18, { fill, ink } = styleOf(letter, 0);
  square.width = square.height = size * devicePixelRatio;
  square.style.width = square.style.height = `${size}px`;
  const brush = square.getContext("2d");
  brush.scale(devicePixelRatio, devicePixelRatio);
  for (const style of KINDS[letter].hatch ? [fill, hatchOf(ink)] : [fill]) {
    brush.fillStyle = style;
    brush.fillRect(0, 0, size, size);
  }
  brush.fillStyle = ink;
  brush.font = `600 11px ${FONT}`;
  brush.textAlign = "center";
  brush.textBaseline = "middle";
  brush.fillText(letter, size / 2, size / 2 + 0.5);
  return element("li", [square, KINDS[letter].does]);
}

// -- start ------------------------------------------------------------------------------------------------------

// An op in the page's address, such as #2F0 or #forward:2:0, is gone to.
function openAddress() {
  let name = location.hash.slice(1);
  try { name = decodeURIComponent(name); } catch { return; } // such as #%, which no op is called
  const [op] = opsNamed(name);
  if (op) go(op);
}

addEventListener("hashchange", openAddress);
readColours();
drawLegend();
resize();
fit();
openAddress();
new ResizeObserver(resize).observe(scroller);
