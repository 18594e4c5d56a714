// What a checkpoint is, in a card; its files; and what is wrong with it.

import { html, useState } from "../../vendor/htm-preact-standalone.mjs";
import { Icon } from "../../components/icons.js";
import { Copy } from "../../components/parts.js";
import { usePolled } from "../../components/polled.js";
import { count, number, percent, size } from "../../format.js";

const MOST_FILES = 200;
const MOST_NAMED = 6;
const LAYOUT_WORDS = { world_size: "World size", ranks_present: "Ranks present", fsdp_version: "FSDP version" };

/** @param {{found: any, tree: import("./tree.js").Tree}} props */
export function Overview({ found, tree }) {
  const titles = useTitles();
  const isWhole = !found.problems.length;
  return html`
    ${!isWhole && html`<${Broken} found=${found} tree=${tree} />`}
    <section class="card panel checkpoint-card" aria-label="What it is">
      <div class="what-it-is"><h2 class="verdict"><${Icon} name=${isWhole ? "check" : "warn"} /><b>${titles[found.format] ?? found.format}</b><span class="hint">${[found.format, found.model_type, ...(found.architectures ?? [])].filter(Boolean).join(", ")}</span></h2>
        <p class="source-line"><code>${found.url}</code><${Copy} text=${found.url} label="Copy the path" /></p></div>
      <dl class="tiles"><div><dt>Weights</dt><dd>${size(found.bytes)}</dd></div><div><dt>Tensors</dt><dd>${number(found.tensors)}</dd></div><div><dt>Pieces</dt><dd>${number(found.pieces)}</dd></div>
        <div><dt>Files</dt><dd>${number(found.files.length)}</dd></div><div><dt>On disk</dt><dd>${size(found.file_bytes)}</dd></div><div><dt>Config</dt><dd title=${found.config ?? ""}>${found.config ? found.config.split("/").pop() : "none"}</dd></div></dl>
      <${Types} dtypes=${found.dtypes} all=${found.bytes} />
      <${Layout} found=${found} />
    </section>`;
}

/** What formats are called, by their names. */
function useTitles() {
  const { data } = usePolled("/v1/formats");
  return Object.fromEntries((data?.read ?? []).map((known) => [known.name, known.title]));
}

/** Types by their bytes. */
function Types({ dtypes, all }) {
  const rows = Object.entries(dtypes).sort(([, one], [, other]) => other - one);
  return html`<div class="types"><div class="type-bar" aria-hidden="true">${rows.map(([, bytes], index) => html`<i class=${`type-${index % 5}`} style=${{ width: `${(100 * bytes) / (all || 1)}%` }} />`)}</div>
    <ul class="swatches">${rows.map(([dtype, bytes], index) => html`<li><i class=${`type-${index % 5}`} /><b>${dtype}</b> ${size(bytes)} <span class="hint">${percent(bytes / (all || 1))}</span></li>`)}</ul></div>`;
}

function Layout({ found }) {
  const { meshes = [], placements = {}, ...rest } = found.layout;
  const plain = Object.entries(rest).filter(([, value]) => value !== null && typeof value !== "object");
  const nested = Object.entries(rest).filter(([, value]) => value !== null && typeof value === "object");
  return html`<details class="layout" open><summary>Parallel layout and evidence</summary><div class="layout-parts">
    ${meshes.length > 0 && html`<div><h3>Device mesh</h3>${meshes.map((mesh) => html`<p class="mesh-names">${Object.entries(mesh).map(([name, length], index) => html`${index > 0 && html`<span aria-hidden="true">×</span>`}<span class="mesh-name">${name}<b>${length}</b></span>`)}</p>`)}</div>`}
    ${Object.keys(placements).length > 0 && html`<div><h3>Placements</h3><ul class="notes">${Object.entries(placements).map(([name, number_]) => html`<li><code>${name}</code> ${count(number_, "tensor")}</li>`)}</ul></div>`}
    ${plain.length > 0 && html`<div><h3>Layout</h3><ul class="notes">${plain.map(([name, value]) => html`<li>${LAYOUT_WORDS[name] ?? name.replaceAll("_", " ")} <b>${value}</b></li>`)}${nested.map(([name, value]) => html`<li>${name.replaceAll("_", " ")} <code>${JSON.stringify(value)}</code></li>`)}</ul></div>`}
    <div><h3>Recognised by</h3><ul class="notes">${found.evidence.map((line) => html`<li>${line}</li>`)}${found.notes.filter((note) => !found.evidence.includes(note)).map((note) => html`<li>${note}</li>`)}</ul></div>
    ${found.side_files.length > 0 && html`<div><h3>Beside the weights</h3><p class="notes">${found.side_files.slice(0, 12).join(", ")}</p></div>`}
    ${found.missing.length > 0 && html`<div><h3>Missing</h3><ul class="notes bad-text">${found.missing.slice(0, MOST_NAMED).map((name) => html`<li>${name}</li>`)}</ul></div>`}
  </div></details>`;
}

/** Why it can't be converted as it lies there. */
function Broken({ found, tree }) {
  const [first] = found.problems;
  const lost = [...tree.faultOf.values()].reduce((sum, fault) => sum + fault.missing_elements, 0);
  return html`<section class="card failure" aria-label="What is wrong"><div class="failure-head"><${Icon} name="warn" /><div><p class="kind">This checkpoint is not whole</p><h2>${first.message}</h2></div></div>
    <dl>${first.file && html`<div><dt>File</dt><dd><code>${first.file}</code></dd></div>`}${first.expected && html`<div><dt>Expected</dt><dd>${first.expected}</dd></div>`}${first.found && html`<div><dt>Found</dt><dd>${first.found}</dd></div>`}
      <div><dt>Tensors that are not whole</dt><dd>${number(tree.faultOf.size)} of ${number(found.tensors)}${lost > 0 ? `, ${number(lost)} elements in no file` : ""}</dd></div></dl>
    <p class="todo">${first.hint}</p></section>`;
}

export function Files({ found }) {
  const [all, setAll] = useState(false);
  const largest = Math.max(1, ...found.files.map((file) => file.size_bytes));
  const rows = all ? found.files : found.files.slice(0, MOST_FILES);
  return html`<div class="panel-body"><div class="scroll" tabindex="0" role="region" aria-label="Files"><table class="rows-table files">
    <thead><tr><th scope="col">Rank</th><th scope="col">File</th><th scope="col" class="end">Size</th><th scope="col"><span class="quiet">Share</span></th></tr></thead>
    <tbody>${rows.map((file) => html`<tr><td>${file.rank ?? "–"}</td><td><code>${file.path}</code></td><td class="end nowrap">${size(file.size_bytes)}</td><td class="share-cell"><span class="share" aria-hidden="true"><i style=${{ width: `${(100 * file.size_bytes) / largest}%` }} /></span></td></tr>`)}</tbody></table></div>
    ${!all && found.files.length > MOST_FILES && html`<p class="hint"><button type="button" class="as-link" onClick=${() => setAll(true)}>Show all ${number(found.files.length)} files</button></p>`}</div>`;
}
