// Data that no stream tells: asked again while somebody looks at the page.

import { useCallback, useEffect, useRef, useState } from "../vendor/htm-preact-standalone.mjs";
import { call } from "../api.js";
import { connection, onGap } from "../live.js";
import { useSignal } from "../store.js";

/**
 * Ask now, when changes may have been missed, when the page is looked at again, and every so often.
 * @param {() => Promise<void>} load
 * @param {number} everyMs 0: not by the clock
 */
export function useAgain(load, everyMs) {
  useEffect(() => {
    let underWay = false;
    // Not again before the answer: one that takes longer than the pause would never be the last that was asked for.
    const turn = async () => {
      if (underWay || document.hidden) return;
      underWay = true;
      await load();
      underWay = false;
    };
    load();
    const timer = everyMs ? setInterval(turn, everyMs) : 0;
    document.addEventListener("visibilitychange", turn);
    const stop = onGap(load);
    return () => { clearInterval(timer); document.removeEventListener("visibilitychange", turn); stop(); };
  }, [load, everyMs]);
}

/** How often to ask for what only the stream tells: 0 while there is one. @param {number} everyMs */
export const useWithoutStream = (everyMs) => (useSignal(connection) === "polling" ? everyMs : 0);

/**
 * @param {string | null} path nothing is asked for null
 * @param {number} everyMs 0: only once, and when changes may have been missed
 * @param {unknown} version when it changes, it is asked for again; what is there stays until then
 * @returns {{data: any, problem: Error | null, reload: () => Promise<void>}}
 */
export function usePolled(path, everyMs = 0, version = "") {
  const [state, setState] = useState({ path: null, data: null, problem: null });
  const asked = useRef(0);
  const shown = useRef(0);
  const load = useCallback(async () => {
    if (!path) return;
    const number = ++asked.current;
    const [data, problem] = await call(path).then((told) => [told, null], (fault) => [null, fault]);
    if (number < shown.current) return; // a later question was answered before
    shown.current = number;
    // What was there stays: the page says that the service is away.
    setState((before) => ({ path, data: data ?? (before.path === path ? before.data : null), problem }));
  }, [path, version]);
  useAgain(load, everyMs);
  useEffect(() => () => { shown.current = asked.current + 1; }, [load]);
  const current = state.path === path ? state : { data: null, problem: null };
  return { data: current.data, problem: current.data ? null : current.problem, reload: load };
}
