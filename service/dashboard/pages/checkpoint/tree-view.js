// The tree of modules: only the rows in view are drawn, and the keyboard goes through it as through any tree.

import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "../../vendor/htm-preact-standalone.mjs";
import { Icon } from "../../components/icons.js";
import { count, dimensions, number, size } from "../../format.js";
import { foundIn, rowsOf, shownIn } from "./tree.js";

const ROW = 30;
const SPARE = 6;

/**
 * @param {{tree: import("./tree.js").Tree, open: Set<number>, setOpen: (open: Set<number>) => void, search: string,
 *   chosen: number, onChoose: (node: number) => void}} props
 */
export function TreeView({ tree, open, setOpen, search, chosen, onChoose }) {
  const box = useRef(null);
  const [view, setView] = useState({ top: 0, height: 480 });
  const [active, setActive] = useState(chosen);
  const rows = useMemo(() => (search ? foundIn(tree, search) : rowsOf(tree, open)), [tree, open, search]);
  const at = Math.max(0, rows.nodes.indexOf(active));
  useScroll(box, setView);
  useEffect(() => { if (chosen > 0) setActive(chosen); }, [chosen]);
  useLayoutEffect(() => { if (active > 0) reveal(box.current, at * ROW); }, [active, rows]);
  const toggle = (node, wanted) => {
    const next = new Set(open);
    if (wanted) next.add(node); else next.delete(node);
    setOpen(next);
  };
  const move = (place) => {
    const node = rows.nodes[Math.min(rows.nodes.length - 1, Math.max(0, place))];
    setActive(node);
    if (tree.tensors[node] >= 0) onChoose(node);
  };
  const onKeyDown = (event) => {
    const done = keyed(event.key, { tree, open, rows, at, move, toggle, search, page: Math.floor(view.height / ROW) - 1 });
    if (done) event.preventDefault();
  };
  const pick = (node) => {
    setActive(node);
    if (tree.children[node].length && !search) toggle(node, !open.has(node));
    if (tree.tensors[node] >= 0) onChoose(node);
  };
  const first = Math.max(0, Math.floor(view.top / ROW) - SPARE);
  const last = Math.min(rows.nodes.length, Math.ceil((view.top + view.height) / ROW) + SPARE);
  if (!rows.nodes.length) return html`<p class="hint empty" role="status">No tensor has this in its name.</p>`;
  return html`<div class="tree" ref=${box} role="tree" tabindex="0" aria-label="Modules and tensors" aria-activedescendant=${`node-${rows.nodes[at]}`} onKeyDown=${onKeyDown}>
    <div class="rows" role="presentation" style=${{ height: `${rows.nodes.length * ROW}px` }}>
      ${rows.nodes.slice(first, last).map((node, place) => html`<${Row} key=${node} tree=${tree} node=${node} depth=${rows.depths[first + place]} top=${(first + place) * ROW}
        isOpen=${!search && open.has(node)} isActive=${first + place === at} isChosen=${node === chosen} whole=${Boolean(search)} onPick=${pick} />`)}
    </div>
  </div>`;
}

function Row({ tree, node, depth, top, isOpen, isActive, isChosen, whole, onPick }) {
  const tensor = tree.tensors[node];
  const inside = tree.children[node].length && !whole;
  const kind = tensor >= 0 ? tree.table.kinds[tree.table.kind[tensor]] : null;
  const shown = shownIn(tree, node);
  const siblings = tree.children[shown.parent];
  const parent = tree.bytes[shown.parent] || 1;
  const label = whole ? tree.table.names[tensor] : shown.label;
  return html`<div id=${`node-${node}`} role="treeitem" class=${`row${isActive ? " active" : ""}${isChosen ? " chosen" : ""}`} style=${{ top: `${top}px`, paddingLeft: `${8 + (depth - 1) * 16}px` }}
      aria-level=${depth} aria-expanded=${inside ? String(isOpen) : undefined} aria-selected=${String(isChosen)} aria-setsize=${siblings.length} aria-posinset=${1 + Math.max(siblings.indexOf(node), siblings.indexOf(tree.parents[node]))}
      onClick=${() => onPick(node)}>
    <span class=${`twist${isOpen ? " open" : ""}`}>${inside ? html`<${Icon} name="chevron" />` : null}</span>
    <span class="label-text" title=${label}>${label}</span>
    ${tree.faults[node] > 0 && html`<span class="fault-mark" title=${tensor >= 0 && !inside ? "Not whole" : `${number(tree.faults[node])} tensors are not whole`}><${Icon} name="warn" /><span class="quiet">not whole</span></span>`}
    <span class="kind">${kind ? `${kind.dtype} ${dimensions(kind.shape)}` : count(tree.counts[node], "tensor")}</span>
    <span class="share" aria-hidden="true"><i style=${{ width: `${Math.max(2, (100 * tree.bytes[node]) / parent)}%` }} /></span>
    <span class="amount">${size(tree.bytes[node])}</span>
  </div>`;
}

/** Do what a key means in a tree; false for keys that mean nothing. */
function keyed(key, { tree, open, rows, at, move, toggle, search, page }) {
  const node = rows.nodes[at];
  const inside = tree.children[node].length > 0 && !search;
  switch (key) {
    case "ArrowDown": move(at + 1); return true;
    case "ArrowUp": move(at - 1); return true;
    case "PageDown": move(at + page); return true;
    case "PageUp": move(at - page); return true;
    case "Home": move(0); return true;
    case "End": move(rows.nodes.length - 1); return true;
    case "ArrowRight":
      if (inside && !open.has(node)) toggle(node, true);
      else if (inside) move(at + 1);
      return true;
    case "ArrowLeft":
      if (inside && open.has(node)) toggle(node, false);
      else if (!search && shownIn(tree, node).parent > 0) move(rows.nodes.indexOf(shownIn(tree, node).parent));
      return true;
    case "Enter": case " ":
      if (inside) toggle(node, !open.has(node));
      else move(at);
      return true;
    default: return false;
  }
}

function reveal(box, top) {
  if (top < box.scrollTop) box.scrollTop = top;
  else if (top + ROW > box.scrollTop + box.clientHeight) box.scrollTop = top + ROW - box.clientHeight;
}

function useScroll(box, setView) {
  useLayoutEffect(() => {
    const element = box.current;
    if (!element) return undefined;
    const look = () => setView({ top: element.scrollTop, height: element.clientHeight });
    const watcher = new ResizeObserver(look);
    watcher.observe(element);
    element.addEventListener("scroll", look, { passive: true });
    look();
    return () => { watcher.disconnect(); element.removeEventListener("scroll", look); };
  }, [box.current]);
}
