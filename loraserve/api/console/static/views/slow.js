// The slowest requests of the last hour, and what they waited for.
import { api } from "../lib/api.js";
import { day, number, percent, seconds } from "../lib/format.js";
import { html, useState } from "../lib/html.js";
import { Bar, Chip, Choice, Empty, Failure, Heading, Legend, Loading, useLoaded } from "../lib/ui.js";

const STAGES = [
  { kind: "queue", name: "queue" },
  { kind: "adapter", name: "adapter" },
  { kind: "prefill", name: "prefill" },
  { kind: "decode", name: "decode" },
  { kind: "other", name: "elsewhere" },
];

const WHERE = { device: "on the device, but not free to use", host: "in the host's memory", disk: "on disk" };

function stagesOf(one) {
  const decode = one.first_token_s === null ? 0 : Math.max(0, one.duration_s - one.first_token_s);
  const known = one.queue_s + one.adapter_s + one.prefill_s + decode;
  const values = {
    queue: one.queue_s,
    adapter: one.adapter_s,
    prefill: one.prefill_s,
    decode,
    other: Math.max(0, one.duration_s - known),
  };
  return STAGES.map((stage) => ({ ...stage, value: values[stage.kind], text: seconds(values[stage.kind]) }));
}

// The cause in words, and where to go on.
function causeOf(one, stages) {
  const most = stages.reduce((best, stage) => (stage.value > best.value ? stage : best));
  const share = percent(most.value / one.duration_s);
  const perToken = one.completion_tokens > 1 ? (stages[3].value / (one.completion_tokens - 1)) : null;
  if (one.first_token_s === null) {
    return {
      text: `No token came in ${seconds(one.duration_s)}: it ended with "${one.outcome}".`,
      next: one.outcome === "adapter_not_ready"
        ? html`Its adapter couldn't be loaded in time. <a href="#/residency">See what fills the memory</a>, or pin the adapter.`
        : html`The client may have left, or the server refused it: see the outcome, and the server's log.`,
    };
  }
  switch (most.kind) {
    case "queue":
      return {
        text: `${share} of the time it waited in the queue: other requests had all the places or all the KV memory.`,
        next: html`<a href="#/overview">See the queue and the KV use</a>. More places (--max-num-seqs) or memory (--memory-budget), a higher weight for the tenant, or another replica shorten it.`,
      };
    case "adapter":
      return {
        text: `${share} of the time it waited for its adapter's weights, which were ${WHERE[one.adapter_tier] ?? "not on the device"}${one.adapter_read_s > 0 ? ` (reading and checking them: ${seconds(one.adapter_read_s)})` : ""}.`,
        next: html`<a href=${`#/residency?find=${encodeURIComponent(one.answered_by)}`}>See where the adapter is now</a>: an admin can pin it, and warming it before traffic comes helps too.`,
      };
    case "prefill":
      return {
        text: `${share} of the time went into its prompt: ${number(one.prompt_tokens)} tokens, of which ${number(one.cached_tokens)} were found in the prefix cache.`,
        next: html`A shorter prompt, or one that begins like earlier prompts of the same version, is computed faster.`,
      };
    case "decode":
      return {
        text: `${share} of the time went into the answer itself: ${number(one.completion_tokens)} tokens${perToken === null ? "" : `, ${seconds(perToken)} each`}.`,
        next: html`A long answer takes long. If the time per token is high, <a href="#/overview">compare it with the others'</a>: many requests share a step, and preempted ones start over.`,
      };
    default:
      return {
        text: `${share} of the time passed outside the engine: between processes, or in an answer that fell back to another version.`,
        next: html`The server's processor may be busy, or the client read slowly.`,
      };
  }
}

export function Slow({ me, tenant }) {
  const [order, setOrder] = useState("duration");
  const loaded = useLoaded(() => api.get(`/api/v1/requests/slow?by=${order}&limit=50`), [order], 10_000);
  const rows = loaded.value?.data;
  const total = rows?.length ? Math.max(...rows.map((one) => one.duration_s)) : 1;
  return html`
    <${Heading} title="Why was it slow?" actions=${html`<${Choice} label="Slowest by" value=${order} onChange=${setOrder}
      options=${[["duration", "Whole answer"], ["first_token", "First token"]]} />`}>
      The slowest requests of the last hour on this server, and where their time went.
    <//>
    ${loaded.error && html`<${Failure} error=${loaded.error} again=${() => loaded.reload()} />`}
    ${!rows && !loaded.error && html`<${Loading} what="requests" />`}
    ${rows &&
    html`<section class="card">
      <${Legend} parts=${STAGES} />
      ${rows.length === 0 &&
      html`<${Empty} title="No request has ended in the last hour">Ask something in the <a href="#/playground">playground</a>.<//>`}
      <ol class="slow" role="list">
        ${rows.map((one) => html`<${SlowRow} key=${one.id + one.started_at} one=${one} total=${total} hasTenant=${me.is_admin && !tenant} />`)}
      </ol>
    </section>`}
  `;
}

function SlowRow({ one, total, hasTenant }) {
  const stages = stagesOf(one);
  const cause = causeOf(one, stages);
  const isBad = !["stop", "length", "abort"].includes(one.outcome);
  return html`<li>
    <div class="spread">
      <div class="row">
        <strong class="num">${seconds(one.duration_s)}</strong>
        <span>${one.answered_by}</span>
        ${hasTenant && html`<${Chip}>${one.tenant}<//>`}
        <${Chip} kind=${isBad ? "bad" : one.outcome === "abort" ? "warn" : "plain"}>${one.outcome === "abort" ? "client left" : one.outcome}<//>
      </div>
      <span class="muted small num">first token ${seconds(one.first_token_s)} · ${number(one.completion_tokens)} tokens · ${day(one.started_at)}</span>
    </div>
    <div style=${{ width: `${Math.max(4, (100 * one.duration_s) / total)}%` }}>
      <${Bar} isThin label="Time" parts=${stages} total=${one.duration_s} />
    </div>
    <details>
      <summary>Why?</summary>
      <div class="stack">
        <p><strong>${cause.text}</strong></p>
        <p>${cause.next}</p>
        <${Legend} parts=${stages} />
        <dl class="facts">
          ${[
            ["Answer", one.id],
            ["Asked for", one.asked],
            ["Answered by", one.answered_by],
            ["Adapter was", WHERE[one.adapter_tier] === undefined ? "" : one.adapter_tier === "device" ? "on the device" : WHERE[one.adapter_tier]],
            ["Tenant", one.tenant],
            ["Prompt", `${number(one.prompt_tokens)} tokens, ${number(one.cached_tokens)} cached`],
          ].filter(([, value]) => value !== "").map(([name, value]) => html`<div><dt>${name}</dt><dd class="num">${value}</dd></div>`)}
        </dl>
      </div>
    </details>
  </li>`;
}
