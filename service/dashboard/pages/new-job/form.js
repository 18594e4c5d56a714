// What a form for a new job holds, and what the service says of it: the address of the page keeps the first.

import { useEffect, useMemo } from "../../vendor/htm-preact-standalone.mjs";
import { call } from "../../api.js";
import { useAsked } from "../../components/asked.js";
import { usePolled } from "../../components/polled.js";
import { useAddressed, usePlace } from "../../router.js";
import { baseName, parentOf } from "../../format.js";
import { tellJob } from "../../live.js";
import { notify } from "../../store.js";

/** @param {URLSearchParams} query */
export function optionsIn(query) {
  try {
    const options = JSON.parse(query.get("options") ?? "{}");
    return typeof options === "object" && options !== null && !Array.isArray(options) ? options : {};
  } catch {
    return {};
  }
}

/** Options as an address has them. @param {Record<string, unknown>} options */
export const spelledOptions = (options) => (Object.keys(options).length ? JSON.stringify(options) : "");

/** The values in an address. @param {URLSearchParams} query */
export const valuesOf = (query) => ({
  source: query.get("source") ?? "",
  destination: query.get("destination") ?? "",
  options: optionsIn(query),
  labels: Object.fromEntries(query.getAll("label").filter((label) => label.includes(":")).map((label) => [label.slice(0, label.indexOf(":")), label.slice(label.indexOf(":") + 1)])),
});

/** A folder beside the source, if nothing else was said. @param {string} source */
export const proposed = (source) => (source ? `${parentOf(source)}${baseName(source)}-hf` : "");

const spelled = ({ source, destination, options, labels }) => ({
  source,
  destination,
  options: spelledOptions(options),
  label: Object.entries(labels).map(([name, value]) => `${name}:${value}`),
});

/** @param {URLSearchParams} query */
export function useForm(query) {
  const [values, set] = useAddressed(query, valuesOf, spelled);
  const { go: lead } = usePlace();
  const formats = usePolled("/v1/formats");
  const body = useMemo(() => ({ source: values.source, destination: values.destination || proposed(values.source), options: values.options, labels: values.labels }), [values]);
  const [found, askFound] = useAsked(body.source);
  const [plan, askPlan] = useAsked(JSON.stringify(body));
  const [sent, askSent] = useAsked(JSON.stringify(body));
  const inspect = () => askFound("inspect", () => call("/v1/inspect", { body: { source: body.source, options: body.options } }));
  const preview = () => askPlan("plan", async () => (await call("/v1/jobs?dry_run=true", { body })).plan);
  const submit = async () => {
    const job = await askSent("submit", (key) => call("/v1/jobs", { body, headers: { "Idempotency-Key": key } }));
    if (!job) return;
    tellJob(job);
    notify("good", "The job is queued");
    lead(`/jobs/${job.id}`);
  };
  useEffect(() => { if (values.source) inspect(); }, []);
  return { values, body, formats, found, plan, sent, set, inspect, preview, submit };
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
