// Draws the page that the address names, and starts what all pages share.

import { html, render, useEffect, useRef, useState } from "./vendor/htm-preact-standalone.mjs";
import { session } from "./api.js";
import { Skeleton, Trouble, Voices } from "./components/parts.js";
import { Shell, TokenQuestion } from "./components/shell.js";
import { keepFocus } from "./focus.js";
import { follow } from "./live.js";
import { keepOverview } from "./overview.js";
import { pageOf } from "./pages.js";
import { place, takeLinks } from "./router.js";
import { useSignal } from "./store.js";

function App() {
  const { path, query } = useSignal(place);
  const signedIn = useSignal(session);
  const found = pageOf(path);
  const { Page, problem } = usePage(found?.page);
  useHeadingFocus(path, Page);
  let content = html`<div class="page"><${Skeleton} lines=${6} /></div>`;
  if (!found) content = html`<${Nowhere} path=${path} />`;
  else if (problem) content = html`<div class="page"><${Trouble} problem=${problem} onRetry=${() => location.reload()} /></div>`;
  else if (Page) content = html`<${Page} key=${`${path} ${signedIn}`} params=${found.params} query=${query} />`;
  return html`<${Shell} path=${path}>${content}<//><${TokenQuestion} /><${Voices} />`;
}

/** The component of a page, once its module is there. */
function usePage(page) {
  const [loaded, setLoaded] = useState({});
  useEffect(() => {
    if (!page) return;
    page.load().then(
      (module) => setLoaded({ page, Page: module.default }),
      () => setLoaded({ page, problem: { message: "This part of the page could not be loaded", hint: "Is the service running?" } }),
    );
  }, [page]);
  return loaded.page === page ? loaded : {};
}

/** After going to another page, the keyboard goes on at its heading. */
function useHeadingFocus(path, Page) {
  const first = useRef(path);
  useEffect(() => {
    if (!Page || first.current === path) return;
    first.current = path;
    // What stands for a page while it loads goes away with its heading: then `keepFocus` finds the next one.
    document.querySelector("main h1")?.focus({ preventScroll: true });
  }, [path, Page]);
}

function Nowhere({ path }) {
  return html`<div class="page"><h1 tabindex="-1">There is no such page</h1><p><code>${path}</code> is not one of them. <a href="/">Go to the jobs</a></p></div>`;
}

const scheme = localStorage.getItem("unshard-scheme");
if (scheme) document.documentElement.dataset.scheme = scheme;
takeLinks((path) => pageOf(path) !== null);
keepOverview();
follow();
render(html`<${App} />`, document.getElementById("app"));
keepFocus(document.getElementById("main"));
