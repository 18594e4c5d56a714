// The tensors as a table: the map for whoever wants to search and read.

import { html, useEffect, useRef, useState } from "../../vendor/htm-preact-standalone.mjs";
import { call, query } from "../../api.js";
import { Icon } from "../../components/icons.js";
import { attempt, Button, Skeleton, Trouble } from "../../components/parts.js";
import { dimensions, number, size } from "../../format.js";

const PAGE = 100;
const WAIT_MS = 200;
const MOST_SOURCES = 3;

/** @param {{job: import("../../types.js").Job, shards: import("../../types.js").Shard[]}} props */
export function TensorList({ job, shards }) {
  const [wanted, setWanted] = useState({ name: "", file: "" });
  const [found, setFound] = useState({ items: null, total: 0, cursor: null, problem: null });
  const timer = useRef(0);
  const done = new Set(shards.filter((shard) => shard.state === "done").map((shard) => shard.path));
  const path = (cursor) => `/v1/jobs/${job.id}/tensors${query({ ...wanted, limit: PAGE, cursor })}`;
  useEffect(() => {
    const stop = new AbortController();
    call(path(null), { signal: stop.signal }).then(
      (page) => { if (!stop.signal.aborted) setFound({ items: page.items, total: page.total, cursor: page.next_cursor, problem: null }); },
      (problem) => { if (!stop.signal.aborted) setFound({ items: null, total: 0, cursor: null, problem }); },
    );
    return () => stop.abort();
  }, [wanted.name, wanted.file, job.id]);
  const more = () => attempt(async () => {
    const { cursor } = found;
    const page = await call(path(cursor));
    // Not if another name or file was asked for meanwhile.
    setFound((before) => (before.cursor === cursor ? { ...before, items: [...before.items, ...page.items], cursor: page.next_cursor } : before));
  });
  const type = (event) => {
    const name = event.target.value.trim();
    clearTimeout(timer.current);
    timer.current = setTimeout(() => setWanted((before) => ({ ...before, name })), WAIT_MS);
  };
  return html`<div class="tensor-list">
    <div class="filters">
      <label class="search"><${Icon} name="search" /><span class="quiet">Search tensors by name</span><input type="search" placeholder="Search names" onInput=${type} spellcheck=${false} /></label>
      <select aria-label="Output file" value=${wanted.file} onChange=${(event) => setWanted({ ...wanted, file: event.target.value })}>
        <option value="">All files</option>${shards.map((shard) => html`<option value=${shard.path}>${shard.path}</option>`)}</select>
      <span class="hint">${found.items ? `${number(found.total)} tensors` : ""}</span>
    </div>
    ${found.problem && html`<${Trouble} problem=${found.problem} />`}
    ${!found.items && !found.problem && html`<${Skeleton} lines=${6} />`}
    ${found.items && html`<div class="scroll" tabindex="0" role="region" aria-label="Tensors"><table class="rows-table">
      <thead><tr><th scope="col">Name</th><th scope="col">Type</th><th scope="col">Shape</th><th scope="col" class="end">Size</th><th scope="col">State</th><th scope="col">File</th><th scope="col">Made by</th><th scope="col">Of</th></tr></thead>
      <tbody>${found.items.map((tensor) => html`<tr key=${tensor.position}>
        <td><code>${tensor.name}</code></td><td>${tensor.dtype}</td><td class="nowrap">${dimensions(tensor.shape)}</td><td class="end nowrap">${size(tensor.size_bytes)}</td>
        <td>${done.has(tensor.file) ? "done" : "waits"}</td><td><code>${tensor.file}</code></td><td>${tensor.operation}</td><td><${Sources} names=${tensor.sources} /></td></tr>`)}</tbody>
    </table></div>`}
    ${found.cursor && html`<div class="more"><${Button} label="Show more tensors" icon="chevron" onClick=${more}>Show more<//></div>`}
  </div>`;
}

function Sources({ names }) {
  return html`${names.slice(0, MOST_SOURCES).map((name) => html`<code class="source">${name}</code>`)}
    ${names.length > MOST_SOURCES && html`<span class="hint" title=${names.join("\n")}>and ${number(names.length - MOST_SOURCES)} more</span>`}`;
}
