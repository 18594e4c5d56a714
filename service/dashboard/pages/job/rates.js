// How fast bytes are read and written, over time.

import { html, useEffect, useLayoutEffect, useRef, useState } from "../../vendor/htm-preact-standalone.mjs";
import { clock, rate, size } from "../../format.js";
import { useScheme } from "./shard-map.js";

const HEIGHT = 190;
const AXIS_WIDTH = 76;
const SERIES = [["Read", "--chart-read"], ["Written", "--chart-write"]];
const SHORTEST_S = 0.2;
const STEPS_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];

/**
 * Rates between the points of a history, as uPlot wants them: times, read, written.
 * @param {{at: number, read: number, written: number}[]} points
 */
export function ratesOf(points) {
  const columns = [[], [], []];
  let before = points[0];
  for (const point of points.slice(1)) {
    const seconds = point.at - before.at;
    if (seconds < SHORTEST_S) continue;
    columns[0].push(point.at);
    columns[1].push(Math.max(0, (point.read - before.read) / seconds));
    columns[2].push(Math.max(0, (point.written - before.written) / seconds));
    before = point;
  }
  return columns;
}

/** @param {{points: {at: number, read: number, written: number}[], ended: boolean}} props */
export function Rates({ points, ended }) {
  const columns = ratesOf(points);
  const [at, setAt] = useState(null);
  const count = columns[0].length;
  const place = at === null || at >= count ? count - 1 : at;
  const said = count ? SERIES.map(([name], series) => `${name} ${rate(columns[series + 1][count - 1]) || "0 B/s"}`).join(", ") : "nothing yet";
  return html`<section class="card panel" aria-label="Rates">
    <div class="panel-head"><h2>Rates</h2>
      <ul class="legend">${SERIES.map(([name, colour], series) => html`<li><i style=${{ background: `var(${colour})` }} />${name}
        <b>${count ? rate(columns[series + 1][place]) || "0 B/s" : "–"}</b></li>`)}
        <li class="at">${at !== null && place === at ? clock(columns[0][place] * 1000) : ""}</li></ul></div>
    <div class="chart" role="img" aria-label=${`Rates over time; last: ${said}`}>
      ${count > 1 ? html`<${Chart} columns=${columns} onPoint=${setAt} />` : html`<p class="hint">${ended ? "It was too short for a chart." : "The chart begins with the first bytes."}</p>`}
    </div>
  </section>`;
}

function Chart({ columns, onPoint }) {
  const box = useRef(null);
  const plot = useRef(null);
  const scheme = useScheme();
  useEffect(() => {
    let gone = false;
    import("../../vendor/uPlot.esm.js").then(({ default: UPlot }) => {
      if (!gone) plot.current = new UPlot(optionsFor(box.current, onPoint), columns, box.current);
    });
    const watcher = new ResizeObserver(() => plot.current?.setSize({ width: box.current.clientWidth, height: HEIGHT }));
    watcher.observe(box.current);
    return () => { gone = true; watcher.disconnect(); plot.current?.destroy(); plot.current = null; };
  }, [scheme]);
  useLayoutEffect(() => { plot.current?.setData(columns); });
  return html`<div class="plot" ref=${box} aria-hidden="true" style=${{ height: `${HEIGHT}px` }} />`;
}

function optionsFor(box, onPoint) {
  const colour = (name) => { box.style.color = `var(${name})`; const found = getComputedStyle(box).color; box.style.color = ""; return found; };
  const grid = { stroke: colour("--line"), width: 1 };
  const axis = { stroke: colour("--dim"), grid, ticks: { show: false }, font: `11px ${getComputedStyle(box).fontFamily}` };
  const line = ([name, variable]) => ({ label: name, stroke: colour(variable), width: 1.75, points: { show: false }, fill: colour(variable).replace("rgb(", "rgba(").replace(")", ", 0.08)") });
  return {
    width: box.clientWidth,
    height: HEIGHT,
    legend: { show: false },
    cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
    scales: { y: { range: (_, low, high) => [0, Math.max(high * 1.1, 1)] } },
    axes: [
      { ...axis, size: 30, space: 90, incrs: STEPS_S, values: (_, ticks) => ticks.map((tick) => clock(tick * 1000)) },
      { ...axis, size: AXIS_WIDTH, values: (_, ticks) => ticks.map((tick) => (tick ? `${size(tick)}/s` : "0")) },
    ],
    series: [{}, ...SERIES.map(line)],
    hooks: { setCursor: [(drawn) => onPoint(drawn.cursor.idx ?? null)] },
  };
}
