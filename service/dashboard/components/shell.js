// What surrounds every page: navigation, the state of the service, colour scheme, and the question for a token.

import { html, useEffect, useLayoutEffect, useRef, useState } from "../vendor/htm-preact-standalone.mjs";
import { isSignedIn, signIn, signOut, tokenWanted } from "../api.js";
import { connection } from "../live.js";
import { overview } from "../overview.js";
import { PAGES } from "../pages.js";
import { useSignal } from "../store.js";
import { Icon } from "./icons.js";
import { Button, Trouble } from "./parts.js";

const WORDS = { connecting: "Connecting", live: "Live", polling: "Live", offline: "Offline: trying again", unknown: "Not signed in", refused: "Not live: this token may not see jobs" };
/** Pixels in which the navigation fades out at the right of a narrow screen, as its style says. */
const FADE = 28;
const SCHEME = "unshard-scheme";
const SCHEMES = [["", "Scheme of the system", "settings"], ["light", "Light scheme", "sun"], ["dark", "Dark scheme", "moon"]];

/** @param {{path: string, children: unknown}} props */
export function Shell({ path, children }) {
  return html`
    <a class="skip" href="#main">Skip to the content</a>
    <header class="side">
      <a class="brand" href="/" aria-label="unshard: jobs"><img src="/static/icon.svg" alt="" width="22" height="22" /><span>unshard</span></a>
      <nav aria-label="Pages">${PAGES.filter((page) => page.nav).map((page) => html`<${NavLink} page=${page} path=${path} />`)}</nav>
      <${Foot} />
    </header>
    <main id="main" tabindex="-1">${children}</main>`;
}

function NavLink({ page, path }) {
  const current = page.pattern.test(path) || path.startsWith(`${page.nav.href === "/" ? "/jobs" : page.nav.href}/`);
  const link = useRef(null);
  // On a narrow screen the navigation scrolls sideways. `scrollIntoView` would also move where the Tab key goes on from.
  useEffect(() => {
    if (!current) return undefined;
    const show = () => {
      const bar = link.current.parentElement;
      const { offsetLeft, offsetWidth } = link.current;
      const beyond = offsetLeft + offsetWidth + FADE - bar.offsetLeft - bar.clientWidth;
      if (beyond > 0) bar.scrollLeft = beyond;
    };
    show();
    addEventListener("resize", show);
    return () => removeEventListener("resize", show);
  }, [current]);
  return html`<a href=${page.nav.href} class="nav" ref=${link} aria-current=${current ? "page" : undefined}>
    <${Icon} name=${page.nav.icon} /><span>${page.nav.label}</span>
  </a>`;
}

function Foot() {
  const state = useSignal(connection);
  const told = useSignal(overview);
  return html`<div class="foot">
    <p class=${`link link-${state}`} title=${state === "polling" ? "Asks for news every two seconds" : undefined}>
      <span class="lamp" aria-hidden="true" /><span>${WORDS[state]}</span></p>
    <a class="nav" href="/v1/docs"><${Icon} name="file" /><span>API</span></a>
    <${Scheme} />
    ${isSignedIn() && html`<${Button} label="Sign out: forget the token" icon="leave" kind="ghost" onClick=${signOut} />`}
    ${told?.version && html`<p class="version">unshard ${told.version}</p>`}
  </div>`;
}

/** Light, dark, or what the system has. */
function Scheme() {
  const [chosen, choose] = useState(() => localStorage.getItem(SCHEME) ?? "");
  useLayoutEffect(() => {
    if (chosen) document.documentElement.dataset.scheme = chosen;
    else delete document.documentElement.dataset.scheme;
    localStorage.setItem(SCHEME, chosen);
    dispatchEvent(new Event("schemechange"));
  }, [chosen]);
  const place = SCHEMES.findIndex(([name]) => name === chosen);
  const [, label, icon] = SCHEMES[place];
  return html`<${Button} label=${label} icon=${icon === "settings" ? "sun" : icon} kind="ghost"
    onClick=${() => choose(SCHEMES[(place + 1) % SCHEMES.length][0])} />`;
}

/** Asks for the token that the service wants; it stays in this tab. */
export function TokenQuestion() {
  const wanted = useSignal(tokenWanted);
  const dialog = useRef(null);
  const field = useRef(null);
  useEffect(() => {
    if (wanted && !dialog.current.open) dialog.current.showModal();
    if (!wanted && dialog.current.open) dialog.current.close();
  }, [wanted]);
  const [tried, setTried] = useState({ busy: false, problem: null });
  const submit = async (event) => {
    event.preventDefault();
    setTried({ busy: true, problem: null });
    const problem = await signIn(field.current.value.trim()).then(() => null, (fault) => fault);
    setTried({ busy: false, problem });
    if (!problem) field.current.value = "";
    else field.current.select();
  };
  // A browser lets Escape close it in the end, whatever the page says; without a token nothing is shown behind it.
  const stay = () => { if (tokenWanted.value) dialog.current.showModal(); };
  return html`<dialog ref=${dialog} class="dialog" aria-labelledby="token-title" onCancel=${(event) => event.preventDefault()} onClose=${stay}>
    <form onSubmit=${submit}>
      <h2 id="token-title">This service asks for a token</h2>
      <p>${isSignedIn() ? "The token that this tab has is not valid any more." : "Whoever runs the service gives you one."} It is kept in this tab only, until you close it.</p>
      <label for="token">Token</label>
      <input id="token" ref=${field} type="password" autocomplete="off" required spellcheck=${false} pattern="\s*[!-~]+\s*" title="Letters, digits and signs of a keyboard, without spaces" />
      ${tried.problem && html`<${Trouble} problem=${tried.problem} />`}
      <div class="actions"><${Button} label="Sign in" type="submit" kind="primary" busy=${tried.busy}>Sign in<//></div>
    </form>
  </dialog>`;
}
