// Any checkpoint by its path, without converting it: what it is, what is in it, where each slice lies, what is missing.

import { html, useEffect, useMemo, useRef, useState } from "../vendor/htm-preact-standalone.mjs";
import { query as spelled } from "../api.js";
import { Icon } from "../components/icons.js";
import { Button, Code, Skeleton, Trouble } from "../components/parts.js";
import { baseName, count, number, quoted, size } from "../format.js";
import { overview } from "../overview.js";
import { setQuery } from "../router.js";
import { useSignal } from "../store.js";
import { Compare } from "./checkpoint/compare.js";
import { choiceOf, useCheckpoint, useTensor } from "./checkpoint/data.js";
import { Files, Overview } from "./checkpoint/overview.js";
import { TensorDetail } from "./checkpoint/tensor.js";
import { nameOf, nodeOf, openAtFirst, pathTo } from "./checkpoint/tree.js";
import { TreeView } from "./checkpoint/tree-view.js";
import { Treemap } from "./checkpoint/treemap.js";

const ADDRESS_WAIT_MS = 250;
const VIEWS = [["", "Tensors", "layers"], ["map", "Bytes by module", "grid"], ["files", "Files", "file"], ["compare", "Compare", "compare"]];

export default function CheckpointPage({ query }) {
  const choice = choiceOf(query);
  const found = useCheckpoint(choice);
  useEffect(() => { document.title = `${choice.source ? `${baseName(choice.source)} · ` : ""}Checkpoint · unshard`; }, [choice.source]);
  return html`<div class="page checkpoint-page">
    <div class="head"><h1 tabindex="-1">${choice.source ? baseName(choice.source) : "Checkpoint"}</h1>
      ${found.answer && !found.answer.problems.length && html`<a class="button primary" href=${`/new${spelled({ source: choice.source })}`}><${Icon} name="arrow" /><span>Convert</span></a>`}</div>
    <${Choice} key=${`${choice.source} ${query.get("step") ?? ""}`} choice=${choice} query=${query} busy=${found.busy} reload=${found.reload} />
    ${!choice.source && html`<${Nothing} />`}
    ${found.busy && html`<div class="card panel-body"><${Skeleton} lines=${8} label="Looking into the checkpoint" /></div>`}
    ${found.problem && html`<${Refused} problem=${found.problem} reload=${found.reload} />`}
    ${found.answer && html`<${Overview} found=${found.answer} tree=${found.tree} /><${Inside} key=${found.answer.version} found=${found.answer} tree=${found.tree} choice=${choice} query=${query} />`}
  </div>`;
}

function Choice({ choice, query, busy, reload }) {
  const field = useRef(null);
  const step = useRef(null);
  const submit = (event) => {
    event.preventDefault();
    const source = field.current.value.trim();
    const wanted = step.current.value.trim();
    if (source === choice.source && wanted === (query.get("step") ?? "")) reload();
    else setQuery({ source, step: wanted, tensor: "", module: "", search: "" }, { push: true });
  };
  return html`<form class="source-form" onSubmit=${submit} role="search">
    <div class="field"><label for="source">Path or URL</label><input id="source" ref=${field} defaultValue=${choice.source} required spellcheck=${false} autocomplete="off" placeholder="/runs/qwen/global_step_120 or s3://bucket/run/step" /></div>
    <div class="field narrow"><label for="step">Step</label><input id="step" ref=${step} defaultValue=${query.get("step") ?? ""} inputmode="numeric" pattern="[0-9]*" autocomplete="off" placeholder="the only one" /></div>
    <${Button} label=${choice.source ? "Look again" : "Look into it"} type="submit" kind=${choice.source ? "plain" : "primary"} icon="search" busy=${busy}>${choice.source ? "Look again" : "Look into it"}<//>
  </form>`;
}

function Nothing() {
  const told = useSignal(overview);
  return html`<section class="card nothing-yet"><${Icon} name="cube" /><h2>Look into any checkpoint without converting it</h2>
    <p>Its modules with their sizes, the mesh that it was saved by, where each rank's slice of a tensor lies, what is missing, and how it differs from another. Nothing is written, and only metadata is read until you compare.</p>
    ${told?.demo && html`<a class="button primary" href=${`/checkpoint${spelled({ source: told.demo.source })}`}>Look into the demo checkpoint</a>`}
    <p class="hint">Or from a shell</p><${Code} text=${`unshard inspect ${quoted("/path/to/checkpoint")}`} label="command" /></section>`;
}

/** A source that cannot be opened at all: what the service says of it, part by part. */
function Refused({ problem, reload }) {
  const { file, tensor, expected, found } = problem.document ?? {};
  const rows = [["File", file], ["Tensor", tensor], ["Expected", expected], ["Found", found]].filter(([, value]) => value);
  return html`<${Trouble} problem=${problem} onRetry=${reload} />
    ${rows.length > 0 && html`<section class="card panel-body refused" aria-label="What is wrong"><dl class="facts">${rows.map(([name, value]) => html`<div><dt>${name}</dt><dd><code>${value}</code></dd></div>`)}</dl></section>`}`;
}

function Inside({ found, tree, choice, query }) {
  const view = query.get("view") ?? "";
  const show = (name) => setQuery({ view: name }, { push: true });
  return html`<section class="card panel" aria-label="Contents">
    <div class="panel-head"><div class="chips" role="group" aria-label="Show">${VIEWS.map(([name, label, icon]) => html`<button key=${name} type="button" class="chip" aria-pressed=${String(view === name)} onClick=${() => show(name)}><${Icon} name=${icon} />${label}</button>`)}</div></div>
    ${view === "map" && html`<${Map} tree=${tree} query=${query} />`}
    ${view === "files" && html`<${Files} found=${found} />`}
    ${view === "compare" && html`<${Compare} choice=${choice} query=${query} />`}
    ${!["map", "files", "compare"].includes(view) && html`<${Tensors} found=${found} tree=${tree} choice=${choice} query=${query} />`}
  </section>`;
}

function Map({ tree, query }) {
  const node = Math.max(0, nodeOf(tree, query.get("module") ?? ""));
  return html`<div class="panel-body"><${Treemap} tree=${tree} node=${node} onGo=${(next) => setQuery({ module: nameOf(tree, next) }, { push: true })} onTensor=${(next) => setQuery({ view: "", tensor: nameOf(tree, next) }, { push: true })} /></div>`;
}

function Tensors({ found, tree, choice, query }) {
  const asked = query.get("tensor") ?? "";
  const [node, setNode] = useState(() => nodeOf(tree, asked));
  const [open, setOpen] = useState(() => new Set([...openAtFirst(tree), ...(node > 0 ? pathTo(tree, node) : [])]));
  const [search, setSearch] = useState(query.get("search") ?? "");
  const name = useMemo(() => (node > 0 && tree.tensors[node] >= 0 ? nameOf(tree, node) : ""), [tree, node]);
  const state = useTensor(choice, found.version, name);
  useEffect(() => { if (asked && asked !== name) setNode(nodeOf(tree, asked)); }, [asked]);
  useEffect(() => {
    const timer = setTimeout(() => setQuery({ tensor: name, search }), ADDRESS_WAIT_MS);
    return () => clearTimeout(timer);
  }, [name, search]);
  return html`<div class="tensors-view">
    <div class="tree-side">
      <label class="search"><${Icon} name="search" /><span class="quiet">Search in names</span><input type="search" placeholder=${`Search ${number(found.tensors)} names`} value=${search} spellcheck=${false} onInput=${(event) => setSearch(event.target.value.trim())} /></label>
      <${TreeView} tree=${tree} open=${open} setOpen=${setOpen} search=${search} chosen=${node} onChoose=${setNode} />
      <p class="hint tree-foot">${count(found.tensors, "tensor")}, ${size(found.bytes)}</p>
    </div>
    <${TensorDetail} checkpoint=${found} tree=${tree} node=${node} name=${name} state=${state} />
  </div>`;
}
