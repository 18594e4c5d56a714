// A batch with all its items, as they change.

import { useEffect, useRef, useState } from "../../vendor/htm-preact-standalone.mjs";
import { call, pagesOf } from "../../api.js";
import { onBatch, onGap, onJob } from "../../live.js";

const APPLY_MS = 150;

/** What is shown of an item: skipped is what was there already. */
export const stateOf = (item) => (item.state === "succeeded" && item.already_there ? "skipped" : (item.state ?? "forgotten"));

/** @param {string} id */
export function useBatch(id) {
  const [batch, setBatch] = useState(null);
  const [problem, setProblem] = useState(null);
  const load = () => call(`/v1/batches/${id}`).then((told) => { setBatch(told); setProblem(null); }, (fault) => setBatch((known) => { if (!known) setProblem(fault); return known; }));
  useEffect(() => {
    load();
    const stopBatches = onBatch((told) => { if (told.id === id) setBatch(told); });
    const stopGaps = onGap(load);
    return () => { stopBatches(); stopGaps(); };
  }, [id]);
  return { batch, problem, setBatch, reload: load };
}

/** The items in the order of the batch; null before the first page. @param {string | undefined} id */
export function useItems(id) {
  const [items, setItems] = useState(null);
  const waiting = useRef(new Map());
  useEffect(() => {
    if (!id) return undefined;
    const stop = new AbortController();
    let timer = 0;
    let again = 0;
    const load = async () => {
      const round = ++again;
      const found = [];
      try {
        for await (const page of pagesOf(`/v1/batches/${id}/items`, { signal: stop.signal })) {
          if (round !== again) return;
          found.push(...page);
          if (found.length <= 200) setItems((known) => (known && known.length > found.length ? known : found.slice()));
        }
        setItems(found);
      } catch { /* the page tells that the service is away, and asks again when it is back */ }
    };
    const apply = () => {
      timer = 0;
      const changed = waiting.current;
      waiting.current = new Map();
      setItems((known) => known?.map((item) => {
        const job = changed.get(item.job_id);
        return job ? { ...item, state: job.state, error: job.error, already_there: job.result?.already_there ?? item.already_there } : item;
      }) ?? null);
    };
    load();
    const stopJobs = onJob((job) => {
      if (job.batch_id !== id) return;
      waiting.current.set(job.id, job);
      timer ||= setTimeout(apply, APPLY_MS);
    });
    const stopGaps = onGap(load);
    return () => { stop.abort(); clearTimeout(timer); stopJobs(); stopGaps(); };
  }, [id]);
  return items;
}
