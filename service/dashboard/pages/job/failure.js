// Why a job failed and what to do about it; and, for one that has not begun, what it waits for.

import { html } from "../../vendor/htm-preact-standalone.mjs";
import { call } from "../../api.js";
import { attempt, Button } from "../../components/parts.js";
import { Icon } from "../../components/icons.js";
import { usePolled } from "../../components/polled.js";
import { count } from "../../format.js";
import { act } from "../../job-actions.js";
import { tellJob } from "../../live.js";
import { overview } from "../../overview.js";
import { GROUPS } from "../../states.js";
import { useSignal } from "../../store.js";

const KINDS = {
  input: "The checkpoint or the options need a change",
  destination: "The destination cannot take the model",
  resource: "The machine or the cluster is too small for this",
  timeout: "It took longer than a job may",
  internal: "A fault of unshard itself",
};
const FACTS = [["tensor", "Tensor"], ["file", "File"], ["expected", "Expected"], ["found", "Found"]];
const CLUSTER_POLL_MS = 3000;

/** @param {{job: import("../../types.js").Job}} props */
export function Failure({ job }) {
  const { error } = job;
  const again = (fromScratch) => attempt(async () => tellJob(await call(job.links.retry, { body: { from_scratch: fromScratch } })));
  return html`<section class="card failure" aria-label="Failure">
    <div class="failure-head"><${Icon} name="cross" /><div><p class="kind">${KINDS[error.kind] ?? error.kind}</p><h2>${error.message}</h2></div></div>
    <dl>${FACTS.filter(([name]) => error[name]).map(([name, label]) => html`<div><dt>${label}</dt><dd><code>${error[name]}</code></dd></div>`)}</dl>
    ${error.hint && html`<div class="todo"><h3>What to do</h3><p>${error.hint}</p></div>`}
    <div class="actions">
      ${job.links.retry && html`<${Button} label="Retry" icon="retry" kind="primary" onClick=${() => act(job, "retry")}>Retry<//>
        <${Button} label="Retry from scratch" onClick=${() => again(true)}>Retry from scratch<//>`}
      <a class="button" href=${againUrl(job)}>Change and submit</a>
      <span class="hint">A retry keeps ${job.progress?.files_done ? count(job.progress.files_done, "finished file") : "the files that are finished"}.</span>
    </div>
  </section>`;
}

/** The form for a new job, filled with this one's. @param {import("../../types.js").Job} job */
export function againUrl(job) {
  const asked = new URLSearchParams({ source: job.source, destination: job.destination });
  if (Object.keys(job.options).length) asked.set("options", JSON.stringify(job.options));
  for (const [name, value] of Object.entries(job.labels)) asked.append("label", `${name}:${value}`);
  return `/new?${asked}`;
}

/** What a queued job waits for. */
export function Waiting() {
  const told = useSignal(overview);
  const { data: cluster } = usePolled("/v1/workers", CLUSTER_POLL_MS);
  const active = told ? GROUPS[1].states.reduce((sum, state) => sum + (told.jobs[state] ?? 0), 0) : 0;
  let why = "A worker takes it as soon as one is free.";
  if (cluster && cluster.state !== "ok") why = `The cluster is not ready: ${cluster.detail || cluster.state}.`;
  else if (active) why = `${count(active, "job")} ${active === 1 ? "is" : "are"} active, and this one starts when a place is free. A higher priority goes first.`;
  return html`<section class="card waiting" aria-label="Waiting"><${Icon} name="clock" /><div><h2>Waiting for its turn</h2><p>${why}</p></div></section>`;
}
