// A button for what cannot be undone: it asks once more, and a double press is no answer.

import { html, useEffect, useRef, useState } from "../vendor/htm-preact-standalone.mjs";
import { Button } from "./parts.js";

/**
 * @param {{label: string, ask: string, askLabel?: string, keep?: string, icon?: string, onConfirm: () => Promise<unknown>,
 *   also?: {ask: string, label: string, onConfirm: () => Promise<unknown>}}} props
 *   `ask` is the question, and `also` the same with more to it
 */
export function Confirmed({ label, ask, askLabel = ask, keep = "Keep it", icon = "trash", onConfirm, also }) {
  const [isAsking, setAsking] = useState(false);
  const box = useRef(null);
  const touched = useRef(false);
  const turn = (asking) => { touched.current = true; setAsking(asking); };
  // On the harmless one of two, and back again.
  useEffect(() => { if (touched.current) [...(box.current?.querySelectorAll("button") ?? [])].at(-1)?.focus(); }, [isAsking]);
  const confirm = (work) => async (event) => {
    if (event.detail > 1) return; // the second half of a double click on the first button
    await work();
    setAsking(false);
  };
  const onKeyDown = (event) => { if (isAsking && event.key === "Escape") turn(false); };
  return html`<span class="confirmed" ref=${box} onKeyDown=${onKeyDown}>${isAsking
    ? html`<${Button} key="confirm" label=${askLabel} icon=${icon} kind="danger" onClick=${confirm(onConfirm)}>${ask}<//>${also && html`<${Button} key="also" label=${also.label} kind="danger" onClick=${confirm(also.onConfirm)}>${also.ask}<//>`}<${Button} key="keep" label=${keep} icon="close" kind="ghost" onClick=${() => turn(false)} />`
    : html`<${Button} key="ask" label=${label} icon=${icon} kind="ghost" onClick=${() => turn(true)} />`}</span>`;
}
