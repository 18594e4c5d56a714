// The bytes of a checkpoint by module: boxes in boxes, each as large as what is in it.

import { html, useLayoutEffect, useMemo, useRef, useState } from "../../vendor/htm-preact-standalone.mjs";
import { Icon } from "../../components/icons.js";
import { number, percent, size } from "../../format.js";
import { nameOf, pathTo } from "./tree.js";

const LEAST_SIDE = 14;
const LEAST_DRAWN = 7;
const HEAD = 20;
const LEAST_HEAD_WIDTH = 54;
const DEEPEST = 6;
const MOST_BOXES = 260;
const KINDS = [
  ["attention", "Attention", /(attn|attention|linear_qkv|[._](q|k|v|o|qkv)_proj)/],
  ["expert", "Experts", /expert/],
  ["mlp", "Feed-forward", /(mlp|feed_forward|ffn|gate_proj|up_proj|down_proj|fc[12])/],
  ["embedding", "Embeddings and head", /(embed|lm_head|wte|output\.weight|output_layer)/],
  ["norm", "Norms", /norm/],
];

const kindOf = (name) => KINDS.find(([, , sign]) => sign.test(name))?.[0] ?? "other";

/** @param {{tree: import("./tree.js").Tree, node: number, onGo: (node: number) => void, onTensor: (node: number) => void}} props */
export function Treemap({ tree, node, onGo, onTensor }) {
  const box = useRef(null);
  const [room, setRoom] = useState({ width: 0, height: 460 });
  useLayoutEffect(() => {
    const look = () => setRoom({ width: box.current.clientWidth, height: box.current.clientHeight });
    const watcher = new ResizeObserver(look);
    watcher.observe(box.current);
    look();
    return () => watcher.disconnect();
  }, []);
  const boxes = useMemo(() => (room.width ? boxesOf(tree, node, room) : []), [tree, node, room.width, room.height]);
  const kinds = new Set(boxes.filter((one) => one.leaf).map((one) => one.kind));
  return html`<div class="treemap-view">
    <nav class="trail" aria-label="Module"><button type="button" class="as-link" onClick=${() => onGo(0)}>all</button>
      ${[...pathTo(tree, node), ...(node ? [node] : [])].map((at) => html`<${Icon} name="chevron" /><button type="button" class="as-link" aria-current=${at === node ? "location" : undefined} onClick=${() => onGo(at)}>${tree.labels[at]}</button>`)}
      <span class="hint">${size(tree.bytes[node])}, ${number(tree.counts[node])} tensors</span></nav>
    <div class="treemap" ref=${box} role="group" aria-label="Bytes by module">
      ${boxes.map((one) => html`<${Box} key=${one.node} tree=${tree} box=${one} all=${tree.bytes[node]} onGo=${onGo} onTensor=${onTensor} />`)}
    </div>
    <ul class="swatches">${[...KINDS, ["other", "Other"]].filter(([kind]) => kinds.has(kind)).map(([kind, word]) => html`<li><i class=${`map-${kind}`} />${word}</li>`)}</ul>
  </div>`;
}

function Box({ tree, box, all, onGo, onTensor }) {
  const name = nameOf(tree, box.node);
  const title = box.node === box.from ? tree.labels[box.node] : name.slice(nameOf(tree, box.from).length - tree.labels[box.from].length);
  const label = `${name}: ${size(tree.bytes[box.node])}, ${percent(tree.bytes[box.node] / all)}`;
  const place = { left: `${box.x}px`, top: `${box.y}px`, width: `${box.width}px`, height: `${box.height}px` };
  const isTensor = tree.children[box.node].length === 0;
  return html`<button type="button" class=${`${box.leaf ? "box" : "group"} map-${box.leaf ? box.kind : "group"}`} style=${place} title=${label} aria-label=${label}
      onClick=${() => (isTensor ? onTensor(box.node) : onGo(box.node))}>
    ${box.width > 34 && box.height > 16 && html`<span>${title}</span>`}
    ${box.leaf && box.width > 64 && box.height > 40 && html`<small>${size(tree.bytes[box.node])}</small>`}
  </button>`;
}

/** What is drawn, from the outside in. */
function boxesOf(tree, root, room) {
  const boxes = [];
  const queue = [{ node: root, area: { x: 0, y: 0, width: room.width, height: room.height }, depth: 0 }];
  while (queue.length) {
    const { node, area, depth, group } = queue.shift();
    if (boxes.length >= MOST_BOXES) {
      group.leaf = true;
      continue;
    }
    const children = tree.children[node].length ? [...tree.children[node]].sort((one, other) => tree.bytes[other] - tree.bytes[one]) : [node];
    for (const [from, place] of squarified(children, tree.bytes, area)) {
      const child = innermost(tree, from);
      const inside = tree.children[child].length > 0 && depth + 1 < DEEPEST && place.width > LEAST_HEAD_WIDTH && place.height > HEAD + LEAST_SIDE * 2;
      const box = { node: child, from, ...place, leaf: !inside, kind: kindOf(nameOf(tree, child)) };
      boxes.push(box);
      if (inside) queue.push({ group: box, node: child, area: { x: place.x + 2, y: place.y + HEAD, width: place.width - 4, height: place.height - HEAD - 2 }, depth: depth + 1 });
    }
  }
  return boxes;
}

/** A module that holds one thing only is drawn as that. */
function innermost(tree, node) {
  let at = node;
  while (tree.children[at].length === 1 && tree.tensors[at] < 0) [at] = tree.children[at];
  return at;
}

/** Lay nodes, largest first, out in rows whose boxes are as square as can be (Bruls, Huizing, van Wijk: Squarified Treemaps). */
function squarified(nodes, bytes, area) {
  const placed = [];
  let { x, y, width, height } = area;
  let left = nodes.reduce((sum, node) => sum + bytes[node], 0);
  const scale = () => (left > 0 ? (width * height) / left : 0);
  let start = 0;
  while (start < nodes.length && left > 0 && width > 1 && height > 1) {
    const side = Math.min(width, height);
    const factor = scale();
    let end = start;
    let sum = 0;
    let worst = Infinity;
    while (end < nodes.length) {
      const next = sum + bytes[nodes[end]] * factor;
      const smallest = bytes[nodes[end]] * factor;
      const largest = bytes[nodes[start]] * factor;
      const ratio = Math.max((side * side * largest) / (next * next), (next * next) / (side * side * Math.max(smallest, 1e-9)));
      if (ratio > worst) break;
      worst = ratio;
      sum = next;
      end += 1;
    }
    const thick = sum / side;
    let at = 0;
    for (let index = start; index < end; index += 1) {
      const long = (bytes[nodes[index]] * factor) / thick;
      const place = width >= height ? { x, y: y + at, width: thick, height: long } : { x: x + at, y, width: long, height: thick };
      if (place.width >= LEAST_DRAWN && place.height >= LEAST_DRAWN) placed.push([nodes[index], { x: place.x + 1, y: place.y + 1, width: place.width - 2, height: place.height - 2 }]);
      at += long;
      left -= bytes[nodes[index]];
    }
    if (width >= height) { x += thick; width -= thick; } else { y += thick; height -= thick; }
    start = end;
  }
  return placed;
}
