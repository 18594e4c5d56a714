// The audit: who changed what, from where, and how it ended.

import { html, useEffect, useRef } from "../../vendor/htm-preact-standalone.mjs";
import { query as spelled } from "../../api.js";
import { Icon } from "../../components/icons.js";
import { useListed } from "../../components/listed.js";
import { attempt, Button, Skeleton, Time, Trouble } from "../../components/parts.js";
import { setQuery } from "../../router.js";

const FILTERS = [["actor", "Who", "token_… or administrator"], ["action", "What", "POST /v1/jobs"], ["target", "Of what", "job_…"]];

export function Audit({ query }) {
  const filter = Object.fromEntries(FILTERS.map(([name]) => [name, query.get(name) ?? ""]));
  const { items: rows, problem, reload, hasMore, more } = useListed(`/v1/audit${spelled(filter)}`);
  const form = useRef(null);
  // What the address says comes into the fields, also after the way back; they keep the focus.
  useEffect(() => { for (const [name] of FILTERS) form.current.elements[name].value = filter[name]; }, [JSON.stringify(filter)]);
  const submit = (event) => { event.preventDefault(); setQuery(Object.fromEntries(FILTERS.map(([name]) => [name, form.current.elements[name].value.trim()])), { push: true }); };
  return html`<form class="source-form audit-form" ref=${form} onSubmit=${submit} role="search" aria-label="Filter the audit">${FILTERS.map(([name, label, hint]) => html`<div class="field"><label for=${`audit-${name}`}>${label}</label><input id=${`audit-${name}`} name=${name} defaultValue=${filter[name]} placeholder=${hint} autocomplete="off" spellcheck=${false} /></div>`)}
      <${Button} label="Filter" type="submit" icon="search">Filter<//></form>
    ${problem && html`<${Trouble} problem=${problem} onRetry=${reload} />`}
    ${!rows && !problem && html`<${Skeleton} lines=${6} />`}
    ${rows?.length === 0 && html`<p class="nothing">Nothing fits. Whatever changes something is written down here: who, from where, what, and how it ended.</p>`}
    ${rows?.length > 0 && html`<div class="card panel-body audit"><div class="scroll" tabindex="0" role="region" aria-label="Audit"><table role="table" class="rows-table stacks"><thead role="rowgroup"><tr role="row"><th role="columnheader" scope="col">When</th><th role="columnheader" scope="col">Who</th><th role="columnheader" scope="col">What</th><th role="columnheader" scope="col">Of what</th><th role="columnheader" scope="col">From</th><th role="columnheader" scope="col" class="end">Answer</th></tr></thead>
      <tbody role="rowgroup">${rows.map((row) => html`<tr role="row" key=${row.id}><td role="cell" class="nowrap"><${Time} at=${row.at} /></td><td role="cell">${row.actor_name || row.actor}<div class="hint"><code>${row.actor}</code></div></td><td role="cell" class="wraps wide"><code>${row.action}</code></td><td role="cell" class="wraps"><code>${row.target}</code></td><td role="cell" class="nowrap" data-label="from">${row.address}</td>
        <td role="cell" class="end nowrap"><span class=${row.status >= 400 ? "bad-text" : "good-text"}><${Icon} name=${row.status >= 400 ? "cross" : "check"} /> ${row.status}</span></td></tr>`)}</tbody></table></div>
      ${hasMore && html`<div class="more"><${Button} label="Show older rows" icon="chevron" onClick=${() => attempt(more)}>Show older rows<//></div>`}</div>`}`;
}
