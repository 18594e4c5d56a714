// Tokens: who may do what, and how much of it.

import { html, useState } from "../../vendor/htm-preact-standalone.mjs";
import { call } from "../../api.js";
import { serviceNow } from "../../clock.js";
import { Confirmed } from "../../components/confirmed.js";
import { Icon } from "../../components/icons.js";
import { useListed } from "../../components/listed.js";
import { attempt, Button, Code, Copy, Skeleton, Time, Trouble } from "../../components/parts.js";
import { number } from "../../format.js";
import { notify } from "../../store.js";

const SCOPES = [["jobs:read", "see its own jobs, inspect, compare"], ["jobs:write", "submit, cancel and retry jobs"], ["batches:write", "make batches and watches"], ["webhooks", "keep webhooks"], ["admin", "everything, everybody's"]];
const LIMITS = [["max_running", "Jobs at work at a time"], ["max_queued", "Jobs that wait"], ["requests_per_minute", "Requests a minute"]];
const DAYS = [["", "never"], ["1", "in a day"], ["30", "in 30 days"], ["90", "in 90 days"], ["365", "in a year"]];
const DAY_S = 86_400;

export function Tokens() {
  const list = useListed("/v1/tokens");
  const [made, setMade] = useState(null);
  const [making, setMaking] = useState(false);
  const { items } = list;
  return html`
    ${made && html`<${Secret} title=${`The token of ${made.name}`} text=${made.token} close=${() => setMade(null)}>It is shown this once: of it only a digest is kept. Whoever gets it sends it as <code>Authorization: Bearer …</code>, or sets <code>UNSHARD_TOKEN</code>.<//>`}
    ${making ? html`<${NewToken} close=${() => setMaking(false)} onMade=${(token) => { setMade(token); setMaking(false); list.reload(); }} />` : html`<div><${Button} label="New token" icon="plus" kind="primary" onClick=${() => setMaking(true)}>New token<//></div>`}
    ${list.problem && html`<${Trouble} problem=${list.problem} onRetry=${list.reload} />`}
    ${!items && !list.problem && html`<${Skeleton} lines=${4} />`}
    ${items?.length === 0 && !making && html`<section class="card nothing-yet"><${Icon} name="key" /><h2>No token yet</h2><p>Give each team or training run a token of its own: it sees what it made itself, has its own limits, and can be ended alone.</p><${Code} text=${`curl -s ${location.origin}/v1/tokens -H 'Authorization: Bearer ADMIN' \\\n  -H 'Content-Type: application/json' -d '{"name": "training", "scopes": ["jobs:read", "jobs:write"]}'`} label="command" /></section>`}
    ${items?.length > 0 && html`<div class="card panel-body tokens"><div class="scroll" tabindex="0" role="region" aria-label="Tokens"><table role="table" class="rows-table stacks"><thead role="rowgroup"><tr role="row"><th role="columnheader" scope="col">Token</th><th role="columnheader" scope="col">May</th><th role="columnheader" scope="col">Limits</th><th role="columnheader" scope="col">Used</th><th role="columnheader" scope="col">Ends</th><th role="columnheader" scope="col"><span class="quiet">Action</span></th></tr></thead>
      <tbody role="rowgroup">${items.map((token) => html`<${Row} key=${token.id} token=${token} reload=${list.reload} />`)}</tbody></table></div></div>`}
    ${list.hasMore && html`<div class="more"><${Button} label="Show older tokens" icon="chevron" onClick=${() => attempt(list.more)}>Show older tokens<//></div>`}`;
}

/** Something that is shown this once. */
export function Secret({ title, text, close, children }) {
  return html`<section class="card secret" role="status" aria-label=${title}><div class="secret-head"><${Icon} name="key" /><h2>${title}</h2><${Button} label="I have it: hide it" icon="close" kind="ghost" onClick=${close} /></div>
    <div class="code"><pre tabindex="0" aria-label="The secret"><code>${text}</code></pre><${Copy} text=${text} label="Copy the secret" /></div><p class="hint">${children}</p></section>`;
}

function Row({ token, reload }) {
  const revoke = (how, told) => attempt(async () => { await call(`/v1/tokens/${token.id}${how}`, { method: "DELETE" }); notify("good", `The token of ${token.name} is ended; ${told}`); await reload(); });
  const alone = () => revoke("", "its jobs go on");
  const withJobs = { ask: "With its jobs", label: `With its jobs: revoke ${token.name} and cancel them`, onConfirm: () => revoke("?cancel_jobs=true", "its jobs are cancelled") };
  const isPast = token.expires_at && Date.parse(token.expires_at) < serviceNow();
  const limits = LIMITS.filter(([name]) => token[name]).map(([name, title]) => `${title}: ${number(token[name])}`);
  return html`<tr role="row" class=${token.revoked_at || isPast ? "ended" : ""}><td role="cell"><b>${token.name}</b><div class="hint"><code>${token.id}</code></div></td><td role="cell">${token.scopes.map((scope) => html`<code class="scope">${scope}</code> `)}</td>
    <td role="cell">${limits.length ? limits.map((limit) => html`<div class="nowrap">${limit}</div>`) : html`<span class="hint">the service's</span>`}</td><td role="cell" class="nowrap" data-label="used">${token.last_used_at ? html`<${Time} at=${token.last_used_at} />` : html`<span class="hint">never</span>`}</td>
    <td role="cell" class="nowrap" data-label=${token.revoked_at ? undefined : "ends"}>${token.revoked_at ? html`<span class="bad-text">revoked <${Time} at=${token.revoked_at} /></span>` : token.expires_at ? html`<${Time} at=${token.expires_at} />` : html`<span class="hint">never</span>`}</td>
    <td role="cell" class="end nowrap">${!token.revoked_at && html`<${Confirmed} label=${`Revoke ${token.name}`} ask="Really revoke?" askLabel=${`Really revoke? ${token.name}`} onConfirm=${alone} also=${withJobs} />`}</td></tr>`;
}

function NewToken({ close, onMade }) {
  const [values, setValues] = useState({ name: "", scopes: ["jobs:read", "jobs:write"], days: "90" });
  const [asked, setAsked] = useState({ busy: false, problem: null });
  const set = (change) => setValues((before) => ({ ...before, ...change }));
  const submit = async (event) => {
    event.preventDefault();
    setAsked({ busy: true, problem: null });
    const limits = Object.fromEntries(LIMITS.filter(([name]) => values[name]).map(([name]) => [name, Number(values[name])]));
    try {
      onMade(await call("/v1/tokens", { body: { name: values.name.trim(), scopes: values.scopes, ...limits, ...(values.days ? { expires_in_s: Number(values.days) * DAY_S } : {}) } }));
    } catch (problem) {
      setAsked({ busy: false, problem });
    }
  };
  const turn = (scope, on) => set({ scopes: on ? [...values.scopes, scope] : values.scopes.filter((one) => one !== scope) });
  return html`<form class="card form-card" onSubmit=${submit} aria-label="New token">
    <div class="pair-fields"><div class="field"><label for="token-name">Whose it is</label><input id="token-name" required value=${values.name} autocomplete="off" placeholder="training" onInput=${(event) => set({ name: event.target.value })} /></div>
      <div class="field"><label for="token-end">Ends</label><select id="token-end" value=${values.days} onChange=${(event) => set({ days: event.target.value })}>${DAYS.map(([days, word]) => html`<option value=${days}>${word}</option>`)}</select></div></div>
    <fieldset class="scopes"><legend>May</legend>${SCOPES.map(([scope, what]) => html`<label class="scope-choice"><input type="checkbox" checked=${values.scopes.includes(scope)} onChange=${(event) => turn(scope, event.target.checked)} /><span><code>${scope}</code> <span class="hint">${what}</span></span></label>`)}</fieldset>
    <div class="pair-fields">${LIMITS.map(([name, title]) => html`<div class="field"><label for=${`token-${name}`}>${title}</label><input id=${`token-${name}`} type="number" min="1" value=${values[name] ?? ""} placeholder="the service's" onInput=${(event) => set({ [name]: event.target.value })} /></div>`)}</div>
    ${asked.problem && html`<${Trouble} problem=${asked.problem} />`}
    <div class="actions"><${Button} label="Make the token" type="submit" kind="primary" icon="key" busy=${asked.busy} disabled=${!values.scopes.length}>Make the token<//><${Button} label="Close the form" kind="ghost" icon="close" onClick=${close}>Close<//></div></form>`;
}
