// Webhooks: whom the service tells of events, and what became of each delivery.

import { html, useState } from "../../vendor/htm-preact-standalone.mjs";
import { call } from "../../api.js";
import { Confirmed } from "../../components/confirmed.js";
import { Icon } from "../../components/icons.js";
import { useListed } from "../../components/listed.js";
import { attempt, Button, Code, Skeleton, StateBadge, Time, Trouble } from "../../components/parts.js";
import { usePolled } from "../../components/polled.js";
import { number } from "../../format.js";
import { setQuery, usePlace } from "../../router.js";
import { notify } from "../../store.js";
import { Secret } from "./tokens.js";

const POLL_MS = 4000;
const EVENTS = ["job.succeeded", "job.failed", "job.cancelled", "batch.completed", "job.*", "*"];

export function Webhooks({ query, isAdmin }) {
  const list = useListed("/v1/webhooks", { everyMs: POLL_MS });
  const [secret, setSecret] = useState(null);
  const [making, setMaking] = useState(false);
  const { items } = list;
  const open = query.get("webhook") ?? "";
  return html`
    ${secret && html`<${Secret} title=${`The secret of ${secret.url}`} text=${secret.secret} close=${() => setSecret(null)}>It is shown this once. Deliveries are signed with it as Standard Webhooks say; check the header <code>webhook-signature</code>.<//>`}
    ${making ? html`<${NewWebhook} isAdmin=${isAdmin} close=${() => setMaking(false)} onMade=${(made) => { setSecret(made); setMaking(false); list.reload(); }} />` : html`<div><${Button} label="New webhook" icon="plus" kind="primary" onClick=${() => setMaking(true)}>New webhook<//></div>`}
    ${list.problem && html`<${Trouble} problem=${list.problem} onRetry=${list.reload} />`}
    ${!items && !list.problem && html`<${Skeleton} lines=${4} />`}
    ${items?.length === 0 && !making && html`<section class="card nothing-yet"><${Icon} name="link" /><h2>Tell others when a model is there</h2><p>Deliveries are signed, tried again for about two days, and listed here with what the receiver answered.</p><${Code} text=${`curl -s ${location.origin}/v1/webhooks -H 'Content-Type: application/json' \\\n  -d '{"url": "https://example.com/unshard", "events": ["job.succeeded", "job.failed"]}'`} label="command" /></section>`}
    ${items?.map((hook) => html`<${Hook} key=${hook.id} hook=${hook} isOpen=${open === hook.id} reload=${list.reload} onSecret=${setSecret} />`)}
    ${list.hasMore && html`<div class="more"><${Button} label="Show older webhooks" icon="chevron" onClick=${() => attempt(list.more)}>Show older webhooks<//></div>`}`;
}

function Hook({ hook, isOpen, reload, onSecret }) {
  const { setQuery: lead } = usePlace();
  const here = `/v1/webhooks/${hook.id}`;
  const act = (work) => attempt(async () => { await work(); await reload(); });
  const test = () => act(async () => {
    const told = await call(`${here}:test`, { method: "POST" });
    notify(told.state === "delivered" ? "good" : "bad", told.state === "delivered" ? `The receiver answered ${told.response_status}` : `The test was not delivered: ${told.error ?? `the receiver answered ${told.response_status}`}`);
    lead({ webhook: hook.id });
  });
  const rotate = () => act(async () => onSecret({ ...hook, ...(await call(`${here}:rotate_secret`, { method: "POST" })) }));
  return html`<article class="card panel hook" aria-label=${hook.url}><div class="watch-head"><div class="who"><h2 class="hook-url">${hook.url}</h2><${StateBadge} state=${hook.state} /></div>
      <div class="actions"><${Button} label=${`Test ${hook.url}`} icon="play" onClick=${test}>Test<//>
        ${hook.state === "disabled" && html`<${Button} label=${`Make active: ${hook.url}`} icon="retry" kind="primary" onClick=${() => act(() => call(here, { method: "PATCH", body: { state: "active" } }))}>Make active<//>`}
        <${Confirmed} label=${`New secret for ${hook.url}`} ask="Really a new secret?" keep="Leave the secret as it is" icon="key" onConfirm=${rotate} />
        <${Confirmed} label=${`Forget ${hook.url}`} ask="Really forget it?" onConfirm=${() => act(() => call(here, { method: "DELETE" }))} /></div></div>
    <p class="watch-where">${hook.events.map((name) => html`<code class="scope">${name}</code> `)}${hook.everyone && html`<span class="hint">of everybody's jobs</span>`}</p>
    ${hook.disabled_reason && html`<div class="watch-error"><${Icon} name="warn" /><p>${hook.disabled_reason}</p></div>`}
    <div class="watch-foot"><button type="button" class="as-link" aria-expanded=${String(isOpen)} onClick=${() => setQuery({ webhook: isOpen ? "" : hook.id })}>${isOpen ? "Hide its deliveries" : "Show its deliveries"}</button></div>
    ${isOpen && html`<${Deliveries} here=${here} url=${hook.url} />`}</article>`;
}

function Deliveries({ here, url }) {
  const { items, problem, reload, hasMore, more } = useListed(`${here}/deliveries`, { everyMs: POLL_MS });
  const [open, setOpen] = useState("");
  if (problem) return html`<div class="panel-body"><${Trouble} problem=${problem} onRetry=${reload} /></div>`;
  if (!items) return html`<div class="panel-body"><${Skeleton} lines=${3} /></div>`;
  if (!items.length) return html`<p class="hint empty">Nothing was sent yet. Test it, or wait for an event.</p>`;
  const again = (delivery) => attempt(async () => { await call(`${here}/deliveries/${delivery.id}:redeliver`, { method: "POST" }); await reload(); });
  return html`<div class="scroll panel-body" tabindex="0" role="region" aria-label=${`Deliveries to ${url}`}><table class="rows-table"><thead><tr><th scope="col">State</th><th scope="col">Event</th><th scope="col">Answer</th><th scope="col" class="end">Attempts</th><th scope="col" class="end">When</th><th scope="col"><span class="quiet">Action</span></th></tr></thead>
    <tbody>${items.map((delivery) => html`<tr key=${delivery.id}><td class="nowrap"><${StateBadge} state=${delivery.state} /></td><td><button type="button" class="as-link" aria-expanded=${String(open === delivery.id)} onClick=${() => setOpen(open === delivery.id ? "" : delivery.id)}>${delivery.event_type}</button>${delivery.job_id && html`<div class="hint"><a href=${`/jobs/${delivery.job_id}`}>its job</a></div>`}</td>
      <td class="wraps">${delivery.response_status ?? ""} ${delivery.error ?? ""}</td><td class="end">${number(delivery.attempts)}</td><td class="end nowrap"><${Time} at=${delivery.last_attempt_at ?? delivery.created_at} />${delivery.next_attempt_at && delivery.state === "pending" && delivery.attempts > 0 && html`<div class="hint">again <${Time} at=${delivery.next_attempt_at} /></div>`}</td>
      <td class="end">${delivery.state !== "pending" && html`<${Button} label=${`Send ${delivery.event_type} again`} icon="retry" kind="ghost" onClick=${() => again(delivery)} />`}</td></tr>
      ${open === delivery.id && html`<tr key=${`${delivery.id} body`}><td colspan="6"><${Body} path=${`${here}/deliveries/${delivery.id}`} /></td></tr>`}`)}</tbody></table>
    ${hasMore && html`<div class="more"><${Button} label="Show older deliveries" icon="chevron" onClick=${() => attempt(more)}>Show older deliveries<//></div>`}</div>`;
}

/** What a delivery tells its receiver. */
function Body({ path }) {
  const { data, problem, reload } = usePolled(path);
  if (problem) return html`<${Trouble} problem=${problem} onRetry=${reload} />`;
  return data ? html`<${Code} text=${JSON.stringify(data.body, null, 2)} label="body of the delivery" />` : html`<${Skeleton} lines=${3} />`;
}

function NewWebhook({ isAdmin, close, onMade }) {
  const [values, setValues] = useState({ url: "", description: "", events: ["job.succeeded", "job.failed"], everyone: false });
  const [asked, setAsked] = useState({ busy: false, problem: null });
  const set = (change) => setValues((before) => ({ ...before, ...change }));
  const submit = async (event) => {
    event.preventDefault();
    setAsked({ busy: true, problem: null });
    try { onMade(await call("/v1/webhooks", { body: { ...values, url: values.url.trim() } })); } catch (problem) { setAsked({ busy: false, problem }); }
  };
  const turn = (name, on) => set({ events: on ? [...values.events, name] : values.events.filter((one) => one !== name) });
  return html`<form class="card form-card" onSubmit=${submit} aria-label="New webhook">
    <div class="field"><label for="hook-url">Where to</label><input id="hook-url" type="url" required value=${values.url} autocomplete="off" placeholder="https://example.com/unshard" onInput=${(event) => set({ url: event.target.value })} /></div>
    <fieldset class="scopes"><legend>Events</legend>${EVENTS.map((name) => html`<label class="scope-choice"><input type="checkbox" checked=${values.events.includes(name)} onChange=${(event) => turn(name, event.target.checked)} /><span><code>${name}</code>${name === "*" ? html` <span class="hint">all of them</span>` : ""}</span></label>`)}</fieldset>
    ${isAdmin && html`<label class="scope-choice"><input type="checkbox" checked=${values.everyone} onChange=${(event) => set({ everyone: event.target.checked })} /><span>Of everybody's jobs</span></label>`}
    ${asked.problem && html`<${Trouble} problem=${asked.problem} />`}
    <div class="actions"><${Button} label="Make the webhook" type="submit" kind="primary" icon="link" busy=${asked.busy} disabled=${!values.events.length}>Make the webhook<//><${Button} label="Close the form" kind="ghost" icon="close" onClick=${close}>Close<//></div></form>`;
}
