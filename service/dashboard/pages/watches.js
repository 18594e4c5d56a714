// Watches: prefixes that are looked at regularly, what each saw there, and why something waits.

import { html, useEffect } from "../vendor/htm-preact-standalone.mjs";
import { call } from "../api.js";
import { Icon } from "../components/icons.js";
import { useAsked } from "../components/asked.js";
import { Confirmed } from "../components/confirmed.js";
import { useListed } from "../components/listed.js";
import { attempt, Button, Code, Skeleton, StateBadge, Time, Trouble } from "../components/parts.js";
import { NO_PATTERN, PatternFields, patternOf, spelledPattern } from "../components/pattern-form.js";
import { usePolled } from "../components/polled.js";
import { baseName, count, number, period } from "../format.js";
import { setQuery, useAddressed, usePlace } from "../router.js";
import { notify } from "../store.js";

const POLL_MS = 5000;
const LOOKED_MS = 900;
const ITEMS = 100;
const DEFAULT_INTERVAL_S = 60;
const COMMAND = `curl -s ${location.origin}/v1/watches \\
  -H 'Content-Type: application/json' \\
  -d '{"prefix": "/runs/qwen", "pattern": "global_step_*", "interval_s": 60,
       "template": {"destination": "/models/qwen/step-{step}"}}'`;

export default function Watches({ query }) {
  const list = useListed("/v1/watches", { everyMs: POLL_MS });
  const isNew = query.get("new") === "1";
  const open = query.get("watch") ?? "";
  useEffect(() => { document.title = "Watches · unshard"; }, []);
  const { items } = list;
  return html`<div class="page stack">
    <div class="head"><h1 tabindex="-1">Watches</h1>${!isNew && html`<${Button} label="New watch" icon="plus" kind="primary" onClick=${() => setQuery({ new: "1" }, { push: true })}>New watch<//>`}</div>
    ${isNew && html`<${NewWatch} query=${query} reload=${list.reload} />`}
    ${list.problem && html`<${Trouble} problem=${list.problem} onRetry=${list.reload} />`}
    ${!items && !list.problem && html`<${Skeleton} lines=${5} label="Loading the watches" />`}
    ${items?.length === 0 && !isNew && html`<section class="card nothing-yet"><${Icon} name="eye" /><h2>Convert checkpoints as training writes them</h2>
      <p>A watch looks at a folder or bucket regularly. What appears there becomes a job once it is complete and its files are at rest.</p>
      <${Button} label="Make a watch" icon="plus" kind="primary" onClick=${() => setQuery({ new: "1" }, { push: true })}>Make a watch<//><p class="hint">Or from a shell</p><${Code} text=${COMMAND} label="command" /></section>`}
    ${items?.map((watch) => html`<${Watch} key=${watch.id} watch=${watch} isOpen=${open === watch.id || (items.length === 1 && open !== "none")} reload=${list.reload} />`)}
    ${list.hasMore && html`<div class="more"><${Button} label="Show older watches" icon="chevron" onClick=${() => attempt(list.more)}>Show older watches<//></div>`}
  </div>`;
}

function Watch({ watch, isOpen, reload }) {
  const title = watch.name || baseName(watch.prefix);
  const act = (work) => attempt(async () => { await work(); await reload(); });
  const look = () => act(async () => { await call(watch.links.look, { method: "POST" }); await new Promise((resolve) => { setTimeout(resolve, LOOKED_MS); }); });
  const turn = (state) => act(() => call(watch.links.self, { method: "PATCH", body: { state } }));
  const remove = () => act(async () => { await call(watch.links.self, { method: "DELETE" }); notify("good", "The watch is gone; what became jobs goes on"); });
  const { counts } = watch;
  return html`<article class="card panel watch" aria-label=${title}>
    <div class="watch-head"><div class="who"><h2>${title}</h2><${StateBadge} state=${watch.state} /></div>
      <div class="actions">${watch.links.look && html`<${Button} label=${`Look now at ${title}`} icon="search" onClick=${look}>Look now<//>`}
        ${watch.state === "active" ? html`<${Button} label=${`Pause ${title}`} icon="pause" onClick=${() => turn("paused")}>Pause<//>` : html`<${Button} label=${`Resume ${title}`} icon="play" kind="primary" onClick=${() => turn("active")}>Resume<//>`}
        <${Confirmed} label=${`End the watch ${title}`} ask="Really end it?" onConfirm=${remove} /></div></div>
    <p class="where-line watch-where"><code>${watch.prefix}/${watch.pattern}</code> → <code>${watch.template.destination}</code></p>
    ${watch.error && html`<div class="watch-error"><${Icon} name="warn" /><div><p>${watch.error.message}</p><p class="hint">${watch.error.hint}</p></div></div>`}
    <dl class="tiles watch-tiles"><div><dt>Waiting</dt><dd>${number(counts.waiting)}</dd></div><div><dt>Became jobs</dt><dd>${number(counts.submitted)}</dd></div><div><dt>Refused</dt><dd>${number(counts.refused)}</dd></div>
      <div><dt>Looks every</dt><dd>${period(watch.interval_s)}</dd></div><div><dt>Last look</dt><dd>${watch.last_look_at ? html`<${Time} at=${watch.last_look_at} />` : "not yet"}</dd></div><div><dt>Next look</dt><dd>${watch.state === "active" ? html`<${Time} at=${watch.next_look_at} />` : "paused"}</dd></div></dl>
    <div class="watch-foot"><button type="button" class="as-link" aria-expanded=${String(isOpen)} onClick=${() => setQuery({ watch: isOpen ? "none" : watch.id })}>${isOpen ? "Hide what it saw" : `Show what it saw (${count(counts.waiting + counts.submitted + counts.refused, "folder")})`}</button>
      ${counts.submitted > 0 && html`<a href=${`/?watch=${watch.id}`}>Its jobs</a>`}</div>
    ${isOpen && html`<${Seen} watch=${watch} />`}
  </article>`;
}

/** The folders that a watch saw: what became of each, or what it waits for. */
function Seen({ watch }) {
  const { data, problem, reload } = usePolled(`/v1/watches/${watch.id}/items?limit=${ITEMS}`, POLL_MS, `${watch.last_look_at} ${watch.counts.submitted}`);
  if (problem) return html`<div class="panel-body"><${Trouble} problem=${problem} onRetry=${reload} /></div>`;
  if (!data) return html`<div class="panel-body"><${Skeleton} lines=${3} /></div>`;
  if (!data.items.length) return html`<p class="hint empty">Nothing that fits the pattern was there at the last look.</p>`;
  return html`<div class="scroll panel-body" tabindex="0" role="region" aria-label=${`Folders that ${watch.name || watch.prefix} saw`}><table role="table" class="rows-table stacks"><thead role="rowgroup"><tr role="row"><th role="columnheader" scope="col">State</th><th role="columnheader" scope="col">Folder</th><th role="columnheader" scope="col">What it waits for, or what went wrong</th><th role="columnheader" scope="col" class="end">Seen</th></tr></thead>
    <tbody role="rowgroup">${data.items.map((item) => html`<tr role="row"><td role="cell" class="nowrap"><${StateBadge} state=${item.job_state ?? item.state} /></td>
      <td role="cell" class="wraps">${item.job_id ? html`<a href=${`/jobs/${item.job_id}`}>${baseName(item.source)}</a>` : html`<a href=${`/checkpoint?source=${encodeURIComponent(item.source)}`}>${baseName(item.source)}</a>`}</td>
      <td role="cell" class="wraps wide">${item.error ? html`${item.error.message}<div class="hint">${item.error.hint}</div>` : item.state === "waiting" ? "its files to be at rest for two looks" : null}</td>
      <td role="cell" class="end nowrap" data-label="seen"><${Time} at=${item.first_seen_at} /></td></tr>`)}</tbody></table>
    ${data.next_cursor && html`<p class="hint">and more: GET /v1/watches/${watch.id}/items tells them all</p>`}</div>`;
}

function NewWatch({ query, reload }) {
  const [values, set] = useAddressed(query, watchOf, spelledWatch);
  const { setQuery: lead } = usePlace();
  const body = { name: values.name, prefix: values.prefix.trim(), pattern: values.pattern.trim(), interval_s: Number(values.interval_s) || DEFAULT_INTERVAL_S, template: { destination: values.destination.trim(), options: values.options } };
  const [asked, ask] = useAsked(JSON.stringify(body));
  const closed = { new: "", ...NO_PATTERN, interval: "" };
  const submit = async (event) => {
    event.preventDefault();
    const made = await ask("make", (key) => call("/v1/watches", { body, headers: { "Idempotency-Key": key } }));
    if (!made) return;
    notify("good", "The watch looks for the first time now");
    lead({ ...closed, watch: made.id });
    await reload();
  };
  return html`<form class="card form-card" onSubmit=${submit} aria-label="New watch"><${PatternFields} values=${values} set=${set} problem=${asked.problem} />
    <div class="pair-fields"><div class="field"><label for="interval">Look every … seconds</label><input id="interval" type="number" min="1" step="any" required value=${values.interval_s} onInput=${(event) => set({ interval_s: event.target.value })} /></div></div>
    ${asked.problem && html`<${Trouble} problem=${asked.problem} />`}
    <div class="actions"><${Button} label="Make the watch" type="submit" kind="primary" icon="eye" busy=${asked.busy}>Watch<//><${Button} label="Close the form" kind="ghost" icon="close" onClick=${() => lead(closed)}>Close<//></div></form>`;
}

const watchOf = (query) => ({ ...patternOf(query), interval_s: query.get("interval") ?? String(DEFAULT_INTERVAL_S) });
const spelledWatch = (values) => ({ ...spelledPattern(values), interval: values.interval_s === String(DEFAULT_INTERVAL_S) ? "" : values.interval_s });
