// The time by the service's clock: all times in answers are of it, and a viewer's own clock may be minutes off.

/** The header `Date` counts whole seconds, and answers take their way: less is no difference. */
const COARSE_MS = 2000;
let aheadMs = 0;

/** Take the time of an answer that has just arrived. @param {Response} response */
export function keepTime(response) {
  const told = Date.parse(response.headers.get("date") ?? "");
  if (Number.isNaN(told)) return;
  const offMs = told + 500 - Date.now();
  if (Math.abs(offMs - aheadMs) > COARSE_MS) aheadMs = Math.abs(offMs) > COARSE_MS ? offMs : 0;
}

/** Milliseconds since 1970, as the service counts them. */
export const serviceNow = () => Date.now() + aheadMs;
