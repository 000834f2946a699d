"use strict";

// A finger scrolls the page; only a mouse selects and zooms inside a plot.
const isTouch = matchMedia("(pointer: coarse)").matches;
const canHover = matchMedia("(hover: hover)").matches;
const config = {
  responsive: true,
  displaylogo: false,
  displayModeBar: canHover ? "hover" : false,
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
};
const hidden = new Set(); // names of candidates
const redraws = [];

function report(problem) {
  const card = document.getElementById("problem");
  card.hidden = false;
  card.textContent += `Something on this page could not be drawn: ${problem}. `;
}

addEventListener("error", (event) => report(event.message));
addEventListener("unhandledrejection", (event) => report(event.reason));
addEventListener("securitypolicyviolation", (event) => report(`${event.blockedURI} was refused`));

function draw(plot, index) {
  const view = plot.views[index];
  const data = view.data.map((trace) => ({ ...trace, visible: !hidden.has(trace.meta) }));
  const still = { fixedrange: isTouch };
  const layout = {
    ...view.layout,
    dragmode: isTouch ? false : "zoom",
    xaxis: { ...view.layout.xaxis, ...still },
    yaxis: { ...view.layout.yaxis, ...still },
  };
  return Plotly.react(plot.name, data, layout, config);
}

function offerViews(plot) {
  const figure = document.getElementById(plot.name).closest("figure");
  const select = figure.querySelector("select");
  if (!select) {
    return () => draw(plot, 0);
  }
  const redraw = () => draw(plot, select.selectedIndex);
  const step = (by) => {
    const count = plot.views.length;
    select.selectedIndex = (select.selectedIndex + by + count) % count;
    redraw();
  };
  const [back, on] = figure.querySelectorAll("figcaption button");
  select.addEventListener("change", redraw);
  back.addEventListener("click", () => step(-1));
  on.addEventListener("click", () => step(1));
  return redraw;
}

function offerHiding() {
  for (const button of document.querySelectorAll("#legend button")) {
    button.addEventListener("click", () => {
      const isShown = button.getAttribute("aria-pressed") === "true";
      button.setAttribute("aria-pressed", String(!isShown));
      hidden[isShown ? "add" : "delete"](button.dataset.name);
      redraws.forEach((redraw) => redraw());
    });
  }
}

async function show(plot) {
  const redraw = offerViews(plot);
  await redraw();
  redraws.push(redraw);
}

async function start() {
  const plots = JSON.parse(document.getElementById("plots").textContent);
  await Promise.all(plots.map((plot) => show(plot).catch(report)));
  offerHiding();
  document.documentElement.dataset.drawn = String(redraws.length);
}

start();
