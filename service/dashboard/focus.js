// Where the keyboard goes on when what had the focus is taken away: at what is beside it, not at the top of the document.

const REACHABLE = "a[href], button:not([disabled]), input:not([disabled]), select:not([disabled]), summary, [tabindex='0']";

/** @param {HTMLElement} main what is watched */
export function keepFocus(main) {
  let way = [];
  document.addEventListener("focusin", ({ target }) => {
    way = [];
    for (let at = target; at && at !== main; at = at.parentElement) way.push(at);
    if (!main.contains(target)) way = [];
  });
  new MutationObserver((changes) => {
    if (!way.length || way[0].isConnected || document.activeElement !== document.body) return;
    const next = way[0].matches("h1") ? null : beside(way, changes);
    const found = next ?? main.querySelector("h1");
    if (found) found.focus({ preventScroll: true }); // else with the next change
  }).observe(main, { childList: true, subtree: true });
}

/** What can be reached next to where the way was cut off; nothing when the whole page went. */
function beside(way, changes) {
  for (const { target, removedNodes, nextSibling, previousSibling } of changes) {
    if (!target.isConnected || target.id === "main" || ![...removedNodes].some((node) => way.includes(node))) continue;
    for (let at = nextSibling; at; at = at.nextSibling) if (firstIn(at)) return firstIn(at);
    for (let at = previousSibling; at; at = at.previousSibling) if (firstIn(at)) return firstIn(at);
    return target.closest("section, article, table, form, ul")?.querySelector(REACHABLE) ?? null;
  }
  return null;
}

const firstIn = (node) => (node.matches?.(REACHABLE) ? node : node.querySelector?.(REACHABLE));
