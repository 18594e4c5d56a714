// Data that no stream tells: asked again while somebody looks at the page.

import { useCallback, useEffect, useRef, useState } from "../vendor/htm-preact-standalone.mjs";
import { call } from "../api.js";
import { onGap } from "../live.js";

/**
 * @param {string | null} path nothing is asked for null
 * @param {number} everyMs 0: only once, and when changes may have been missed
 * @returns {{data: any, problem: Error | null, reload: () => Promise<void>}}
 */
export function usePolled(path, everyMs = 0) {
  const [state, setState] = useState({ path: null, data: null, problem: null });
  const asked = useRef(0);
  const load = useCallback(async () => {
    if (!path) return;
    const number = ++asked.current;
    try {
      const data = await call(path);
      if (number === asked.current) setState({ path, data, problem: null });
    } catch (problem) {
      // What was there stays: the page says that the service is away.
      if (number === asked.current) setState((before) => ({ path, data: before.path === path ? before.data : null, problem }));
    }
  }, [path]);
  useEffect(() => {
    load();
    const timer = everyMs ? setInterval(() => { if (!document.hidden) load(); }, everyMs) : 0;
    const seen = () => { if (!document.hidden) load(); };
    document.addEventListener("visibilitychange", seen);
    const stop = onGap(load);
    return () => { asked.current += 1; clearInterval(timer); document.removeEventListener("visibilitychange", seen); stop(); };
  }, [load, everyMs]);
  const current = state.path === path ? state : { data: null, problem: null };
  return { data: current.data, problem: current.data ? null : current.problem, reload: load };
}
