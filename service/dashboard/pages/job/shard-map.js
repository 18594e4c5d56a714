// The shard map: every output file with its tensors. Pointer and arrow keys show what each is made of.

import { html, useEffect, useLayoutEffect, useRef, useState } from "../../vendor/htm-preact-standalone.mjs";
import { baseName, number, size } from "../../format.js";
import { forgetColours, ShardBar } from "./shard-bar.js";
import { described, isWritten, tensorAt } from "./tensors.js";

const ROW = 30;
const ROW_NARROW = 50;
const BAR = 18;
const SPARE_ROWS = 4;
const NARROW = matchMedia("(max-width: 700px)");
const MOST_SOURCES = 6;

/**
 * @param {{shards: import("../../types.js").Shard[], table: import("./tensors.js").TensorTable | null,
 *   job: import("../../types.js").Job}} props
 */
export function ShardMap({ shards, table, job }) {
  const box = useRef(null);
  const [view, setView] = useState({ top: 0, height: 360, width: 0, narrow: NARROW.matches });
  const [chosen, select] = useState(-1);
  const selected = table ? chosen : -1; // a retry takes the plan away, and what was chosen in it
  const scheme = useScheme();
  useBox(box, setView);
  const row = view.narrow ? ROW_NARROW : ROW;
  const failed = table && job.error?.tensor ? table.names.indexOf(job.error.tensor) : -1;
  useEffect(() => { if (failed >= 0) select(failed); }, [failed]);
  useEffect(() => { if (selected >= 0) reveal(box.current, table.files[selected] * row, row); }, [selected]);
  const largest = Math.max(1, ...shards.map((shard) => shard.size_bytes));
  const first = Math.max(0, Math.floor(view.top / row) - SPARE_ROWS);
  const last = Math.min(shards.length, Math.ceil((view.top + view.height) / row) + SPARE_ROWS);
  const room = Math.max(0, view.narrow ? view.width : view.width - 252 - 132);
  const rangesOf = (shard) => (shard.state === "done" ? [[0, shard.size_bytes]] : (job.progress?.written?.[shard.path] ?? []));
  const onKeyDown = (event) => {
    const next = table && moved(table, selected, event.key);
    if (next === null || next === undefined || next === false) return;
    event.preventDefault();
    select(next);
  };
  return html`<div class="shard-map">
    <div class="map" ref=${box} tabindex="0" role="listbox" aria-label=${`Tensors of ${shards.length} output files; arrow keys go from one to the next`}
        aria-activedescendant=${selected >= 0 ? "map-tensor" : undefined} onKeyDown=${onKeyDown}
        onFocus=${(event) => { if (table && selected < 0 && event.target.matches(":focus-visible")) select(0); }}>
      <div role="option" id="map-tensor" class="quiet" aria-selected=${selected >= 0 ? "true" : "false"} aria-setsize=${table?.count ?? 1} data-ready=${table ? "true" : undefined}
        aria-posinset=${selected + 1 || 1}>${selected >= 0 ? described(table, selected) : "No tensor is chosen"}</div>
      <div class="rows" role="presentation" style=${{ height: `${shards.length * row}px` }}>
        ${shards.slice(first, last).map((shard, place) => {
          const file = first + place;
          const width = Math.max(4, (room * shard.size_bytes) / largest);
          const pick = (event) => { if (table?.firsts[file + 1] > table?.firsts[file]) select(tensorAt(table, file, (event.offsetX / width) * shard.size_bytes)); };
          return html`<div key=${shard.path} role="presentation" class="row" style=${{ top: `${file * row}px`, height: `${row}px` }}>
            <span class="file" title=${shard.path}>${baseName(shard.path)}</span>
            <span class="cell" onPointerMove=${pick} onPointerDown=${pick}>
              <${ShardBar} table=${table} file=${file} bytes=${shard.size_bytes} width=${width} height=${BAR} ranges=${rangesOf(shard)} selected=${selected} failed=${failed} scheme=${scheme} /></span>
            <span class="amount">${size(shard.size_bytes)}<span class=${shard.state}>${wordOf(shard, rangesOf(shard), job)}</span></span>
          </div>`;
        })}
      </div>
    </div>
    <${Detail} table=${table} tensor=${selected} shards=${shards} rangesOf=${rangesOf} failed=${failed} />
  </div>`;
}

function wordOf(shard, ranges, job) {
  if (shard.state === "done") return "done";
  if (!ranges.length || job.state === "queued") return "waits";
  const written = ranges.reduce((sum, [start, stop]) => sum + stop - start, 0);
  return `${Math.min(99, Math.floor((100 * written) / shard.size_bytes))} %`;
}

/** What is known of the chosen tensor. Its place is there before one is chosen, so that nothing moves. */
function Detail({ table, tensor, shards, rangesOf, failed }) {
  if (!table || tensor < 0) {
    return html`<div class="detail"><p class="hint">${table ? "Point at a tensor, or go through them with the arrow keys." : "Reading the list of tensors."}</p></div>`;
  }
  const shard = shards[table.files[tensor]];
  const sources = table.sources[tensor].split("\n");
  const state = tensor === failed ? "failed" : isWritten(table, tensor, rangesOf(shard)) ? "written" : "waits";
  return html`<div class="detail">
    <p class="tensor"><code>${table.names[tensor]}</code><span class=${`is ${state}`}>${state}</span></p>
    <dl>
      <div><dt>Shape</dt><dd>${table.shapes[tensor]}</dd></div>
      <div><dt>Type</dt><dd>${table.dtypes[tensor]}</dd></div>
      <div><dt>Size</dt><dd title=${`${number(table.stops[tensor] - table.starts[tensor])} bytes`}>${size(table.stops[tensor] - table.starts[tensor])}</dd></div>
      <div><dt>Made by</dt><dd>${table.operations[tensor]}</dd></div>
      <div class="wide"><dt>Of</dt><dd>${sources.slice(0, MOST_SOURCES).map((source) => html`<code>${source}</code>`)}
        ${sources.length > MOST_SOURCES && html`<span>and ${number(sources.length - MOST_SOURCES)} more</span>`}</dd></div>
    </dl>
  </div>`;
}

/** The tensor that a key leads to; null for keys that lead nowhere. */
function moved(table, tensor, key) {
  const at = Math.max(0, tensor);
  const file = table.files[at];
  const beside = (other) => {
    const clamped = Math.min(table.firsts.length - 2, Math.max(0, other));
    return tensorAt(table, clamped, table.starts[at]);
  };
  switch (key) {
    case "ArrowRight": return Math.min(table.count - 1, tensor + 1);
    case "ArrowLeft": return Math.max(0, tensor - 1);
    case "ArrowDown": return beside(file + 1);
    case "ArrowUp": return beside(file - 1);
    case "PageDown": return beside(file + 10);
    case "PageUp": return beside(file - 10);
    case "Home": return 0;
    case "End": return table.count - 1;
    default: return null;
  }
}

function reveal(box, top, height) {
  if (top < box.scrollTop) box.scrollTop = top;
  else if (top + height > box.scrollTop + box.clientHeight) box.scrollTop = top + height - box.clientHeight;
}

function useBox(box, setView) {
  useLayoutEffect(() => {
    const element = box.current;
    const look = () => setView({ top: element.scrollTop, height: element.clientHeight, width: element.clientWidth - 24, narrow: NARROW.matches });
    const watcher = new ResizeObserver(look);
    watcher.observe(element);
    element.addEventListener("scroll", look, { passive: true });
    look();
    return () => { watcher.disconnect(); element.removeEventListener("scroll", look); };
  }, []);
}

/** A number that changes with the colour scheme: what is drawn by hand has to be drawn again. */
export function useScheme() {
  const [times, again] = useState(0);
  useEffect(() => {
    const change = () => { forgetColours(); again((before) => before + 1); };
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", change);
    addEventListener("schemechange", change);
    return () => { dark.removeEventListener("change", change); removeEventListener("schemechange", change); };
  }, []);
  return times;
}
