"use strict";
// Plots in the page's own colours: redrawn when these, a selector or the ticked series change, and for paper.
window.scriptErrors = [];
addEventListener("error", event => scriptErrors.push(event.message));
addEventListener("unhandledrejection", event => scriptErrors.push(String(event.reason)));

const PAPER_WIDTH = 660;     // pixels of a figure on A4 or letter
const plots = new Map();     // element id -> { specs: choices joined by "|" -> {data, layout}, by: [selector names] }
const choices = {};          // selector name -> its value
const unticked = new Set();  // series (legendgroup of their traces) that are not shown
let width = null;            // of every plot; null: as wide as its element
let ready = false;           // plotly.js is unpacked: figures can be drawn

function draw(id, spec) { drawChosen(id, { "": spec }, []); }

function drawChosen(id, specs, by) {
  plots.set(id, { specs, by });
  paint(id);
}

function paint(id) {
  if (!ready) return;
  const { specs, by } = plots.get(id), element = document.getElementById(id);
  const spec = specs[by.map(name => choices[name]).join("|")];
  if (!spec) Plotly.purge(element);
  if (!spec || element.classList.contains("none")) element.textContent = spec ? "" : "Not measured for this choice.";
  element.classList.toggle("none", !spec);
  if (!spec) return;
  const data = spec.data.map(trace => (unticked.has(trace.legendgroup) ? { ...trace, visible: false } : trace));
  element.style.height = spec.layout.height ? `${spec.layout.height}px` : "";
  Plotly.react(element, data, themed(spec.layout), { responsive: true, displayModeBar: false });
}

// Runs the plotly.js that the page carries gzipped; rejects where that is broken.
async function unpack() {
  const bytes = Uint8Array.from(atob(document.getElementById("plotly").textContent), sign => sign.charCodeAt(0));
  const script = document.createElement("script");
  script.text = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  document.head.append(script);
}

function undrawn(element) {
  element.classList.add("none");
  element.textContent = "This browser is too old to unpack the figures (it lacks DecompressionStream).";
}

function themed(layout) {
  const css = getComputedStyle(document.documentElement), of = name => css.getPropertyValue(name).trim();
  const axis = { gridcolor: of("--line"), zerolinecolor: of("--line"), linecolor: of("--line") };
  const look = {
    ...layout, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { ...layout.font, color: of("--ink") }, ...(width === null ? {} : { width }),
    hoverlabel: { bgcolor: of("--band"), bordercolor: of("--line"), font: { color: of("--ink") } },
  };
  for (const key of Object.keys(layout)) if (/^[xy]axis/.test(key)) look[key] = { ...axis, ...layout[key] };
  return look;
}

function paintAll() { plots.forEach((_, id) => paint(id)); }

// Sets a selector: elements marked data-only and the same selector elsewhere follow.
function set(name, value) {
  choices[name] = value;
  document.querySelectorAll(`select[data-choice="${name}"]`).forEach(select => { select.value = value; });
  document.querySelectorAll("[data-only]").forEach(part => {
    part.hidden = Object.entries(JSON.parse(part.dataset.only)).some(([key, only]) => choices[key] !== only);
  });
}

function choose(name, value) {
  set(name, value);
  plots.forEach(({ by }, id) => { if (by.includes(name)) paint(id); });
}

function tick(series, on) {
  unticked[on ? "delete" : "add"](series);
  document.querySelectorAll("input[data-series]").forEach(box => {
    if (box.dataset.series === series) box.checked = on;
  });
  paintAll();
}

function onPaper(on) {
  document.documentElement.classList.toggle("print", on);  // paper is white, whatever the screen is
  width = on ? PAPER_WIDTH : null;
  paintAll();
}

addEventListener("change", ({ target }) => {
  if (target.dataset.choice) choose(target.dataset.choice, target.value);
  if (target.dataset.series) tick(target.dataset.series, target.checked);
});
// Only now has every figure the width that it keeps.
addEventListener("DOMContentLoaded", async () => {
  Object.entries(choices).forEach(([name, value]) => set(name, value));
  if (!window.DecompressionStream) return document.querySelectorAll(".plot").forEach(undrawn);
  await unpack();
  ready = true;
  paintAll();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paintAll);
addEventListener("beforeprint", () => onPaper(true));
addEventListener("afterprint", () => onPaper(false));
