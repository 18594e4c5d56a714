// The address bar is the state of a view: which page, and in the query what is filtered, opened and looked at.

import { signal } from "./store.js";

/** @returns {{path: string, query: URLSearchParams}} */
const here = () => ({ path: location.pathname, query: new URLSearchParams(location.search) });

/** Where the viewer is. */
export const place = signal(here());

/**
 * Go to another address of these pages.
 * @param {string} url
 * @param {{replace?: boolean}} [how]
 */
export function go(url, { replace = false } = {}) {
  const before = location.pathname;
  history[replace ? "replaceState" : "pushState"](null, "", url);
  place.set(here());
  if (location.pathname !== before) scrollTo(0, 0);
}

/**
 * Change the query of the address; an empty value takes its name away.
 * @param {Record<string, string | string[] | null | undefined>} changes
 * @param {{push?: boolean}} [how]
 */
export function setQuery(changes, { push = false } = {}) {
  const query = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(changes)) {
    query.delete(name);
    for (const one of Array.isArray(value) ? value : [value]) if (one) query.append(name, one);
  }
  const text = query.toString();
  go(location.pathname + (text ? `?${text}` : ""), { replace: !push });
}

/**
 * Let links of these pages be followed without loading everything again.
 * @param {(path: string) => boolean} isOurs
 */
export function takeLinks(isOurs) {
  addEventListener("popstate", () => place.set(here()));
  document.addEventListener("click", (event) => {
    if (event.defaultPrevented || event.button !== 0 || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
    const link = event.target.closest?.("a[href]");
    if (!link || link.target || link.hasAttribute("download") || link.origin !== location.origin) return;
    if (link.hash && link.pathname === location.pathname) return;
    if (!isOurs(link.pathname)) return;
    event.preventDefault();
    go(link.pathname + link.search);
  });
}
