// A batch with all its items, as they change.

import { useEffect, useMemo, useRef, useState } from "../../vendor/htm-preact-standalone.mjs";
import { call, pagesOf } from "../../api.js";
import { useAgain, useWithoutStream } from "../../components/polled.js";
import { hearing, newestBatch, onBatch, onJob } from "../../live.js";
import { useTurns } from "../../turns.js";

const APPLY_MS = 150;
const POLL_MS = 3000;
const FIRST_PAGE = 200;

/** What is shown of an item: skipped is what was there already. */
export const stateOf = (item) => (item.state === "succeeded" && item.already_there ? "skipped" : (item.state ?? "forgotten"));

/** @param {string} id */
export function useBatch(id) {
  const [state, setState] = useState({ batch: null, problem: null });
  const load = useMemo(() => async () => {
    try {
      const [answer, heard] = await hearing(onBatch, () => call(`/v1/batches/${id}`));
      setState({ batch: newestBatch(heard.get(id) ?? answer), problem: null });
    } catch (problem) {
      setState((known) => (known.batch && problem.status !== 404 ? known : { batch: null, problem }));
    }
  }, [id]);
  useEffect(() => onBatch((batch) => { if (batch.id === id) setState({ batch, problem: null }); }), [id]);
  useAgain(load, useWithoutStream(POLL_MS));
  return { ...state, reload: load };
}

/** The items in the order of the batch; null before the first page. @param {string | undefined} id */
export function useItems(id) {
  const [items, setItems] = useState(null);
  const waiting = useRef(new Map());
  useTurns(id, "", async (stop) => {
    const found = [];
    const [, heard] = await hearing(onJob, async () => {
      for await (const page of pagesOf(`/v1/batches/${id}/items`, { signal: stop })) {
        found.push(...page);
        if (found.length <= FIRST_PAGE) setItems((known) => (known && known.length > found.length ? known : found.slice()));
      }
    });
    setItems(changed(found, heard));
  });
  useEffect(() => {
    let timer = 0;
    const apply = () => {
      timer = 0;
      const told = waiting.current;
      waiting.current = new Map();
      setItems((known) => known && changed(known, told));
    };
    const stop = onJob((job) => {
      if (job.batch_id !== id) return;
      waiting.current.set(job.id, job);
      timer ||= setTimeout(apply, APPLY_MS);
    });
    return () => { clearTimeout(timer); stop(); };
  }, [id]);
  return items;
}

/** The items with what was told of their jobs. */
const changed = (items, jobs) => items.map((item) => {
  const job = jobs.get(item.job_id);
  return job ? { ...item, state: job.state, error: job.error, already_there: job.result?.already_there ?? item.already_there } : item;
});
