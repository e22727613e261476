// Requests to the API, with the session's key. What the server refuses is an ApiError with its words.
import { REVOKED, session, signOut } from "./session.js";

export class ApiError extends Error {
  constructor(status, body) {
    const told = body?.error ?? body ?? {};
    super(told.detail ?? told.message ?? `The server answered with ${status}.`);
    this.status = status;
    this.code = told.code ?? null;
    this.problems = (body?.errors ?? []).map((one) => one.detail).filter(Boolean);
    this.received = body?.received;
  }
}

export class Unreachable extends Error {
  constructor() {
    super("The server can't be reached. It may be restarting, or the network is down.");
  }
}

export function path(...parts) {
  return parts.map((part) => encodeURIComponent(part)).join("/");
}

function headersOf(key, tenant, more) {
  const headers = { ...(key ? { Authorization: `Bearer ${key}` } : {}), ...more };
  if (tenant) headers["X-Tenant"] = tenant;
  return headers;
}

// The whole answer of one request; `as` is another key than the session's, which signs nobody out.
export async function send(method, url, { json, body, headers, signal, as } = {}) {
  const { key, tenant } = session.value;
  const init = { method, signal, cache: "no-store", credentials: "omit" };
  init.headers = as ? headersOf(as, null, headers) : headersOf(key, tenant, headers);
  if (json !== undefined) {
    init.body = JSON.stringify(json);
    init.headers["Content-Type"] = "application/json";
  } else if (body !== undefined) {
    init.body = body;
  }
  let answer;
  try {
    answer = await fetch(url, init);
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Unreachable();
  }
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => null);
  if (answer.status === 401 && !as && key === session.value.key) signOut(REVOKED);
  throw new ApiError(answer.status, told);
}

async function read(answer) {
  return answer.status === 204 ? null : answer.json();
}

export const api = {
  get: async (url, how) => read(await send("GET", url, how)),
  post: async (url, json, how) => read(await send("POST", url, { json, ...how })),
  put: async (url, json, how) => read(await send("PUT", url, { json, ...how })),
  patch: async (url, json, how) => read(await send("PATCH", url, { json, ...how })),
  delete: async (url, how) => read(await send("DELETE", url, how)),
};

// Every page of a list, up to `most` items.
export async function all(url, { most = 1000, signal, headers } = {}) {
  const items = [];
  let cursor = null;
  let first = null;
  do {
    const at = new URL(url, location.origin);
    at.searchParams.set("limit", "200");
    if (cursor) at.searchParams.set("cursor", cursor);
    const page = await api.get(at.pathname + at.search, { signal, headers });
    first ??= page;
    items.push(...page.data);
    cursor = page.next_cursor;
  } while (cursor && items.length < most);
  return { items: items.slice(0, most), first, isWhole: !cursor && items.length <= most };
}

// The events of a stream: {name, data}. EventSource can't send a key, so the body is read here.
export async function* events(method, url, { json, signal, headers } = {}) {
  const answer = await send(method, url, { json, signal, headers: { Accept: "text/event-stream", ...headers } });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      let piece;
      try {
        piece = await reader.read();
      } catch (error) {
        if (signal?.aborted) throw error;
        throw new Unreachable();
      }
      if (piece.done) return;
      held += piece.value;
      for (let end = held.indexOf("\n\n"); end >= 0; end = held.indexOf("\n\n")) {
        const frame = held.slice(0, end);
        held = held.slice(end + 2);
        let name = "message";
        let data = "";
        for (const line of frame.split("\n")) {
          if (line.startsWith("event: ")) name = line.slice(7);
          else if (line.startsWith("data: ")) data += line.slice(6);
        }
        if (data) yield { name, data: JSON.parse(data) };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
