// Every word with the service: JSON requests, problems as errors, streams of server-sent events, and the token.

import { keepTime } from "./clock.js";
import { signal } from "./store.js";

const TOKEN = "unshard-token";
/** Of a stream: the service speaks every 15 seconds, and connections are lost without a word. */
const SILENCE_MS = 45_000;
const AWAY = "The service does not answer";
const LOOK_FIRST = "It is not known whether it did what was asked: look before you try again.";
const UNASKED = { title: "This service asks for a token", hint: "Sign in to see this." };

/** Whether the service refused the last request for want of a valid token. */
export const tokenWanted = signal(false);

/** Counts sign-ins, so that what is shown can be asked for again with the new token. */
export const session = signal(0);

/** An answer that isn't what was asked for: RFC 9457, plus whatever the network does. */
export class Problem extends Error {
  /**
   * @param {{title?: string, detail?: string, hint?: string, type?: string, errors?: {detail: string, pointer?: string}[]}} document
   * @param {number} status 0 when there was no answer
   */
  constructor(document, status) {
    super(document.detail || document.title || `the service answered ${status}`);
    this.document = document;
    this.status = status;
    this.hint = document.hint ?? "";
    this.name = (document.type ?? "").split("/").pop() || "problem";
  }
}

/**
 * Take a token for all that is asked from now on; a `Problem` says that it opens nothing.
 * @param {string} token
 */
export async function signIn(token) {
  await asked("/v1/tokens/self", {}, token);
  sessionStorage.setItem(TOKEN, token);
  tokenWanted.set(false);
  session.set(session.value + 1);
}

export function signOut() {
  sessionStorage.removeItem(TOKEN);
  session.set(session.value + 1);
}

export const isSignedIn = () => sessionStorage.getItem(TOKEN) !== null;

/**
 * Ask the service.
 * @param {string} path
 * @param {{method?: string, body?: unknown, headers?: Record<string, string>, signal?: AbortSignal, accept?: string}} [how]
 * @returns {Promise<Response>} whose status is one of success
 */
export async function send(path, how = {}) {
  // What was refused once would be refused again, and counted as a guess: nothing is asked before the sign-in.
  if (tokenWanted.value) throw new Problem(UNASKED, 401);
  const token = sessionStorage.getItem(TOKEN);
  try {
    return await asked(path, how, token);
  } catch (problem) {
    // A refusal that arrives after a sign-in was of the token before it, or of none.
    if (problem.status === 401 && token === sessionStorage.getItem(TOKEN)) tokenWanted.set(true);
    throw problem;
  }
}

async function asked(path, how, token) {
  const headers = { Accept: how.accept ?? "application/json", ...how.headers };
  if (token) headers.Authorization = `Bearer ${token}`;
  if (how.body !== undefined) headers["Content-Type"] = "application/json";
  const body = how.body === undefined ? undefined : JSON.stringify(how.body);
  const method = how.method ?? (body ? "POST" : "GET");
  const response = await answered(method, () => fetch(path, { method, headers, body, signal: how.signal, cache: "no-store" }));
  keepTime(response);
  if (!response.ok) throw await problemOf(response);
  return response;
}

/** What the network gives, or a problem in place of its errors. */
async function answered(method, work) {
  try {
    return await work();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem({ title: AWAY, hint: method === "GET" ? "Is it running? The page tries again by itself." : LOOK_FIRST }, 0);
  }
}

async function problemOf(response) {
  const document = await response.json().catch(() => ({}));
  return new Problem(document, response.status);
}

/**
 * Ask the service and read its JSON.
 * @param {string} path
 * @param {Parameters<typeof send>[1]} [how]
 */
export async function call(path, how) {
  const response = await send(path, how);
  return response.status === 204 ? null : answered(how?.method ?? (how?.body === undefined ? "GET" : "POST"), () => response.json());
}

/**
 * All items of a list, page by page.
 * @param {string} path
 * @param {{signal?: AbortSignal, limit?: number}} [how]
 * @returns {AsyncGenerator<any[]>}
 */
export async function* pagesOf(path, { signal: stop, limit = 200 } = {}) {
  const join = path.includes("?") ? "&" : "?";
  let cursor = null;
  do {
    const after = cursor ? `&cursor=${encodeURIComponent(cursor)}` : "";
    const page = await call(`${path}${join}limit=${limit}${after}`, { signal: stop });
    yield page.items;
    cursor = page.next_cursor;
  } while (cursor);
}

/**
 * A query string of what is set; a list gives its name several times.
 * @param {Record<string, string | number | string[] | null | undefined>} values
 */
export function query(values) {
  const pairs = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined && one !== "") pairs.append(name, String(one));
    }
  }
  const text = pairs.toString();
  return text ? `?${text}` : "";
}

/**
 * Server-sent events of one connection, until it ends.
 * @param {string} path
 * @param {{lastId?: string, signal?: AbortSignal}} [how]
 * @returns {AsyncGenerator<{id: string, type: string, data: string}>}
 */
export async function* streamOf(path, { lastId = "", signal: stop } = {}) {
  const headers = lastId ? { "Last-Event-ID": lastId } : {};
  const own = new AbortController();
  const signal_ = stop ? AbortSignal.any([stop, own.signal]) : own.signal;
  try {
    const response = await unlessSilent(send(path, { accept: "text/event-stream", headers, signal: signal_ }));
    if (!response.headers.get("content-type")?.startsWith("text/event-stream")) {
      throw new Problem({ title: "No stream of events" }, response.status);
    }
    yield { id: "", type: "open", data: "" };
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { done, value } = await unlessSilent(reader.read());
      if (done) return;
      const blocks = (text + value).replaceAll("\r\n", "\n").split("\n\n");
      text = blocks.pop();
      for (const block of blocks) {
        const event = parseEvent(block);
        if (event) yield event;
      }
    }
  } finally {
    own.abort();
  }
}

/** What is waited for, or a problem when it takes longer than a stream is ever silent. */
function unlessSilent(wanted) {
  let timer = 0;
  const silence = new Promise((_, give) => { timer = setTimeout(() => give(new Problem({ title: "The stream went silent" }, 0)), SILENCE_MS); });
  return Promise.race([wanted, silence]).finally(() => clearTimeout(timer));
}

function parseEvent(block) {
  const event = { id: "", type: "message", data: "" };
  const data = [];
  for (const line of block.split("\n")) {
    const [, field, value] = /^([^:]*):? ?(.*)$/.exec(line) ?? [];
    if (field === "data") data.push(value);
    else if (field === "event") event.type = value;
    else if (field === "id") event.id = value;
  }
  event.data = data.join("\n");
  return data.length ? event : null;
}

/**
 * Hand a document of the service to the browser as a file; a plain link could not carry the token.
 * @param {string} path
 * @param {string} name
 */
export async function download(path, name) {
  const response = await send(path);
  const url = URL.createObjectURL(await answered("GET", () => response.blob()));
  const link = Object.assign(document.createElement("a"), { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
