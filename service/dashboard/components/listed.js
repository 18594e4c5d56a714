// A list of the service, newest first, page by page, kept new by whoever tells of changes or by asking again.

import { useEffect, useMemo, useState } from "../vendor/htm-preact-standalone.mjs";
import { call } from "../api.js";
import { hearing } from "../live.js";
import { useAgain } from "./polled.js";

const MOST_AGAIN = 200;
const APPLY_MS = 100;
/** `reach` is the id of the oldest item that was asked for: what is older comes with the next page. */
const NOTHING = { items: null, cursor: null, reach: "", problem: null };
const EMPTY_WORDS = { fits: () => true, newest: (one) => one, listen: () => () => {} };

/**
 * @template T
 * @typedef {Object} Way how a list is asked for and kept
 * @property {number} [page] items that are asked for at a time
 * @property {number} [everyMs] when it is asked for again, where nothing tells of changes
 * @property {(one: T) => boolean} [fits] whether something that changed belongs to the list
 * @property {(listener: (one: T) => void) => () => void} [listen] to changes
 * @property {(one: T) => T} [newest] that is known of one
 */

/**
 * @template {{id: string}} T ids grow with time
 * @param {string} path with the filter in its query
 * @param {Way<T>} way
 * @returns {{items: T[] | null, problem: Error | null, hasMore: boolean, more: () => Promise<void>, reload: () => Promise<void>}}
 */
export function useListed(path, way = {}) {
  const [state, setState] = useState({ path: "", ...NOTHING });
  const list = useMemo(() => listOf(path, { page: 50, ...EMPTY_WORDS, ...way }, (known) => setState({ path, ...known })), [path]);
  useAgain(list.load, way.everyMs ?? 0);
  useEffect(() => list.keep(), [list]);
  const { items, cursor, problem } = state.path === path ? state : NOTHING;
  return { items, problem, hasMore: Boolean(cursor), more: list.more, reload: list.load };
}

/** One list as long as it is shown. Answers that a later one has overtaken, or that come too late, are not taken. */
function listOf(path, { page, fits, newest, listen }, show) {
  let known = NOTHING;
  let asked = 0;
  let answered = 0;
  let adding = false;
  let gone = false;
  const ask = (limit, cursor = "") => hearing(listen, () => call(`${path}${path.includes("?") ? "&" : "?"}limit=${limit}${cursor && `&cursor=${encodeURIComponent(cursor)}`}`));
  const set = (next) => { known = next; if (!gone) show(known); };
  const taken = (items) => items.map(newest).filter(fits);

  async function load() {
    const number = ++asked;
    try {
      const [answer, heard] = await ask(Math.min(Math.max(page, known.items?.length ?? 0), MOST_AGAIN));
      if (number < answered) return;
      answered = number;
      set(merged(refreshed(known, answer, taken(answer.items)), heard, { fits, newest }));
    } catch (problem) {
      if (number < answered) return;
      answered = number;
      set(known.items ? known : { ...NOTHING, problem });
    }
  }

  async function more() {
    const { cursor } = known;
    if (!cursor || adding) return;
    adding = true;
    try {
      const [answer, heard] = await ask(page, cursor);
      if (known.cursor !== cursor) return;
      const there = new Set(known.items.map((one) => one.id));
      const older = taken(answer.items).filter((one) => !there.has(one.id));
      const reach = answer.items.at(-1)?.id ?? known.reach;
      set(merged({ ...known, items: [...known.items, ...older], cursor: answer.next_cursor, reach }, heard, { fits, newest }));
    } finally {
      adding = false;
    }
  }

  /** Take what is told, some at a time. */
  function keep() {
    const waiting = new Map();
    let timer = 0;
    const apply = () => {
      timer = 0;
      set(merged(known, waiting, { fits, newest }));
      waiting.clear();
    };
    const stop = listen((one) => { waiting.set(one.id, one); timer ||= setTimeout(apply, APPLY_MS); });
    return () => { gone = true; clearTimeout(timer); stop(); };
  }

  return { load, more, keep };
}

/** The list with its first items as they were answered; older ones stay, unless there may be others in between. */
function refreshed(known, answer, items) {
  const last = answer.items.at(-1)?.id ?? "";
  const meets = answer.next_cursor && known.items?.length > 0 && last <= known.items[0].id;
  const older = meets ? known.items.filter((one) => one.id < last) : [];
  const end = older.length ? { cursor: known.cursor, reach: known.reach } : { cursor: answer.next_cursor, reach: last };
  return { items: [...items, ...older], ...end, problem: null };
}

/** The list with what changed in its place, what is new at its own, and without what does not fit any more. */
function merged(known, changed, { fits, newest }) {
  if (!known.items || !changed.size) return known;
  const places = new Map(known.items.map((one, place) => [one.id, place]));
  const oldest = known.cursor ? known.reach : "";
  const items = known.items.slice();
  const fresh = [];
  for (const told of changed.values()) {
    const one = newest(told);
    const place = places.get(one.id);
    if (place !== undefined) items[place] = fits(one) ? one : null;
    else if (fits(one) && one.id > oldest) fresh.push(one);
  }
  const kept = items.filter(Boolean);
  return { ...known, items: fresh.length ? [...kept, ...fresh].sort((one, other) => (one.id < other.id ? 1 : -1)) : kept };
}
