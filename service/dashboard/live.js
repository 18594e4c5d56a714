// The one stream of a page: every job's newest snapshot, as it changes. Where there is no stream, the list is polled.
//
// Two things reach a page: `onJob` with a job that changed, and `onGap` when changes may have been missed (connected,
// connected again, came back from the background), upon which it asks for what it shows.

import { call, session, streamOf, tokenWanted } from "./api.js";
import { signal } from "./store.js";

const PATH = "/v1/events";
const POLL_MS = 2000;
const RETRY_MS = [500, 1000, 2000, 5000];
/** A stream that ends sooner was none: the next try comes later, since upon each the page asks for all it shows. */
const LASTED_MS = 5000;
const POLLED_JOBS = 100;
const MOST_SEEN = 2000;

/** "connecting", "live" (stream), "polling", "offline", "unknown" before the sign-in, or "refused" where a token may not follow jobs. */
export const connection = signal("connecting");

const jobListeners = new Set();
const batchListeners = new Set();
const gapListeners = new Set();
let stopped = null;
let lastId = "";
let failures = 0;

/** @param {(job: import("./types.js").Job) => void} listener */
export function onJob(listener) {
  jobListeners.add(listener);
  return () => jobListeners.delete(listener);
}

/** @param {(batch: {id: string, state: string, counts: Record<string, number>}) => void} listener */
export function onBatch(listener) {
  batchListeners.add(listener);
  return () => batchListeners.delete(listener);
}

/** Tell the page what is said of a batch. */
export function tellBatch(told) {
  const batch = newestBatch(told);
  for (const listener of [...batchListeners]) listener(batch);
}

/** @param {() => void} listener */
export function onGap(listener) {
  gapListeners.add(listener);
  return () => gapListeners.delete(listener);
}

/** The newest that is known of each of many things: an answer and the stream may overtake each other. */
function newestOf() {
  const seen = new Map();
  session.watch(() => seen.clear());
  return (one) => {
    const known = seen.get(one.id);
    if (known && Date.parse(known.updated_at) > Date.parse(one.updated_at)) return known;
    if (seen.size > MOST_SEEN) seen.clear();
    seen.set(one.id, one);
    return one;
  };
}

/** @type {(job: import("./types.js").Job) => import("./types.js").Job} */
export const newest = newestOf();
export const newestBatch = newestOf();

/**
 * Ask for something, and hear what is told meanwhile: the answer may be older than that.
 * @template A, T
 * @param {(listener: (one: T) => void) => () => void} listen `onJob` or `onBatch`
 * @param {() => Promise<A>} ask
 * @returns {Promise<[A, Map<string, T>]>} the answer, and what was told since the question, by id
 */
export async function hearing(listen, ask) {
  const heard = new Map();
  const stop = listen((one) => heard.set(one.id, one));
  try {
    return [await ask(), heard];
  } finally {
    stop();
  }
}

/** Tell the page what an answer of the service says of a job, without waiting for the stream to say it. */
export function tellJob(told) {
  const job = newest(told);
  for (const listener of [...jobListeners]) listener(job);
}

/** Let the page ask again for what it shows. */
export function tellGap() {
  for (const listener of [...gapListeners]) listener();
}

/** Begin, and keep going for as long as the page is there. */
export function follow() {
  restart();
  session.watch(restart);
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && connection.value !== "live") restart();
  });
  addEventListener("online", restart);
}

function restart() {
  stopped?.abort();
  stopped = new AbortController();
  failures = 0;
  run(stopped.signal);
}

async function run(stop) {
  while (!stop.aborted) {
    const began = Date.now();
    let waitMs = 0;
    try {
      await readStream(stop);
    } catch (error) {
      if (stop.aborted) return;
      if ([404, 405].includes(error.status) || error.name === "too-many-streams") return poll(stop);
      if (error.status === 401) return connection.set("unknown");
      if (error.status === 403) return connection.set("refused");
      waitMs = 1000 * (error.document?.retry_after_s ?? 0);
    }
    if (stop.aborted) return;
    failures = Date.now() - began > LASTED_MS ? 0 : failures + 1;
    if (failures > 0) connection.set("offline");
    await pause(Math.max(waitMs, RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]), stop);
  }
}

async function readStream(stop) {
  for await (const event of streamOf(PATH, { lastId, signal: stop })) {
    if (stop.aborted) return;
    if (event.id) lastId = event.id;
    if (event.type === "open") {
      connection.set("live");
      tellGap();
    } else {
      take(event.data);
    }
  }
}

function take(data) {
  const told = JSON.parse(data);
  if (told.id?.startsWith("batch_")) return tellBatch(told);
  const job = told.job ?? told;
  if (job.id && job.state && job.source) tellJob(job);
}

async function poll(stop) {
  const known = new Map();
  while (!stop.aborted) {
    try {
      if (!document.hidden) {
        const { items } = await call(`/v1/jobs?limit=${POLLED_JOBS}`, { signal: stop });
        for (const job of items) if (known.get(job.id) !== job.updated_at) tellJob(job);
        known.clear();
        for (const job of items) known.set(job.id, job.updated_at);
        if (connection.value !== "polling") tellGap();
        connection.set("polling");
      }
    } catch (error) {
      if (stop.aborted) return;
      connection.set("offline");
      if (tokenWanted.value) return;
    }
    await pause(POLL_MS, stop);
  }
}

/** @param {number} ms @param {AbortSignal} stop ends it early */
export function pause(ms, stop) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    stop.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
  });
}
