// What the page of a job knows: the job, its events with the history of progress, its output files and its tensors.

import { useEffect, useMemo, useRef, useState } from "../../vendor/htm-preact-standalone.mjs";
import { call, pagesOf } from "../../api.js";
import { useAgain, usePolled, useWithoutStream } from "../../components/polled.js";
import { newest, onJob, pause } from "../../live.js";
import { isTerminal } from "../../states.js";
import { useTurns } from "../../turns.js";
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
  useEffect(() => onJob((job) => { if (job.id === id) setState({ job, problem: null }); }), [id]);
  // The list that stands in for a stream has the newest jobs only.
  useAgain(load, useWithoutStream(POLL_MS));
  return { ...state, reload: load };
}

/**
 * Everything that happened to the job so far; asked for again, from the last one on, when the job changes.
 * @param {import("../../types.js").Job | null} job
 * @returns {{seq: number, at: string, type: string, data: any}[] | null}
 */
export function useEvents(job) {
  const [events, setEvents] = useState(null);
  const after = useRef(0);
  useTurns(job?.id, `${job?.updated_at} ${job?.state}`, async (stop) => {
    for (let full = true; full; ) {
      const page = await call(`/v1/jobs/${job.id}/events?after=${after.current}`, { signal: stop });
      after.current = page.next_after;
      full = page.items.length === EVENT_PAGE;
      setEvents((before) => [...(before ?? []), ...page.items]);
    }
    await pause(EVENTS_WAIT_MS, stop);
  });
  return events;
}

/**
 * The output files; none before there is a plan.
 * @param {import("../../types.js").Job | null} job
 * @returns {import("../../types.js").Shard[] | null}
 */
export function useShards(job) {
  const [shards, setShards] = useState(null);
  const version = job ? `${job.state} ${job.progress?.files_done} ${job.state_times.running}` : "";
  useTurns(job?.id, version, async (stop) => {
    const found = [];
    for await (const items of pagesOf(`/v1/jobs/${job.id}/shards`, { signal: stop })) found.push(...items);
    setShards(found);
    // A large job finishes files all the time.
    await pause(SHARDS_WAIT_MS, stop);
  });
  return shards;
}

/** What tells one plan of a job from the next: a retry makes another, which is there when the job runs. */
const planOf = (job, shards) => (job && shards?.length ? `${job.id} ${job.state_times.running ?? ""} ${shards.length}` : "");

/**
 * The tensors of the plan, in columns; null until they are there.
 * @param {import("../../types.js").Job | null} job
 * @param {import("../../types.js").Shard[] | null} shards
 */
export function useTensors(job, shards) {
  const [known, setKnown] = useState({ plan: "", table: null });
  const plan = planOf(job, shards);
  const read = useRef("");
  useTurns(plan, "", async (stop) => {
    if (read.current === plan) return;
    const building = tensorTable(shards);
    for await (const items of pagesOf(`/v1/jobs/${job.id}/tensors`, { signal: stop, limit: TENSOR_PAGE })) {
      building.add(items);
      await new Promise((resolve) => setTimeout(resolve));
    }
    read.current = plan;
    setKnown({ plan, table: building.finish() });
  });
  return known.plan === plan ? known.table : null;
}

/** The plan, once there is one. */
export function usePlan(job, shards) {
  const plan = planOf(job, shards);
  return usePolled(plan && `/v1/jobs/${job.id}/plan`, 0, plan).data?.plan ?? null;
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
