// The items of a batch as a grid of squares, coloured by state; arrow keys go from one to the next.

import { Component, html, useEffect, useRef } from "../../vendor/htm-preact-standalone.mjs";
import { Icon } from "../../components/icons.js";
import { baseName } from "../../format.js";
import { go } from "../../router.js";
import { looks } from "../../states.js";
import { stateOf } from "./data.js";

const CHUNK = 200;
const MOST_NAMED = 600;

/** The number in a folder's name, or the name. */
export function stepOf(source) {
  const name = baseName(source);
  return /(?:step|iter|iteration|epoch|checkpoint|ckpt)[-_=.]?0*(\d+)/i.exec(name)?.[1] ?? /(\d+)(?!.*\d)/.exec(name)?.[1] ?? name;
}

/** @param {{items: any[], chosen: number, onChoose: (place: number) => void}} props */
export function ItemGrid({ items, chosen, onChoose }) {
  const box = useRef(null);
  const dense = items.length > MOST_NAMED;
  useEffect(() => { box.current.querySelector("[aria-selected=true]")?.scrollIntoView({ block: "nearest" }); }, [chosen]);
  const onKeyDown = (event) => {
    const at = Math.max(0, chosen);
    const columns = columnsOf(box.current);
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns, Home: -at, End: items.length - 1 - at };
    if (event.key === "Enter" && items[at]?.job_id) return go(`/jobs/${items[at].job_id}`);
    if (!(event.key in steps)) return undefined;
    event.preventDefault();
    return onChoose(Math.min(items.length - 1, Math.max(0, at + steps[event.key])));
  };
  const pick = (event) => {
    const square = event.target.closest("[data-place]");
    if (square) onChoose(Number(square.dataset.place));
  };
  const chunks = Array.from({ length: Math.ceil(items.length / CHUNK) }, (_, index) => items.slice(index * CHUNK, (index + 1) * CHUNK));
  return html`<div class=${`squares${dense ? " dense" : ""}`} ref=${box} role="listbox" tabindex="0" aria-label="Items by state; arrow keys go from one to the next, Enter opens the job" aria-activedescendant=${chosen >= 0 ? `item-${chosen}` : undefined}
      onKeyDown=${onKeyDown} onPointerOver=${pick} onClick=${pick} onFocus=${(event) => { if (chosen < 0 && event.target.matches(":focus-visible")) onChoose(0); }}>
    ${chunks.map((chunk, index) => html`<${Chunk} key=${index} items=${chunk} from=${index * CHUNK} dense=${dense} chosen=${chosen >= index * CHUNK && chosen < (index + 1) * CHUNK ? chosen : -1} />`)}
  </div>`;
}

/** Drawn again only when one of its items or the choice changed. */
class Chunk extends Component {
  shouldComponentUpdate(next) {
    return next.chosen !== this.props.chosen || next.dense !== this.props.dense || next.items.length !== this.props.items.length || next.items.some((item, place) => item !== this.props.items[place]);
  }

  render({ items, from, dense, chosen }) {
    return items.map((item, index) => {
      const place = from + index;
      const state = stateOf(item);
      const { tone, icon, word } = looks(state);
      const step = stepOf(item.source);
      return html`<div key=${place} id=${`item-${place}`} data-place=${place} role="option" class=${`square tone-${tone} is-${state}`} aria-selected=${String(place === chosen)} aria-label=${`${step}: ${word}`} title=${`${baseName(item.source)}: ${word}`}>
        ${!dense && html`<${Icon} name=${icon} /><span>${step}</span>`}</div>`;
    });
  }
}

function columnsOf(box) {
  const [first, ...others] = box.querySelectorAll(".square");
  const place = others.findIndex((square) => square.offsetTop > first.offsetTop);
  return place < 0 ? others.length + 1 : place + 1;
}
