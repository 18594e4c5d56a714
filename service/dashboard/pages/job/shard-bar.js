// One output file as a bar: its tensors side by side, as wide as their bytes, filled when they are written.

import { html, useLayoutEffect, useRef } from "../../vendor/htm-preact-standalone.mjs";

const COLOURS = ["--map-done-0", "--map-done-1", "--map-wait-0", "--map-wait-1", "--bad", "--text", "--card"];
let palette = null;

function colours() {
  if (palette) return palette;
  // Custom properties keep light-dark() as it is written; a colour that is used comes out resolved.
  const probe = document.createElement("i");
  document.body.append(probe);
  palette = COLOURS.map((name) => { probe.style.color = `var(${name})`; return getComputedStyle(probe).color; });
  probe.remove();
  return palette;
}

/** Called when the colour scheme has changed. */
export function forgetColours() {
  palette = null;
}

/**
 * @param {{table: import("./tensors.js").TensorTable | null, file: number, bytes: number, width: number, height: number,
 *   ranges: [number, number][], selected: number, failed: number, scheme: number}} props
 *   `ranges`: what is written; `selected` and `failed`: tensors, or -1
 */
export function ShardBar(props) {
  const canvas = useRef(null);
  const { table, file, width, height, ranges, selected, failed, scheme } = props;
  const here = (tensor) => (table && tensor >= table.firsts[file] && tensor < table.firsts[file + 1] ? tensor : -1);
  useLayoutEffect(() => { draw(canvas.current, props); }, [table, file, width, height, JSON.stringify(ranges), here(selected), here(failed), scheme]);
  return html`<canvas ref=${canvas} aria-hidden="true" style=${{ width: `${width}px`, height: `${height}px` }} />`;
}

function draw(canvas, { table, file, bytes, width, height, ranges, selected, failed }) {
  const ratio = devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const scale = width / bytes;
  const [done0, done1, wait0, wait1, bad, text, card] = colours();
  if (!table) {
    pen.fillStyle = wait0;
    pen.fillRect(0, 0, width, height);
    pen.fillStyle = done0;
    for (const [start, stop] of ranges) pen.fillRect(start * scale, 0, (stop - start) * scale, height);
    return;
  }
  let range = 0;
  const paint = (from, to, colour) => { pen.fillStyle = colour; pen.fillRect(from, 0, to - from, height); };
  let from = 0;
  let colour = "";
  const last = table.firsts[file + 1];
  for (let tensor = table.firsts[file]; tensor < last; tensor += 1) {
    const start = table.starts[tensor];
    const stop = table.stops[tensor];
    while (range < ranges.length && ranges[range][1] < stop) range += 1;
    const isDone = range < ranges.length && ranges[range][0] <= start;
    const own = isDone ? (table.shades[tensor] ? done1 : done0) : (table.shades[tensor] ? wait1 : wait0);
    const x = start * scale;
    if (own !== colour) { // tensors of one colour are one rectangle
      if (colour) paint(from, x, colour);
      from = x;
      colour = own;
    }
    if ((stop - start) * scale > 5) { // a seam, where there is room for one
      paint(from, stop * scale - 1, own);
      paint(stop * scale - 1, stop * scale, card);
      from = stop * scale;
    }
  }
  if (colour && from < width) paint(from, width, colour);
  if (failed >= table.firsts[file] && failed < last) mark(pen, table, failed, scale, height, bad, true);
  if (selected >= table.firsts[file] && selected < last) mark(pen, table, selected, scale, height, text, false);
}

function mark(pen, table, tensor, scale, height, colour, filled) {
  const x = table.starts[tensor] * scale;
  const wide = Math.max(3, (table.stops[tensor] - table.starts[tensor]) * scale);
  pen.fillStyle = colour;
  if (filled) { pen.fillRect(x, 0, wide, height); return; }
  pen.strokeStyle = colour;
  pen.lineWidth = 2;
  pen.strokeRect(x + (wide > 4 ? 1 : 0), 1, Math.max(1, wide - 2), height - 2);
}
