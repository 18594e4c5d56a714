// What a form asks of the service: the answer belongs to the values that were asked with, and to no others.

import { useRef, useState } from "../vendor/htm-preact-standalone.mjs";

const NOTHING = { of: "", kind: "", busy: false, answer: null, problem: null };

/**
 * @param {string} of what it is asked for: the values, spelled
 * @returns {[{kind: string, busy: boolean, answer: any, problem: any}, (kind: string, work: (key: string) => Promise<any>) => Promise<any>]}
 *   what came of the last question, if it was of these values, and how to ask; `work` gets an idempotency key, the same
 *   for the same values until it has succeeded: who tries again after a lost answer gets what was made
 */
export function useAsked(of) {
  const [state, setState] = useState(NOTHING);
  const keys = useRef({ of: "", key: "" });
  const ask = async (kind, work) => {
    if (keys.current.of !== of) keys.current = { of, key: newKey() };
    setState({ ...NOTHING, of, kind, busy: true });
    const [answer, problem] = await work(keys.current.key).then((told) => [told, null], (fault) => [null, fault]);
    setState((known) => (known.of === of && known.kind === kind ? { ...NOTHING, of, kind, answer, problem } : known));
    return answer;
  };
  return [state.of === of ? state : NOTHING, ask];
}

/** Browsers give UUIDs to secure origins only. */
const newKey = () => crypto.randomUUID?.() ?? Array.from(crypto.getRandomValues(new Uint32Array(4)), (part) => part.toString(16)).join("-");
