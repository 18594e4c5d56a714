// What the states of a job look like: a shape, a word and a tone, so that colour is never all that tells them apart.

/** @type {Record<string, {word: string, icon: string, tone: string}>} */
const STATES = {
  queued: { word: "Queued", icon: "clock", tone: "quiet" },
  planning: { word: "Planning", icon: "plan", tone: "busy" },
  running: { word: "Running", icon: "spin", tone: "busy" },
  verifying: { word: "Verifying", icon: "shield", tone: "busy" },
  cancelling: { word: "Cancelling", icon: "stop", tone: "warn" },
  succeeded: { word: "Succeeded", icon: "check", tone: "good" },
  failed: { word: "Failed", icon: "cross", tone: "bad" },
  cancelled: { word: "Cancelled", icon: "slash", tone: "quiet" },
  skipped: { word: "Already there", icon: "check", tone: "good" },
  refused: { word: "Refused", icon: "warn", tone: "warn" },
  completed: { word: "Completed", icon: "check", tone: "good" },
  active: { word: "Active", icon: "eye", tone: "busy" },
  paused: { word: "Paused", icon: "pause", tone: "quiet" },
  waiting: { word: "Waiting", icon: "clock", tone: "quiet" },
  submitted: { word: "Submitted", icon: "arrow", tone: "busy" },
  pending: { word: "Pending", icon: "clock", tone: "quiet" },
  delivered: { word: "Delivered", icon: "check", tone: "good" },
  disabled: { word: "Disabled", icon: "slash", tone: "bad" },
};

/** How a state is shown; one that came after this page was written is shown by its name. @param {string} state */
export const looks = (state) => STATES[state] ?? { word: state, icon: "dot", tone: "quiet" };

const TERMINAL = new Set(["succeeded", "failed", "cancelled"]);

/** @param {string} state */
export const isTerminal = (state) => TERMINAL.has(state);

/** Groups of states that the list of jobs can be narrowed to. */
export const GROUPS = [
  { name: "", label: "All", states: [] },
  { name: "active", label: "Active", states: ["planning", "running", "verifying", "cancelling"] },
  { name: "queued", label: "Queued", states: ["queued"] },
  { name: "succeeded", label: "Succeeded", states: ["succeeded"] },
  { name: "failed", label: "Failed", states: ["failed"] },
  { name: "cancelled", label: "Cancelled", states: ["cancelled"] },
];

/** Seconds that a job has worked, or worked, in this attempt; null before. @param {import("./types.js").Job} job */
export function secondsOf(job, now) {
  const began = job.state_times.planning ?? job.state_times.running;
  if (!began) return null;
  const ended = isTerminal(job.state) ? Date.parse(job.state_times[job.state]) : now;
  return Math.max(0, (ended - Date.parse(began)) / 1000);
}
