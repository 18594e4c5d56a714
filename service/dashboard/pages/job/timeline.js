// The states that a job went through, when, and for how long.

import { html } from "../../vendor/htm-preact-standalone.mjs";
import { Icon } from "../../components/icons.js";
import { useNow } from "../../components/parts.js";
import { clock, duration, exact } from "../../format.js";
import { isTerminal, looks } from "../../states.js";

const WAY = ["queued", "planning", "running", "verifying", "succeeded"];

/** @param {{job: import("../../types.js").Job}} props */
export function Timeline({ job }) {
  const now = useNow(!isTerminal(job.state));
  const past = Object.entries(job.state_times).sort(([, one], [, other]) => Date.parse(one) - Date.parse(other));
  const steps = past.map(([state, at], place) => {
    const until = past[place + 1] ? Date.parse(past[place + 1][1]) : now;
    return { state, at, seconds: isTerminal(state) ? null : (until - Date.parse(at)) / 1000, current: state === job.state };
  });
  const next = isTerminal(job.state) || job.state === "cancelling" ? [] : WAY.slice(WAY.indexOf(job.state) + 1).filter((state) => !job.state_times[state]);
  return html`<ol class="timeline" aria-label="States">
    ${steps.map((step) => html`<${Step} key=${step.state} step=${step} />`)}
    ${next.map((state) => html`<li key=${state} class="step next"><span class="dot" /><span class="word">${looks(state).word}</span></li>`)}
  </ol>`;
}

function Step({ step }) {
  const { word, icon, tone } = looks(step.state);
  return html`<li class=${`step tone-${step.current || isTerminal(step.state) ? tone : "good"}`} aria-current=${step.current ? "step" : undefined}>
    <span class="dot"><${Icon} name=${step.current || isTerminal(step.state) ? icon : "check"} spin=${step.current && tone === "busy"} /></span>
    <span class="word">${word}</span>
    <span class="times"><time datetime=${step.at} title=${exact(step.at)}>${clock(step.at)}</time>${step.seconds !== null && html` · ${duration(step.seconds)}`}</span>
  </li>`;
}
