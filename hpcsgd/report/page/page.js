"use strict";
// Draws the panels of the page. Everything it needs is in the page: the data as JSON, Plotly packed.

const LIGHT = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7b3fa0", "#8c6d31", "#d62728", "#666666", "#1b9aaa", "#e377c2", "#7f9c3b", "#3f3f9e"];
const DARK = ["#58b4ec", "#ff9248", "#2fce9f", "#eba0c9", "#e9c440", "#9ad7ff", "#c08be6", "#cfae6b", "#ff7b7b", "#b5b5b5", "#5fd3de", "#ff9fe0", "#b9d36a", "#9a9aff"];
// Chosen one by one: Plotly's own choice has a button that sends the plot to a server of theirs.
const CONFIG = {
  displaylogo: false, responsive: true, displayModeBar: true, plotlyServerURL: "",
  modeBarButtons: [["toImage"], ["zoom2d", "pan2d"], ["resetScale2d"]],
};
const PAPER = { height: 205, entry: 13, width: 320, wide: 670 }; // pixels: two plots side by side, or one alone
const DASHES = ["solid", "dash", "dot", "dashdot"];
const UNITS = {
  step: { title: "step", tickformat: "~s" },
  samples: { title: "samples", tickformat: "~s" },
  seconds: { title: "seconds of training", tickformat: "~s" },
  bytes: { title: "bytes sent by rank 0", tickformat: "~s", ticksuffix: "B" },
};
const data = JSON.parse(document.getElementById("data").textContent);
const several = data.runs.length > 1;
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const hidden = new Set(); // runs
const drawn = new Set(); // panels
let against = location.hash.replace("#against=", "");
if (!data.spent.includes(against)) against = "step";
let logarithmic = true;
let printing = false;

function palette() {
  return dark.matches && !printing ? DARK : LIGHT;
}

function colour(number) {
  const colours = palette();
  return number < 0 ? ink() : colours[number % colours.length];
}

function ink() {
  return dark.matches && !printing ? "#e3e7ec" : "#1b1f24";
}

// Where the run was at these steps: between two readings in a straight line.
function along(run, steps) {
  const to = data.spent.indexOf(against);
  if (to === 0) return steps;
  const [from, spent] = [data.runs[run].ruler[0], data.runs[run].ruler[to]];
  let i = 1;
  return steps.map((step) => {
    while (i < from.length - 1 && from[i] < step) i++;
    if (from.length < 2) return spent[0];
    const part = (Math.min(step, from[i]) - from[i - 1]) / (from[i] - from[i - 1] || 1);
    return spent[i - 1] + part * (spent[i] - spent[i - 1]);
  });
}

function courseTrace(trace) {
  const line = { color: colour(trace.colour), width: 1.6 };
  if (several) line.dash = DASHES[Math.floor(trace.run / LIGHT.length) % DASHES.length];
  const made = {
    type: "scatter", mode: "lines", x: along(trace.run, trace.step), y: trace.y, line,
    name: several ? data.runs[trace.run].label : trace.name, connectgaps: false,
  };
  if (trace.look === "faint") return { ...made, opacity: 0.35, line: { ...line, width: 1 }, hoverinfo: "skip", showlegend: false };
  if (trace.look === "points") return { ...made, mode: "lines+markers", marker: { size: 5 } };
  if (trace.look === "area") return { ...made, stackgroup: "all", line: { ...line, width: 0.5 }, fillcolor: line.color };
  return made;
}

function plainTrace(trace) {
  const { colour: number, colours, run, width, size, symbol, shape, ...made } = trace;
  if (made.type === "bar") {
    made.marker = { color: colours ? colours.map(colour) : colour(number) };
    if (made.text) Object.assign(made, { textposition: "auto", cliponaxis: false, constraintext: "none" });
  } else {
    made.line = { color: colour(number), width: width || 1.6, shape: shape || "linear" };
    made.marker = { color: colour(number), size: size || 4, symbol: symbol || "circle" };
  }
  return made;
}

function layoutOf(panel) {
  const grid = dark.matches && !printing ? "#2a313a" : "#e4e8ec";
  const axis = { gridcolor: grid, linecolor: grid, zerolinecolor: grid, automargin: true };
  const { bars, xaxis, yaxis, ...own } = panel.layout;
  const x = panel.course ? { ...UNITS[against] } : { ...xaxis };
  if (typeof x.title === "string") x.title = { text: x.title, standoff: 6 };
  const y = { exponentformat: "power", ...yaxis };
  if (typeof y.title === "string") y.title = { text: y.title, standoff: 6 };
  if (panel.course && panel.log && logarithmic) Object.assign(y, { type: "log", dtick: 1 });
  if (panel.course) own.shapes = several ? [] : restarts();
  const named = new Set(panel.traces.map((trace) => trace.name)).size;
  const byRun = several && panel.traces.every((trace) => trace.run !== undefined);
  const showlegend = named > 1 && !byRun && !panel.traces.some((trace) => trace.look === "faint");
  const columns = printing ? { entrywidth: 0.49, entrywidthmode: "fraction", maxheight: 1 } : {};
  if (printing) {
    own.width = panel.wide ? PAPER.wide : PAPER.width;
    own.height = PAPER.height + (showlegend ? PAPER.entry * named : 0);
  }
  return {
    modebar: { bgcolor: "rgba(0,0,0,0)", color: "#8a949e", activecolor: ink() },
    margin: { l: 48, r: 12, t: 8, b: 36 }, font: { color: ink(), size: 11, family: "system-ui, sans-serif" },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: panel.course ? "x unified" : "closest",
    hoverlabel: { bgcolor: dark.matches && !printing ? "#20262e" : "#ffffff", font: { color: ink() }, namelength: 40 },
    showlegend,
    legend: { orientation: "h", x: 0, y: -0.2, yanchor: "top", font: { size: printing ? 8 : 10 }, traceorder: "normal", ...columns },
    xaxis: { ...axis, ...x }, yaxis: { ...axis, ...y }, ...own,
  };
}

// Where a requeued run began again.
function restarts() {
  return along(0, data.runs[0].restarts).map((x) => ({
    type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line: { color: ink(), width: 1, dash: "dot" }, opacity: 0.5,
  }));
}

function draw(number) {
  const panel = data.panels[number];
  const traces = panel.traces.map(panel.course ? courseTrace : plainTrace);
  panel.traces.forEach((trace, i) => { traces[i].visible = !(several && hidden.has(trace.run)); });
  const place = document.getElementById(`panel-${number}`);
  const layout = layoutOf(panel);
  if (panel.layout.bars) place.style.height = `${Math.max(17, 8 + 1.5 * panel.layout.bars)}rem`;
  if (printing) place.style.height = `${layout.height}px`;
  else if (!panel.layout.bars) place.style.height = "";
  Plotly.react(place, traces, layout, CONFIG);
  drawn.add(number);
}

function drawAgain(which = () => true) {
  for (const number of drawn) if (which(data.panels[number])) draw(number);
}

// First what can be seen, then the rest, a panel at a time, so that the page answers meanwhile.
function drawAll() {
  const order = data.panels.map((_, number) => [document.getElementById(`panel-${number}`).getBoundingClientRect().top, number]);
  const waiting = order.sort((a, b) => a[0] - b[0]);
  while (waiting.length && waiting[0][0] < window.innerHeight) draw(waiting.shift()[1]);
  performance.mark("seen");
  const next = () => {
    if (waiting.length) {
      const number = waiting.shift()[1];
      if (!drawn.has(number)) draw(number);
      setTimeout(next);
    } else {
      performance.mark("drawn");
      document.body.dataset.drawn = Math.round(performance.now());
    }
  };
  setTimeout(next);
}

function offerChoices() {
  const spent = document.getElementById("spent");
  for (const name of data.spent) {
    const label = spent.appendChild(document.createElement("label"));
    const input = label.appendChild(document.createElement("input"));
    Object.assign(input, { type: "radio", name: "spent", value: name, checked: name === against });
    label.append(` ${name === "step" ? "steps" : name}`);
    input.addEventListener("change", () => {
      against = name;
      history.replaceState(null, "", `#against=${name}`);
      drawAgain((panel) => panel.course);
    });
  }
  document.getElementById("log").addEventListener("change", (event) => {
    logarithmic = event.target.checked;
    drawAgain((panel) => panel.log);
  });
  if (several) offerRuns();
  document.getElementById("controls").hidden = false;
}

function offerRuns() {
  const list = document.getElementById("runs");
  data.runs.forEach((run, number) => {
    const label = list.appendChild(document.createElement("label"));
    const input = label.appendChild(document.createElement("input"));
    Object.assign(input, { type: "checkbox", checked: true });
    const swatch = label.appendChild(document.createElement("span"));
    swatch.className = "swatch";
    swatch.dataset.run = number;
    const plain = document.createElement("textarea"); // labels are escaped for Plotly
    plain.innerHTML = run.label;
    label.append(plain.value);
    label.title = plain.value;
    input.addEventListener("change", () => {
      if (input.checked) hidden.delete(number);
      else hidden.add(number);
      drawAgain();
    });
  });
}

function paintSwatches() {
  for (const swatch of document.querySelectorAll(".swatch")) {
    const run = Number(swatch.dataset.run);
    const dash = ["solid", "dashed", "dotted", "double"][Math.floor(run / LIGHT.length) % 4];
    swatch.style.borderTop = `3px ${dash} ${colour(run)}`;
  }
}

async function unpack(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent.trim()), (letter) => letter.charCodeAt(0));
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(unpacked).text();
}

// While a job runs the page is written anew; who looks away, or says so, keeps the one that is there.
function follow() {
  const every = Number(document.body.dataset.every);
  if (!every) return;
  setInterval(() => {
    if (document.getElementById("follow").checked && !document.hidden) location.reload();
  }, 1000 * every);
}

function print(begins) {
  printing = begins;
  paintSwatches();
  data.panels.forEach((_, number) => draw(number));
}

async function start() {
  follow();
  offerChoices();
  paintSwatches();
  const library = document.createElement("script");
  library.textContent = await unpack("library");
  document.head.append(library);
  drawAll();
  dark.addEventListener("change", () => { paintSwatches(); drawAgain(); });
  window.addEventListener("beforeprint", () => print(true));
  window.addEventListener("afterprint", () => print(false));
}

start();
