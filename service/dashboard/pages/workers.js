// The cluster: its machines, its actors, and what each does at this moment.

import { html, useEffect } from "../vendor/htm-preact-standalone.mjs";
import { Icon } from "../components/icons.js";
import { Code, Skeleton, Trouble } from "../components/parts.js";
import { usePolled } from "../components/polled.js";
import { baseName, count, number, share, size } from "../format.js";

const POLL_MS = 2000;
const SHORT = 8;
const STATE_WORDS = { ok: ["check", "good", "The cluster works"], starting: ["spin", "busy", "The cluster starts"], failed: ["cross", "bad", "The cluster does not work"] };
const RESOURCES = [["CPU", "Processors", number], ["GPU", "GPUs", number], ["memory", "Memory", size]];

export default function Workers() {
  const { data, problem, reload } = usePolled("/v1/workers", POLL_MS);
  useEffect(() => { document.title = "Workers · unshard"; }, []);
  return html`<div class="page stack">
    <div class="head"><h1 tabindex="-1">Workers</h1></div>
    ${problem && html`<${Trouble} problem=${problem} onRetry=${reload} />`}
    ${!data && !problem && html`<${Skeleton} lines=${6} label="Looking at the cluster" />`}
    ${data && html`<${Cluster} data=${data} />`}
  </div>`;
}

function Cluster({ data }) {
  const [icon, tone, word] = STATE_WORDS[data.state] ?? ["dot", "quiet", data.state];
  const busy = data.items.filter((worker) => worker.doing.length).length;
  const store = data.nodes.reduce((sum, node) => [sum[0] + node.object_store_used_bytes, sum[1] + node.object_store_bytes], [0, 0]);
  return html`
    <section class=${`card cluster tone-${tone}`} aria-label="Cluster"><p class="cluster-state" role="status"><${Icon} name=${icon} spin=${icon === "spin"} /><b>${word}</b><span class="hint">${data.detail}</span></p>
      ${data.nodes.length > 0 && html`<dl class="tiles"><div><dt>Machines</dt><dd>${number(data.nodes.length)}</dd></div><div><dt>Actors</dt><dd>${number(data.items.length)}</dd></div><div><dt>At work</dt><dd>${number(busy)}</dd></div>
        ${RESOURCES.slice(0, 2).map(([name, title]) => html`<div><dt>${title}</dt><dd>${number(sumOf(data.nodes, name))}</dd></div>`)}<div><dt>Object store</dt><dd>${size(store[0])} of ${size(store[1])}</dd></div></dl>`}</section>
    ${data.nodes.length === 0 && html`<${Nobody} data=${data} />`}
    ${data.nodes.map((node) => html`<${Node} key=${node.id} node=${node} workers=${data.items.filter((worker) => worker.node === node.id)} />`)}`;
}

const sumOf = (nodes, name) => nodes.reduce((sum, node) => sum + (node.total[name] ?? 0), 0);

function Nobody({ data }) {
  if (data.state !== "ok") return html`<p class="hint">Machines and actors are shown as soon as the cluster answers. Jobs wait until then.</p>`;
  return html`<section class="card nothing-yet"><${Icon} name="workers" /><h2>Conversions run in this process</h2><p>With a Ray cluster they run on its machines, side by side. Start a head node, let others join, and name it to the service.</p>
    <${Code} text=${"ray start --head\nRAY_ADDRESS=auto unshard serve"} label="command" /></section>`;
}

function Node({ node, workers }) {
  return html`<section class="card panel node" aria-label=${`Machine ${node.address}`}>
    <div class="panel-head"><h2>${node.address}</h2><span class="hint"><code>${node.id.slice(0, SHORT)}</code></span><span class="hint">${count(workers.length, "actor")}</span></div>
    <div class="meters">${RESOURCES.filter(([name]) => node.total[name]).map(([name, title, spell]) => html`<${Meter} title=${title} used=${node.total[name] - (node.available[name] ?? 0)} total=${node.total[name]} spell=${spell} />`)}
      ${node.object_store_bytes > 0 && html`<${Meter} title="Object store" used=${node.object_store_used_bytes} total=${node.object_store_bytes} spell=${size} />`}</div>
    ${workers.length > 0 ? html`<div class="scroll" tabindex="0" role="region" aria-label=${`Actors of ${node.address}`}><table role="table" class="stacks rows-table actors"><thead role="rowgroup"><tr role="row"><th role="columnheader" scope="col">Actor</th><th role="columnheader" scope="col">Kind</th><th role="columnheader" scope="col">Does</th><th role="columnheader" scope="col" class="end">Process</th></tr></thead>
      <tbody role="rowgroup">${workers.map((worker) => html`<tr role="row"><td role="cell" class="nowrap"><code>${worker.name}</code></td><td role="cell" class="nowrap">${worker.kind}</td><td role="cell" class="wraps"><${Doing} doing=${worker.doing} /></td><td role="cell" class="end" data-label="process">${worker.pid}</td></tr>`)}</tbody></table></div>` : html`<p class="hint empty">No actor is here at the moment.</p>`}
  </section>`;
}

function Meter({ title, used, total, spell }) {
  const part = share(used, total);
  return html`<div class="meter"><span class="meter-name">${title}</span><progress class=${`bar tone-${part > 0.9 ? "warn" : "busy"}`} max="1" value=${part} aria-label=${`${title} in use`} aria-valuetext=${`${spell(used)} of ${spell(total)}`} /><span class="hint nowrap">${spell(used)} of ${spell(total)}</span></div>`;
}

function Doing({ doing }) {
  if (!doing.length) return html`<span class="idle"><${Icon} name="clock" />waits</span>`;
  return doing.map((work) => html`<div class="doing"><${Icon} name="arrow" />${work.job_id ? html`<a href=${`/jobs/${work.job_id}`}>${baseName(work.file ?? "") || "a job"}</a>` : html`<span>works for somebody else</span>`}</div>`);
}
