// How fast bytes are read, merged and written, over time.

import { html, useEffect, useLayoutEffect, useRef, useState } from "../../vendor/htm-preact-standalone.mjs";
import { clock, rate, size } from "../../format.js";
import { useScheme } from "./shard-map.js";

const HEIGHT = 190;
const AXIS_WIDTH = 76;
/**
 * In the order in which bytes pass them. On a file system each block is written as it is made, and without casts as many
 * bytes are read as merged: the lines differ in more than colour, so that all are seen where they are one.
 */
const STAGES = [
  { key: "read", name: "Read", colour: "--chart-read", width: 2 },
  { key: "merged", name: "Merged", colour: "--chart-merge", width: 5 },
  { key: "written", name: "Written", colour: "--chart-write", width: 2, dash: [10, 12] },
];
/** From the one at the bottom on: the widest, and at the top the one with gaps. */
const DRAWN = [STAGES[1], STAGES[0], STAGES[2]];
const SHORTEST_S = 0.2;
const STEPS_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];

/**
 * Rates between the points of a history, in columns.
 * @param {{at: number, read: number, merged: number, written: number}[]} points
 * @returns {Record<"at" | "read" | "merged" | "written", number[]>} seconds, and bytes a second
 */
export function ratesOf(points) {
  const columns = { at: [], read: [], merged: [], written: [] };
  let before = points[0];
  for (const point of points.slice(1)) {
    const seconds = point.at - before.at;
    if (seconds < SHORTEST_S) continue;
    columns.at.push(point.at);
    for (const { key } of STAGES) columns[key].push(Math.max(0, (point[key] - before[key]) / seconds));
    before = point;
  }
  return columns;
}

/** @param {{points: {at: number, read: number, merged: number, written: number}[], ended: boolean}} props */
export function Rates({ points, ended }) {
  const columns = ratesOf(points);
  const [at, setAt] = useState(null);
  const count = columns.at.length;
  const place = at === null || at >= count ? count - 1 : at;
  const told = (key, index) => rate(columns[key][index]) || "0 B/s";
  const said = count ? STAGES.map(({ key, name }) => `${name} ${told(key, count - 1)}`).join(", ") : "nothing yet";
  return html`<section class="card panel" aria-label="Rates">
    <div class="panel-head"><h2>Rates</h2>
      <ul class="legend">${STAGES.map(({ key, name, colour }) => html`<li><i class=${key} style=${{ color: `var(${colour})` }} />${name}
        <b>${count ? told(key, place) : "–"}</b></li>`)}
        <li class="at">${at !== null && place === at ? clock(columns.at[place] * 1000) : ""}</li></ul></div>
    <div class="chart" role="img" aria-label=${`Rates over time; last: ${said}`}>
      ${count > 1 ? html`<${Chart} columns=${[columns.at, ...DRAWN.map(({ key }) => columns[key])]} onPoint=${setAt} />` : html`<p class="hint">${ended ? "It was too short for a chart." : "The chart begins with the first bytes."}</p>`}
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
  const line = ({ name, colour: variable, width, dash }) => ({ label: name, stroke: colour(variable), width, dash, points: { show: false }, fill: colour(variable).replace("rgb(", "rgba(").replace(")", ", 0.06)") });
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
    series: [{}, ...DRAWN.map(line)],
    hooks: { setCursor: [(drawn) => onPoint(drawn.cursor.idx ?? null)] },
  };
}
