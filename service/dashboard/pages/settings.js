// For administrators: tokens, webhooks and their deliveries, and the audit. Whoever keeps webhooks sees those.

import { html, useEffect } from "../vendor/htm-preact-standalone.mjs";
import { Icon } from "../components/icons.js";
import { Skeleton, Trouble } from "../components/parts.js";
import { usePolled } from "../components/polled.js";
import { number } from "../format.js";
import { setQuery } from "../router.js";
import { Audit } from "./settings/audit.js";
import { Tokens } from "./settings/tokens.js";
import { Webhooks } from "./settings/webhooks.js";

const TABS = [["tokens", "Tokens", "key", "admin"], ["webhooks", "Webhooks", "link", "webhooks"], ["audit", "Audit", "shield", "admin"]];

export default function Settings({ query }) {
  const { data: self, problem, reload } = usePolled("/v1/tokens/self");
  useEffect(() => { document.title = "Settings · unshard"; }, []);
  const may = (scope) => self?.scopes.includes("admin") || self?.scopes.includes(scope);
  const tabs = TABS.filter(([, , , scope]) => may(scope));
  const tab = tabs.find(([name]) => name === query.get("tab")) ?? tabs[0];
  return html`<div class="page stack">
    <div class="head"><h1 tabindex="-1">Settings</h1></div>
    ${problem && html`<${Trouble} problem=${problem} onRetry=${reload} />`}
    ${!self && !problem && html`<${Skeleton} lines=${5} label="Asking what you may do" />`}
    ${self && html`<${Self} self=${self} />`}
    ${self && tabs.length === 0 && html`<section class="card nothing-yet"><${Icon} name="shield" /><h2>Settings are for administrators</h2><p>Tokens, webhooks and the audit need a token with the scope <code>admin</code> (webhooks alone: <code>webhooks</code>). Yours may do: ${self.scopes.map((scope) => html`<code>${scope}</code> `)}</p></section>`}
    ${tabs.length > 0 && html`<div class="chips settings-tabs" role="group" aria-label="Settings">${tabs.map(([name, label, icon]) => html`<button key=${name} type="button" class="chip" aria-pressed=${String(tab[0] === name)} onClick=${() => setQuery({ tab: name, webhook: "" }, { push: true })}><${Icon} name=${icon} />${label}</button>`)}</div>`}
    ${tab?.[0] === "tokens" && html`<${Tokens} />`}
    ${tab?.[0] === "webhooks" && html`<${Webhooks} query=${query} isAdmin=${may("admin")} />`}
    ${tab?.[0] === "audit" && html`<${Audit} query=${query} />`}
  </div>`;
}

/** Whom the service takes this tab for. */
function Self({ self }) {
  return html`<p class="hint self-line"><${Icon} name="key" />You are <b>${self.name}</b><code>${self.id}</code>${self.requests_per_minute && html`<span>with ${number(self.requests_per_minute)} requests a minute</span>`}</p>`;
}
