// What happens now, and in the last hour.
import { api } from "../lib/api.js";
import { Chart } from "../lib/chart.js";
import { bytes, number, percent, seconds, short } from "../lib/format.js";
import { html, useState } from "../lib/html.js";
import { live } from "../lib/live.js";
import { useStore } from "../lib/store.js";
import { Choice, Heading, Loading, Note, useLoaded } from "../lib/ui.js";

const BASE_MS = 60_000;

const QUANTILES = [
  { field: "p50", name: "p50", colour: "--series-1" },
  { field: "p95", name: "p95", colour: "--series-2", dash: [6, 3] },
  { field: "p99", name: "p99", colour: "--series-3", dash: [2, 3] },
];

function quantiles(prefix) {
  return QUANTILES.map((one) => ({ ...one, field: `${prefix}_${one.field}` }));
}

function Stat({ title, value, children, href }) {
  return html`<div class="card stat">
    <p class="card-title">${href ? html`<a href=${href}>${title}</a>` : title}</p>
    <p class="figure num">${value}</p>
    <p class="muted small num">${children}</p>
  </div>`;
}

export function Overview({ me, tenant }) {
  const { state, now, samples } = useStore(live);
  const [minutes, setMinutes] = useState(5);
  const base = useLoaded(() => api.get("/api/v1/base"), [], BASE_MS).value;
  if (!now) return html`<${Heading} title="Overview" /><${Loading} what="live figures" />`;
  const last = samples.at(-1);
  const engine = now.engine;
  const whose = me.is_admin && !tenant ? "All tenants' requests" : `Requests of ${tenant ?? me.tenant}`;
  return html`
    <${Heading}
      title="Overview"
      actions=${html`<${Choice} label="Time shown" value=${minutes} onChange=${setMinutes}
        options=${[[5, "5 min"], [15, "15 min"], [60, "1 h"]]} />`}
    >
      ${whose}, live. Percentiles are of the last minute; charts go back an hour, or to the server’s start.
    <//>
    ${state === "away" && html`<${Note} kind="warn">The server can't be reached; these are its last figures.<//>`}
    ${!now.is_ready && html`<${Note} kind="warn">The server isn't ready: ${now.status ?? "the engine is starting"}<//>`}
    ${base?.precision?.advice && html`<${Note} kind="warn">
      Rounding the base changes its answers: ${kept(base.precision)}. To keep more, start the server with
      <code>${base.precision.advice}</code>.
    <//>`}
    <section class="stats" aria-label="Now">
      <${Stat} title="Tokens / s" value=${short(last.tokens ?? null)}>
        ${number(now.completion_tokens)} since the start
      <//>
      <${Stat} title="Requests / min" value=${short(last.perMinute ?? null)}>
        ${number(now.num_ended)} ended, ${number(now.num_failed)} failed
      <//>
      <${Stat} title="First token, p50" value=${seconds(last.first_p50 ?? null)} href="#/slow">
        p95 ${seconds(last.first_p95)} · p99 ${seconds(last.first_p99)}
      <//>
      <${Stat} title="Per token, p50" value=${seconds(last.token_p50 ?? null)}>
        p95 ${seconds(last.token_p95)} · p99 ${seconds(last.token_p99)}
      <//>
      <${Stat} title="In the queue" value=${number(now.num_waiting)}>
        ${number(now.num_running)} running${engine ? ` of ${number(engine.max_num_seqs)} at once` : ""}
      <//>
      ${engine &&
      html`<${Stat} title="KV in use" value=${percent(kvShare(engine))} href="#/residency">
        ${bytes(engine.memory.kv_used_bytes)} of ${bytes(engine.memory.budget_bytes)}, shared with adapters
      <//>`}
    </section>
    <section class="charts" aria-label="The last minutes">
      <${Chart} title="Tokens per second" samples=${samples} minutes=${minutes} format=${short}
        words=${`Tokens per second, now ${short(last.tokens ?? null)}`}
        series=${[{ field: "tokens", name: "now", colour: "--series-1", isFilled: true }]} />
      <${Chart} title="Time to first token" samples=${samples} minutes=${minutes} format=${seconds}
        words=${`Time to first token, median ${seconds(last.first_p50 ?? null)}`} series=${quantiles("first")} />
      <${Chart} title="Time per token" samples=${samples} minutes=${minutes} format=${seconds}
        words=${`Time per token, median ${seconds(last.token_p50 ?? null)}`} series=${quantiles("token")} />
      <${Chart} title="Requests" samples=${samples} minutes=${minutes} format=${(value) => number(value)}
        words=${`${now.num_running} requests running, ${now.num_waiting} waiting`}
        series=${[
          { field: "running", name: "running", colour: "--series-1" },
          { field: "waiting", name: "waiting", colour: "--series-2", dash: [6, 3] },
        ]} />
      ${engine &&
      html`<${Chart} title="Share of the device's memory" samples=${samples} minutes=${minutes}
        format=${(value) => (value === null ? "–" : `${number(value)} %`)}
        words=${`KV uses ${percent(kvShare(engine))} of the budget`}
        series=${[
          { field: "kv", name: "KV in use", colour: "--series-1" },
          { field: "adapters", name: "adapters", colour: "--series-2", dash: [6, 3] },
        ]} />`}
    </section>
    ${engine && html`<${EngineFacts} engine=${engine} base=${base} />`}
  `;
}

function kvShare(engine) {
  return engine.memory.budget_bytes ? engine.memory.kv_used_bytes / engine.memory.budget_bytes : 0;
}

function kept(precision) {
  return `the likeliest token of float32 at ${percent(precision.top1_agreement, 1)} of a text’s positions`;
}

function defaultsOf(base) {
  const named = Object.entries(base?.generation_defaults ?? {}).map(([name, value]) => `${name} ${value}`);
  return named.join(", ") || "the API’s own";
}

function EngineFacts({ engine, base }) {
  const step = engine.num_steps ? engine.step_s / engine.num_steps : null;
  const facts = [
    ["Base", base ? `${base.id}, ${base.quantization === "none" ? base.dtype : base.quantization}` : "–"],
    ["Rounding keeps", base?.precision ? kept(base.precision) : base?.precision_note || "not measured yet"],
    ["Defaults of requests", defaultsOf(base)],
    ["Sequences running in the engine", `${number(engine.num_running)} of ${number(engine.max_num_seqs)}`],
    ["Waiting in the engine", `${number(engine.num_waiting)}, ${number(engine.num_waiting_for_adapter)} for their adapter`],
    ["Mean step since the start", seconds(step)],
    ["Preemptions", number(engine.num_preemptions)],
    ["Adapters loaded from disk", number(engine.adapter_loads)],
    ["Adapters evicted from the device", number(engine.device_evictions)],
    ["Restarts of the engine", number(engine.num_restarts)],
  ];
  return html`<section class="card" aria-labelledby="engine-title">
    <h2 id="engine-title">Engine</h2>
    <dl class="facts">${facts.map(([name, value]) => html`<div><dt>${name}</dt><dd class="num">${value}</dd></div>`)}</dl>
  </section>`;
}
