// The list of jobs that fit a filter, kept new by the stream.

import { useEffect, useMemo, useRef, useState } from "../vendor/htm-preact-standalone.mjs";
import { call, query } from "../api.js";
import { newest, onGap, onJob } from "../live.js";
import { GROUPS } from "../states.js";

const PAGE = 100;
const MOST_AGAIN = 200;

/**
 * @typedef {Object} Filter
 * @property {string} group of states, one of GROUPS
 * @property {string} search
 * @property {string[]} labels NAME:VALUE
 * @property {string} batch the id of one
 * @property {string} watch the id of one
 */

/** The filter in an address. @param {URLSearchParams} asked @returns {Filter} */
export const filterOf = (asked) => ({
  group: asked.get("show") ?? "",
  search: asked.get("search") ?? "",
  labels: asked.getAll("label"),
  batch: asked.get("batch") ?? "",
  watch: asked.get("watch") ?? "",
});

/** Whether it is that of all jobs. @param {Filter} filter */
export const isOpen = (filter) => !filter.group && !filter.search && !filter.labels.length && !filter.batch && !filter.watch;

const statesOf = (filter) => GROUPS.find((group) => group.name === filter.group)?.states ?? [];

/** Whether a job fits; the same rules as the service's. @param {import("../types.js").Job} job @param {Filter} filter */
export function fits(job, filter) {
  const states = statesOf(filter);
  if (states.length && !states.includes(job.state)) return false;
  if (filter.batch && job.batch_id !== filter.batch) return false;
  if (filter.watch && job.watch_id !== filter.watch) return false;
  const wanted = filter.search.toLowerCase();
  if (wanted && ![job.id, job.source, job.destination].some((text) => text.toLowerCase().includes(wanted))) return false;
  return filter.labels.every((label) => {
    const colon = label.indexOf(":");
    return job.labels[label.slice(0, colon)] === label.slice(colon + 1);
  });
}

const pathOf = (filter, limit, cursor) => {
  const { search, labels: label, batch: batch_id, watch: watch_id } = filter;
  return `/v1/jobs${query({ state: statesOf(filter), search, label, batch_id, watch_id, limit, cursor })}`;
};

/**
 * @param {Filter} filter
 * @returns {{jobs: import("../types.js").Job[] | null, problem: Error | null, hasMore: boolean, more: () => Promise<void>, reload: () => void}}
 */
export function useJobs(filter) {
  const spelled = JSON.stringify(filter);
  const [state, setState] = useState({ spelled, jobs: null, cursor: null, problem: null });
  const waiting = useRef(new Map());
  const load = useMemo(() => loader(filter, spelled, setState), [spelled]);
  useEffect(() => {
    load();
    let frame = 0;
    const apply = () => {
      frame = 0;
      const changed = waiting.current;
      waiting.current = new Map();
      setState((known) => merged(known, changed, filter));
    };
    const stopJobs = onJob((job) => {
      waiting.current.set(job.id, job);
      if (!frame) frame = setTimeout(apply, 100);
    });
    const stopGaps = onGap(load);
    return () => { stopJobs(); stopGaps(); clearTimeout(frame); waiting.current.clear(); };
  }, [load]);
  const more = async () => {
    const page = await call(pathOf(filter, PAGE, state.cursor));
    setState((known) => ({ ...known, jobs: [...known.jobs, ...page.items], cursor: page.next_cursor }));
  };
  const current = state.spelled === spelled;
  return { jobs: current ? state.jobs : null, problem: current ? state.problem : null, hasMore: Boolean(state.cursor), more, reload: load };
}

/** Asks for the list from its start, as far as it was known. */
function loader(filter, spelled, setState) {
  let known = PAGE;
  let asked = 0;
  return async () => {
    const number = ++asked;
    try {
      const page = await call(pathOf(filter, Math.min(known, MOST_AGAIN)));
      if (number !== asked) return;
      page.items = page.items.map(newest);
      setState((before) => {
        const older = before.spelled === spelled && before.jobs ? before.jobs.filter((job) => job.id < lastId(page.items)) : [];
        const jobs = page.next_cursor ? [...page.items, ...older] : page.items;
        known = Math.max(PAGE, jobs.length);
        return { spelled, jobs, cursor: older.length ? before.cursor : page.next_cursor, problem: null };
      });
    } catch (problem) {
      if (number === asked) setState((before) => (before.jobs && before.spelled === spelled ? before : { spelled, jobs: null, cursor: null, problem }));
    }
  };
}

const lastId = (jobs) => jobs[jobs.length - 1]?.id ?? "";

/** The list with what changed; ids grow with time, so their order is that of the list. */
function merged(known, changed, filter) {
  if (!known.jobs || !changed.size) return known;
  const places = new Map(known.jobs.map((job, place) => [job.id, place]));
  const oldest = known.cursor ? lastId(known.jobs) : "";
  const jobs = known.jobs.slice();
  let fresh = [];
  for (const job of changed.values()) {
    const place = places.get(job.id);
    if (place !== undefined) jobs[place] = fits(job, filter) ? job : null;
    else if (fits(job, filter) && job.id > oldest) fresh.push(job);
  }
  fresh = fresh.sort((one, other) => (one.id < other.id ? 1 : -1));
  const kept = jobs.filter(Boolean);
  const all = fresh.length ? [...kept, ...fresh].sort((one, other) => (one.id < other.id ? 1 : -1)) : kept;
  return { ...known, jobs: all };
}
