// Batches: many conversions each, and how far they are.

import { html, useEffect, useState } from "../vendor/htm-preact-standalone.mjs";
import { call } from "../api.js";
import { CountsBar } from "../components/counts-bar.js";
import { Icon } from "../components/icons.js";
import { attempt, Button, Code, Skeleton, StateBadge, Time, Trouble } from "../components/parts.js";
import { count, duration, number } from "../format.js";
import { onBatch, onGap } from "../live.js";
import { setQuery } from "../router.js";

const PAGE = 50;
const STATES = [["", "All"], ["running", "Running"], ["completed", "Completed"], ["cancelled", "Cancelled"]];
const COMMAND = `curl -s http://127.0.0.1:8000/v1/batches \\
  -H 'Content-Type: application/json' \\
  -d '{"discover": {"prefix": "/runs/qwen", "pattern": "global_step_*"},
       "template": {"destination": "/models/qwen/step-{step}"}}'`.replace("http://127.0.0.1:8000", location.origin);

export default function Batches({ query }) {
  const state = query.get("show") ?? "";
  const list = useBatches(state);
  useEffect(() => { document.title = "Batches · unshard"; }, []);
  return html`<div class="page">
    <div class="head"><h1 tabindex="-1">Batches</h1><a class="button primary" href="/batches/new"><${Icon} name="plus" /><span>New batch</span></a></div>
    ${(state || list.items?.length > 0) && html`<div class="filters"><div class="chips" role="group" aria-label="Show batches by state">${STATES.map(([name, label]) => html`<button key=${name} type="button" class="chip" aria-pressed=${String(state === name)} onClick=${() => setQuery({ show: name }, { push: true })}>${label}</button>`)}</div></div>`}
    ${list.problem && html`<${Trouble} problem=${list.problem} onRetry=${list.reload} />`}
    ${!list.items && !list.problem && html`<${Skeleton} lines=${6} label="Loading the batches" />`}
    ${list.items?.length === 0 && (state ? html`<p class="nothing">No batch is in this state.</p>` : html`<${Nothing} />`)}
    ${list.items?.length > 0 && html`<ul class="card batch-list">${list.items.map((batch) => html`<${Row} key=${batch.id} batch=${batch} />`)}</ul>`}
    ${list.cursor && html`<div class="more"><${Button} label="Show older batches" icon="chevron" onClick=${() => attempt(list.more)}>Show older batches<//></div>`}
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
function useBatches(state) {
  const [known, setKnown] = useState({ state: null, items: null, cursor: null, problem: null });
  const path = (cursor) => `/v1/batches?limit=${PAGE}${state ? `&state=${state}` : ""}${cursor ? `&cursor=${encodeURIComponent(cursor)}` : ""}`;
  const load = () => call(path()).then(
    (page) => setKnown({ state, items: page.items, cursor: page.next_cursor, problem: null }),
    (problem) => setKnown((before) => (before.items && before.state === state ? before : { state, items: null, cursor: null, problem })),
  );
  useEffect(() => {
    load();
    const stopBatches = onBatch((batch) => setKnown((before) => {
      if (!before.items || before.state !== state) return before;
      const fits = !state || batch.state === state;
      const others = before.items.filter((one) => one.id !== batch.id);
      const isKnown = others.length < before.items.length;
      if (!fits) return { ...before, items: others };
      if (isKnown) return { ...before, items: before.items.map((one) => (one.id === batch.id ? batch : one)) };
      return { ...before, items: [batch, ...others].sort((one, other) => (one.id < other.id ? 1 : -1)) };
    }));
    const stopGaps = onGap(load);
    return () => { stopBatches(); stopGaps(); };
  }, [state]);
  const more = async () => {
    const page = await call(path(known.cursor));
    setKnown((before) => ({ ...before, items: [...before.items, ...page.items], cursor: page.next_cursor }));
  };
  const current = known.state === state ? known : { items: null, cursor: null, problem: null };
  return { ...current, more, reload: load };
}
