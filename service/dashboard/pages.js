// The pages: which addresses each answers to, its code, and its place in the navigation. `service/api/pages.py` lists
// the same addresses, since a page can be opened directly.

/**
 * @typedef {Object} Page
 * @property {RegExp} pattern of the path; named groups become the page's `params`
 * @property {() => Promise<{default: Function}>} load
 * @property {{label: string, icon: string, href: string}} [nav]
 */

/** @type {Page[]} */
export const PAGES = [
  {
    pattern: /^\/(?:jobs)?$/,
    load: () => import("./pages/jobs.js"),
    nav: { label: "Jobs", icon: "list", href: "/" },
  },
  { pattern: /^\/jobs\/(?<id>job_[0-9a-f]+)$/, load: () => import("./pages/job.js") },
  {
    pattern: /^\/new$/,
    load: () => import("./pages/new-job.js"),
    nav: { label: "New job", icon: "plus", href: "/new" },
  },
  {
    pattern: /^\/checkpoint$/,
    load: () => import("./pages/checkpoint.js"),
    nav: { label: "Checkpoint", icon: "cube", href: "/checkpoint" },
  },
  {
    pattern: /^\/batches$/,
    load: () => import("./pages/batches.js"),
    nav: { label: "Batches", icon: "grid", href: "/batches" },
  },
  { pattern: /^\/batches\/new$/, load: () => import("./pages/new-batch.js") },
  { pattern: /^\/batches\/(?<id>batch_[0-9a-f]+)$/, load: () => import("./pages/batch.js") },
  {
    pattern: /^\/watches$/,
    load: () => import("./pages/watches.js"),
    nav: { label: "Watches", icon: "eye", href: "/watches" },
  },
  {
    pattern: /^\/workers$/,
    load: () => import("./pages/workers.js"),
    nav: { label: "Workers", icon: "workers", href: "/workers" },
  },
  {
    pattern: /^\/settings$/,
    load: () => import("./pages/settings.js"),
    nav: { label: "Settings", icon: "settings", href: "/settings" },
  },
];

/**
 * The page of a path, with what the path says.
 * @param {string} path
 */
export function pageOf(path) {
  for (const page of PAGES) {
    const match = page.pattern.exec(path);
    if (match) return { page, params: { ...match.groups } };
  }
  return null;
}
