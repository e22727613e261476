// The live figures, and their last hour: what the server has of it, then what the page has seen.
import { api, events } from "./api.js";
import { REVOKED, session, signOut } from "./session.js";
import { Store } from "./store.js";

const INTERVAL_S = 2;
const KEPT_S = 3600;
const WINDOW_S = 60; // percentiles are of the last minute
const AGAIN_MS = [500, 1000, 2000, 5000];

export const live = new Store({ state: "connecting", now: null, samples: [] });

// The value below which `share` of a histogram lies, by its buckets' upper bounds.
export function percentile(counts, bounds, share) {
  const total = counts.reduce((sum, count) => sum + count, 0);
  if (!total) return null;
  let left = share * total;
  for (let index = 0; index < counts.length; index += 1) {
    if (counts[index] >= left) {
      const upper = bounds[index] ?? bounds[bounds.length - 1];
      const lower = index ? bounds[index - 1] : 0;
      return lower + ((upper - lower) * left) / counts[index];
    }
    left -= counts[index];
  }
  return bounds[bounds.length - 1];
}

function difference(after, before) {
  return after.map((count, index) => count - before[index]);
}

function sampleOf(figures, raws) {
  const at = Date.parse(figures.at) / 1000;
  const last = raws.at(-1);
  const sample = { at, waiting: figures.num_waiting, running: figures.num_running };
  const engine = figures.engine;
  if (engine) {
    const memory = engine.memory;
    sample.kv = memory.budget_bytes ? (100 * memory.kv_used_bytes) / memory.budget_bytes : 0;
    sample.adapters = memory.budget_bytes
      ? (100 * (memory.adapters_used_bytes + memory.adapters_idle_bytes)) / memory.budget_bytes
      : 0;
  }
  // a server that restarted counts from 0 again
  const isAfter = last && figures.num_ended >= last.num_ended && figures.completion_tokens >= last.completion_tokens;
  if (!isAfter) raws.length = 0;
  if (isAfter && at > last.at) {
    const passed = at - last.at;
    sample.tokens = (figures.completion_tokens - last.completion_tokens) / passed;
    sample.requests = (figures.num_ended - last.num_ended) / passed;
    const first = raws.find((raw) => at - raw.at <= WINDOW_S) ?? last;
    const began = difference(figures.first_token_counts, first.first_token_counts);
    const gaps = difference(figures.per_token_counts, first.per_token_counts);
    for (const [name, share] of [["p50", 0.5], ["p95", 0.95], ["p99", 0.99]]) {
      sample[`first_${name}`] = percentile(began, figures.bounds_s, share);
      sample[`token_${name}`] = percentile(gaps, figures.bounds_s, share);
    }
    sample.perMinute = ((figures.num_ended - first.num_ended) / (at - first.at)) * 60;
    sample.failed = figures.num_failed - first.num_failed;
  }
  raws.push({ ...figures, at });
  while (raws.length > 1 && at - raws[0].at > WINDOW_S) raws.shift();
  return sample;
}

// What happened before the page was open, in the form of its samples.
async function past(signal) {
  const { data } = await api.get("/api/v1/live/history", { signal });
  return data.map((point) => {
    const sample = { at: Date.parse(point.at) / 1000, waiting: point.num_waiting, running: point.num_running };
    if (point.kv_share !== null) Object.assign(sample, { kv: 100 * point.kv_share, adapters: 100 * point.adapters_share });
    sample.tokens = point.tokens_per_s;
    sample.perMinute = point.requests_per_minute;
    for (const name of ["p50", "p95", "p99"]) {
      sample[`first_${name}`] = point.first_token_s?.[name] ?? null;
      sample[`token_${name}`] = point.per_token_s?.[name] ?? null;
    }
    return sample;
  });
}

let running = null;

// Follow the figures for the session's key until `stop`.
export function follow() {
  stop();
  const ending = new AbortController();
  running = ending;
  live.set({ state: "connecting", now: null, samples: [] });
  void keepFollowing(ending.signal);
}

export function stop() {
  running?.abort();
  running = null;
}

async function keepFollowing(signal) {
  const raws = [];
  let samples = [];
  for (let failures = 0; !signal.aborted; failures += 1) {
    try {
      // charts may begin empty: the figures matter more
      if (!samples.length) samples = await past(signal).catch(() => []);
      const stream = events("GET", `/api/v1/live?interval_s=${INTERVAL_S}`, { signal });
      for await (const { name, data } of stream) {
        if (signal.aborted) return;
        if (name === "error" && data.error.status === 401) {
          signOut(REVOKED);
          return;
        }
        if (name !== "figures") break;
        failures = -1;
        const sample = sampleOf(data, raws);
        // the first of a stream has no rates: those before it are seconds old
        samples = [...samples, sample.tokens === undefined ? { ...samples.at(-1), ...sample } : sample];
        if (samples.length > KEPT_S / INTERVAL_S) samples = samples.slice(-KEPT_S / INTERVAL_S);
        live.set({ state: "live", now: data, samples });
      }
    } catch (error) {
      if (signal.aborted || session.value.key === null) return;
      live.set({ ...live.value, state: "away", why: error.message });
    }
    await new Promise((wake) => setTimeout(wake, AGAIN_MS[Math.max(0, Math.min(failures, AGAIN_MS.length - 1))]));
  }
}
