// What a newcomer sees: no job yet, and how to make the first one.

import { html, useRef } from "../vendor/htm-preact-standalone.mjs";
import { quoted } from "../format.js";
import { go } from "../router.js";
import { query } from "../api.js";
import { Icon } from "./icons.js";
import { Button, Code } from "./parts.js";

const STEPS = [
  ["search", "Name it", "unshard reads the metadata and tells what it is: format, ranks, tensors, and what is missing."],
  ["plan", "See the plan", "Which files will be written, from which pieces, with how much memory. Nothing is stored yet."],
  ["check", "Convert", "Each byte is moved once and checked. What was finished is kept if something breaks."],
];

/** @param {{demo?: {source: string, destination: string} | null}} props */
export function Welcome({ demo }) {
  const field = useRef(null);
  const begin = (event) => {
    event.preventDefault();
    const source = field.current.value.trim();
    if (source) go(`/new${query({ source })}`);
  };
  const command = `unshard submit ${quoted("/path/to/checkpoint")} ${quoted("/path/to/model")} --server ${location.origin}`;
  return html`<section class="welcome">
    <h1 tabindex="-1">Convert a checkpoint</h1>
    <p class="lead">From what training wrote (FSDP, Megatron, DCP, DeepSpeed and more) to a Hugging Face model folder, bit for bit.</p>
    <form class="start" onSubmit=${begin}>
      <label for="start-source">Path or URL of the checkpoint</label>
      <div><input id="start-source" ref=${field} required spellcheck=${false} autocomplete="off" placeholder="/runs/qwen/global_step_120 or s3://bucket/run/step" aria-describedby="start-hint" />
      <${Button} label="Look into it" type="submit" kind="primary" icon="arrow">Look into it<//></div>
      <p id="start-hint" class="hint">Paths are those of the machine that the service runs on. Nothing is written before you say so.</p>
    </form>
    ${demo && html`<div class="demo"><${Icon} name="cube" /><div><h2>No checkpoint at hand?</h2>
      <p>A small one comes with unshard: a Qwen3 mixture of experts, saved by two ranks of verl.</p></div>
      <a class="button" href=${`/new${query({ source: demo.source, destination: demo.destination })}`}>Try the demo checkpoint</a></div>`}
    <ol class="steps">${STEPS.map(([icon, title, text]) => html`<li><${Icon} name=${icon} /><h2>${title}</h2><p>${text}</p></li>`)}</ol>
    <h2 class="or">Or from a shell</h2>
    <${Code} text=${command} label="command" />
  </section>`;
}
