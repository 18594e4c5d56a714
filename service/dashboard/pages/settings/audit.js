// The audit: who changed what, from where, and how it ended.

import { html, useEffect, useRef, useState } from "../../vendor/htm-preact-standalone.mjs";
import { call, query as spelled } from "../../api.js";
import { Icon } from "../../components/icons.js";
import { attempt, Button, Skeleton, Time, Trouble } from "../../components/parts.js";
import { usePolled } from "../../components/polled.js";
import { setQuery } from "../../router.js";

const PAGE = 50;
const FILTERS = [["actor", "Who", "token_… or administrator"], ["action", "What", "POST /v1/jobs"], ["target", "Of what", "job_…"]];

export function Audit({ query }) {
  const filter = Object.fromEntries(FILTERS.map(([name]) => [name, query.get(name) ?? ""]));
  const path = `/v1/audit${spelled({ ...filter, limit: PAGE })}`;
  const { data, problem, reload } = usePolled(path);
  const [older, setOlder] = useState({ items: [], cursor: null });
  const form = useRef(null);
  useEffect(() => { setOlder({ items: [], cursor: data?.next_cursor ?? null }); }, [data]);
  const more = () => attempt(async () => {
    const page = await call(`${path}&cursor=${encodeURIComponent(older.cursor)}`);
    setOlder((before) => ({ items: [...before.items, ...page.items], cursor: page.next_cursor }));
  });
  const submit = (event) => { event.preventDefault(); setQuery(Object.fromEntries(FILTERS.map(([name]) => [name, form.current.elements[name].value.trim()])), { push: true }); };
  const rows = data ? [...data.items, ...older.items] : [];
  return html`<form class="source-form audit-form" ref=${form} onSubmit=${submit} key=${path} role="search" aria-label="Filter the audit">${FILTERS.map(([name, label, hint]) => html`<div class="field"><label for=${`audit-${name}`}>${label}</label><input id=${`audit-${name}`} name=${name} defaultValue=${filter[name]} placeholder=${hint} autocomplete="off" spellcheck=${false} /></div>`)}
      <${Button} label="Filter" type="submit" icon="search">Filter<//></form>
    ${problem && html`<${Trouble} problem=${problem} onRetry=${reload} />`}
    ${!data && !problem && html`<${Skeleton} lines=${6} />`}
    ${data && rows.length === 0 && html`<p class="nothing">Nothing fits. Whatever changes something is written down here: who, from where, what, and how it ended.</p>`}
    ${rows.length > 0 && html`<div class="card panel-body audit"><div class="scroll" tabindex="0" role="region" aria-label="Audit"><table role="table" class="rows-table stacks"><thead role="rowgroup"><tr role="row"><th role="columnheader" scope="col">When</th><th role="columnheader" scope="col">Who</th><th role="columnheader" scope="col">What</th><th role="columnheader" scope="col">Of what</th><th role="columnheader" scope="col">From</th><th role="columnheader" scope="col" class="end">Answer</th></tr></thead>
      <tbody role="rowgroup">${rows.map((row) => html`<tr role="row" key=${row.id}><td role="cell" class="nowrap"><${Time} at=${row.at} /></td><td role="cell">${row.actor_name || row.actor}<div class="hint"><code>${row.actor}</code></div></td><td role="cell" class="wraps wide"><code>${row.action}</code></td><td role="cell" class="wraps"><code>${row.target}</code></td><td role="cell" class="nowrap">${row.address}</td>
        <td role="cell" class="end nowrap"><span class=${row.status >= 400 ? "bad-text" : "good-text"}><${Icon} name=${row.status >= 400 ? "cross" : "check"} /> ${row.status}</span></td></tr>`)}</tbody></table></div>
      ${older.cursor && html`<div class="more"><${Button} label="Show older rows" icon="chevron" onClick=${more}>Show older rows<//></div>`}</div>`}`;
}
