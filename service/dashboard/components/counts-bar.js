// Many things by their states: a bar in parts, and the same in words.

import { html } from "../vendor/htm-preact-standalone.mjs";
import { number } from "../format.js";
import { looks } from "../states.js";
import { Icon } from "./icons.js";

const ORDER = ["succeeded", "skipped", "running", "failed", "refused", "cancelled", "queued"];

/** @param {{counts: Record<string, number>, words?: boolean}} props */
export function CountsBar({ counts, words = true }) {
  const parts = ORDER.filter((state) => counts[state] > 0);
  const all = counts.total || 1;
  const told = parts.map((state) => `${number(counts[state])} ${looks(state).word.toLowerCase()}`).join(", ") || "nothing yet";
  return html`<div class="counts">
    <div class="counts-bar" role="img" aria-label=${told}>${parts.map((state) => html`<i class=${`tone-${looks(state).tone} is-${state}`} style=${{ width: `${(100 * counts[state]) / all}%` }} />`)}</div>
    ${words && html`<ul class="counts-words" aria-hidden="true">${parts.map((state) => html`<li class=${`tone-${looks(state).tone}`}><${Icon} name=${looks(state).icon} /><b>${number(counts[state])}</b> ${looks(state).word.toLowerCase()}</li>`)}</ul>`}
  </div>`;
}
