// What the page of a job knows: the job, its events with the history of progress, its output files and its tensors.

import { useEffect, useMemo, useRef, useState } from "../../vendor/htm-preact-standalone.mjs";
import { call, pagesOf } from "../../api.js";
import { connection, newest, onGap, onJob } from "../../live.js";
import { isTerminal } from "../../states.js";
import { tensorTable } from "./tensors.js";

const POLL_MS = 2000;
const EVENTS_WAIT_MS = 800;
const SHARDS_WAIT_MS = 600;
const EVENT_PAGE = 500;
const TENSOR_PAGE = 5000;

/**
 * The job, as it is.
 * @param {string} id
 * @returns {{job: import("../../types.js").Job | null, problem: Error | null, reload: () => void}}
 */
export function useJob(id) {
  const [state, setState] = useState({ job: null, problem: null });
  const load = useMemo(() => () => call(`/v1/jobs/${id}`).then(
    (job) => setState({ job: newest(job), problem: null }),
    (problem) => setState((known) => (known.job && problem.status !== 404 ? known : { job: null, problem })),
  ), [id]);
  useEffect(() => {
    load();
    const stopJobs = onJob((job) => { if (job.id === id) setState({ job, problem: null }); });
    const stopGaps = onGap(load);
    // The list that stands in for a stream has the newest jobs only.
    const timer = setInterval(() => { if (connection.value === "polling" && !document.hidden) load(); }, POLL_MS);
    return () => { stopJobs(); stopGaps(); clearInterval(timer); };
  }, [load]);
  return { ...state, reload: load };
}

/**
 * Everything that happened to the job so far; asked for again, from the last one on, when the job changes.
 * @param {import("../../types.js").Job | null} job
 * @returns {{seq: number, at: string, type: string, data: any}[] | null}
 */
export function useEvents(job) {
  const [events, setEvents] = useState(null);
  const known = useRef({ after: 0, busy: false, again: false, gone: false });
  const load = async () => {
    const now = known.current;
    if (now.busy) { now.again = true; return; }
    now.busy = true;
    try {
      for (let full = true; full && !now.gone; ) {
        const page = await call(`/v1/jobs/${job.id}/events?after=${now.after}`);
        now.after = page.next_after;
        full = page.items.length === EVENT_PAGE;
        setEvents((before) => [...(before ?? []), ...page.items]);
      }
      await new Promise((resolve) => setTimeout(resolve, EVENTS_WAIT_MS));
    } catch {
      // The next change of the job asks again.
    }
    now.busy = false;
    if (now.again && !now.gone) { now.again = false; load(); }
  };
  useEffect(() => { if (job) load(); }, [job?.updated_at, job?.state]);
  useEffect(() => () => { known.current.gone = true; }, []);
  return events;
}

/**
 * The output files; none before there is a plan.
 * @param {import("../../types.js").Job | null} job
 * @returns {import("../../types.js").Shard[] | null}
 */
export function useShards(job) {
  const [shards, setShards] = useState(null);
  const id = job?.id;
  const version = job ? `${job.state} ${job.progress?.files_done} ${job.state_times.running}` : "";
  const asked = useRef({ at: 0, number: 0 });
  const ask = async () => {
    const number = ++asked.current.number;
    asked.current.at = Date.now();
    const found = [];
    try {
      for await (const items of pagesOf(`/v1/jobs/${id}/shards`)) {
        found.push(...items);
        if (number !== asked.current.number) return;
      }
      setShards(found);
    } catch {
      // Asked again with the next change, or when the connection is back.
    }
  };
  // Not at once and not put off by the next change: a large job finishes files all the time.
  useEffect(() => {
    if (!id) return undefined;
    const timer = setTimeout(ask, Math.max(0, asked.current.at + SHARDS_WAIT_MS - Date.now()));
    return () => clearTimeout(timer);
  }, [id, version]);
  useEffect(() => () => { asked.current.number += 1; }, []);
  return shards;
}

/**
 * The tensors of the plan, in columns.
 * @param {import("../../types.js").Job | null} job
 * @param {import("../../types.js").Shard[] | null} shards
 */
export function useTensors(job, shards) {
  const [table, setTable] = useState(null);
  const plan = job && shards?.length ? `${job.id} ${job.state_times.planning ?? ""} ${shards.length}` : "";
  useEffect(() => {
    if (!plan) return undefined;
    const stop = new AbortController();
    (async () => {
      const building = tensorTable(shards);
      try {
        for await (const items of pagesOf(`/v1/jobs/${job.id}/tensors`, { signal: stop.signal, limit: TENSOR_PAGE })) {
          building.add(items);
          await new Promise((resolve) => setTimeout(resolve));
        }
        setTable(building.finish());
      } catch {
        setTable(null);
      }
    })();
    return () => stop.abort();
  }, [plan]);
  return table;
}

/** The plan, once there is one. */
export function usePlan(job, shards) {
  const [plan, setPlan] = useState(null);
  const version = job && shards?.length ? `${job.id} ${job.state_times.planning ?? ""}` : "";
  useEffect(() => {
    if (version) call(`/v1/jobs/${job.id}/plan`).then((told) => setPlan(told.plan), () => setPlan(null));
  }, [version]);
  return plan;
}

/**
 * The history of progress since the last plan: time in seconds, and bytes read, merged and written so far.
 * @param {import("../../types.js").Job} job
 * @param {{type: string, at: string, data: any}[] | null} events
 */
export function historyOf(job, events) {
  if (!events) return [];
  let points = [];
  for (const event of events) {
    const at = Date.parse(event.at) / 1000;
    if (event.type === "job.planned") points = [];
    if (event.type === "job.running" && !event.data.kept_files?.length) points.push({ at, read: 0, merged: 0, written: 0, workers: {} });
    if (event.type === "job.progress") points.push(pointOf(at, event.data));
  }
  const ended = job.state_times.verifying ?? (isTerminal(job.state) ? job.state_times[job.state] : null);
  const last = points[points.length - 1];
  const moved = last && job.progress && (job.progress.bytes_read ?? 0) + job.progress.bytes_done > last.read + last.written;
  if (ended && moved && Date.parse(ended) / 1000 > last.at) points.push(pointOf(Date.parse(ended) / 1000, job.progress));
  return points;
}

const pointOf = (at, progress) => ({
  at,
  read: progress.bytes_read ?? 0,
  merged: progress.bytes_merged ?? 0,
  written: progress.bytes_done,
  workers: progress.workers ?? {},
});
