// Every word with the service: JSON requests, problems as errors, streams of server-sent events, and the token.

import { signal } from "./store.js";

const TOKEN = "unshard-token";

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

/** @param {string} token */
export function signIn(token) {
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
  const headers = { Accept: how.accept ?? "application/json", ...how.headers };
  const token = sessionStorage.getItem(TOKEN);
  if (token) headers.Authorization = `Bearer ${token}`;
  if (how.body !== undefined) headers["Content-Type"] = "application/json";
  const body = how.body === undefined ? undefined : JSON.stringify(how.body);
  let response;
  try {
    response = await fetch(path, { method: how.method ?? (body ? "POST" : "GET"), headers, body, signal: how.signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem({ title: "The service does not answer", hint: "Is it running? The page tries again by itself." }, 0);
  }
  // A refusal that arrives after a sign-in was of the token before it, or of none.
  if (response.status === 401 && token === sessionStorage.getItem(TOKEN)) tokenWanted.set(true);
  if (!response.ok) throw await problemOf(response);
  return response;
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
  return response.status === 204 ? null : response.json();
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
  const response = await send(path, { accept: "text/event-stream", headers, signal: stop });
  if (!response.headers.get("content-type")?.startsWith("text/event-stream")) {
    throw new Problem({ title: "No stream of events" }, response.status);
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    yield { id: "", type: "open", data: "" };
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (text + value).replaceAll("\r\n", "\n").split("\n\n");
      text = blocks.pop();
      for (const block of blocks) {
        const event = parseEvent(block);
        if (event) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
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
  const url = URL.createObjectURL(await response.blob());
  const link = Object.assign(document.createElement("a"), { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
