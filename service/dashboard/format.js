// Numbers and times for people. Sizes are decimal, as Hugging Face writes them.

const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];
const EXACT = new Intl.DateTimeFormat(undefined, { dateStyle: "full", timeStyle: "long" });
const CLOCK = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const DAY = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" });
const DATE = new Intl.DateTimeFormat(undefined, { year: "numeric", month: "short", day: "numeric" });
const RELATIVE = new Intl.RelativeTimeFormat(undefined, { numeric: "auto", style: "short" });
const NUMBER = new Intl.NumberFormat(undefined);

/** @param {number} value */
export function size(value) {
  let unit = 0;
  while (Math.abs(value) >= 999.5 && unit < UNITS.length - 1) { value /= 1000; unit += 1; }
  if (unit === 0) return `${Math.round(value)} B`;
  return `${value >= 99.5 ? Math.round(value) : value.toPrecision(3)} ${UNITS[unit]}`;
}

/** @param {number | null | undefined} value bytes a second */
export const rate = (value) => (value ? `${size(value)}/s` : "");

/** @param {number} value */
export const number = (value) => NUMBER.format(value);

/**
 * @param {number} value
 * @param {string} noun
 */
export const count = (value, noun) => `${number(value)} ${noun}${value === 1 ? "" : "s"}`;

/** @param {number | null | undefined} seconds */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "";
  if (seconds < 9.95) return `${Math.max(0, seconds).toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${whole % 60} s`;
}

/** A length of time that somebody has chosen: 1 min, and not 1 min 0 s. @param {number} seconds */
export const period = (seconds) => (seconds < 60 ? `${Number(seconds.toFixed(1))} s` : duration(seconds).replace(/ 0 (s|min|h)$/, ""));

/** Like 3 min ago. @param {number} then @param {number} now milliseconds */
export function ago(then, now) {
  const seconds = Math.round((then - now) / 1000);
  if (Math.abs(seconds) < 10) return "just now";
  if (Math.abs(seconds) < 60) return RELATIVE.format(seconds, "second");
  if (Math.abs(seconds) < 3600) return RELATIVE.format(Math.round(seconds / 60), "minute");
  if (Math.abs(seconds) < 86400) return RELATIVE.format(Math.round(seconds / 3600), "hour");
  return new Date(then).getFullYear() === new Date(now).getFullYear() ? DAY.format(then) : DATE.format(then);
}

/** @param {number | string} moment */
export const exact = (moment) => EXACT.format(new Date(moment));

/** @param {number | string} moment */
export const clock = (moment) => CLOCK.format(new Date(moment));

/** The last part of a path or URL: what a model is called. @param {string} address */
export const baseName = (address) => address.replace(/\/+$/, "").split("/").pop() || address;

/** What comes before that. @param {string} address */
export const parentOf = (address) => address.replace(/\/+$/, "").slice(0, -baseName(address).length);

/** @param {number} done @param {number} total from 0 to 1 */
export const share = (done, total) => (total > 0 ? Math.min(1, Math.max(0, done / total)) : 0);

/** @param {number} part from 0 to 1 */
export const percent = (part) => `${part > 0.99 && part < 1 ? 99 : Math.round(part * 100)} %`;

/** @param {number[]} shape */
export const dimensions = (shape) => (shape.length ? shape.join(" × ") : "scalar");

/** A word of a shell. @param {string} text */
export const quoted = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`);
