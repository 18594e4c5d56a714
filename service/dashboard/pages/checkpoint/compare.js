// Two checkpoints: which tensors differ, and by how much.

import { html, useEffect, useRef, useState } from "../../vendor/htm-preact-standalone.mjs";
import { call } from "../../api.js";
import { Icon } from "../../components/icons.js";
import { Button, Skeleton, Trouble } from "../../components/parts.js";
import { count, dimensions, number, percent, size } from "../../format.js";
import { setQuery } from "../../router.js";

const MOST_NAMES = 20;

/** @param {{choice: {source: string, options: Record<string, unknown>}, query: URLSearchParams}} props */
export function Compare({ choice, query }) {
  const other = query.get("with") ?? "";
  const atol = query.get("atol") ?? "";
  const field = useRef(null);
  const within = useRef(null);
  const state = useComparison(choice, other, atol);
  const submit = (event) => {
    event.preventDefault();
    setQuery({ with: field.current.value.trim(), atol: within.current.value.trim() });
    if (field.current.value.trim() === other && within.current.value.trim() === atol) state.again();
  };
  return html`<div class="panel-body compare">
    <form class="compare-form" onSubmit=${submit}>
      <div class="field"><label for="compare-with">Compare with</label><input id="compare-with" ref=${field} defaultValue=${other} required spellcheck=${false} autocomplete="off" placeholder="another checkpoint, or a model" /></div>
      <div class="field narrow"><label for="compare-atol">Tolerance</label><input id="compare-atol" ref=${within} defaultValue=${atol} inputmode="decimal" pattern="[0-9.eE+\\-]*" placeholder="0: every bit" autocomplete="off" /></div>
      <${Button} label="Compare" type="submit" kind="primary" icon="compare" busy=${state.busy}>Compare<//>
    </form>
    ${!other && html`<p class="hint">Both are compared as Hugging Face would see them: a checkpoint with the model made of it, one step with the next, one framework with another.</p>`}
    ${state.busy && html`<${Skeleton} lines=${4} label="Comparing" />`}
    ${state.problem && html`<${Trouble} problem=${state.problem} onRetry=${state.again} />`}
    ${state.answer && html`<${Verdict} told=${state.answer} />`}
  </div>`;
}

function useComparison(choice, other, atol) {
  const key = JSON.stringify([choice, other, atol]);
  const [round, again] = useState(0);
  const [state, set] = useState({ key: "", answer: null, problem: null });
  useEffect(() => {
    if (!other) return undefined;
    const stop = new AbortController();
    set({ key: "", answer: null, problem: null });
    const body = { a: choice.source, b: other, options_a: choice.options, atol: Number(atol) || 0 };
    call("/v1/compare", { body, signal: stop.signal }).then(
      (answer) => set({ key, answer, problem: null }),
      (problem) => { if (problem.name !== "AbortError") set({ key, answer: null, problem }); },
    );
    return () => stop.abort();
  }, [key, round]);
  const current = state.key === key ? state : { answer: null, problem: null };
  return { ...current, busy: Boolean(other) && !current.answer && !current.problem, again: () => again((number_) => number_ + 1) };
}

const COMPARED = { values: "every value was compared", part: "only a part of the values was compared", digests: "names, types, shapes and recorded digests were compared", metadata: "only names, types and shapes were compared" };

function Verdict({ told }) {
  const tone = told.equal === null ? "warn" : told.equal ? "good" : "bad";
  const words = told.equal === null ? "Nothing differs in what was compared" : told.equal ? "They are equal" : "They differ";
  const lists = [["Only in the first", told.only_in_first], ["Only in the second", told.only_in_second]];
  return html`<div class="comparison">
    <p class=${`verdict tone-${tone}`} role="status"><${Icon} name=${told.equal ? "check" : told.equal === null ? "info" : "cross"} /><b>${words}</b><span class="hint">${COMPARED[told.compared] ?? told.compared}</span></p>
    ${told.reason && html`<p class="hint">Not all values: ${told.reason}.</p>`}
    <dl class="tiles small"><div><dt>In both</dt><dd>${number(told.tensors)}</dd></div><div><dt>Other values</dt><dd>${otherValues(told)}</dd></div>
      <div><dt>Other type or shape</dt><dd>${number(told.other_kinds.length)}</dd></div><div><dt>Compared</dt><dd>${size(told.compared_bytes)} of ${size(told.bytes)}</dd></div></dl>
    ${told.differences.length > 0 && html`<${Differences} rows=${told.differences} all=${told.different_tensors} soFar=${told.compared === "part"} />`}
    ${told.other_kinds.length > 0 && html`<h3>Other types or shapes</h3><div class="scroll" tabindex="0" role="region" aria-label="Other types or shapes"><table class="rows-table"><thead><tr><th scope="col">Tensor</th><th scope="col">First</th><th scope="col">Second</th></tr></thead>
      <tbody>${told.other_kinds.slice(0, 200).map((row) => html`<tr><td><code>${row.tensor}</code></td><td>${row.first.dtype} ${dimensions(row.first.shape)}</td><td>${row.second.dtype} ${dimensions(row.second.shape)}</td></tr>`)}</tbody></table></div>`}
    ${lists.filter(([, names]) => names.length).map(([title, names]) => html`<h3>${title}</h3><ul class="notes">${names.slice(0, MOST_NAMES).map((name) => html`<li><code>${name}</code></li>`)}${names.length > MOST_NAMES && html`<li>and ${number(names.length - MOST_NAMES)} more</li>`}</ul>`)}
  </div>`;
}

/** What was not looked at may differ, too: a number is told only of what was. */
function otherValues({ compared, different_tensors: found }) {
  if (compared === "values") return number(found);
  return compared === "part" ? `${number(found)} so far` : "–";
}

/** Largest first. */
function Differences({ rows, all, soFar }) {
  const sorted = [...rows].sort((one, other) => (other.largest ?? Infinity) - (one.largest ?? Infinity));
  return html`<h3>${count(all, "tensor")} with other values${soFar ? ", so far" : ""}</h3><div class="scroll" tabindex="0" role="region" aria-label="Tensors with other values"><table role="table" class="stacks rows-table">
    <thead role="rowgroup"><tr role="row"><th role="columnheader" scope="col">Tensor</th><th role="columnheader" scope="col" class="end">Largest difference</th><th role="columnheader" scope="col" class="end">Elements that differ</th><th role="columnheader" scope="col">First of them</th></tr></thead>
    <tbody role="rowgroup">${sorted.slice(0, 200).map((row) => html`<tr role="row"><td role="cell" class="wide"><a href=${`?${queryTo(row.tensor)}`}><code>${row.tensor}</code></a><div class="hint">${row.dtype} ${dimensions(row.shape)}</div></td>
      <td role="cell" class="end" data-label="by up to">${row.largest === null ? "not a number" : plain(row.largest)}</td>
      <td role="cell" class="end"><span class="part-of">${number(row.different_elements)}<span class="share" aria-hidden="true"><i style=${{ width: `${Math.max(2, (100 * row.different_elements) / row.elements)}%` }} /></span></span><div class="hint">${few(row.different_elements / row.elements)}</div></td>
      <td role="cell" class="nowrap"><code>[${row.index.join(", ")}]</code> <span class="hint">${plain(row.first)} → ${plain(row.second)}</span></td></tr>`)}</tbody></table></div>`;
}

const few = (part) => (part < 0.005 ? "less than 1 %" : percent(part));
const plain = (value) => (value === null ? "not a number" : Number(value.toPrecision(5)).toString());

function queryTo(tensor) {
  const query = new URLSearchParams(location.search);
  query.set("tensor", tensor);
  query.delete("view");
  return query.toString();
}
