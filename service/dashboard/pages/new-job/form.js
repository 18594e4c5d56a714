// What a form for a new job holds, and what the service says of it: the address of the page keeps the first.

import { useEffect, useMemo, useState } from "../../vendor/htm-preact-standalone.mjs";
import { call } from "../../api.js";
import { go, setQuery } from "../../router.js";
import { baseName, parentOf } from "../../format.js";
import { tellJob } from "../../live.js";
import { notify } from "../../store.js";

/** @param {URLSearchParams} query */
function optionsIn(query) {
  try {
    const options = JSON.parse(query.get("options") ?? "{}");
    return typeof options === "object" && options !== null && !Array.isArray(options) ? options : {};
  } catch {
    return {};
  }
}

/** The values in an address. @param {URLSearchParams} query */
export const valuesOf = (query) => ({
  source: query.get("source") ?? "",
  destination: query.get("destination") ?? "",
  options: optionsIn(query),
  labels: Object.fromEntries(query.getAll("label").filter((label) => label.includes(":")).map((label) => [label.slice(0, label.indexOf(":")), label.slice(label.indexOf(":") + 1)])),
});

/** A folder beside the source, if nothing else was said. @param {string} source */
export const proposed = (source) => (source ? `${parentOf(source)}${baseName(source)}-hf` : "");

/** Something asked of the service: what came of it, or its problem. */
const NOTHING = { busy: false, answer: null, problem: null, of: "" };

async function asked(set, of, work) {
  set({ ...NOTHING, busy: true, of });
  try {
    const answer = await work();
    set((known) => (known.of === of ? { ...NOTHING, answer, of } : known));
    return answer;
  } catch (problem) {
    set((known) => (known.of === of ? { ...NOTHING, problem, of } : known));
    return null;
  }
}

/** @param {URLSearchParams} query */
export function useForm(query) {
  const [values, setValues] = useState(() => valuesOf(query));
  const [schema, setSchema] = useState(null);
  const [found, setFound] = useState(NOTHING);
  const [plan, setPlan] = useState(NOTHING);
  const [sent, setSent] = useState(NOTHING);
  useEffect(() => { call("/v1/formats").then(setSchema, () => {}); }, []);
  useEffect(() => {
    setQuery({
      source: values.source,
      destination: values.destination,
      options: Object.keys(values.options).length ? JSON.stringify(values.options) : "",
      label: Object.entries(values.labels).map(([name, value]) => `${name}:${value}`),
    });
  }, [values]);
  const body = useMemo(() => ({ source: values.source, destination: values.destination || proposed(values.source), options: values.options, labels: values.labels }), [values]);
  const inspect = () => asked(setFound, JSON.stringify([body.source, body.options]), () => call("/v1/inspect", { body: { source: body.source, options: body.options } }));
  const preview = () => asked(setPlan, JSON.stringify(body), async () => (await call("/v1/jobs?dry_run=true", { body })).plan);
  const submit = async () => {
    const job = await asked(setSent, JSON.stringify(body), () => call("/v1/jobs", { body, headers: { "Idempotency-Key": crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}` } }));
    if (!job) return;
    tellJob(job);
    notify("good", "The job is queued");
    go(`/jobs/${job.id}`);
  };
  useEffect(() => { if (values.source) inspect(); }, []);
  return {
    values,
    body,
    schema,
    found: found.of.startsWith(JSON.stringify([body.source]).slice(0, -1)) ? found : NOTHING,
    plan: plan.of === JSON.stringify(body) ? plan : NOTHING,
    sent: sent.of === JSON.stringify(body) ? sent : NOTHING,
    set: (change) => setValues((before) => ({ ...before, ...change })),
    inspect,
    preview,
    submit,
  };
}

/** Faults of options by their names, of whatever was asked last. */
export function faultsOf(...asked) {
  const faults = {};
  for (const { problem } of asked) {
    for (const fault of problem?.document?.errors ?? []) {
      const name = /^\/options\/([^/]+)/.exec(fault.pointer ?? "")?.[1];
      if (name) faults[name] = fault.detail;
    }
  }
  return faults;
}
