// The tensor as a box, seen from its front: where each piece lies in it, and in red what no piece or several hold.

import { html } from "../../vendor/htm-preact-standalone.mjs";
import { count, dimensions, number, size } from "../../format.js";
import { sliceText } from "./mesh.js";

const WIDTH = 480;
const MOST_HEIGHT = 260;
const LEAST_HEIGHT = 56;
const MOST_DRAWN = 2000;
const MOST_NAMED = 64;
const MOST_ROWS = 200;

/** The two dimensions that are drawn: where it is cut, down and across; a vector is a line. */
function sidesOf(tensor) {
  const { shape } = tensor;
  if (shape.length < 2) return { down: -1, across: shape.length - 1 };
  const isCut = (dim) => tensor.pieces.some((piece) => piece.sizes[dim] < shape[dim]);
  const order = [...shape.keys()].sort((one, other) => Number(isCut(other)) - Number(isCut(one)) || shape[other] - shape[one]);
  const [down, across] = order.slice(0, 2).sort((one, other) => one - other);
  return { down, across };
}

/** @param {{tensor: any, rank: number}} props */
export function Picture({ tensor, rank }) {
  const sides = sidesOf(tensor);
  const length = (dim) => (dim < 0 ? 1 : tensor.shape[dim] || 1);
  const height = sides.down < 0 ? LEAST_HEIGHT : Math.min(MOST_HEIGHT, Math.max(LEAST_HEIGHT, (WIDTH * length(sides.down)) / length(sides.across)));
  const place = ({ offsets, sizes }) => {
    const [x, w] = sides.across < 0 ? [0, 1] : [offsets[sides.across] / length(sides.across), sizes[sides.across] / length(sides.across)];
    const [y, h] = sides.down < 0 ? [0, 1] : [offsets[sides.down] / length(sides.down), sizes[sides.down] / length(sides.down)];
    return { x: x * WIDTH, y: y * height, width: Math.max(0.75, w * WIDTH), height: Math.max(0.75, h * height) };
  };
  const own = tensor.pieces.filter((piece) => !piece.replica).slice(0, MOST_DRAWN);
  const faults = [...tensor.uncovered.map((box) => ["uncovered", box]), ...tensor.overlaps.map((box) => ["overlap", box])];
  const words = `${dimensions(tensor.shape)} in ${count(own.length, "piece")}${tensor.uncovered.length ? `, ${count(tensor.uncovered.length, "part")} in no file` : ""}${tensor.overlaps.length ? `, ${count(tensor.overlaps.length, "overlap")}` : ""}`;
  return html`<section class="picture-part" aria-label="The tensor">
    <div class="part-head"><h3>Slices</h3><span class="hint">${sides.down < 0 ? "" : `rows: dimension ${sides.down}, columns: dimension ${sides.across}`}</span></div>
    <svg class="picture" viewBox=${`-1 -1 ${WIDTH + 2} ${height + 2}`} role="img" aria-label=${words}>
      ${own.map((piece, index) => html`<g class=${`piece shade-${(piece.rank ?? index) % 4}`}><rect ...${place(piece)}><title>${`${piece.rank === null ? "" : `Rank ${piece.rank}: `}${sliceText(piece)}, ${piece.file}`}</title></rect>
        ${own.length <= MOST_NAMED && html`<${Name} box=${place(piece)} text=${piece.rank === null ? "" : String(piece.rank)} />`}</g>`)}
      ${own.filter((piece) => piece.rank !== null && piece.rank === rank).map((piece) => html`<rect class="at" ...${place(piece)} />`)}
      ${faults.map(([kind, box]) => html`<rect class=${kind} ...${place(box)}><title>${`${kind === "overlap" ? "Held by several pieces" : "In no file"}: ${sliceText(box)}`}</title></rect>`)}
    </svg>
    ${faults.length > 0 && html`<ul class="swatches"><li><i class="cell own" />held by one piece</li>${tensor.uncovered.length > 0 && html`<li><i class="cell lost" />in no file: ${tensor.uncovered.slice(0, 3).map(sliceText).join(", ")}${tensor.uncovered.length > 3 ? " …" : ""}</li>`}
      ${tensor.overlaps.length > 0 && html`<li><i class="cell lost" />held by several pieces: ${tensor.overlaps.slice(0, 3).map(sliceText).join(", ")}</li>`}</ul>`}
  </section>`;
}

function Name({ box, text }) {
  if (box.width < 16 || box.height < 14) return null;
  return html`<text x=${box.x + box.width / 2} y=${box.y + box.height / 2}>${text}</text>`;
}

/** The same in words and numbers. */
export function PieceTable({ tensor }) {
  const rows = tensor.pieces.slice(0, MOST_ROWS);
  return html`<details class="pieces"><summary>Table of ${count(tensor.pieces.length, "piece")}</summary>
    <div class="scroll" tabindex="0" role="region" aria-label="Pieces"><table class="rows-table">
      <thead><tr><th scope="col">Rank</th><th scope="col">Slice</th><th scope="col">File</th><th scope="col" class="end">First byte</th><th scope="col" class="end">Size</th></tr></thead>
      <tbody>${rows.map((piece) => html`<tr><td>${piece.rank ?? "–"}</td><td class="nowrap"><code>${sliceText(piece)}</code>${piece.replica ? " copy" : ""}</td><td><code>${piece.file}</code></td><td class="end">${number(piece.offset)}</td><td class="end nowrap">${size(piece.length)}</td></tr>`)}
        ${tensor.uncovered.map((box) => html`<tr class="bad-text"><td>–</td><td class="nowrap"><code>${sliceText(box)}</code></td><td>in no file</td><td></td><td></td></tr>`)}</tbody>
    </table></div>
    ${tensor.pieces.length > MOST_ROWS && html`<p class="hint">and ${number(tensor.pieces.length - MOST_ROWS)} more: POST /v1/inspect tells them all</p>`}</details>`;
}
