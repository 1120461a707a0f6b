// Draws the plots with Plotly. The form at the top sets their axes, smoothing and lines.
const form = () => document.forms.controls;
const color = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"];
const BUTTONS = [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d", "toImage"]];  // none that sends anything
let data, text = "", drawing = 0;

// Centered moving average over a share of the points, at least 3, as in jaxdp/loggers/smoothing.py.
function smooth(values, share) {
  const count = values.length, size = share && count >= data.fewest ? Math.max(3, 2 * Math.round(share * count / 2) + 1) : 1;
  const totals = [0], counts = [0];
  values.forEach((value, i) => { totals.push(totals[i] + (value ?? 0)); counts.push(counts[i] + (value !== null)); });
  return values.map((value, i) => {
    const radius = Math.min((size - 1) / 2, i, count - 1 - i), first = i - radius, end = i + radius + 1;
    return value === null || radius === 0 ? value : (totals[end] - totals[first]) / (counts[end] - counts[first]);
  });
}

const plain = text => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");  // Plotly takes HTML
const inverse = values => values.map(value => value === null ? null : value === 0 ? Infinity : 1 / value);

function timeUnit() {
  const longest = Math.max(...data.positions.map(position => position.wall_seconds.findLast(value => value !== null) ?? 0));
  return longest < 300 ? ["seconds", 1] : longest < 10800 ? ["minutes", 60] : ["hours", 3600];
}

function curveTraces(plot, shown) {
  const axis = form().axis.value, unit = axis === "wall_seconds" ? timeUnit()[1] : 1, share = form().smoothing.value / 100;
  const names = [...new Set(plot.curves.map(curve => curve.name))], classes = plot.curves.some(curve => !curve.smooth && !curve.thick && curve.name);
  return plot.curves.filter(curve => shown.has(curve.line)).flatMap(curve => {
    const line = data.lines[curve.line], x = data.positions[curve.at][axis].map(value => value === null ? null : value / unit);
    const average = values => curve.harmonic ? inverse(smooth(inverse(values), share)) : curve.smooth ? smooth(values, share) : values;
    const paint = classes && shown.size === 1 ? PALETTE[names.indexOf(curve.name) % PALETTE.length]
      : line.color === "currentColor" ? color("text") : line.color;
    const name = [shown.size > 1 && plain(line.label), plain(curve.name)].filter(Boolean).join(": ");
    const style = {color: paint, dash: line.dash, width: curve.thick ? 2.4 : 1.4, shape: curve.steps ? "hv" : "linear"};
    const y = average(curve.y), base = {x, name, type: "scatter", mode: "lines", line: style, yhoverformat: ".5~g"};
    const quiet = {...base, hoverinfo: "skip", line: {...style, width: 0}};
    if (curve.deviation) {
      const deviation = average(curve.deviation);
      return [
        {...quiet, y: y.map((value, i) => value === null ? null : value - deviation[i])},
        {...quiet, y: y.map((value, i) => value === null ? null : value + deviation[i]), fill: "tonexty", fillcolor: `${paint}33`},
        {...base, y, text: deviation.map(value => ` ± ${value?.toPrecision(3) ?? "—"}`), hovertemplate: "%{y}%{text}"},
      ];
    }
    const few = y.length < 60 && !curve.steps && !curve.smooth || y.length === 1;
    const drawn = {...base, y, mode: few ? "lines+markers" : "lines", marker: {size: 5, color: paint}};
    return y.some((value, i) => value !== curve.y[i]) ? [{...quiet, y: curve.y, opacity: 0.25, line: {...style, width: 1}}, drawn] : [drawn];
  });
}

function givenTraces(plot, shown) {
  return plot.traces.filter(trace => !trace.lines || trace.lines.some(line => shown.has(line))).map(({lines, ...trace}) => {
    const line = lines && data.lines[lines[0]], paint = line?.color;
    return !line ? {...structuredClone(trace), ...(trace.type === "heatmap" ? {textfont: {color: color("text")}} : {})}
      : {...trace, name: plain(line.label), marker: {size: 9, opacity: 0.8, color: paint === "currentColor" ? color("text") : paint}};
  });
}

function layout(plot, traces) {
  const axis = form().axis.value, scale = form().scale.value, touch = matchMedia("(pointer: coarse)").matches;
  const lines = {gridcolor: color("line"), zerolinecolor: color("line"), linecolor: color("line"), automargin: true};
  const common = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: {color: color("text"), size: 12}, showlegend: Boolean(plot.key),
    margin: {l: 8, r: 12, t: 30, b: 8}, modebar: {bgcolor: "rgba(0,0,0,0)", color: color("quiet"), activecolor: color("text")}, dragmode: touch ? false : "zoom", uirevision: `${axis} ${form().logx.checked} ${scale}`, barmode: plot.stacked ? "stack" : "group",
    hoverlabel: {bgcolor: color("card"), bordercolor: color("line"), font: {color: color("text"), size: 11}, namelength: 34}, hoverdistance: -1,
  };
  if (plot.traces) {
    const matrix = plot.traces[0].type === "heatmap";
    const names = {tickmode: "array", tickvals: plot.names.map((_, i) => i), ticktext: plot.names.map(plain)};
    return {...common, height: 26 * Math.max(plot.names.length + (plot.key ? 6 : 0), 5) + 80, hovermode: matrix ? "closest" : "y unified",
      legend: {orientation: "h", yref: "container", y: 0, yanchor: "bottom", maxheight: 140, traceorder: "normal"}, xaxis: {...lines, title: {text: plot.unit}, ...(matrix ? names : {}), showgrid: !matrix},
      yaxis: {...lines, ...names, showgrid: !matrix, autorange: "reversed"}};
  }
  const log = {linear: false, log: true}[scale] ?? plot.log, name = axis === "wall_seconds" ? `${data.axes[axis]}, ${timeUnit()[0]}` : data.axes[axis];
  return {...common, height: 280, hovermode: traces.filter(trace => trace.hoverinfo !== "skip").length > 16 ? "closest" : "x unified",
    xaxis: {...lines, title: {text: name}, type: form().logx.checked ? "log" : "linear", nticks: 7},
    yaxis: {...lines, title: {text: plot.unit}, type: log ? "log" : "linear", rangemode: plot.zero ? "tozero" : "normal", ...(log ? {tickformat: "~g", nticks: 3} : {})}};
}

async function draw() {
  const mine = ++drawing, shown = new Set([...form().querySelectorAll("[name^=line]")].flatMap((box, i) => box.checked ? [i] : []));
  for (const [name, plot] of Object.entries(data.plots)) {
    await new Promise(done => setTimeout(done));  // the browser answers in between
    const box = document.querySelector(`#plot-${name} > div`);
    if (mine !== drawing || !box) continue;
    const traces = plot.curves ? curveTraces(plot, shown) : givenTraces(plot, shown);
    if (!box.data) box.replaceChildren();
    await Plotly.react(box, traces, layout(plot, traces), {displaylogo: false, displayModeBar: true, responsive: true, modeBarButtons: BUTTONS});
  }
}

function read(root) {
  const found = root.querySelector("#data").textContent;
  if (found === text) return;
  data = JSON.parse(text = found);
  if (form()) draw();
}

// Of a page that `jaxdp watch` serves: asks every few seconds for the page, and replaces the sections that have changed.
const SECONDS = 2;
const wide = root => [...root.querySelectorAll(".wide")];
const received = new Map();  // the HTML of the sections as it came, by id
let etag = "";

function prepare(section) {
  for (const box of wide(section)) if (box.scrollWidth > box.clientWidth) {
    box.tabIndex = 0;
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", `${section.querySelector("h2").textContent}: table, scrolls sideways`);
  }
}

function replace(old, next) {
  const focused = wide(old).indexOf(document.activeElement), scrolled = wide(old).map(box => box.scrollLeft);
  for (const input of old.querySelectorAll("input, select")) {
    const twin = next.querySelector(`[name="${CSS.escape(input.name)}"]`);
    if (twin) Object.assign(twin, input.type === "checkbox" ? {checked: input.checked} : {value: input.value});
  }
  for (const plot of next.querySelectorAll(".plot")) {  // one that is drawn stays
    const drawn = old.querySelector(`#${plot.id} > div`);
    if (drawn?.data) plot.querySelector("div").replaceWith(drawn);
  }
  old.replaceWith(next);
  prepare(next);
  wide(next).forEach((box, number) => box.scrollLeft = scrolled[number] ?? 0);
  wide(next)[focused]?.focus({preventScroll: true});
}

async function update() {
  const headers = etag ? {"If-None-Match": etag} : {};
  const response = await fetch("/", {headers, cache: "no-store", signal: AbortSignal.timeout(120_000)});
  if (response.status === 304) return;
  if (!response.ok) throw new Error(await response.text());
  const next = new DOMParser().parseFromString(await response.text(), "text/html"), main = document.querySelector("main");
  document.title = next.title;
  for (const one of ["#announcement", "footer"]) {
    const said = document.querySelector(one), says = next.querySelector(one).textContent;
    if (said.textContent !== says) said.textContent = says;
  }
  const sections = [...next.querySelectorAll("section")], ids = new Set(sections.map(section => section.id));
  for (const old of [...main.children]) if (!ids.has(old.id)) old.remove();
  for (const [number, section] of sections.entries()) {
    const html = section.outerHTML;
    if (received.get(section.id) === html && document.getElementById(section.id)) continue;
    if (main.children[number]?.id !== section.id) main.insertBefore(document.createElement("section"), main.children[number] ?? null);
    replace(main.children[number], section);
    received.set(section.id, html);
  }
  read(next);
  etag = response.headers.get("ETag");
}

async function follow() {
  if (!document.hidden) {
    const connection = document.getElementById("connection");
    let problem = "";
    await update().catch(error => problem = error.message.startsWith("jaxdp") ? error.message : "jaxdp watch does not answer; this page shows its last state.");
    if (connection.textContent !== problem) connection.textContent = problem;
  }
  setTimeout(follow, 1000 * SECONDS);
}

for (const section of document.querySelectorAll("section")) {
  received.set(section.id, section.outerHTML);
  prepare(section);
}
read(document);
document.addEventListener("input", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => form() && draw());
if (location.protocol.startsWith("http") && document.documentElement.dataset.follow !== undefined) {
  if (location.search) history.replaceState(null, "", location.pathname);  // the cookie has the token now
  follow();
}
