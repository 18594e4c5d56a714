// Batches: many conversions each, and how far they are.

import { html, useEffect } from "../vendor/htm-preact-standalone.mjs";
import { query } from "../api.js";
import { CountsBar } from "../components/counts-bar.js";
import { Icon } from "../components/icons.js";
import { useListed } from "../components/listed.js";
import { attempt, Button, Code, Skeleton, StateBadge, Time, Trouble } from "../components/parts.js";
import { useWithoutStream } from "../components/polled.js";
import { count, duration, number } from "../format.js";
import { newestBatch, onBatch } from "../live.js";
import { setQuery } from "../router.js";

const PAGE = 50;
const POLL_MS = 3000;
const STATES = [["", "All"], ["running", "Running"], ["completed", "Completed"], ["cancelled", "Cancelled"]];
const COMMAND = `curl -s http://127.0.0.1:8000/v1/batches \\
  -H 'Content-Type: application/json' \\
  -d '{"discover": {"prefix": "/runs/qwen", "pattern": "global_step_*"},
       "template": {"destination": "/models/qwen/step-{step}"}}'`.replace("http://127.0.0.1:8000", location.origin);

export default function Batches({ query: asked }) {
  const state = asked.get("show") ?? "";
  const list = useBatches(state);
  useEffect(() => { document.title = "Batches · unshard"; }, []);
  return html`<div class="page">
    <div class="head"><h1 tabindex="-1">Batches</h1><a class="button primary" href="/batches/new"><${Icon} name="plus" /><span>New batch</span></a></div>
    ${(state || list.items?.length > 0) && html`<div class="filters"><div class="chips" role="group" aria-label="Show batches by state">${STATES.map(([name, label]) => html`<button key=${name} type="button" class="chip" aria-pressed=${String(state === name)} onClick=${() => setQuery({ show: name }, { push: true })}>${label}</button>`)}</div></div>`}
    ${list.problem && html`<${Trouble} problem=${list.problem} onRetry=${list.reload} />`}
    ${!list.items && !list.problem && html`<${Skeleton} lines=${6} label="Loading the batches" />`}
    ${list.items?.length === 0 && (state ? html`<p class="nothing">No batch is in this state.</p>` : html`<${Nothing} />`)}
    ${list.items?.length > 0 && html`<ul class="card batch-list">${list.items.map((batch) => html`<${Row} key=${batch.id} batch=${batch} />`)}</ul>`}
    ${list.hasMore && html`<div class="more"><${Button} label="Show older batches" icon="chevron" onClick=${() => attempt(list.more)}>Show older batches<//></div>`}
  </div>`;
}

export const titleOf = (batch) => batch.name || (batch.discover ? `${batch.discover.prefix}/${batch.discover.pattern}` : count(batch.counts.total, "checkpoint"));

/** What is known of how long it still takes. */
export const leftOf = (batch) => (batch.state === "running" && batch.eta_s ? `${duration(batch.eta_s)} left` : "");

function Row({ batch }) {
  const done = batch.counts.succeeded + batch.counts.skipped;
  return html`<li class="batch-row">
    <div class="who"><a class="name" href=${`/batches/${batch.id}`}>${titleOf(batch)}</a><${StateBadge} state=${batch.state} />
      <div class="hint where-line">${batch.discover ? html`<code>${batch.discover.prefix}/${batch.discover.pattern}</code>` : count(batch.counts.total, "item")}${batch.template.destination && html` → <code>${batch.template.destination}</code>`}</div></div>
    <div class="far"><${CountsBar} counts=${batch.counts} words=${false} /><span class="hint">${number(done)} of ${number(batch.counts.total)}${batch.counts.failed > 0 ? html`, <span class="bad-text">${number(batch.counts.failed)} failed</span>` : ""}${leftOf(batch) && `, ${leftOf(batch)}`}</span></div>
    <div class="when hint"><${Time} at=${batch.created_at} /></div>
  </li>`;
}

function Nothing() {
  return html`<section class="card nothing-yet"><${Icon} name="grid" /><h2>Convert all checkpoints of a run at once</h2>
    <p>Name a folder and a pattern, and what each becomes. What is there already is skipped, so the same batch can be sent after every step.</p>
    <a class="button primary" href="/batches/new">Make a batch</a><p class="hint">Or from a shell</p><${Code} text=${COMMAND} label="command" /></section>`;
}

/** The newest batches, kept new by the stream. */
const useBatches = (state) => useListed(`/v1/batches${query({ state })}`, { page: PAGE, everyMs: useWithoutStream(POLL_MS), newest: newestBatch, listen: onBatch, fits: (batch) => !state || batch.state === state });
