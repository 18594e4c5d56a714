// A new job in three steps: what lies at the source, where it goes and how, and what would be written.

import { html, useEffect, useState } from "../vendor/htm-preact-standalone.mjs";
import { Icon } from "../components/icons.js";
import { Button, Code, Skeleton, Trouble } from "../components/parts.js";
import { count, size } from "../format.js";
import { overview } from "../overview.js";
import { useSignal } from "../store.js";
import { curlOf, PlanFacts } from "./job/details.js";
import { Found } from "./new-job/found.js";
import { faultsOf, proposed, useForm } from "./new-job/form.js";
import { Options } from "./new-job/options.js";

export default function NewJob({ query }) {
  const form = useForm(query);
  useEffect(() => { document.title = "New job · unshard"; }, []);
  return html`<div class="page new-job">
    <div class="head"><h1 tabindex="-1">New job</h1></div>
    <${SourceStep} form=${form} />
    <${TargetStep} form=${form} />
    <${PlanStep} form=${form} />
    <details class="card request"><summary>The same from a shell</summary><div class="panel-body"><${Code} text=${curlOf(form.body)} label="curl command" /></div></details>
  </div>`;
}

/** @param {{number: number, title: string, done?: boolean, children: unknown}} props */
function Step({ number, title, done = false, children }) {
  return html`<section class=${`card step-card${done ? " done" : ""}`} aria-labelledby=${`step-${number}`}>
    <h2 id=${`step-${number}`}><span class="mark" aria-hidden="true">${done ? html`<${Icon} name="check" />` : number}</span>${title}</h2><div>${children}</div>
  </section>`;
}

function SourceStep({ form }) {
  const { found, values } = form;
  const told = useSignal(overview);
  const look = (event) => { event.preventDefault(); if (values.source) form.inspect(); };
  return html`<${Step} number=${1} title="Checkpoint" done=${Boolean(found.answer) && !found.answer.missing.length}>
    <form onSubmit=${look}><label for="source">Path or URL</label>
      <div class="line"><input id="source" required spellcheck=${false} autocomplete="off" value=${values.source} placeholder="/runs/qwen/global_step_120 or s3://bucket/run/step"
        aria-describedby="source-hint" onInput=${(event) => form.set({ source: event.target.value.trim() })} />
      <${Button} label="Look into it" type="submit" icon="search" busy=${found.busy}>Look into it<//></div>
      <p class="hint" id="source-hint">As the machine of the service sees it. Only metadata is read.
        ${told?.demo && !values.source && html` <button type="button" class="as-link" onClick=${() => form.set(told.demo)}>Take the demo checkpoint</button>`}</p></form>
    ${found.busy && html`<${Skeleton} lines=${3} label="Looking into the checkpoint" />`}
    ${found.problem && html`<${Trouble} problem=${found.problem} />`}
    ${found.answer && html`<${Found} found=${found.answer} formats=${form.formats.data?.read} />`}
  <//>`;
}

function TargetStep({ form }) {
  const { values, formats } = form;
  const setOption = (name, value) => {
    const options = { ...values.options };
    if (value === undefined) delete options[name];
    else options[name] = value;
    form.set({ options });
  };
  return html`<${Step} number=${2} title="Model" done=${Boolean(form.plan.answer)}>
    <label for="destination">Where it goes</label>
    <input id="destination" spellcheck=${false} autocomplete="off" value=${values.destination} placeholder=${proposed(values.source) || "/models/qwen-120 or s3://bucket/models/qwen-120"}
      aria-describedby="destination-hint" onInput=${(event) => form.set({ destination: event.target.value.trim() })} />
    <p class="hint" id="destination-hint">A folder or URL that is not there yet, or is empty. Nobody sees the model there before it is whole.</p>
    ${formats.data ? html`<${Options} schema=${formats.data.options} values=${values.options} onChange=${setOption} faults=${faultsOf(form.plan, form.found, form.sent)} />` : formats.problem ? html`<${Trouble} problem=${formats.problem} onRetry=${formats.reload} />` : html`<${Skeleton} lines=${4} label="Loading the options" />`}
    <${Labels} labels=${values.labels} onChange=${(labels) => form.set({ labels })} />
  <//>`;
}

function Labels({ labels, onChange }) {
  const [text, setText] = useState("");
  const add = () => {
    const [, name, value] = /^\s*([^:=\s]+)\s*[:=]\s*(.*?)\s*$/.exec(text) ?? [];
    if (!name) return;
    onChange({ ...labels, [name]: value });
    setText("");
  };
  const without = (name) => Object.fromEntries(Object.entries(labels).filter(([other]) => other !== name));
  return html`<div class="field labels"><label for="label">Labels</label>
    <div class="line"><input id="label" value=${text} placeholder="run:qwen3" spellcheck=${false} autocomplete="off" aria-describedby="label-hint" onInput=${(event) => setText(event.target.value)}
      onKeyDown=${(event) => { if (event.key === "Enter") { event.preventDefault(); add(); } }} onBlur=${add} /><${Button} label="Add the label" icon="plus" onClick=${add}>Add<//></div>
    <p class="hint" id="label-hint">To find it again: a name and a value.</p>
    <div class="set">${Object.entries(labels).map(([name, value]) => html`<button key=${name} type="button" class="chip set" aria-label=${`Take away the label ${name}`} onClick=${() => onChange(without(name))}>${name}: ${value}<${Icon} name="close" /></button>`)}</div></div>`;
}

function PlanStep({ form }) {
  const { plan, sent, values } = form;
  const ready = Boolean(values.source);
  return html`<${Step} number=${3} title="Plan">
    ${!plan.answer && !plan.busy && html`<p class="hint">See what would be read and written before anything is. You may also submit at once.</p>`}
    ${plan.busy && html`<${Skeleton} lines=${4} label="Making the plan" />`}
    ${plan.problem && html`<${Trouble} problem=${plan.problem} />`}
    ${sent.problem && html`<${Trouble} problem=${sent.problem} />`}
    ${plan.answer && html`<p class="verdict"><${Icon} name="check" /><b>${size(plan.answer.bytes_total)} in ${count(plan.answer.files.length, "file")}</b><span class="hint">to ${form.body.destination}</span></p><${PlanFacts} plan=${plan.answer} />`}
    <div class="actions">
      <${Button} label="Show the plan" kind=${plan.answer ? "plain" : "primary"} icon="plan" busy=${plan.busy} disabled=${!ready} onClick=${form.preview}>Show the plan<//>
      <${Button} label="Convert" kind=${plan.answer ? "primary" : "plain"} icon="arrow" busy=${sent.busy} disabled=${!ready} onClick=${form.submit}>Convert<//>
    </div>
  <//>`;
}
