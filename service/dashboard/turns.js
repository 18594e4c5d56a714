// Asking again and again without two answers overtaking each other.

import { useEffect, useRef } from "./vendor/htm-preact-standalone.mjs";
import { onGap } from "./live.js";

/**
 * `work` as it may be asked for at any time: one run at a time, and one more after it when it was asked for meanwhile.
 * What breaks is asked for again with the next change.
 * @param {() => Promise<unknown>} work
 */
export function inTurns(work) {
  let busy = false;
  let again = false;
  return async () => {
    again = true;
    if (busy) return;
    busy = true;
    while (again) {
      again = false;
      try {
        await work();
      } catch {
        // Said by the page that has nothing to show; the next change, or the connection's return, comes here again.
      }
    }
    busy = false;
  };
}

/**
 * Ask for something that belongs to `key` now, when `version` changes, and when changes may have been missed.
 * @param {string | undefined} key nothing is asked for without one
 * @param {string} version
 * @param {(stop: AbortSignal) => Promise<unknown>} work ends early when it is to stop: the key has changed, or the page
 */
export function useTurns(key, version, work) {
  const turn = useRef(() => {});
  useEffect(() => {
    if (!key) return undefined;
    const stop = new AbortController();
    turn.current = inTurns(async () => { if (!stop.signal.aborted) await work(stop.signal); });
    const stopGaps = onGap(turn.current);
    return () => { stop.abort(); stopGaps(); };
  }, [key]);
  useEffect(() => { if (key) turn.current(); }, [key, version]);
}
