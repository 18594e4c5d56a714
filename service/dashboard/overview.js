// How many jobs are in which state, asked again when one changes its state.

import { call, session } from "./api.js";
import { onGap, onJob } from "./live.js";
import { announcement, signal } from "./store.js";
import { looks } from "./states.js";
import { baseName, count, number } from "./format.js";
import { inTurns } from "./turns.js";

const WAIT_MS = 400;
/** Between two announcements: a batch changes more often than anybody can listen. */
const SAY_MS = 1000;
const MOST_NAMED = 3;
const MOST_KNOWN = 5000;

/** What `GET /v1/overview` said last: {version, jobs: {state: number}, demo}; null before. */
export const overview = signal(null);

/** How many jobs there are. */
export const jobsInAll = (told) => Object.values(told.jobs).reduce((sum, value) => sum + value, 0);

const states = new Map();
const changed = new Map();
const ask = inTurns(async () => overview.set(await call("/v1/overview")));
let timer = 0;
let saying = 0;

function soon() {
  timer ||= setTimeout(() => { timer = 0; ask(); }, WAIT_MS);
}

/** Say which jobs changed their state, or how many when there are more than one can listen to. */
function say() {
  saying = 0;
  const told = [...changed.values()];
  changed.clear();
  if (told.length <= MOST_NAMED) announcement.set(told.map((job) => `${baseName(job.destination)}: ${looks(job.state).word}`).join(", "));
  else announcement.set(`${count(told.length, "job")} changed: ${[...Map.groupBy(told, (job) => job.state)].map(([state, jobs]) => `${number(jobs.length)} ${looks(state).word.toLowerCase()}`).join(", ")}`);
}

/** Begin to keep `overview` new, and to say changes of state aloud. */
export function keepOverview() {
  onGap(soon);
  session.watch(soon);
  onJob((job) => {
    const before = states.get(job.id);
    if (before === job.state) return;
    if (states.size > MOST_KNOWN) states.clear();
    states.set(job.id, job.state);
    soon();
    if (before === undefined) return;
    changed.set(job.id, job);
    saying ||= setTimeout(say, SAY_MS);
  });
  ask();
}
