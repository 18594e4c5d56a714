// One tensor of a checkpoint: what it is, and where each slice of it lies.

import { html } from "../../vendor/htm-preact-standalone.mjs";
import { Icon } from "../../components/icons.js";
import { Copy, Skeleton, Trouble } from "../../components/parts.js";
import { count, dimensions, number, percent, size } from "../../format.js";
import { MeshGrid, useRank } from "./mesh.js";
import { Picture, PieceTable } from "./picture.js";

/** @param {{checkpoint: any, tree: import("./tree.js").Tree, node: number, name: string, state: {tensor: any, problem: any}}} props */
export function TensorDetail({ checkpoint, tree, node, name, state }) {
  const [rank, setRank] = useRank(name);
  if (node <= 0 || tree.tensors[node] < 0) {
    return html`<div class="tensor-detail none"><${Icon} name="layers" /><p>Choose a tensor to see which rank holds which slice of it, in which file and at which bytes.</p></div>`;
  }
  const number_ = tree.tensors[node];
  const kind = tree.table.kinds[tree.table.kind[number_]];
  const fault = tree.faultOf.get(number_);
  return html`<div class="tensor-detail">
    <div class="tensor-name"><h2>${name}</h2><${Copy} text=${name} label="Copy the name" /></div>
    <dl class="tiles small"><div><dt>Shape</dt><dd>${dimensions(kind.shape)}</dd></div><div><dt>Type</dt><dd>${kind.dtype}</dd></div>
      <div><dt>Size</dt><dd title=${`${number(kind.size_bytes)} bytes`}>${size(kind.size_bytes)}</dd></div><div><dt>Pieces</dt><dd>${number(tree.table.pieces[number_])}</dd></div></dl>
    ${fault && html`<p class="not-whole"><${Icon} name="warn" />${faultWords(fault)}</p>`}
    ${state.problem && html`<${Trouble} problem=${state.problem} />`}
    ${!state.tensor && !state.problem && html`<${Skeleton} lines=${5} label="Reading where it lies" />`}
    ${state.tensor && html`<${MeshGrid} checkpoint=${checkpoint} tensor=${state.tensor} chosen=${rank} onChoose=${setRank} />
      <${Picture} tensor=${state.tensor} rank=${rank} />
      <${PieceTable} tensor=${state.tensor} />`}
  </div>`;
}

function faultWords(fault) {
  if (fault.overlaps) return "Several pieces hold the same part of it.";
  return `${count(fault.missing_elements, "element")} of ${number(fault.elements)} (${percent(fault.missing_elements / fault.elements)}) are in no file.`;
}
