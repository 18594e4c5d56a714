// The list of jobs that fit a filter, kept new by the stream.

import { query } from "../api.js";
import { useListed } from "../components/listed.js";
import { newest, onJob } from "../live.js";
import { GROUPS } from "../states.js";

const PAGE = 100;

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

const pathOf = (filter) => {
  const { search, labels: label, batch: batch_id, watch: watch_id } = filter;
  return `/v1/jobs${query({ state: statesOf(filter), search, label, batch_id, watch_id })}`;
};

/**
 * @param {Filter} filter
 * @returns {ReturnType<typeof useListed<import("../types.js").Job>>}
 */
export const useJobs = (filter) => useListed(pathOf(filter), { page: PAGE, newest, listen: onJob, fits: (job) => fits(job, filter) });
