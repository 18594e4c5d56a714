// One job: how far it is, how fast, on what; what went wrong; and everything about it.

import { html, useEffect } from "../vendor/htm-preact-standalone.mjs";
import { call } from "../api.js";
import { Confirmed } from "../components/confirmed.js";
import { Icon } from "../components/icons.js";
import { amount, attempt, Bar, Button, Copy, Skeleton, StateBadge, Trouble, useNow } from "../components/parts.js";
import { baseName, count, duration, number, percent, rate, share, size } from "../format.js";
import { act } from "../job-actions.js";
import { tellGap } from "../live.js";
import { go, setQuery } from "../router.js";
import { isTerminal, looks, secondsOf } from "../states.js";
import { notify } from "../store.js";
import { historyOf, useEvents, useJob, usePlan, useShards, useTensors } from "./job/data.js";
import { Details } from "./job/details.js";
import { againUrl, Failure, Waiting } from "./job/failure.js";
import { Lanes } from "./job/lanes.js";
import { Rates } from "./job/rates.js";
import { ShardMap } from "./job/shard-map.js";
import { TensorList } from "./job/tensor-list.js";
import { Timeline } from "./job/timeline.js";

export default function JobPage({ params, query }) {
  const { job, problem, reload } = useJob(params.id);
  const events = useEvents(job);
  const shards = useShards(job);
  const table = useTensors(job, shards);
  const plan = usePlan(job, shards);
  useEffect(() => { if (job) document.title = `${titleOf(job)} · unshard`; }, [job?.state, job?.progress?.bytes_done]);
  if (problem) return html`<div class="page"><${Trail} /><h1 tabindex="-1">${problem.status === 404 ? "No such job" : "Job"}</h1><${Trouble} problem=${problem} onRetry=${reload} /></div>`;
  if (!job) return html`<div class="page"><h1 class="quiet" tabindex="-1">Job</h1><${Skeleton} lines=${10} label="Loading the job" /></div>`;
  const points = historyOf(job, events);
  return html`<div class="page job-page">
    <${Head} job=${job} />
    ${job.error && html`<${Failure} job=${job} />`}
    ${job.state === "queued" && html`<${Waiting} />`}
    <section class="card panel" aria-label="Progress">
      <${Timeline} job=${job} />
      <${Numbers} job=${job} plan=${plan} />
    </section>
    <div class="pair"><${Rates} points=${points} ended=${isTerminal(job.state)} /><${Lanes} points=${points} workers=${job.progress?.workers ?? {}} /></div>
    <${Files} job=${job} shards=${shards} table=${table} view=${query.get("view")} />
    <${Details} job=${job} plan=${plan} events=${events} tab=${query.get("tab") ?? ""} />
  </div>`;
}

function titleOf(job) {
  const { progress } = job;
  const far = progress && !isTerminal(job.state) ? ` ${percent(share(progress.bytes_done, progress.bytes_total))}` : "";
  return `${looks(job.state).word}${far} · ${baseName(job.destination)}`;
}

const Trail = () => html`<nav class="trail" aria-label="Where this is"><a href="/">Jobs</a><${Icon} name="chevron" /></nav>`;

function Head({ job }) {
  return html`<header class="job-head">
    <nav class="trail" aria-label="Where this is"><a href="/">Jobs</a><${Icon} name="chevron" /><code>${job.id}</code><${Copy} text=${job.id} label="Copy the id" /></nav>
    <div class="head"><div class="what"><h1 tabindex="-1">${baseName(job.destination)}</h1><${StateBadge} state=${job.state} attempt=${job.attempt} /></div><${Actions} job=${job} /></div>
    <dl class="way"><div><dt>From</dt><dd><code>${job.source}</code><${Copy} text=${job.source} label="Copy the source" /></dd></div>
      <div><dt>To</dt><dd><code>${job.destination}</code><${Copy} text=${job.destination} label="Copy the destination" /></dd></div>
      ${Object.keys(job.labels).length > 0 && html`<div><dt>Labels</dt><dd>${Object.entries(job.labels).map(([name, value]) => html`<a class="label" href=${`/?label=${encodeURIComponent(`${name}:${value}`)}`}><span>${name}</span>${value}</a>`)}</dd></div>`}
    </dl>
  </header>`;
}

function Actions({ job }) {
  const remove = () => attempt(async () => {
    go("/"); // first, so that nothing here asks for what is no more
    await call(job.links.self, { method: "DELETE" });
    notify("good", `${baseName(job.destination)} is forgotten; its files stay where they are`);
    tellGap();
  });
  return html`<div class="actions">
    ${job.links.cancel && html`<${Button} label="Cancel the job" icon="close" kind="danger" busy=${job.state === "cancelling"} onClick=${() => act(job, "cancel")}>Cancel<//>`}
    ${job.state === "cancelled" && html`<${Button} label="Retry the job" icon="retry" kind="primary" onClick=${() => act(job, "retry")}>Retry<//>`}
    ${job.state === "succeeded" && html`<a class="button" href=${againUrl(job)}><${Icon} name="retry" /><span>Convert again</span></a>`}
    ${isTerminal(job.state) && html`<${Confirmed} label="Forget this job" ask="Really forget it?" askLabel="Really forget this job" onConfirm=${remove} />`}
  </div>`;
}

function Numbers({ job, plan }) {
  const now = useNow(!isTerminal(job.state));
  const { progress, result } = job;
  const total = progress?.bytes_total ?? plan?.bytes_total ?? 0;
  const done = progress?.bytes_done ?? 0;
  const seconds = result?.seconds ?? secondsOf(job, now);
  const speed = result ? result.bytes / Math.max(result.seconds, 0.001) : isTerminal(job.state) ? null : progress?.bytes_per_s;
  const tiles = [
    ["Written", progress ? amount(progress) : total ? `0 B of ${size(total)}` : "–"],
    ["Read", progress ? size(progress.bytes_read) : "–"],
    ["Tensors", progress ? `${number(progress.tensors_done)} of ${number(progress.tensors_total)}` : plan ? `0 of ${number(plan.tensors)}` : "–"],
    ["Files", progress ? `${number(progress.files_done)} of ${number(progress.files_total)}` : plan ? `0 of ${number(plan.files.length)}` : "–"],
    [result ? "Rate in all" : "Rate", rate(speed) || "–"],
    isTerminal(job.state) ? ["Took", duration(seconds) || "–"] : ["Left", progress?.eta_s ? duration(progress.eta_s) : "–"],
  ];
  const far = job.state === "succeeded" ? 1 : share(done, total);
  return html`<div class="numbers">
    <div class="far"><${Bar} value=${far} label="Bytes written" tone=${looks(job.state).tone} /><b>${percent(far)}</b></div>
    <dl class="tiles">${tiles.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    ${result && html`<p class="result"><${Icon} name="check" />The model is at <code>${result.location}</code><${Copy} text=${result.location} label="Copy where the model is" />
      <span class="hint">${count(result.files.length, "file")}, ${result.digest}</span></p>`}
  </div>`;
}

function Files({ job, shards, table, view }) {
  const asTable = view === "table";
  const done = shards?.filter((shard) => shard.state === "done").length ?? 0;
  return html`<section class="card panel" aria-label="Output files">
    <div class="panel-head"><h2>Output files</h2><span class="hint">${shards?.length ? `${number(done)} of ${count(shards.length, "file")} done` : ""}</span>
      <div class="chips" role="group" aria-label="Show the tensors as">
        <button type="button" class="chip" aria-pressed=${asTable ? "false" : "true"} onClick=${() => setQuery({ view: null })}><${Icon} name="layers" />Map</button>
        <button type="button" class="chip" aria-pressed=${asTable ? "true" : "false"} onClick=${() => setQuery({ view: "table" })}><${Icon} name="table" />Table</button></div></div>
    ${!shards && html`<div class="panel-body"><${Skeleton} lines=${4} /></div>`}
    ${shards && shards.length === 0 && html`<p class="hint empty">${isTerminal(job.state) ? "The job ended before its files were planned." : "The files are known when the plan is made."}</p>`}
    ${shards?.length > 0 && (asTable ? html`<${TensorList} job=${job} shards=${shards} />` : html`<${ShardMap} shards=${shards} table=${table} job=${job} />`)}
  </section>`;
}
