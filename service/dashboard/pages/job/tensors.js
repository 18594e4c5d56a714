// The tensors of a plan, in columns: tens of thousands of rows as objects would be most of the page's memory.

import { dimensions, size } from "../../format.js";

/**
 * @typedef {Object} TensorTable rows in the order of writing
 * @property {number} count
 * @property {string[]} names
 * @property {string[]} dtypes
 * @property {string[]} shapes
 * @property {string[]} operations
 * @property {string[]} sources one a line
 * @property {Int32Array} files place of each tensor's file in the list of output files
 * @property {Float64Array} starts first byte in the file
 * @property {Float64Array} stops
 * @property {Uint8Array} shades alternating from layer to layer, so that layers can be told apart
 * @property {Int32Array} firsts [files + 1]: the tensors of file f are firsts[f] to firsts[f + 1]
 */

/** @param {import("../../types.js").Shard[]} shards */
export function tensorTable(shards) {
  const places = new Map(shards.map((shard, place) => [shard.path, place]));
  const columns = { names: [], dtypes: [], shapes: [], operations: [], sources: [] };
  const numbers = { files: [], starts: [], stops: [], shades: [] };
  const known = new Map();
  const once = (text) => { // equal texts are kept once
    if (!known.has(text)) known.set(text, text);
    return known.get(text);
  };
  let layer = "";
  let shade = 0;
  return {
    add(rows) {
      for (const row of rows) {
        const own = /\.(\d+)\./.exec(row.name)?.[0] ?? "";
        if (own !== layer) { layer = own; shade = 1 - shade; }
        columns.names.push(row.name);
        columns.dtypes.push(once(row.dtype));
        columns.shapes.push(once(dimensions(row.shape)));
        columns.operations.push(once(row.operation));
        columns.sources.push(row.sources.length === 1 && row.sources[0] === row.name ? row.name : row.sources.join("\n"));
        numbers.files.push(places.get(row.file) ?? 0);
        numbers.starts.push(row.offset);
        numbers.stops.push(row.offset + row.size_bytes);
        numbers.shades.push(shade);
      }
    },
    /** @returns {TensorTable} */
    finish() {
      const files = Int32Array.from(numbers.files);
      const firsts = new Int32Array(shards.length + 1);
      for (const file of files) firsts[file + 1] += 1;
      for (let file = 0; file < shards.length; file += 1) firsts[file + 1] += firsts[file];
      return {
        ...columns,
        count: files.length,
        files,
        starts: Float64Array.from(numbers.starts),
        stops: Float64Array.from(numbers.stops),
        shades: Uint8Array.from(numbers.shades),
        firsts,
      };
    },
  };
}

/** The tensor of a file that holds a byte, or the nearest. @param {TensorTable} table */
export function tensorAt(table, file, byte) {
  let low = table.firsts[file];
  let high = table.firsts[file + 1] - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (table.stops[middle] > byte) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** A tensor in words. @param {TensorTable} table @param {number} tensor */
export const described = (table, tensor) =>
  `${table.names[tensor]}, ${table.dtypes[tensor]}, ${table.shapes[tensor]}, ${size(table.stops[tensor] - table.starts[tensor])}`;

/** Whether a tensor is written. @param {[number, number][]} ranges that are, in order */
export const isWritten = (table, tensor, ranges) =>
  ranges.some(([start, stop]) => start <= table.starts[tensor] && table.stops[tensor] <= stop);
