// One lane for each worker: what it worked on when, and now.

import { html } from "../../vendor/htm-preact-standalone.mjs";
import { baseName, clock, count } from "../../format.js";

const MOST_LANES = 24;

/** Of a file the part that tells it from the others. */
const shortName = (what) => baseName(what).replace(/\.safetensors$/, "");

/**
 * Spans of time in which a worker's work had one name.
 * @param {{at: number, workers: Record<string, string>}[]} points
 * @returns {Map<string, {from: number, to: number, what: string, shade: number}[]>}
 */
export function lanesOf(points) {
  const lanes = new Map();
  points.forEach((point, place) => {
    const until = points[place + 1]?.at ?? point.at;
    for (const [worker, what] of Object.entries(point.workers)) {
      if (!lanes.has(worker)) lanes.set(worker, []);
      const spans = lanes.get(worker);
      const last = spans[spans.length - 1];
      if (last && last.what === what && last.to >= point.at - 0.001) last.to = until;
      else spans.push({ from: point.at, to: until, what, shade: last ? 1 - last.shade : 0 });
    }
  });
  return lanes;
}

/** @param {{points: {at: number, workers: Record<string, string>}[], workers: Record<string, string>}} props */
export function Lanes({ points, workers }) {
  const lanes = lanesOf(points);
  for (const worker of Object.keys(workers)) if (!lanes.has(worker)) lanes.set(worker, []);
  const names = [...lanes.keys()].sort((one, other) => one.localeCompare(other, undefined, { numeric: true }));
  const [start, stop] = [points[0]?.at ?? 0, points[points.length - 1]?.at ?? 1];
  const part = (at) => `${(100 * (at - start)) / Math.max(stop - start, 0.001)}%`;
  return html`<section class="card panel" aria-label="Workers">
    <div class="panel-head"><h2>Workers</h2><span class="hint">${names.length ? count(names.length, "worker") : ""}</span></div>
    ${names.length === 0 && html`<p class="hint empty">No worker has had a part of this job yet.</p>`}
    <ul class="lanes">${names.slice(0, MOST_LANES).map((worker) => html`<li key=${worker}>
      <span class="who" title=${worker}>${worker}</span>
      <span class="lane" aria-hidden="true">${lanes.get(worker).map((span) => html`<i class=${`shade-${span.shade}`} title=${`${span.what}, ${clock(span.from * 1000)} to ${clock(span.to * 1000)}`}
        style=${{ left: part(span.from), width: `max(2px, ${(100 * (span.to - span.from)) / Math.max(stop - start, 0.001)}%)` }} />`)}</span>
      <span class="what" title=${workers[worker] ?? ""}>${workers[worker] ? shortName(workers[worker]) : "idle"}</span>
    </li>`)}</ul>
    ${names.length > MOST_LANES && html`<p class="hint empty">and ${count(names.length - MOST_LANES, "worker")} more</p>`}
  </section>`;
}
