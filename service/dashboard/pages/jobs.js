// The first page: what converts, what waits, what went wrong.

import { html, useCallback, useEffect, useRef, useState } from "../vendor/htm-preact-standalone.mjs";
import { Icon } from "../components/icons.js";
import { JobRow } from "../components/job-row.js";
import { Button, Skeleton, Trouble, attempt } from "../components/parts.js";
import { Welcome } from "../components/welcome.js";
import { count, number } from "../format.js";
import { actOnAll } from "../job-actions.js";
import { jobsInAll, overview } from "../overview.js";
import { setQuery, usePlace } from "../router.js";
import { GROUPS } from "../states.js";
import { useSignal } from "../store.js";
import { filterOf, isOpen, useJobs } from "./jobs-data.js";

const SEARCH_WAIT_MS = 200;
const COLUMNS = [
  ["state", "State"], ["model", "Model"], ["progress", "Progress"], ["rate", "Rate"], ["left", "Time"], ["when", "Created"],
];

export default function Jobs({ query }) {
  const filter = filterOf(query);
  const told = useSignal(overview);
  const list = useJobs(filter);
  useEffect(() => { document.title = titleOf(told); }, [told]);
  const isNew = isOpen(filter) && list.items?.length === 0 && (told === null || jobsInAll(told) === 0);
  if (isNew) return html`<div class="page"><${Welcome} demo=${told?.demo} /></div>`;
  return html`<div class="page jobs-page">
    <div class="head"><h1 tabindex="-1">Jobs</h1><a class="button primary" href="/new"><${Icon} name="plus" /><span>New job</span></a></div>
    <${Filters} filter=${filter} counts=${told?.jobs} />
    ${list.problem && html`<${Trouble} problem=${list.problem} onRetry=${list.reload} />`}
    ${!list.items && !list.problem && html`<${Skeleton} lines=${8} label="Loading the jobs" />`}
    ${list.items && html`<${List} list=${list} />`}
  </div>`;
}

const titleOf = (told) => {
  const busy = told ? GROUPS[1].states.reduce((sum, state) => sum + (told.jobs[state] ?? 0), 0) : 0;
  return busy ? `(${busy}) Jobs · unshard` : "Jobs · unshard";
};

function Filters({ filter, counts }) {
  const inGroup = (group) => {
    if (!counts) return "";
    const states = group.states.length ? group.states : Object.keys(counts);
    return number(states.reduce((sum, state) => sum + (counts[state] ?? 0), 0));
  };
  return html`<div class="filters">
    <div class="chips" role="group" aria-label="Show jobs by state">
      ${GROUPS.map((group) => html`<button key=${group.name} type="button" class="chip" aria-pressed=${filter.group === group.name ? "true" : "false"}
        onClick=${() => setQuery({ show: group.name }, { push: true })}>${group.label}<span class="number">${inGroup(group)}</span></button>`)}
    </div>
    ${filter.labels.map((label) => html`<button key=${label} type="button" class="chip set" aria-label=${`Take away the filter ${label}`}
      onClick=${() => setQuery({ label: filter.labels.filter((other) => other !== label) }, { push: true })}>${label}<${Icon} name="close" /></button>`)}
    ${["batch", "watch"].filter((kind) => filter[kind]).map((kind) => html`<button key=${kind} type="button" class="chip set"
      aria-label=${`Take away the filter by ${kind}`} onClick=${() => setQuery({ [kind]: "" }, { push: true })}>of one ${kind}<${Icon} name="close" /></button>`)}
    <${Search} text=${filter.search} />
  </div>`;
}

function Search({ text }) {
  const timer = useRef(0);
  const field = useRef(null);
  const { setQuery: search } = usePlace();
  // What was searched for may also be changed by a link, a button or the way back; what is being typed goes first.
  useEffect(() => { if (!timer.current && field.current.value.trim() !== text) field.current.value = text; }, [text]);
  useEffect(() => {
    const slash = (event) => {
      if (event.key !== "/" || event.target.closest("input, textarea, select, dialog")) return;
      event.preventDefault();
      field.current.focus();
    };
    addEventListener("keydown", slash);
    return () => removeEventListener("keydown", slash);
  }, []);
  const type = (event) => {
    const wanted = event.target.value.trim();
    clearTimeout(timer.current);
    timer.current = setTimeout(() => { timer.current = 0; search({ search: wanted }); }, SEARCH_WAIT_MS);
  };
  return html`<label class="search"><${Icon} name="search" /><span class="quiet">Search in paths and ids</span>
    <input ref=${field} type="search" placeholder="Search paths and ids" defaultValue=${text} onInput=${type} spellcheck=${false} /><kbd aria-hidden="true">/</kbd></label>`;
}

/** Narrow the list by one more label, whichever the address has by then: rows are not drawn again for it. */
const addLabel = (label) => setQuery({ label: [...new Set([...filterOf(new URLSearchParams(location.search)).labels, label])] }, { push: true });

function List({ list }) {
  const { chosen, choose, chooseAll, clear } = useChoice(list.items);
  if (!list.items.length) return html`<${Nothing} />`;
  const all = chosen.size === list.items.length;
  return html`
    <div class="card"><table role="table" class="jobs">
      <caption class="quiet">Jobs, newest first</caption>
      <thead role="rowgroup"><tr role="row">
        <th role="columnheader" class="pick"><input type="checkbox" aria-label="Select all that are shown" checked=${all} onChange=${() => chooseAll(!all)} /></th>
        ${COLUMNS.map(([name, label]) => html`<th role="columnheader" class=${name} scope="col">${label}</th>`)}
        <th role="columnheader" class="act"><span class="quiet">Action</span></th>
      </tr></thead>
      <tbody role="rowgroup">${list.items.map((job) => html`<${JobRow} key=${job.id} job=${job} chosen=${chosen.has(job.id)} onChoose=${choose} onLabel=${addLabel} />`)}</tbody>
    </table></div>
    ${list.hasMore && html`<div class="more"><${Button} label="Show older jobs" icon="chevron" onClick=${() => attempt(list.more)}>Show older jobs<//></div>`}
    ${chosen.size > 0 && html`<${Bulk} jobs=${list.items.filter((job) => chosen.has(job.id))} clear=${clear} />`}`;
}

/** Which rows are marked; what left the list is marked no more. Shift marks all from the last one on. */
function useChoice(jobs) {
  const [marked, setMarked] = useState(new Set());
  const shown = useRef(jobs);
  const last = useRef("");
  shown.current = jobs;
  const choose = useCallback((id, event) => {
    const ids = shown.current.map((job) => job.id);
    const [from, to] = [ids.indexOf(last.current), ids.indexOf(id)].sort((one, other) => one - other);
    const span = event.shiftKey && from >= 0 ? ids.slice(from, to + 1) : [id];
    const { checked } = event.target;
    last.current = id;
    setMarked((before) => {
      const after = new Set(before);
      for (const one of span) if (checked) after.add(one); else after.delete(one);
      return after;
    });
  }, []);
  const chosen = new Set(jobs.filter((job) => marked.has(job.id)).map((job) => job.id));
  return {
    chosen,
    choose,
    chooseAll: (all) => setMarked(new Set(all ? jobs.map((job) => job.id) : [])),
    clear: () => setMarked(new Set()),
  };
}

function Bulk({ jobs, clear }) {
  const able = (action) => jobs.filter((job) => job.links[action] && job.state !== "cancelling");
  const run = async (action) => { await actOnAll(able(action), action); clear(); };
  const button = (action, icon, word) => able(action).length > 0 && html`<${Button} key=${action} label=${`${word} ${count(able(action).length, "job")}`} icon=${icon}
    onClick=${() => run(action)}>${word} ${number(able(action).length)}<//>`;
  return html`<div class="bulk" role="region" aria-label="Selected jobs">
    <span>${number(jobs.length)} selected</span>${button("cancel", "close", "Cancel")}${button("retry", "retry", "Retry")}
    <${Button} label="Select none" kind="ghost" icon="close" onClick=${clear} />
  </div>`;
}

function Nothing() {
  return html`<div class="card nothing"><${Icon} name="search" /><p>No job fits this filter.</p>
    <${Button} label="Show all jobs" onClick=${() => setQuery({ show: "", search: "", label: [], batch: "", watch: "" }, { push: true })}>Show all jobs<//></div>`;
}
