// The address bar is the state of a view: which page, and in the query what is filtered, opened and looked at.

import { useEffect, useMemo, useRef, useState } from "./vendor/htm-preact-standalone.mjs";
import { signal } from "./store.js";

const TYPING_MS = 250;
const SCROLL_MS = 2000;

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
  const same = new URL(url, location.href).href === location.href;
  if (!replace && !same) history.replaceState({ y: scrollY }, "");
  history[replace || same ? "replaceState" : "pushState"](null, "", url);
  place.set(here());
  if (location.pathname !== before) scrollTo(0, 0);
}

/**
 * `go` and `setQuery` for what is done later, such as after an answer: nothing happens once the component is gone, so
 * that nobody who went elsewhere meanwhile is led away from there.
 * @returns {{go: typeof go, setQuery: typeof setQuery}}
 */
export function usePlace() {
  const here_ = useRef(true);
  useEffect(() => () => { here_.current = false; }, []);
  const whileHere = (move) => (...how) => { if (here_.current) move(...how); };
  return useMemo(() => ({ go: whileHere(go), setQuery: whileHere(setQuery) }), []);
}

/**
 * Values of a form that its address keeps: what is typed goes there after a pause, and what the address says otherwise,
 * after a link or the browser's way back, comes into the form.
 * @template V
 * @param {URLSearchParams} query
 * @param {(query: URLSearchParams) => V} read
 * @param {(values: V) => Record<string, string | string[] | null>} spell
 * @returns {[V, (change: Partial<V>) => void]}
 */
export function useAddressed(query, read, spell) {
  const [values, setValues] = useState(() => read(query));
  const asked = JSON.stringify(spell(read(query)));
  const known = useRef(asked);
  const { setQuery: write } = usePlace();
  const text = JSON.stringify(spell(values));
  useEffect(() => {
    if (text === known.current) return undefined;
    const timer = setTimeout(() => { known.current = text; write(JSON.parse(text)); }, TYPING_MS);
    return () => clearTimeout(timer);
  }, [text]);
  useEffect(() => {
    if (asked === known.current) return;
    known.current = asked;
    setValues((before) => ({ ...before, ...read(query) }));
  }, [asked]);
  return [values, (change) => setValues((before) => ({ ...before, ...change }))];
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

/** Go to where a page was left, once there is as much of it again. @param {number} y */
function scrollBack(y) {
  let until = performance.now() + SCROLL_MS;
  addEventListener("wheel", () => { until = 0; }, { once: true, passive: true });
  const look = () => {
    const room = document.documentElement.scrollHeight - innerHeight;
    scrollTo(0, Math.min(y, room));
    if (room < y && performance.now() < until) requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
}

/**
 * Let links of these pages be followed without loading everything again.
 * @param {(path: string) => boolean} isOurs
 */
export function takeLinks(isOurs) {
  addEventListener("popstate", ({ state }) => {
    place.set(here());
    scrollBack(state?.y ?? 0);
  });
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
