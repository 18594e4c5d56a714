// One job in a list.

import { Component, html } from "../vendor/htm-preact-standalone.mjs";
import { baseName, duration, parentOf, percent, rate, share, size } from "../format.js";
import { act } from "../job-actions.js";
import { serviceNow } from "../clock.js";
import { isTerminal, looks, secondsOf } from "../states.js";
import { amount, Bar, Button, StateBadge, Time } from "./parts.js";

/** Drawn again only when its job or its mark changed: a list may be long, and most of it stays. */
export class JobRow extends Component {
  shouldComponentUpdate(next) {
    return next.job !== this.props.job || next.chosen !== this.props.chosen;
  }

  render({ job, chosen, onChoose, onLabel }) {
    const name = baseName(job.destination);
    return html`<tr role="row" class=${`job tone-${looks(job.state).tone}`} data-id=${job.id} data-state=${job.state}>
      <td role="cell" class="pick"><input type="checkbox" checked=${chosen} aria-label=${`Select ${name}`} onClick=${(event) => onChoose(job.id, event)} /></td>
      <td role="cell" class="state"><${StateBadge} state=${job.state} attempt=${job.attempt} /></td>
      <td role="cell" class="model">
        <a class="name" href=${`/jobs/${job.id}`} title=${job.destination}>${name}</a>
        <${Labels} labels=${job.labels} onLabel=${onLabel} />
        <div class="where" title=${`${job.source} to ${job.destination}`}><span class="place"><bdi>${job.source}</bdi></span><span class="to" aria-label="to">→</span><span class="place"><bdi>${parentOf(job.destination)}</bdi></span></div>
        ${job.error && html`<div class="why"><b>${job.error.message}</b>${job.error.hint && html` <span>${job.error.hint}</span>`}</div>`}
      </td>
      <td role="cell" class="progress"><${Far} job=${job} /></td>
      <td role="cell" class="rate">${rateOf(job)}</td>
      <td role="cell" class="left">${leftOf(job)}</td>
      <td role="cell" class="when"><${Time} at=${job.created_at} /></td>
      <td role="cell" class="act"><${Act} job=${job} name=${name} /></td>
    </tr>`;
  }
}

function Labels({ labels, onLabel }) {
  return Object.entries(labels).map(([name, value]) => html`<button key=${name} type="button" class="label"
    title="Only jobs with this label" onClick=${() => onLabel(`${name}:${value}`)}><span class="quiet">Only jobs with </span><span>${name}</span> ${value}</button>`);
}

function Far({ job }) {
  if (job.result) return html`<span class="amount">${size(job.result.bytes)}</span>`;
  if (!job.progress) return html`<span class="none" aria-label="nothing yet">–</span>`;
  const far = share(job.progress.bytes_done, job.progress.bytes_total);
  return html`<${Bar} value=${far} label=${`Bytes of ${baseName(job.destination)}`} tone=${looks(job.state).tone} />
    <span class="amount">${amount(job.progress)}</span><span class="percent">${percent(far)}</span>`;
}

function rateOf(job) {
  if (job.result) return job.result.seconds > 0 ? rate(job.result.bytes / job.result.seconds) : "";
  return isTerminal(job.state) ? "" : rate(job.progress?.bytes_per_s);
}

function leftOf(job) {
  if (job.result) return duration(job.result.seconds);
  if (isTerminal(job.state)) return duration(secondsOf(job, serviceNow()));
  const left = job.progress?.eta_s;
  return left === null || left === undefined ? "" : `${duration(left)} left`;
}

function Act({ job, name }) {
  if (job.links.cancel) {
    if (job.state === "cancelling") return null;
    return html`<${Button} label=${`Cancel ${name}`} icon="close" kind="ghost" onClick=${() => act(job, "cancel")} />`;
  }
  if (job.links.retry) return html`<${Button} label=${`Retry ${name}`} icon="retry" kind="ghost" onClick=${() => act(job, "retry")} />`;
  return null;
}
