// The modules of a checkpoint as a tree, in columns: tens of thousands of tensors make no object each.

const NO_CHILDREN = [];

/**
 * @typedef {Object} Tree nodes are numbers; 0 is the whole checkpoint, and a parent's number is below its children's
 * @property {string[]} labels the part of the name that a node adds
 * @property {Int32Array} parents
 * @property {Int32Array} tensors the tensor of a node, -1 for a mere module
 * @property {number[][]} children
 * @property {Float64Array} bytes
 * @property {Int32Array} counts tensors in a node and below it
 * @property {Int32Array} faults tensors there that are not whole
 * @property {Map<number, {missing_elements: number, elements: number, overlaps: boolean}>} faultOf by tensor
 * @property {{names: string[], kind: number[], pieces: number[], kinds: {dtype: string, shape: number[], size_bytes: number}[]}} table
 */

/** @returns {Tree} */
export function treeOf(table) {
  const labels = [""];
  const above = [-1];
  const leaf = [-1];
  const children = [[]];
  const known = new Map();
  table.names.forEach((name, tensor) => {
    let node = 0;
    for (const label of name.split(".")) {
      const key = `${node}.${label}`;
      let next = known.get(key);
      if (next === undefined) {
        next = labels.push(label) - 1;
        known.set(key, next);
        above.push(node);
        leaf.push(-1);
        children.push(NO_CHILDREN);
        if (children[node] === NO_CHILDREN) children[node] = [];
        children[node].push(next);
      }
      node = next;
    }
    leaf[node] = tensor;
  });
  for (const list of children) if (list.length > 1) list.sort((one, other) => byNumber(labels[one], labels[other]));
  const faultOf = new Map(table.faults.map((fault) => [fault.tensor, fault]));
  return { labels, parents: Int32Array.from(above), tensors: Int32Array.from(leaf), children, faultOf, table, ...sums(above, leaf, table, faultOf) };
}

/** Numbers by their value; other names stay in the order in which they came. */
function byNumber(one, other) {
  const [a, b] = [Number(one), Number(other)];
  return Number.isNaN(a) || Number.isNaN(b) ? 0 : a - b;
}

function sums(above, leaf, table, faultOf) {
  const bytes = new Float64Array(above.length);
  const counts = new Int32Array(above.length);
  const faults = new Int32Array(above.length);
  for (let node = above.length - 1; node >= 0; node -= 1) {
    if (leaf[node] >= 0) {
      bytes[node] += table.kinds[table.kind[leaf[node]]].size_bytes;
      counts[node] += 1;
      if (faultOf.has(leaf[node])) faults[node] += 1;
    }
    if (node === 0) break;
    bytes[above[node]] += bytes[node];
    counts[above[node]] += counts[node];
    faults[above[node]] += faults[node];
  }
  return { bytes, counts, faults };
}

/** A module with nothing but one tensor is shown as that tensor. @param {Tree} tree */
function shownFor(tree, node) {
  const [only, ...others] = tree.children[node];
  return only !== undefined && !others.length && tree.tensors[node] < 0 && !tree.children[only].length ? only : node;
}

/** The module in whose list a node is shown, and by which label. @param {Tree} tree */
export function shownIn(tree, node) {
  const parent = tree.parents[node];
  if (parent <= 0 || shownFor(tree, parent) !== node) return { parent, label: tree.labels[node] };
  return { parent: tree.parents[parent], label: `${tree.labels[parent]}.${tree.labels[node]}` };
}

/** The nodes that are shown, in order, and how deep each is. @param {Tree} tree @param {Set<number>} open */
export function rowsOf(tree, open) {
  const nodes = [];
  const depths = [];
  const walk = (node, depth) => {
    for (const child of tree.children[node]) {
      const shown = shownFor(tree, child);
      nodes.push(shown);
      depths.push(depth);
      if (open.has(shown)) walk(shown, depth + 1);
    }
  };
  walk(0, 1);
  return { nodes, depths };
}

/** The tensors whose names hold a text, as rows without modules. @param {Tree} tree */
export function foundIn(tree, text) {
  const wanted = text.toLowerCase();
  const nodes = [];
  for (let node = 1; node < tree.labels.length; node += 1) {
    const tensor = tree.tensors[node];
    if (tensor >= 0 && tree.table.names[tensor].toLowerCase().includes(wanted)) nodes.push(node);
  }
  return { nodes, depths: nodes.map(() => 1) };
}

/** @param {Tree} tree @param {string} name the node of a tensor or module; -1 for none */
export function nodeOf(tree, name) {
  let node = 0;
  for (const label of name ? name.split(".") : []) {
    const next = tree.children[node].find((child) => tree.labels[child] === label);
    if (next === undefined) return -1;
    node = next;
  }
  return node;
}

/** @param {Tree} tree */
export function nameOf(tree, node) {
  const parts = [];
  for (let at = node; at > 0; at = tree.parents[at]) parts.push(tree.labels[at]);
  return parts.reverse().join(".");
}

/** The modules that a node is in, from the outermost one on. @param {Tree} tree */
export function pathTo(tree, node) {
  const path = [];
  for (let at = tree.parents[node]; at > 0; at = tree.parents[at]) path.push(at);
  return path.reverse();
}

/** What is open at first: as long as there is only one way to go on, or little to see. @param {Tree} tree */
export function openAtFirst(tree) {
  const open = new Set();
  let node = 0;
  for (let depth = 0; depth < 3; depth += 1) {
    const modules = tree.children[node].filter((child) => tree.children[child].length);
    const largest = modules.sort((one, other) => tree.bytes[other] - tree.bytes[one])[0];
    if (largest === undefined || tree.children[largest].length > 200) break;
    open.add(largest);
    node = largest;
  }
  return open;
}
