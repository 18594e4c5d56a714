// Small parts that every page uses.

import { html, useEffect, useRef, useState } from "../vendor/htm-preact-standalone.mjs";
import { Problem } from "../api.js";
import { serviceNow } from "../clock.js";
import { ago, exact, percent, size } from "../format.js";
import { looks } from "../states.js";
import { announcement, dismiss, notices, notify, signal, useSignal } from "../store.js";
import { Icon } from "./icons.js";

const tick = signal(0);
setInterval(() => tick.set(tick.value + 1), 10_000);

/** A moment, told from now; the exact one, with its zone, on hover. @param {{at: string}} props */
export function Time({ at }) {
  useSignal(tick);
  return html`<time datetime=${at} title=${exact(at)}>${ago(Date.parse(at), serviceNow())}</time>`;
}

/** A clock for what counts on while it is looked at. @param {boolean} runs */
export function useNow(runs) {
  const [now, set] = useState(serviceNow());
  useEffect(() => {
    if (!runs) return undefined;
    set(serviceNow());
    const timer = setInterval(() => set(serviceNow()), 1000);
    return () => clearInterval(timer);
  }, [runs]);
  return runs ? now : serviceNow();
}

/** @param {{state: string, attempt?: number}} props */
export function StateBadge({ state, attempt = 1 }) {
  const { word, icon, tone } = looks(state);
  return html`<span class=${`badge tone-${tone}`}>
    <${Icon} name=${icon} spin=${state === "running" || state === "planning"} />
    <span>${word}</span>
    ${attempt > 1 && html`<span class="attempt" title=${`Attempt ${attempt}`}>×${attempt}</span>`}
  </span>`;
}

/** @param {{value: number, label: string, tone?: string}} props value from 0 to 1 */
export function Bar({ value, label, tone = "busy" }) {
  return html`<progress class=${`bar tone-${tone}`} max="1" value=${value} aria-label=${label} aria-valuetext=${percent(value)} />`;
}

/** How far by bytes, in words. @param {import("../types.js").Progress} progress */
export const amount = (progress) => `${size(progress.bytes_done)} of ${size(progress.bytes_total)}`;

/**
 * A button that is busy for as long as what it began is under way: a second press does nothing.
 * @param {{label: string, icon?: string, kind?: string, quiet?: boolean, busy?: boolean, disabled?: boolean,
 *   onClick?: () => unknown, children?: unknown, type?: string, title?: string}} props
 */
export function Button({ label, icon, kind = "plain", quiet = false, busy = false, disabled = false, onClick, children, type = "button", title }) {
  const [isWorking, setWorking] = useState(false);
  const works = useRef(false);
  const isBusy = busy || isWorking;
  const turn = (working) => { works.current = working; setWorking(working); };
  const press = (event) => {
    if (busy || works.current) { event.preventDefault(); return; }
    const work = onClick?.(event);
    if (!(work instanceof Promise)) return;
    turn(true);
    work.finally(() => turn(false));
  };
  return html`<button type=${type} class=${`button ${kind}${children ? "" : " only-icon"}`} aria-label=${label}
      aria-disabled=${isBusy || disabled ? "true" : undefined} disabled=${disabled} title=${title ?? (quiet || !children ? label : undefined)}
      onClick=${press}>
    ${icon && html`<${Icon} name=${isBusy ? "spin" : icon} spin=${isBusy} />`}${children && html`<span>${children}</span>`}
  </button>`;
}

/** Copies a text. @param {{text: string, label?: string}} props */
export function Copy({ text, label = "Copy" }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    if (await copied(text)) {
      setDone(true);
      setTimeout(() => setDone(false), 1500);
    } else {
      notify("bad", "The browser does not let this page copy", "Select the text and copy it by hand.");
    }
  };
  return html`<${Button} label=${done ? "Copied" : label} icon=${done ? "check" : "copy"} kind="ghost" onClick=${copy} />`;
}

/** The clipboard API is there on secure origins only; elsewhere the old command does it. */
async function copied(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  const field = Object.assign(document.createElement("textarea"), { value: text, className: "quiet" });
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  return done;
}

/** A command or document, ready to be copied. @param {{text: string, label: string}} props */
export function Code({ text, label }) {
  return html`<div class="code"><pre tabindex="0" aria-label=${label}><code>${text}</code></pre><${Copy} text=${text} label=${`Copy ${label}`} /></div>`;
}

/** What went wrong with a request, and what to do. @param {{problem: Problem, onRetry?: () => void}} props */
export function Trouble({ problem, onRetry }) {
  const faults = (problem.document?.errors ?? []).filter((fault) => fault.detail !== problem.message);
  return html`<div class="trouble" role="alert">
    <${Icon} name="warn" />
    <div>
      <p class="what">${problem.message}</p>
      ${problem.hint && html`<p class="hint">${problem.hint}</p>`}
      ${faults.length > 0 && html`<ul>${faults.map((fault) => html`<li><code>${fault.pointer ?? fault.parameter ?? ""}</code> ${fault.detail}</li>`)}</ul>`}
    </div>
    ${onRetry && html`<${Button} label="Try again" icon="retry" onClick=${onRetry}>Try again<//>`}
  </div>`;
}

/** Grey lines where something will be. @param {{lines?: number, label?: string}} props */
export function Skeleton({ lines = 3, label = "Loading" }) {
  const widths = ["62%", "88%", "74%", "94%", "56%", "81%"];
  return html`<div class="skeleton" role="status"><span class="quiet">${label}</span>
    ${Array.from({ length: lines }, (_, line) => html`<span style=${{ width: widths[line % widths.length] }} />`)}
  </div>`;
}

/** The texts that come and go above the page, and what screen readers are told. */
export function Voices() {
  const shown = useSignal(notices);
  const told = useSignal(announcement);
  return html`
    <div class="quiet" role="status" aria-live="polite">${told}</div>
    <div class="notices" role="region" aria-label="Notices">
      ${shown.map((notice) => html`<div key=${notice.id} class=${`notice tone-${notice.tone}`} role=${notice.tone === "bad" ? "alert" : "status"}>
        <${Icon} name=${notice.tone === "bad" ? "warn" : "check"} />
        <div><p>${notice.text}</p>${notice.hint && html`<p class="hint">${notice.hint}</p>`}</div>
        <${Button} label="Close this notice" icon="close" kind="ghost" onClick=${() => dismiss(notice.id)} />
      </div>`)}
    </div>`;
}

/** Run what a button asks for, and tell what went wrong. @param {() => Promise<unknown>} work */
export async function attempt(work) {
  try {
    return await work();
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    notify("bad", error.message, error.hint);
    return null;
  }
}
