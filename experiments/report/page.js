// draws the plots of the report from the JSON in the page

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const darkScheme = matchMedia("(prefers-color-scheme: dark)");
const narrow = matchMedia("(max-width: 50rem)");
const touchscreen = matchMedia("(pointer: coarse)");
const hidden = new Set();
// width of a plot in pixels on paper; null on a screen, where a plot is as wide as its place
let printWidth = null;

// plotly reads names as markup
const escaped = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const precise = (value) => (value === null ? "-" : Number(value.toPrecision(4)).toString());

// ---- colours

function isDark() {
  return darkScheme.matches && printWidth === null;
}

function parts(colour) {
  return [1, 3, 5].map((place) => parseInt(colour.slice(place, place + 2), 16));
}

// the row's colour, lighter on dark paper; on white paper as in the figures, unless it is too pale
function readable(colour) {
  let rgb = parts(colour);
  // one map for all colours, so that two shades never become one
  if (isDark()) rgb = rgb.map((part) => 90 + part * 165 / 255);
  while (!isDark() && luminance(rgb) > 0.5) rgb = rgb.map((part) => part * 0.95);
  return rgb.map(Math.round);
}

// relative luminance as WCAG defines it
function luminance(rgb) {
  const linear = rgb.map((part) => (part / 255 <= 0.04045 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
}

function paint(row, alpha = 1) {
  return `rgba(${readable(row.colour).join(",")},${alpha})`;
}

function theme() {
  return isDark()
    ? { ink: "#e6e8eb", dim: "#8b939e", line: "#3a4049", paper: "#16181c", shade: "rgba(255,255,255,0.08)" }
    : { ink: "#1c1f24", dim: "#8b939e", line: "#e3e6ea", paper: "#ffffff", shade: "rgba(0,0,0,0.06)" };
}

// ---- plots

function axis(title, more = {}) {
  const { ink, line } = theme();
  const look = { color: ink, gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true, ticks: "outside" };
  return { ...look, tickcolor: line, title: { text: title, standoff: 8 }, ...more };
}

// plain numbers, not powers of ten, and some between them where the range is short
function logarithmic(values) {
  const known = values.filter((value) => value > 0);
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const steps = high / low > 30 ? [1, 3] : [1, 1.5, 2, 3, 4, 6];
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    ticks.push(...steps.map((step) => Number((step * 10 ** power).toPrecision(2))));
  }
  return known.length ? { type: "log", tickvals: ticks, ticktext: ticks.map(String) } : {};
}

function draw(id, traces, layout) {
  const { ink, dim, paper } = theme();
  const size = printWidth === null ? { autosize: true } : { width: printWidth };
  const look = { paper_bgcolor: paper, plot_bgcolor: paper, font: { color: ink, size: 12, family: "system-ui, sans-serif" } };
  const label = { bgcolor: paper, bordercolor: ink, font: { color: ink }, align: "left", namelength: -1 };
  const rest = { margin: { l: 48, r: 12, t: 30, b: 44 }, showlegend: false, hovermode: "closest", hoverlabel: label };
  // a finger on a plot scrolls the page; the buttons are named, as one of plotly's own would send the data away
  const touch = { dragmode: touchscreen.matches ? false : "zoom", modebar: { color: dim, activecolor: ink, bgcolor: "rgba(0,0,0,0)" } };
  const config = { responsive: true, displaylogo: false, plotlyServerURL: "", modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] };
  Plotly.react(byId(id), traces, { ...look, ...rest, ...touch, ...size, ...layout }, config);
}

const shown = () => data.rows.filter((row) => !hidden.has(row.label));

function band(row, curve) {
  const back = (values) => [...values].reverse();
  return {
    x: [...curve.tokens, ...back(curve.tokens)],
    y: [...curve.high, ...back(curve.low)],
    fill: "toself", fillcolor: paint(row, 0.14), mode: "lines", line: { width: 0 }, hoverinfo: "skip", name: escaped(row.label),
  };
}

function line(row, curve) {
  const range = curve.step.map((step, n) => `step ${step}<br>seeds ${precise(curve.low[n])} to ${precise(curve.high[n])}`);
  const points = curve.step.length < 30;
  return {
    x: curve.tokens, y: curve.mean, text: range, name: escaped(row.label), mode: points ? "lines+markers" : "lines",
    line: { color: paint(row), width: 2 }, marker: { symbol: row.symbol, size: 7 },
    hovertemplate: "<b>%{fullData.name}</b><br>%{y:.4g} at %{x:,} tokens<br>%{text}<extra></extra>",
  };
}

function drawCurve(key) {
  const rows = shown().filter((row) => row.curves[key]);
  // rows with other tokens a step have no window in common
  const tails = data.tail.tokens ? [data.tail.tokens] : [];
  const shapes = tails.map(([start, end]) => ({ type: "rect", x0: start, x1: end, yref: "paper", y0: 0, y1: 1, fillcolor: theme().shade, line: { width: 0 }, layer: "below" }));
  const scale = key.endsWith("maxvio") ? logarithmic(rows.flatMap((row) => [...row.curves[key].low, ...row.curves[key].high])) : {};
  const traces = [...rows.map((row) => band(row, row.curves[key])), ...rows.map((row) => line(row, row.curves[key]))];
  draw(`curve-${key}`, traces, { shapes, xaxis: axis("tokens", { range: [0, data.last_token * 1.01] }), yaxis: axis("", scale) });
}

function bars(values, colour) {
  return { type: "data", array: values.map((value) => value ?? 0), color: colour, thickness: 1.5, width: 4 };
}

function drawBalance(key) {
  const rows = shown();
  const points = rows.map((row) => {
    const [x, y] = [row.tail[key], row.tail.val_bpb];
    return {
      x: [x.mean], y: [y.mean], error_x: bars([x.std], paint(row)), error_y: bars([y.std], paint(row)), name: escaped(row.label),
      mode: "markers", marker: { symbol: row.symbol, size: 11, color: paint(row) },
      hovertemplate: `<b>%{fullData.name}</b><br>MaxVio ${precise(x.mean)} ± ${precise(x.std)}<br>BPB ${precise(y.mean)} ± ${precise(y.std)}<extra></extra>`,
    };
  });
  const seeds = rows.map((row) => ({
    x: row.tail[key].seeds, y: row.tail.val_bpb.seeds, text: row.seeds.map((seed) => `seed ${seed}`), name: escaped(row.label),
    mode: "markers", marker: { symbol: row.symbol, size: 7, color: paint(row, 0.4) },
    hovertemplate: "<b>%{fullData.name}</b>, %{text}<br>MaxVio %{x:.4g}<br>BPB %{y:.4g}<extra></extra>",
  }));
  const scale = logarithmic(rows.flatMap((row) => [...row.tail[key].seeds, row.tail[key].mean]));
  draw(`balance-${key}`, [...seeds, ...points], { xaxis: axis("MaxVio", scale), yaxis: axis("BPB") });
}

function drawDevices() {
  const rows = shown().filter((row) => Object.keys(row.devices).length);
  const recorded = data.rows.some((row) => Object.keys(row.devices).length);
  byId("devices-empty").hidden = recorded;
  byId("devices-maxvio").parentElement.hidden = !recorded;
  if (!recorded) return;
  const counts = [...new Set(data.rows.flatMap((row) => Object.keys(row.devices).map(Number)))].sort((a, b) => a - b);
  const traces = rows.map((row) => {
    const own = counts.filter((count) => row.devices[count]);
    const [mean, low, high] = [0, 1, 2].map((place) => own.map((count) => row.devices[count][place]));
    const reach = { ...bars(high.map((value, n) => value - mean[n]), paint(row)), symmetric: false, arrayminus: mean.map((value, n) => value - low[n]) };
    return {
      x: own, y: mean, error_y: reach, name: escaped(row.label), text: mean.map((value, n) => `seeds ${precise(low[n])} to ${precise(high[n])}`),
      mode: "lines+markers", line: { color: paint(row), width: 2 }, marker: { symbol: row.symbol, size: 8 },
      hovertemplate: "<b>%{fullData.name}</b><br>busiest of %{x} devices: 1 + %{y:.3g} times the mean<br>%{text}<extra></extra>",
    };
  });
  const ticks = { type: "log", tickvals: counts, ticktext: counts.map(String) };
  draw("devices-maxvio", traces, { xaxis: axis("devices P", ticks), yaxis: axis("v", { rangemode: "tozero" }) });
}

function drawSweep(key) {
  const { lines, others, logarithmic: log, key: option } = data.sweep;
  const values = lines.flatMap((own) => own.x);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const own = (places) => places.map((place) => data.rows[place]);
  const swept = lines.map(({ name, x, rows }) => {
    const [place, tails] = [own(rows)[Math.floor(rows.length / 2)], own(rows).map((row) => row.tail[key])];
    const on = x.map((_, n) => !hidden.has(own(rows)[n].label));
    const kept = (list) => list.filter((_, n) => on[n]);
    return {
      x: kept(x), y: kept(tails.map((tail) => tail.mean)), error_y: bars(kept(tails.map((tail) => tail.std)), paint(place)), name: escaped(name),
      mode: "lines+markers", line: { color: paint(place), width: 2 }, marker: { symbol: place.symbol, size: 9, color: kept(own(rows)).map((row) => paint(row)) },
      hovertemplate: "<b>%{fullData.name}</b><br>%{y:.4g} at %{x}<extra></extra>",
    };
  });
  const beside = own(others).filter((row) => !hidden.has(row.label)).map((row) => ({
    x: [low, high], y: [row.tail[key].mean, row.tail[key].mean], name: escaped(row.label),
    mode: "lines", line: { color: paint(row), width: 2, dash: "dash" }, hovertemplate: "<b>%{fullData.name}</b><br>%{y:.4g}<extra></extra>",
  }));
  const ticks = [...new Set(values)].sort((a, b) => a - b);
  const word = (value) => (value < 1e-3 ? value.toExponential() : String(value));
  const scale = log ? { type: "log", tickvals: ticks, ticktext: ticks.map(word) } : {};
  draw(`sweep-${key}`, [...swept, ...beside], { xaxis: axis(escaped(option), scale), yaxis: axis("") });
}

// ---- experts

const DIVERGING = ["#053061", "#2166ac", "#4393c3", "#92c5de", "#d1e5f0", "#f7f7f7", "#fddbc7", "#f4a582", "#d6604d", "#b2182b", "#67001f"];
// of one lightness that stands out from white and from black
const GROUPS = ["#4f7fd1", "#2a9d8f", "#7a9a1f", "#c28a00", "#d1602a", "#b5387f"];

function bytes(text) {
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}

// log2 of the load by expert and column, null where nothing was recorded
function loadLevels(experts, layer) {
  const codes = bytes(layer.load);
  const value = (code) => (code > data.load_levels ? null : (code / data.load_levels * 2 - 1) * data.heat_limit);
  return table(experts, (place) => value(codes[place]));
}

function biasLevels(experts, layer) {
  const { low, high, levels } = layer.bias;
  const view = new DataView(bytes(levels).buffer);
  const value = (code) => (code > data.bias_levels ? null : low + code / data.bias_levels * (high - low));
  return table(experts, (place) => value(view.getUint16(2 * place, true)));
}

function table({ num_experts: rows, num_columns: columns }, value) {
  return Array.from({ length: rows }, (_, row) => Array.from({ length: columns }, (_, column) => value(row * columns + column)));
}

function chosen() {
  const row = data.rows[Number(byId("experts-row").value)];
  const layer = row.experts?.layers.find((own) => own.layer === Number(byId("experts-layer").value));
  return { row, layer, experts: row.experts, sorted: byId("experts-order").value === "load" };
}

function spanOf(experts, column) {
  const last = experts.last_step[column];
  const first = column ? experts.last_step[column - 1] + 1 : 1;
  return first === last ? `step ${last}` : `steps ${first} to ${last}`;
}

function drawExperts() {
  const { row, layer, experts, sorted } = chosen();
  reveal("experts-load", layer ? "" : "No load was recorded.");
  reveal("experts-bias", biasMissing(row, layer));
  byId("experts-note").textContent = layer && experts.width > 1 ? `A column is ${experts.width} steps.` : "";
  if (layer) drawLoad(experts, layer, sorted);
  if (layer?.bias) drawBias(experts, layer);
}

function biasMissing(row, layer) {
  if (!layer) return "No bias was recorded.";
  if (!row.experts.has_bias) return "These runs were made before biases were recorded.";
  return layer.bias ? "" : `${row.label} has no selection bias.`;
}

// show a plot, or why there is none
function reveal(id, reason) {
  byId(id).parentElement.hidden = reason !== "";
  byId(`${id}-empty`).hidden = reason === "";
  byId(`${id}-empty`).textContent = reason;
}

function drawLoad(experts, layer, sorted) {
  const levels = loadLevels(experts, layer);
  const order = sorted ? layer.order : levels.map((_, expert) => expert);
  const limit = data.heat_limit;
  const word = (level) => (level === null ? "not recorded" : `${Math.abs(level) >= limit ? (level > 0 ? "≥ " : "≤ ") : ""}${precise(2 ** level)} of the balanced load`);
  const text = order.map((expert) => levels[expert].map((level, column) => `expert ${expert}, ${spanOf(experts, column)}<br>${word(level)}`));
  const ticks = [-2, -1, 0, 1, 2];
  const bar = {
    orientation: "h", thickness: 10, len: narrow.matches ? 0.9 : 0.5, x: 1, xanchor: "right", y: 1.01, yanchor: "bottom", outlinewidth: 0,
    tickvals: ticks, ticktext: ["≤ 1/4", "1/2", "1", "2", "≥ 4"], ticklabelposition: "outside top",
  };
  const trace = {
    type: "heatmap", z: order.map((expert) => levels[expert]), x0: (1 + experts.last_step[0]) / 2, dx: experts.width, text,
    zmin: -limit, zmax: limit, colorscale: DIVERGING.map((colour, n) => [n / 10, colour]), colorbar: bar, hovertemplate: "%{text}<extra></extra>",
  };
  const experts_axis = sorted ? { showticklabels: false, ticks: "" } : {};
  const title = sorted ? "experts, busiest at the top" : "expert";
  draw("experts-load", [trace], { margin: { l: 48, r: 12, t: 60, b: 48 }, xaxis: axis("", { title: { text: "step" }, showgrid: false }), yaxis: axis(title, { autorange: "reversed", showgrid: false, ...experts_axis }) });
}

function drawBias(experts, layer) {
  const levels = biasLevels(experts, layer);
  const last = (expert) => levels[expert].findLast((value) => value !== null) ?? 0;
  const order = levels.map((_, expert) => expert).sort((a, b) => last(a) - last(b));
  const size = Math.ceil(order.length / GROUPS.length);
  // a few traces with gaps between the experts: hundreds of them are slow
  const traces = GROUPS.map((colour, n) => {
    const group = order.slice(n * size, (n + 1) * size);
    return {
      x: group.flatMap(() => [...experts.last_step, null]), y: group.flatMap((expert) => [...levels[expert], null]),
      text: group.flatMap((expert) => [...experts.last_step.map(() => `expert ${expert}`), null]), mode: "lines", line: { color: colour, width: 1.3 },
      hovertemplate: "%{text}, step %{x}<br>bias %{y:.4g}<extra></extra>",
    };
  }).filter((trace) => trace.x.length);
  draw("experts-bias", traces, { xaxis: axis("step"), yaxis: axis("bias") });
}

function fillSelects() {
  const row = byId("experts-row");
  row.append(...data.rows.map((own, place) => new Option(own.label, place)));
  const layers = [...new Set(data.rows.flatMap((own) => own.experts?.layers.map((layer) => layer.layer) ?? []))].sort((a, b) => a - b);
  byId("experts-layer").append(...layers.map((layer) => new Option(`MoE layer ${layer}${layer === data.worst_layer ? " (worst)" : ""}`, layer)));
  if (layers.includes(data.worst_layer)) byId("experts-layer").value = data.worst_layer;
  row.value = Math.max(0, data.rows.findIndex((own) => own.experts?.layers.some((layer) => layer.bias)));
  for (const id of ["experts-row", "experts-layer", "experts-order"]) byId(id).addEventListener("change", drawExperts);
}

// ---- legend

// plotly's markers as paths of about 12 units, for the legend
const PATHS = {
  circle: "M6,0A6,6 0 1,1 6,-0.01Z", square: "M-5,-5H5V5H-5Z", diamond: "M0,-7L7,0L0,7L-7,0Z", "diamond-tall": "M0,-7L4.5,0L0,7L-4.5,0Z",
  cross: "M-2,-6H2V-2H6V2H2V6H-2V2H-6V-2H-2Z", x: "M-6,-3L-3,-6L0,-3L3,-6L6,-3L3,0L6,3L3,6L0,3L-3,6L-6,3L-3,0Z",
  "triangle-up": "M0,-6L6,5H-6Z", "triangle-down": "M0,6L6,-5H-6Z", "triangle-left": "M-6,0L5,-6V6Z", "triangle-right": "M6,0L-5,-6V6Z",
  hexagon: "M0,-6L5.2,-3V3L0,6L-5.2,3V-3Z", pentagon: "M0,-6L5.7,-1.9L3.5,4.9H-3.5L-5.7,-1.9Z", octagon: "M-2.5,-6H2.5L6,-2.5V2.5L2.5,6H-2.5L-6,2.5V-2.5Z",
  star: "M0,-7L1.8,-2.4L6.7,-2.2L2.9,0.9L4.1,5.7L0,3L-4.1,5.7L-2.9,0.9L-6.7,-2.2L-1.8,-2.4Z",
};

function key(row) {
  const button = document.createElement("button");
  const name = document.createElement("span");
  name.textContent = row.label;
  button.type = "button";
  button.innerHTML = `<svg width="26" height="14" viewBox="-13 -7 26 14" aria-hidden="true"><path d="M-13,0H13" stroke-width="2"/><path d="${PATHS[row.symbol]}"/></svg>`;
  button.append(name);
  button.addEventListener("click", () => {
    if (!hidden.delete(row.label)) hidden.add(row.label);
    drawAll();
  });
  return button;
}

function updateLegend() {
  [...byId("legend").children].forEach((button, place) => {
    const row = data.rows[place];
    button.setAttribute("aria-pressed", String(!hidden.has(row.label)));
    button.firstElementChild.style.fill = button.firstElementChild.style.stroke = paint(row);
  });
}

// ---- all of it

function drawAll() {
  updateLegend();
  ["global_maxvio", "local_maxvio", "loss", "val_bpb"].forEach(drawCurve);
  ["global_maxvio", "local_maxvio"].forEach(drawBalance);
  if (data.sweep) ["global_maxvio", "local_maxvio", "val_bpb"].forEach(drawSweep);
  drawDevices();
  drawExperts();
}

byId("legend").append(...data.rows.map(key));
fillSelects();
drawAll();
darkScheme.addEventListener("change", drawAll);
narrow.addEventListener("change", drawExperts);
addEventListener("beforeprint", () => { printWidth = 640; drawAll(); });
addEventListener("afterprint", () => { printWidth = null; drawAll(); });
