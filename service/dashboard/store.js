// State that several components share: a value, and who wants to know when it changes.

import { useLayoutEffect, useState } from "./vendor/htm-preact-standalone.mjs";

/**
 * @template T
 * @typedef {{value: T, set: (next: T) => void, watch: (listener: (value: T) => void) => () => void}} Signal
 */

/**
 * A value to watch. Setting what it is already tells nobody.
 * @template T
 * @param {T} initial
 * @returns {Signal<T>}
 */
export function signal(initial) {
  const listeners = new Set();
  return {
    value: initial,
    set(next) {
      if (Object.is(next, this.value)) return;
      this.value = next;
      for (const listener of [...listeners]) listener(next);
    },
    watch(listener) {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
  };
}

/**
 * The value of a signal, in a component that is drawn again when it changes.
 * @template T
 * @param {Signal<T>} source
 * @returns {T}
 */
export function useSignal(source) {
  const [, again] = useState(0);
  useLayoutEffect(() => {
    const known = source.value;
    const stop = source.watch(() => again((count) => count + 1));
    if (!Object.is(known, source.value)) again((count) => count + 1);
    return stop;
  }, [source]);
  return source.value;
}

/** A text that screen readers are told; for changes of state only. */
export const announcement = signal("");

/** What went wrong or was done a moment ago: {id, tone, text, hint}. */
export const notices = signal([]);

let noticeNumber = 0;

/**
 * Show a notice for a while; one of a failure stays until it is closed.
 * @param {"good" | "bad"} tone
 * @param {string} text
 * @param {string} [hint]
 */
export function notify(tone, text, hint = "") {
  const id = ++noticeNumber;
  notices.set([...notices.value.slice(-3), { id, tone, text, hint }]);
  if (tone === "good") setTimeout(() => dismiss(id), 5000);
}

/** @param {number} id */
export function dismiss(id) {
  notices.set(notices.value.filter((notice) => notice.id !== id));
}
