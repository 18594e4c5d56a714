// Which checkpoints, and what becomes of each: what the forms of batches and watches have in common.

import { html } from "../vendor/htm-preact-standalone.mjs";
import { optionsIn, spelledOptions } from "../pages/new-job/form.js";
import { Skeleton, Trouble } from "./parts.js";
import { usePolled } from "./polled.js";
import { Options } from "../pages/new-job/options.js";

const FIELDS = [["{step}", "the number in its name"], ["{name}", "its name"], ["{path}", "where it lies below the prefix"], ["{flat}", "the same with - for each /"], ["{run}", "the folder that holds it"]];

/** The values of these fields in an address. @param {URLSearchParams} query */
export const patternOf = (query) => ({ name: query.get("name") ?? "", prefix: query.get("prefix") ?? "", pattern: query.get("pattern") ?? "", destination: query.get("destination") ?? "", options: optionsIn(query) });

/** The same as an address has them. */
export const spelledPattern = ({ name, prefix, pattern, destination, options }) => ({ name, prefix, pattern, destination, options: spelledOptions(options) });

/** What takes them out of it. */
export const NO_PATTERN = { name: "", prefix: "", pattern: "", destination: "", options: "" };

/**
 * @param {{values: ReturnType<typeof patternOf>, set: (change: object) => void, problem: any}} props
 */
export function PatternFields({ values, set, problem }) {
  const formats = usePolled("/v1/formats");
  const faults = faultsOf(problem);
  const text = (name) => ({ id: `pattern-${name}`, value: values[name], spellcheck: false, autocomplete: "off", "aria-describedby": `pattern-${name}-hint`, "aria-invalid": faults[name] ? "true" : undefined, onInput: (event) => set({ [name]: event.target.value }) });
  const setOption = (name, value) => {
    const options = { ...values.options };
    if (value === undefined) delete options[name];
    else options[name] = value;
    set({ options });
  };
  return html`<div class="pattern-fields">
    <div class="field"><label for="pattern-prefix">Look below</label><input ...${text("prefix")} required placeholder="/runs/qwen or s3://bucket/runs/qwen" /><p class="hint" id="pattern-prefix-hint">A folder or URL, as the machine of the service sees it.</p>${faults.prefix && html`<p class="fault">${faults.prefix}</p>`}</div>
    <div class="field"><label for="pattern-pattern">For folders named</label><input ...${text("pattern")} required placeholder="global_step_*" /><p class="hint" id="pattern-pattern-hint">Segment by segment, such as <code>run-*/global_step_*</code>; <code>*</code>, <code>?</code> and <code>[a-z]</code> stand for parts of a name.</p>${faults.pattern && html`<p class="fault">${faults.pattern}</p>`}</div>
    <div class="field"><label for="pattern-destination">Each becomes</label><input ...${text("destination")} required placeholder="/models/qwen/step-{step}" /><p class="hint" id="pattern-destination-hint">${FIELDS.map(([field, what]) => html`<span class="field-name"><code>${field}</code> ${what}</span> `)}</p>${faults.destination && html`<p class="fault">${faults.destination}</p>`}</div>
    <div class="field"><label for="pattern-name">Name</label><input ...${text("name")} placeholder="to find it again" /><p class="hint" id="pattern-name-hint">For you; it may be left out.</p></div>
    <details class="more-options"><summary>Options of the conversions${Object.keys(values.options).length > 0 && html` <span class="number">${Object.keys(values.options).length} set</span>`}</summary>
      ${formats.data ? html`<${Options} schema=${formats.data.options} values=${values.options} onChange=${setOption} faults=${faults} />` : formats.problem ? html`<${Trouble} problem=${formats.problem} onRetry=${formats.reload} />` : html`<${Skeleton} lines=${3} />`}</details>
  </div>`;
}

/** Faults by the last part of their pointers. */
function faultsOf(problem) {
  const faults = {};
  for (const fault of problem?.document?.errors ?? []) {
    const name = (fault.pointer ?? "").split("/").pop();
    if (name) faults[name] = fault.detail;
  }
  return faults;
}
