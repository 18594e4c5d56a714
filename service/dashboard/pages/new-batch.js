// The form for a new batch: a pattern, what each becomes, and what would be done before anything is.

import { html, useEffect } from "../vendor/htm-preact-standalone.mjs";
import { call } from "../api.js";
import { Icon } from "../components/icons.js";
import { useAsked } from "../components/asked.js";
import { Button, Skeleton, Trouble } from "../components/parts.js";
import { PatternFields, patternOf, spelledPattern } from "../components/pattern-form.js";
import { count, number } from "../format.js";
import { useAddressed, usePlace } from "../router.js";
import { notify } from "../store.js";

const MOST_SHOWN = 100;

export default function NewBatch({ query }) {
  const [values, set] = useAddressed(query, batchOf, spelledBatch);
  const { go: lead } = usePlace();
  useEffect(() => { document.title = "New batch · unshard"; }, []);
  const body = { name: values.name, discover: { prefix: values.prefix.trim(), pattern: values.pattern.trim() }, template: { destination: values.destination.trim(), options: values.options }, on_item_error: values.on_item_error, ...(values.max_running ? { max_running: Number(values.max_running) } : {}) };
  const [asked, ask] = useAsked(JSON.stringify(body));
  const seen = asked.kind === "preview" ? asked.answer : null;
  const make = async () => {
    const made = await ask("make", (key) => call("/v1/batches", { body, headers: { "Idempotency-Key": key } }));
    if (!made) return;
    notify("good", `The batch has ${count(made.counts.total, "job")}`);
    lead(`/batches/${made.id}`);
  };
  const submit = (event) => { event.preventDefault(); ask("preview", () => call("/v1/batches?dry_run=true", { body })); };
  return html`<div class="page new-job">
    <div class="head"><h1 tabindex="-1">New batch</h1></div>
    <form class="card form-card" onSubmit=${submit}>
      <${PatternFields} values=${values} set=${set} problem=${asked.problem} />
      <div class="pair-fields"><div class="field"><label for="max-running">At once at most</label><input id="max-running" type="number" min="1" max="10000" value=${values.max_running} placeholder="as many as fit" onInput=${(event) => set({ max_running: event.target.value })} /></div>
        <div class="field"><label for="on-error">If one cannot be done</label><select id="on-error" value=${values.on_item_error} onChange=${(event) => set({ on_item_error: event.target.value })}><option value="continue">the others go on</option><option value="fail">do none, and cancel the rest</option></select></div></div>
      ${asked.problem && html`<${Trouble} problem=${asked.problem} />`}
      ${asked.busy && html`<${Skeleton} lines=${3} label="Looking for checkpoints" />`}
      ${seen && html`<${Preview} told=${seen} />`}
      <div class="actions"><${Button} label=${seen ? "Look again" : "Show what would be done"} kind=${seen ? "plain" : "primary"} icon="search" busy=${asked.busy && asked.kind === "preview"} type="submit">${seen ? "Look again" : "Show what would be done"}<//>
        <${Button} label=${`Convert ${seen ? number(seen.total - seen.refused) : ""}`.trim()} kind=${seen ? "primary" : "plain"} icon="arrow" busy=${asked.busy && asked.kind === "make"} disabled=${!seen && asked.kind !== "make"} onClick=${make}>Convert ${seen ? number(seen.total - seen.refused) : ""}<//></div>
    </form></div>`;
}

const batchOf = (query) => ({ ...patternOf(query), max_running: query.get("at_once") ?? "", on_item_error: query.get("on_error") === "fail" ? "fail" : "continue" });
const spelledBatch = (values) => ({ ...spelledPattern(values), at_once: values.max_running, on_error: values.on_item_error === "fail" ? "fail" : "" });

function Preview({ told }) {
  const word = (item) => (item.error ? "refused" : item.done ? "already there" : item.done === null ? "not known" : "to be converted");
  return html`<section class="preview" aria-label="What would be done"><p class="verdict" role="status"><${Icon} name="check" /><b>${count(told.total, "checkpoint")} found</b><span class="hint">${number(told.done)} there already${told.refused ? `, ${number(told.refused)} cannot be done` : ""}${told.unknown ? `, ${number(told.unknown)} not looked at in time` : ""}</span></p>
    <div class="scroll" tabindex="0" role="region" aria-label="Checkpoints"><table class="rows-table"><thead><tr><th scope="col">Checkpoint</th><th scope="col">Becomes</th><th scope="col">State</th></tr></thead>
    <tbody>${told.items.slice(0, MOST_SHOWN).map((item) => html`<tr><td class="wraps"><code>${item.source}</code>${item.error && html`<div class="bad-text">${item.error.message}</div>`}</td><td class="wraps"><code>${item.destination}</code></td><td class="nowrap">${word(item)}</td></tr>`)}</tbody></table></div>
    ${told.items.length > MOST_SHOWN && html`<p class="hint">and ${number(told.items.length - MOST_SHOWN)} more</p>`}</section>`;
}
