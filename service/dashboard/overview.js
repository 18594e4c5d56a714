// How many jobs are in which state, asked again when one changes its state.

import { call, session } from "./api.js";
import { onGap, onJob } from "./live.js";
import { announcement, signal } from "./store.js";
import { looks } from "./states.js";
import { baseName } from "./format.js";

const WAIT_MS = 400;

/** What `GET /v1/overview` said last: {version, jobs: {state: number}, demo}; null before. */
export const overview = signal(null);

/** How many jobs there are. */
export const jobsInAll = (told) => Object.values(told.jobs).reduce((sum, value) => sum + value, 0);

const states = new Map();
let timer = 0;

function ask() {
  timer = 0;
  call("/v1/overview").then((told) => overview.set(told), () => {});
}

function soon() {
  if (!timer) timer = setTimeout(ask, WAIT_MS);
}

/** Begin to keep `overview` new, and to say changes of state aloud. */
export function keepOverview() {
  onGap(soon);
  session.watch(soon);
  onJob((job) => {
    const before = states.get(job.id);
    if (before === job.state) return;
    states.set(job.id, job.state);
    soon();
    if (before !== undefined) announcement.set(`${baseName(job.destination)}: ${looks(job.state).word}`);
  });
  ask();
}
