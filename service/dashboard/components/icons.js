// Icons as strokes on a 16 by 16 grid. They say nothing to a screen reader: the word beside them does.

import { html } from "../vendor/htm-preact-standalone.mjs";

const CIRCLE = "M14.25 8a6.25 6.25 0 1 1-12.5 0 6.25 6.25 0 0 1 12.5 0";
const PATHS = {
  arrow: "M3 8h10M9 4l4 4-4 4",
  chart: "M2 13.5h12M4 11V7m4 4V3m4 8V5.5",
  check: `${CIRCLE}M5.2 8.2l2 2 3.6-4.2`,
  chevron: "M6 3.5 10.5 8 6 12.5",
  clock: `${CIRCLE}M8 4.5V8l2.3 1.6`,
  close: "M4 4l8 8M12 4l-8 8",
  compare: "M2.5 3.5h4.5v9H2.5zM9 3.5h4.5v9H9zM3.8 6.2h2M10.3 6.2h2M3.8 8.6h2",
  copy: "M5.5 5.5v-3h8v8h-3M2.5 5.5h8v8h-8z",
  cross: `${CIRCLE}M5.8 5.8l4.4 4.4M10.2 5.8l-4.4 4.4`,
  cube: "M8 1.8 13.5 5v6L8 14.2 2.5 11V5zM2.5 5 8 8.2 13.5 5M8 8.2v6",
  dot: CIRCLE,
  download: "M8 2v8M4.8 7 8 10.2 11.2 7M2.5 13.5h11",
  file: "M9 1.8H3.5v12.4h9V5.3zM9 1.8v3.5h3.5",
  eye: "M1.5 8S4 3.5 8 3.5 14.5 8 14.5 8 12 12.5 8 12.5 1.5 8 1.5 8zM10 8a2 2 0 1 1-4 0 2 2 0 0 1 4 0",
  grid: "M2.5 2.5h4.5v4.5H2.5zM9 2.5h4.5v4.5H9zM2.5 9h4.5v4.5H2.5zM9 9h4.5v4.5H9z",
  info: `${CIRCLE}M8 7.3v4M8 4.8v.1`,
  layers: "M8 2 14 5.2 8 8.4 2 5.2zM2 8.2l6 3.2 6-3.2M2 11.2l6 3.2 6-3.2",
  key: "M8.5 5.5a3 3 0 1 1-6 0 3 3 0 0 1 6 0M7.7 7.7l5.8 5.8M13.5 13.5v-2.6M10.6 10.6v2",
  leave: "M6.5 2.5h-4v11h4M6.5 8h7M10.5 5l3 3-3 3",
  link: "M6.5 9.5l3-3M7.2 4.6l1.5-1.5a3 3 0 0 1 4.2 4.2l-1.5 1.5M8.8 11.4l-1.5 1.5a3 3 0 0 1-4.2-4.2l1.5-1.5",
  list: "M2.5 4h11M2.5 8h11M2.5 12h7",
  moon: "M13.5 9.6A5.8 5.8 0 0 1 6.4 2.5a5.8 5.8 0 1 0 7.1 7.1z",
  pause: "M5.5 3.5v9M10.5 3.5v9",
  plan: `M8 1.75a6.25 6.25 0 0 1 0 12.5M8 1.75a6.25 6.25 0 0 0-2.4.48M3.6 3.6a6.2 6.2 0 0 0-1.37 2M1.75 8c0 .83.16 1.65.48 2.4M3.6 12.4a6.2 6.2 0 0 0 2 1.37`,
  play: "M5 3.2v9.6L12.5 8z",
  plus: "M8 3v10M3 8h10",
  retry: "M13.2 8a5.2 5.2 0 1 1-1.6-3.8M13.4 2v3h-3",
  search: "M11.5 7a4.5 4.5 0 1 1-9 0 4.5 4.5 0 0 1 9 0zM10.3 10.3l3.4 3.4",
  settings: "M2 4.5h7M12.5 4.5H14M2 11.5h1.5M7 11.5h7M12.4 4.5a1.7 1.7 0 1 1-3.4 0 1.7 1.7 0 0 1 3.4 0M7 11.5a1.7 1.7 0 1 1-3.4 0 1.7 1.7 0 0 1 3.4 0",
  shield: "M8 1.8 13 3.6v4c0 3.2-2 5.3-5 6.6-3-1.3-5-3.4-5-6.6v-4zM5.6 8l1.7 1.7 3-3.4",
  slash: `${CIRCLE}M4.2 11.8l7.6-7.6`,
  spin: "M8 1.75A6.25 6.25 0 1 1 1.75 8",
  stop: `${CIRCLE}M6 6h4v4H6z`,
  sun: "M10.8 8a2.8 2.8 0 1 1-5.6 0 2.8 2.8 0 0 1 5.6 0M8 1.5v1.3M8 13.2v1.3M1.5 8h1.3M13.2 8h1.3M3.4 3.4l.9.9M11.7 11.7l.9.9M12.6 3.4l-.9.9M4.3 11.7l-.9.9",
  table: "M2 3h12v10H2zM2 6.5h12M6.5 3v10",
  trash: "M2.5 4h11M6 4V2.5h4V4M4 4l.6 9.5h6.8L12 4",
  warn: "M8 2.2 14.4 13.5H1.6zM8 6.4v3.4M8 11.6v.1",
  workers: "M2.5 2.5h11v4h-11zM2.5 9.5h11v4h-11zM5 4.5h.1M5 11.5h.1",
};

/** @param {{name: string, spin?: boolean}} props */
export function Icon({ name, spin = false }) {
  return html`<svg class=${`icon${spin ? " spin" : ""}`} viewBox="0 0 16 16" width="16" height="16" aria-hidden="true">
    <path d=${PATHS[name] ?? PATHS.dot} />
  </svg>`;
}
