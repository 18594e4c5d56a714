// The options of a conversion as a form, made from the schema that the service gives: an option that is new there is
// here at once, with its explanation.

import { html } from "../../vendor/htm-preact-standalone.mjs";

const COMMON = ["dtype", "max_shard_size", "quantization", "target_format", "verify", "config_dir", "step", "overwrite"];
const OPEN = { "option-dtype": "as in the source", "option-quantization": "none", "option-tie_word_embeddings": "as it is found" };
const SPELLINGS = { dtype: "Data type", max_shard_size: "Largest file", config_dir: "Config folder", target_format: "Result", lora: "LoRA adapter", lora_alpha: "LoRA alpha", ignore: "Modules not quantised" };

/** @param {string} name */
const labelOf = (name) => SPELLINGS[name] ?? `${name[0].toUpperCase()}${name.slice(1).replaceAll("_", " ")}`;

/** What kind of value an option has, and whether it may be left open. */
function kindOf(schema) {
  const kinds = schema.anyOf ?? [schema];
  const open = kinds.some((kind) => kind.type === "null");
  const main = kinds.find((kind) => kind.enum || kind.const) ?? kinds.find((kind) => kind.type !== "null");
  return { type: main.type, values: main.enum, open };
}

/**
 * @param {{schema: {properties: Record<string, any>}, values: Record<string, unknown>, onChange: (name: string, value: unknown) => void,
 *   faults: Record<string, string>}} props
 */
export function Options({ schema, values, onChange, faults }) {
  const names = Object.keys(schema.properties);
  const rest = names.filter((name) => !COMMON.includes(name));
  const field = (name) => html`<${Field} key=${name} name=${name} schema=${schema.properties[name]} value=${values[name]} onChange=${onChange} fault=${faults[name]} />`;
  const set = rest.filter((name) => name in values).length;
  return html`<div class="options">${COMMON.filter((name) => names.includes(name)).map(field)}</div>
    <details class="more-options" open=${rest.some((name) => faults[name])}><summary>More options${set > 0 && html` <span class="number">${set} set</span>`}</summary><div class="options">${rest.map(field)}</div></details>`;
}

function Field({ name, schema, value, onChange, fault }) {
  const kind = kindOf(schema);
  const id = `option-${name}`;
  const notes = `${id}-text${fault ? ` ${id}-fault` : ""}`;
  const common = { id, "aria-describedby": notes, "aria-invalid": fault ? "true" : undefined };
  const set = (next) => onChange(name, next);
  const flag = kind.type === "boolean" && !kind.open;
  return html`<div class=${`field${flag ? " flag" : ""}`}>
    ${flag && html`<input ...${common} type="checkbox" checked=${value ?? schema.default} onChange=${(event) => set(event.target.checked === schema.default ? undefined : event.target.checked)} />`}
    <label for=${id}>${labelOf(name)}</label>
    ${!flag && html`<${Control} common=${common} kind=${kind} schema=${schema} value=${value} set=${set} />`}
    ${schema.description && html`<p class="hint" id=${`${id}-text`}>${schema.description.replaceAll("``", "")}</p>`}
    ${fault && html`<p class="fault" id=${`${id}-fault`}>${fault}</p>`}
  </div>`;
}

function Control({ common, kind, schema, value, set }) {
  const shown = schema.default === null || schema.default === undefined ? "" : String(schema.default);
  if (kind.values || kind.type === "boolean") {
    const values = kind.values ?? [true, false];
    const none = kind.open ? (OPEN[common.id] ?? "not given") : shown;
    return html`<select ...${common} value=${value === undefined ? "" : JSON.stringify(value)} onChange=${(event) => set(event.target.value ? JSON.parse(event.target.value) : undefined)}>
      ${(kind.open || shown === "") && html`<option value="">${none}</option>`}
      ${values.map((one) => html`<option value=${!kind.open && one === schema.default ? "" : JSON.stringify(one)}>${typeof one === "boolean" ? (one ? "yes" : "no") : one}</option>`)}</select>`;
  }
  if (kind.type === "integer" || kind.type === "number") {
    return html`<input ...${common} type="number" step=${kind.type === "integer" ? 1 : "any"} value=${value ?? ""} placeholder=${shown}
      onInput=${(event) => set(event.target.value === "" ? undefined : Number(event.target.value))} />`;
  }
  const list = kind.type === "array";
  return html`<input ...${common} type="text" spellcheck=${false} autocomplete="off" value=${list ? (value ?? []).join(", ") : (value ?? "")} placeholder=${list ? "one, another" : shown}
    onChange=${(event) => set(parsed(event.target.value.trim(), list))} />`;
}

function parsed(text, list) {
  if (text === "") return undefined;
  return list ? text.split(",").map((one) => one.trim()).filter(Boolean) : text;
}
