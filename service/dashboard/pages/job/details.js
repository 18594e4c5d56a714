// The tabs under a job: plan, events, attempts, and the request that makes the same again.

import { html } from "../../vendor/htm-preact-standalone.mjs";
import { download } from "../../api.js";
import { attempt, Button, Code, Skeleton, StateBadge, Time, Trouble } from "../../components/parts.js";
import { usePolled } from "../../components/polled.js";
import { clock, count, duration, exact, number, quoted, size } from "../../format.js";
import { setQuery } from "../../router.js";

const TABS = [["plan", "Plan"], ["events", "Events"], ["attempts", "Attempts"], ["request", "Request"]];
const MOST_EVENTS = 200;

/** @param {{job: import("../../types.js").Job, plan: any, events: any[] | null, tab: string}} props */
export function Details({ job, plan, events, tab }) {
  const shown = TABS.some(([name]) => name === tab) ? tab : "plan";
  const onKeyDown = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const place = (TABS.findIndex(([name]) => name === shown) + step + TABS.length) % TABS.length;
    setQuery({ tab: TABS[place][0] });
    event.currentTarget.children[place].focus();
  };
  return html`<section class="card panel details" aria-label="Details">
    <div class="panel-head">
      <div class="chips" role="tablist" aria-label="Details" onKeyDown=${onKeyDown}>${TABS.map(([name, label]) => html`<button key=${name} type="button" role="tab" class="chip"
        id=${`tab-${name}`} aria-selected=${shown === name ? "true" : "false"} aria-controls="tab-panel" tabindex=${shown === name ? 0 : -1} onClick=${() => setQuery({ tab: name })}>${label}</button>`)}</div>
      ${job.links.report && html`<${Button} label="Download the report" icon="download" onClick=${() => attempt(() => download(job.links.report, `${job.id}-report.json`))}>Report<//>`}
    </div>
    <div class="panel-body" role="tabpanel" id="tab-panel" aria-labelledby=${`tab-${shown}`} tabindex="0">
      ${shown === "plan" && html`<${PlanTab} plan=${plan} job=${job} />`}
      ${shown === "events" && html`<${EventsTab} events=${events} />`}
      ${shown === "attempts" && html`<${AttemptsTab} job=${job} />`}
      ${shown === "request" && html`<${RequestTab} job=${job} />`}
    </div>
  </section>`;
}

/** Facts as a grid of terms; what is not known is left out. @param {{rows: [string, unknown][]}} props */
export function Facts({ rows }) {
  return html`<dl class="facts">${rows.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([term, value]) => html`<div><dt>${term}</dt><dd>${value}</dd></div>`)}</dl>`;
}

/** A plan's summary, for a job and before there is one. @param {{plan: any}} props */
export function PlanFacts({ plan }) {
  const { source, cost } = plan;
  return html`<${Facts} rows=${[
    ["Format", source?.format],
    ["Family", source?.family],
    ["Tensors", number(plan.tensors)],
    ["Output", `${size(plan.bytes_total)} in ${count(plan.files.length, "file")}`],
    ["To be read", cost && `${size(cost.bytes_read)} in ${count(cost.pieces_read, "piece")}`],
    ["Parts", plan.parts && `${number(plan.parts)}, at most ${size(plan.largest_part_bytes)} each`],
    ["Memory of a worker", plan.worker_memory_bytes && size(plan.worker_memory_bytes)],
    ["Other files", plan.small_files?.join(", ")],
    ["Fingerprint", plan.fingerprint && html`<code>${plan.fingerprint}</code>`],
  ]} />
  ${plan.notes?.length > 0 && html`<h3>Notes</h3><ul class="notes">${plan.notes.map((note) => html`<li>${note}</li>`)}</ul>`}
  ${plan.dropped?.length > 0 && html`<details class="dropped"><summary>${count(plan.dropped.length, "source tensor")} left out</summary>
    <ul class="notes">${plan.dropped.slice(0, 200).map((one) => html`<li><code>${one.name}</code> ${one.reason}</li>`)}</ul></details>`}`;
}

function PlanTab({ plan, job }) {
  if (!plan) return html`<p class="hint">${["queued", "planning"].includes(job.state) ? "The plan is made when the job starts." : "There is no plan: the job ended before it was made."}</p>`;
  return html`<${PlanFacts} plan=${plan} />
    ${job.warnings.length > 0 && html`<h3>Warnings</h3><ul class="notes">${job.warnings.map((text) => html`<li>${text}</li>`)}</ul>`}`;
}

function EventsTab({ events }) {
  if (!events) return html`<${Skeleton} lines=${5} />`;
  const shown = events.filter((event) => event.type !== "job.progress").slice(-MOST_EVENTS).reverse();
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Events"><table class="rows-table events"><thead><tr><th scope="col">Time</th><th scope="col">Event</th><th scope="col">What</th></tr></thead>
    <tbody>${shown.map((event) => html`<tr key=${event.seq}><td class="nowrap"><time datetime=${event.at} title=${exact(event.at)}>${clock(event.at)}</time></td>
      <td class="nowrap"><code>${event.type}</code></td><td>${worded(event.data)}</td></tr>`)}</tbody></table></div>`;
}

/** The data of an event in a line: names and short values; sizes as sizes. */
function worded(data) {
  return Object.entries(data).filter(([, value]) => value !== null && value !== "" && !(Array.isArray(value) && !value.length)).map(([name, value]) => {
    const text = name.includes("bytes") && typeof value === "number" ? size(value) : typeof value === "object" ? JSON.stringify(value) : String(value);
    return `${name}: ${text.length > 200 ? `${text.slice(0, 200)}…` : text}`;
  }).join(" · ");
}

function AttemptsTab({ job }) {
  const { data, problem, reload } = usePolled(job.links.attempts, 0, `${job.attempt} ${job.state}`);
  const attempts = data?.items;
  if (problem) return html`<${Trouble} problem=${problem} onRetry=${reload} />`;
  if (!attempts) return html`<${Skeleton} lines=${3} />`;
  if (!attempts.length) return html`<p class="hint">It has not been tried yet.</p>`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Attempts"><table class="rows-table"><thead><tr><th scope="col">Attempt</th><th scope="col">Started</th><th scope="col">Took</th><th scope="col">Outcome</th><th scope="col">Why</th></tr></thead>
    <tbody>${attempts.map((one) => html`<tr key=${one.attempt}><td>${one.attempt}</td><td class="nowrap"><${Time} at=${one.started_at} /></td>
      <td class="nowrap">${one.ended_at ? duration((Date.parse(one.ended_at) - Date.parse(one.started_at)) / 1000) : "–"}</td>
      <td>${one.outcome ? html`<${StateBadge} state=${one.outcome} />` : "at work"}</td><td>${one.error?.message ?? ""}</td></tr>`)}</tbody></table></div>`;
}

function RequestTab({ job }) {
  return html`
    <h3>Options</h3>
    ${Object.keys(job.options).length ? html`<${Facts} rows=${Object.entries(job.options).map(([name, value]) => [name, html`<code>${JSON.stringify(value)}</code>`])} />` : html`<p class="hint">All as they are by default.</p>`}
    <h3>The same by REST</h3><${Code} text=${curlOf(job)} label="curl command" />
    <h3>This job</h3><${Code} text=${`curl -s ${location.origin}${job.links.self}`} label="curl command for this job" />`;
}

/** The request that makes this job. @param {{source: string, destination: string, options: object, labels: object}} job */
export function curlOf({ source, destination, options, labels, priority }) {
  const body = { source, destination };
  if (Object.keys(options).length) body.options = options;
  if (Object.keys(labels).length) body.labels = labels;
  if (priority) body.priority = priority;
  const token = sessionStorage.getItem("unshard-token") ? ` \\\n     -H "Authorization: Bearer $UNSHARD_TOKEN"` : "";
  return `curl -s ${location.origin}/v1/jobs -H 'Content-Type: application/json'${token} \\\n     -d ${quoted(JSON.stringify(body))}`;
}
