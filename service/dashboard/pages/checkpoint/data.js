// What the page of a checkpoint asks the service for.

import { useEffect, useMemo, useRef, useState } from "../../vendor/htm-preact-standalone.mjs";
import { call } from "../../api.js";
import { treeOf } from "./tree.js";

const WAIT_MS = 120;
const KEPT = 60;

/** @param {URLSearchParams} query */
export function choiceOf(query) {
  const step = query.get("step");
  return {
    source: query.get("source") ?? "",
    options: { ...(query.get("format") ? { source_format: query.get("format") } : {}), ...(step ? { step: Number(step) } : {}) },
  };
}

/** A source with all its tensors. @param {{source: string, options: Record<string, unknown>}} choice */
export function useCheckpoint(choice) {
  const key = JSON.stringify(choice);
  const [round, again] = useState(0);
  const [state, setState] = useState({ key: "", answer: null, problem: null });
  useEffect(() => {
    if (!choice.source) return undefined;
    const stop = new AbortController();
    setState({ key: "", answer: null, problem: null });
    call("/v1/inspect", { body: { ...choice, table: true, partial: true }, signal: stop.signal }).then(
      (answer) => setState({ key, answer, problem: null }),
      (problem) => { if (problem.name !== "AbortError") setState({ key, answer: null, problem }); },
    );
    return () => stop.abort();
  }, [key, round]);
  const current = state.key === key ? state : { answer: null, problem: null };
  const tree = useMemo(() => (current.answer ? treeOf(current.answer.table) : null), [current.answer]);
  return { ...current, tree, busy: Boolean(choice.source) && !current.answer && !current.problem, reload: () => again((count) => count + 1) };
}

/** One tensor and where its pieces lie; what was asked for a moment ago is kept. */
export function useTensor(choice, version, name) {
  const kept = useRef(new Map());
  const [state, setState] = useState({ name: "", tensor: null, problem: null });
  useEffect(() => { kept.current.clear(); }, [version]);
  useEffect(() => {
    if (!name) return undefined;
    const known = kept.current.get(name);
    if (known) { setState({ name, tensor: known, problem: null }); return undefined; }
    const stop = new AbortController();
    const timer = setTimeout(async () => {
      try {
        const { tensor } = await call("/v1/inspect", { body: { ...choice, tensor: name, partial: true, version }, signal: stop.signal });
        if (kept.current.size > KEPT) kept.current.clear();
        kept.current.set(name, tensor);
        setState({ name, tensor, problem: null });
      } catch (problem) {
        if (problem.name !== "AbortError") setState({ name, tensor: null, problem });
      }
    }, WAIT_MS);
    return () => { clearTimeout(timer); stop.abort(); };
  }, [version, name]);
  return state.name === name ? state : { name, tensor: null, problem: null };
}
