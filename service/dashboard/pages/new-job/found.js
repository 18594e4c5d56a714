// What lies at a source, in the words of the service's inspection.

import { html } from "../../vendor/htm-preact-standalone.mjs";
import { Icon } from "../../components/icons.js";
import { count, number, size } from "../../format.js";
import { Facts } from "../job/details.js";

const MOST_NAMED = 8;

/**
 * @param {{found: any, formats: {name: string, title: string}[] | undefined}} props the answers of POST /v1/inspect and GET /v1/formats
 */
export function Found({ found, formats }) {
  const bytes = found.files.reduce((sum, file) => sum + file.size_bytes, 0);
  return html`<div class="found">
    <p class="verdict"><${Icon} name=${found.missing.length ? "warn" : "check"} /><b>${formats?.find((format) => format.name === found.format)?.title ?? found.format}</b>
      <span class="hint">${[found.model_type, ...(found.architectures ?? [])].filter(Boolean).join(", ")}</span></p>
    <${Facts} rows=${[
      ["Tensors", found.tensors !== undefined && number(typeof found.tensors === "number" ? found.tensors : found.tensors.length)],
      ["Files", `${size(bytes)} in ${count(found.files.length, "file")}`],
      ["Ranks", found.world_size ?? ranksOf(found)],
      ["Replicas", found.replicas ? number(found.replicas) : ""],
      ["Config", found.config],
      ["Beside the weights", found.side_files?.slice(0, MOST_NAMED).join(", ")],
    ]} />
    ${found.missing.length > 0 && html`<h3>Missing</h3><ul class="notes">${found.missing.slice(0, MOST_NAMED).map((name) => html`<li><code>${typeof name === "string" ? name : JSON.stringify(name)}</code></li>`)}
      ${found.missing.length > MOST_NAMED && html`<li>and ${number(found.missing.length - MOST_NAMED)} more</li>`}</ul>`}
    ${found.notes.length > 0 && html`<ul class="notes">${found.notes.map((note) => html`<li>${note}</li>`)}</ul>`}
  </div>`;
}

const ranksOf = (found) => {
  const ranks = new Set(found.files.map((file) => file.rank).filter((rank) => rank !== null && rank !== undefined));
  return ranks.size ? number(ranks.size) : "";
};
