// One batch: its checkpoints as a grid by step, what became of each, and what to do about those that failed.

import { html, useEffect, useState } from "../vendor/htm-preact-standalone.mjs";
import { call } from "../api.js";
import { Confirmed } from "../components/confirmed.js";
import { CountsBar } from "../components/counts-bar.js";
import { Icon } from "../components/icons.js";
import { attempt, Button, Copy, Skeleton, StateBadge, Time, Trouble } from "../components/parts.js";
import { count, number, rate, size } from "../format.js";
import { tellBatch, tellGap } from "../live.js";
import { go, setQuery } from "../router.js";
import { notify } from "../store.js";
import { leftOf, titleOf } from "./batches.js";
import { stateOf, useBatch, useItems } from "./batch/data.js";
import { ItemGrid } from "./batch/grid.js";

const MOST_ROWS = 200;
const ACTIVE = new Set(["planning", "running", "verifying", "cancelling"]);
const GROUPS = [["", "All", () => true], ["running", "Running", (state) => ACTIVE.has(state)], ["queued", "Queued", (state) => state === "queued"], ["done", "Done", (state) => state === "succeeded" || state === "skipped"],
  ["failed", "Failed", (state) => state === "failed" || state === "refused"], ["cancelled", "Cancelled", (state) => state === "cancelled"]];

export default function BatchPage({ params, query }) {
  const { batch, problem, reload } = useBatch(params.id);
  const items = useItems(batch?.id);
  useEffect(() => { if (batch) document.title = `${titleOf(batch)} · unshard`; }, [batch?.name, batch?.id]);
  if (problem) return html`<div class="page"><h1 tabindex="-1">${problem.status === 404 ? "No such batch" : "Batch"}</h1><${Trouble} problem=${problem} onRetry=${reload} /></div>`;
  if (!batch) return html`<div class="page"><h1 class="quiet" tabindex="-1">Batch</h1><${Skeleton} lines=${8} label="Loading the batch" /></div>`;
  return html`<div class="page batch-page">
    <${Head} batch=${batch} />
    <section class="card panel batch-numbers" aria-label="Progress"><${CountsBar} counts=${batch.counts} /><${Numbers} batch=${batch} /></section>
    <section class="card panel" aria-label="Items of the batch">${items ? html`<${Items} items=${items} query=${query} />` : html`<div class="panel-body"><${Skeleton} lines=${4} label="Loading the items" /></div>`}</section>
  </div>`;
}

function Head({ batch }) {
  const act = (action) => attempt(async () => {
    const told = await call(batch.links[action], { method: "POST" });
    tellBatch(told.batch ?? told);
    if (told.requeued !== undefined) notify("good", `Queued again: ${count(told.requeued, "job")}${told.not_requeued?.length ? `; ${count(told.not_requeued.length, "job")} could not be, since others have their destinations` : ""}`);
  });
  const forget = () => attempt(async () => {
    go("/batches");
    await call(batch.links.self, { method: "DELETE" });
    notify("good", "The batch is forgotten; its jobs and models stay");
    tellGap();
  });
  const failed = batch.counts.failed;
  return html`<header><nav class="trail" aria-label="Where this is"><a href="/batches">Batches</a><${Icon} name="chevron" /><code>${batch.id}</code><${Copy} text=${batch.id} label="Copy the id" /></nav>
    <div class="head job-head"><div class="what"><h1 tabindex="-1">${titleOf(batch)}</h1><${StateBadge} state=${batch.state} /></div>
      <div class="actions">${batch.links.retry_failed && failed > 0 && html`<${Button} label=${`Retry ${number(failed)} failed`} icon="retry" kind="primary" onClick=${() => act("retry_failed")}>Retry ${number(failed)} failed<//>`}
        ${batch.links.cancel && html`<${Button} label="Cancel the batch" icon="close" kind="danger" busy=${batch.state === "cancelling"} onClick=${() => act("cancel")}>Cancel<//>`}
        <a class="button" href=${`/?batch=${batch.id}`}><${Icon} name="list" /><span>Jobs</span></a>
        ${batch.ended_at && html`<${Confirmed} label="Forget this batch" ask="Really forget it?" onConfirm=${forget} />`}</div></div>
    <dl class="way">${batch.discover && html`<div><dt>From</dt><dd><code>${batch.discover.prefix}/${batch.discover.pattern}</code></dd></div>`}${batch.template.destination && html`<div><dt>To</dt><dd><code>${batch.template.destination}</code></dd></div>`}</dl></header>`;
}

function Numbers({ batch }) {
  const { counts } = batch;
  const rows = [["Checkpoints", number(counts.total)], ["Written", batch.bytes_total ? `${size(batch.bytes_done)} of ${size(batch.bytes_total)}` : size(batch.bytes_done)], ["Rate", rate(batch.bytes_per_s) || "–"],
    batch.ended_at ? ["Ended", html`<${Time} at=${batch.ended_at} />`] : ["Left", leftOf(batch).replace(" left", "") || "–"], ["At once", batch.max_running ? `${number(batch.max_running)} at most` : "as many as fit"], ["If one fails", batch.on_item_error === "fail" ? "the rest is cancelled" : "the others go on"]];
  return html`<dl class="tiles">${rows.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

function Items({ items, query }) {
  const show = query.get("show") ?? "";
  const asTable = query.get("view") === "table";
  const [, , fits] = GROUPS.find(([name]) => name === show) ?? GROUPS[0];
  const shown = items.filter((item) => fits(stateOf(item)));
  // By its place in the batch: while it is read about, others come and go.
  const [position, choose] = useState(-1);
  const chosen = shown.findIndex((item) => item.position === position);
  const counts = GROUPS.map(([, , fits_]) => items.reduce((sum, item) => sum + (fits_(stateOf(item)) ? 1 : 0), 0));
  return html`<div class="panel-head"><div class="chips" role="group" aria-label="Show items by state">${GROUPS.map(([name, label], place) => html`<button key=${name} type="button" class="chip" aria-pressed=${String(show === name)} onClick=${() => setQuery({ show: name })}>${label}<span class="number">${number(counts[place])}</span></button>`)}</div>
      <div class="chips" role="group" aria-label="Show the items as"><button type="button" class="chip" aria-pressed=${String(!asTable)} onClick=${() => setQuery({ view: null })}><${Icon} name="grid" />Grid</button><button type="button" class="chip" aria-pressed=${String(asTable)} onClick=${() => setQuery({ view: "table" })}><${Icon} name="table" />Table</button></div></div>
    ${shown.length === 0 && html`<p class="hint empty">No item is in this state.</p>`}
    ${shown.length > 0 && (asTable ? html`<${Table} items=${shown} />` : html`<${ItemGrid} items=${shown} chosen=${chosen} onChoose=${(place) => choose(shown[place]?.position ?? -1)} /><${ItemFacts} item=${shown[chosen]} />`)}`;
}

function ItemFacts({ item }) {
  if (!item) return html`<div class="item-facts"><p class="hint">Point at a square, or go through them with the arrow keys; Enter opens the job.</p></div>`;
  return html`<div class="item-facts"><p class="item-head"><${StateBadge} state=${stateOf(item)} />${item.job_id && html`<a href=${`/jobs/${item.job_id}`}>Open the job</a>`}<a href=${`/checkpoint?source=${encodeURIComponent(item.source)}`}>Look into the checkpoint</a></p>
    <p class="where-line"><code>${item.source}</code> → <code>${item.destination}</code></p>
    ${item.error && html`<p class="bad-text">${item.error.message}</p><p class="hint">${item.error.hint}</p>`}</div>`;
}

function Table({ items }) {
  return html`<div class="panel-body"><div class="scroll" tabindex="0" role="region" aria-label="Items"><table class="rows-table"><thead><tr><th scope="col">State</th><th scope="col">Checkpoint</th><th scope="col">Becomes</th></tr></thead>
    <tbody>${items.slice(0, MOST_ROWS).map((item) => html`<tr><td><span class="nowrap"><${StateBadge} state=${stateOf(item)} /></span></td><td class="wraps">${item.job_id ? html`<a href=${`/jobs/${item.job_id}`}><code>${item.source}</code></a>` : html`<code>${item.source}</code>`}${item.error && html`<div class="bad-text">${item.error.message}</div>`}</td><td class="wraps"><code>${item.destination}</code></td></tr>`)}</tbody></table></div>
    ${items.length > MOST_ROWS && html`<p class="hint">and ${number(items.length - MOST_ROWS)} more: the grid shows them all</p>`}</div>`;
}
