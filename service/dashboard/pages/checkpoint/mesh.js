// Which rank holds what of a tensor: the device mesh as a grid, a cell for each rank.

import { html, useRef, useState } from "../../vendor/htm-preact-standalone.mjs";
import { count, number, size } from "../../format.js";

const MOST_CELLS = 4096;
const PLAIN_COLUMNS = 16;

/** Slices as people write them: [0:66, 0:40]. */
export const sliceText = ({ offsets, sizes }) => (offsets.length ? `[${offsets.map((start, dim) => `${start}:${start + sizes[dim]}`).join(", ")}]` : "the one value");

/**
 * The ranks of a tensor in the order of the mesh: how many columns, what the dimensions are called, and for each rank
 * its pieces, or null where its file is missing.
 */
export function meshOf(checkpoint, tensor) {
  const byRank = new Map();
  for (const piece of tensor.pieces) {
    if (piece.rank === null) continue;
    if (!byRank.has(piece.rank)) byRank.set(piece.rank, []);
    byRank.get(piece.rank).push(piece);
  }
  if (!byRank.size) return null;
  const there = new Set(checkpoint.files.map((file) => file.rank).filter((rank) => rank !== null));
  const highest = Math.max(...there, ...byRank.keys());
  const ranks = Math.min(MOST_CELLS, checkpoint.layout.world_size ?? highest + 1);
  const mesh = (checkpoint.layout.meshes ?? []).find((one) => Object.values(one).reduce((all, length) => all * length, 1) === ranks);
  const sizes = mesh ? Object.values(mesh) : [];
  const columns = sizes.length > 1 ? sizes[sizes.length - 1] : Math.min(ranks, sizes.length ? Math.ceil(Math.sqrt(ranks)) : PLAIN_COLUMNS);
  const cells = Array.from({ length: ranks }, (_, rank) => ({ rank, pieces: byRank.get(rank) ?? [], lost: !there.has(rank) && Boolean(checkpoint.layout.world_size) }));
  return { columns, cells, names: mesh ?? null, inRow: sizes.length > 1 ? Object.keys(mesh).at(-1) : "" };
}

/** @param {{checkpoint: any, tensor: any}} props */
export function MeshGrid({ checkpoint, tensor, chosen, onChoose }) {
  const mesh = meshOf(checkpoint, tensor);
  const box = useRef(null);
  if (!mesh) return null;
  const onKeyDown = (event) => {
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: mesh.columns, ArrowUp: -mesh.columns, Home: -chosen, End: mesh.cells.length - 1 - chosen };
    if (!(event.key in steps)) return;
    event.preventDefault();
    const next = Math.min(mesh.cells.length - 1, Math.max(0, chosen + steps[event.key]));
    onChoose(next);
    box.current.querySelector(`[data-rank="${next}"]`)?.scrollIntoView({ block: "nearest" });
  };
  const cell = mesh.cells[Math.min(chosen, mesh.cells.length - 1)];
  return html`<section class="mesh-part" aria-label="Ranks">
    <div class="part-head"><h3>Ranks</h3><span class="hint">${mesh.names ? Object.entries(mesh.names).map(([name, length]) => `${name} ${length}`).join(" × ") : count(mesh.cells.length, "rank")}</span></div>
    <div class=${`mesh${mesh.cells.length > 64 ? " dense" : ""}`} ref=${box} role="listbox" tabindex="0" aria-label="Ranks by their place in the mesh; arrow keys go from one to the next" aria-activedescendant=${`rank-${cell.rank}`}
        style=${{ gridTemplateColumns: `repeat(${mesh.columns}, minmax(0, 1fr))` }} onKeyDown=${onKeyDown}>
      ${mesh.cells.map((one) => html`<div id=${`rank-${one.rank}`} data-rank=${one.rank} role="option" class=${`cell ${toneOf(one)}`} aria-selected=${String(one === cell)} aria-label=${`Rank ${one.rank}: ${wordsOf(one)}`}
        title=${`Rank ${one.rank}: ${wordsOf(one)}`} onClick=${() => onChoose(one.rank)} onPointerEnter=${() => onChoose(one.rank)}><b>${one.rank}</b></div>`)}
    </div>
    <${Legend} mesh=${mesh} />
    <${CellFacts} cell=${cell} />
  </section>`;
}

const toneOf = ({ pieces, lost }) => (lost ? "lost" : !pieces.length ? "none" : pieces.every((piece) => piece.replica) ? "copy" : "own");

function wordsOf({ pieces, lost }) {
  if (lost) return "its file is missing";
  if (!pieces.length) return "holds nothing of it";
  const slices = pieces.slice(0, 3).map(sliceText).join(", ");
  return `${pieces.every((piece) => piece.replica) ? "a copy of " : ""}${slices}${pieces.length > 3 ? ` and ${pieces.length - 3} more` : ""}`;
}

function Legend({ mesh }) {
  const tones = new Set(mesh.cells.map(toneOf));
  const words = [["own", "holds a slice"], ["copy", "holds a copy"], ["none", "holds nothing of it"], ["lost", "file is missing"]];
  return html`<ul class="swatches">${words.filter(([tone]) => tones.has(tone)).map(([tone, word]) => html`<li><i class=${`cell ${tone}`} />${word}</li>`)}</ul>`;
}

function CellFacts({ cell }) {
  return html`<div class="cell-facts"><p><b>Rank ${cell.rank}</b> <span class=${cell.lost ? "bad-text" : "hint"}>${cell.pieces.length ? "" : wordsOf(cell)}</span></p>
    ${cell.pieces.slice(0, 4).map((piece) => html`<dl class="slice"><div><dt>${piece.replica ? "Copy of" : "Slice"}</dt><dd><code>${sliceText(piece)}</code></dd></div>
      <div><dt>File</dt><dd><code>${piece.file}</code></dd></div>
      <div><dt>Bytes</dt><dd><code>${number(piece.offset)} – ${number(piece.offset + piece.length)}</code> <span class="hint">${size(piece.length)}</span></dd></div></dl>`)}
    ${cell.pieces.length > 4 && html`<p class="hint">and ${number(cell.pieces.length - 4)} more pieces: see the table</p>`}</div>`;
}

/** Which rank is looked at. */
export function useRank(tensor) {
  const [state, set] = useState({ tensor: "", rank: 0 });
  return [state.tensor === tensor ? state.rank : 0, (rank) => set({ tensor, rank })];
}
