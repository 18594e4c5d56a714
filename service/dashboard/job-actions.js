// What can be done to jobs: one at a time, or many.

import { call } from "./api.js";
import { attempt } from "./components/parts.js";
import { count } from "./format.js";
import { tellJob } from "./live.js";
import { notify } from "./store.js";

const AT_ONCE = 4;

/**
 * @param {import("./types.js").Job} job
 * @param {"cancel" | "retry"} action
 */
export const act = (job, action) => attempt(async () => tellJob(await call(job.links[action], { method: "POST" })));

/**
 * Do the same to many jobs, a few at a time, and say at the end how it went.
 * @param {import("./types.js").Job[]} jobs
 * @param {"cancel" | "retry"} action
 */
export async function actOnAll(jobs, action) {
  const left = jobs.filter((job) => job.links[action]);
  const inAll = left.length;
  const problems = [];
  const worker = async () => {
    for (let job = left.shift(); job; job = left.shift()) {
      try {
        tellJob(await call(job.links[action], { method: "POST" }));
      } catch (problem) {
        problems.push(problem);
      }
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, worker));
  const done = `${action === "cancel" ? "Cancelled" : "Queued again"}: ${count(inAll - problems.length, "job")}`;
  if (problems.length) notify("bad", `${done}; ${count(problems.length, "job")} could not be: ${problems[0].message}`, problems[0].hint);
  else notify("good", done);
}
