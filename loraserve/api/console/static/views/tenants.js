// Tenants: limits, usage, cost, fairness and keys. A tenant's key sees its own alone.
import { all, api, path } from "../lib/api.js";
import { bytes, day, number, percent } from "../lib/format.js";
import { html, useState } from "../lib/html.js";
import { CopyAs, call, command, curl, python } from "../lib/recipe.js";
import { Bar, Dialog, Empty, Failure, Heading, Loading, Note, useAction, useLoaded } from "../lib/ui.js";
import { KEYS_WRITE, Keys } from "./keys.js";

const LIMITS = [
  ["requests_per_minute", "Requests per minute", number],
  ["tokens_per_minute", "Tokens per minute", number],
  ["max_concurrent_requests", "Requests at once", number],
  ["max_queued_requests", "Requests in the queue", number],
  ["max_kv_share", "Share of the KV blocks", (value) => percent(value)],
  ["max_adapters", "Adapters", number],
  ["max_stored_bytes", "Bytes stored", bytes],
  ["max_cached_bytes", "Bytes of kept answers", bytes],
];
const DAYS = 1;

function since() {
  return new Date(Date.now() - DAYS * 86_400_000).toISOString().replace(/\.\d+Z$/, "Z");
}

function usageUrl(groupBy, tenant) {
  const more = tenant ? `&tenant=${encodeURIComponent(tenant)}` : "";
  return `/api/v1/usage?group_by=${groupBy}&from=${encodeURIComponent(since())}${more}`;
}

function tokensOf(usage) {
  return usage ? usage.prompt_tokens + usage.completion_tokens : 0;
}

function costOf(usage) {
  return usage?.cost === null || usage?.cost === undefined ? "–" : `${usage.cost} ${usage.currency}`;
}

export function Tenants({ me, tenant }) {
  if (me.is_admin && !tenant) return html`<${EveryTenant} me=${me} />`;
  return html`<${OwnTenant} me=${me} name=${tenant ?? me.tenant} />`;
}

function OwnTenant({ me, name }) {
  const loaded = useLoaded(async () => {
    const [who, usage] = await Promise.all([api.get("/api/v1/whoami"), all(usageUrl("adapter"))]);
    return { who, usage: usage.items };
  }, [name], 15_000);
  return html`
    <${Heading} title="Tenant">${name}: its limits, and its usage of the last day.<//>
    ${loaded.error && html`<${Failure} error=${loaded.error} again=${() => loaded.reload()} />`}
    ${!loaded.value && !loaded.error && html`<${Loading} what="the tenant" />`}
    ${loaded.value && html`
      <section class="card" aria-labelledby="limits-title"><h2 id="limits-title">Limits</h2><${LimitFacts} limits=${loaded.value.who.limits} weight=${loaded.value.who.weight} /></section>
      <section class="card" aria-labelledby="usage-title"><h2 id="usage-title">Usage of the last day</h2><${UsageTable} rows=${loaded.value.usage} by="adapter" title="Adapter" /></section>
    `}
    <section class="card" aria-labelledby="keys-title"><h2 id="keys-title">Keys</h2>
      ${me.is_admin || me.scopes.includes(KEYS_WRITE)
        ? html`<${OwnKeys} me=${me} name=${name} />`
        : html`<p class="muted">Keys are made, rotated and revoked by an admin, or by a key with the scope <code>${KEYS_WRITE}</code>. Yours is ${me.key_id}, for ${me.scopes.join(", ")}.</p>`}
    </section>
  `;
}

// An admin that acts for a tenant sees its keys here too.
function OwnKeys({ me, name }) {
  const keys = useLoaded(() => all("/api/v1/keys", { most: 2000 }), [name]);
  if (keys.error && !keys.value) return html`<${Failure} error=${keys.error} again=${() => keys.reload()} />`;
  if (!keys.value) return html`<${Loading} what="keys" />`;
  return html`<${Keys} keys=${keys.value.items} root="/api/v1/keys" of=${null} me=${me} onChanged=${() => keys.reload(true)} />`;
}

function LimitFacts({ limits, weight }) {
  return html`<dl class="facts">
    <div><dt>Weight in the fair order</dt><dd class="num">${number(weight, weight % 1 ? 2 : 0)}</dd></div>
    ${LIMITS.map(([name, text, format]) => html`<div><dt>${text}</dt><dd class="num">${limits[name] === null ? "no limit" : format(limits[name])}</dd></div>`)}
  </dl>`;
}

function UsageTable({ rows, by, title }) {
  if (!rows.length) return html`<p class="muted">No tokens were delivered.</p>`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${`Usage by ${by}`}><table>
    <thead><tr><th scope="col">${title}</th><th scope="col" class="num">Requests</th><th scope="col" class="num">Prompt</th><th scope="col" class="num">Cached</th><th scope="col" class="num">Completion</th><th scope="col" class="num">Cost</th></tr></thead>
    <tbody>${[...rows].sort((one, other) => tokensOf(other) - tokensOf(one)).map((row) => html`<tr>
      <td>${row[by] ?? "base"}</td><td class="num">${number(row.num_requests)}</td><td class="num">${number(row.prompt_tokens)}</td><td class="num">${number(row.cached_tokens)}</td><td class="num">${number(row.completion_tokens)}</td><td class="num">${costOf(row)}</td>
    </tr>`)}</tbody>
  </table></div>`;
}

function EveryTenant({ me }) {
  const loaded = useLoaded(async () => {
    const [tenants, usage] = await Promise.all([all("/api/v1/tenants"), all(usageUrl("tenant"))]);
    return { tenants: tenants.items, usage: new Map(usage.items.map((row) => [row.tenant, row])) };
  }, [], 15_000);
  const [open, setOpen] = useState(null);
  const [isCreating, setCreating] = useState(false);
  const { tenants = [], usage = new Map() } = loaded.value ?? {};
  const tokens = tenants.map((one) => tokensOf(usage.get(one.name)));
  const allTokens = tokens.reduce((sum, value) => sum + value, 0);
  // what is fair is among those that asked for something
  const weights = tenants.reduce((sum, one, index) => sum + (tokens[index] ? one.weight : 0), 0);
  return html`
    <${Heading} title="Tenants" actions=${html`<button type="button" class="primary" onClick=${() => setCreating(true)}>New tenant</button>`}>
      Limits, keys and usage of the last day. The share of tokens is a tenant's part of all of them; its due is its weight among the tenants that were active.
    <//>
    ${loaded.error && html`<${Failure} error=${loaded.error} again=${() => loaded.reload()} />`}
    ${!loaded.value && !loaded.error && html`<${Loading} what="tenants" />`}
    ${loaded.value && html`<section class="card" aria-label="All tenants">
      ${tenants.length === 0 ? html`<${Empty} title="No tenants">Make one to hand out keys.<//>` : html`
      <div class="scroll" tabindex="0" role="region" aria-label="Tenants"><table>
        <thead><tr><th scope="col">Tenant</th><th scope="col" class="num">Weight</th><th scope="col" class="num">Requests</th><th scope="col" class="num">Tokens</th><th scope="col">Share of tokens</th><th scope="col" class="num">Cost</th></tr></thead>
        <tbody>${tenants.map((one, index) => {
          const row = usage.get(one.name);
          const had = allTokens ? tokens[index] / allTokens : 0;
          const fair = tokens[index] && weights ? one.weight / weights : null;
          return html`<tr key=${one.id}>
            <td><button type="button" class="link" onClick=${() => setOpen(one.name)}>${one.name}</button></td>
            <td class="num">${number(one.weight, one.weight % 1 ? 2 : 0)}</td>
            <td class="num">${number(row?.num_requests ?? 0)}</td>
            <td class="num">${number(tokens[index])}</td>
            <td>${fair === null ? html`<span class="muted">–</span>` : html`<div class="stack">
              <${Bar} isThin label=${`Share of ${one.name}`} total=${1} parts=${[{ kind: "decode", name: "had", value: had, text: percent(had) }]} />
              <span class="small num">${percent(had)}, due ${percent(fair)}</span></div>`}</td>
            <td class="num">${costOf(row)}</td>
          </tr>`;
        })}</tbody>
      </table></div>`}
    </section>`}
    ${isCreating && html`<${NewTenant} onClose=${() => setCreating(false)} onMade=${(name) => {
      setCreating(false);
      setOpen(name);
      void loaded.reload(true);
    }} />`}
    ${open && html`<${TenantDialog} key=${open} me=${me} tenant=${tenants.find((one) => one.name === open)} name=${open} onClose=${() => setOpen(null)} onChanged=${() => loaded.reload(true)} />`}
  `;
}

function NewTenant({ onClose, onMade }) {
  const [name, setName] = useState("");
  const [act, { isRunning, error }] = useAction(async () => onMade((await api.post("/api/v1/tenants", { name })).name));
  return html`<${Dialog} title="New tenant" onClose=${onClose}>
    <form class="stack" onSubmit=${(event) => {
      event.preventDefault();
      void act();
    }}>
      <label><span>Name</span><input required maxlength="63" pattern="[a-z0-9][a-z0-9._\\-]*" value=${name} autocomplete="off" spellcheck=${false} onInput=${(event) => setName(event.currentTarget.value)} /></label>
      ${error && html`<${Failure} error=${error} />`}
      <div class="actions end"><button type="button" onClick=${onClose}>Cancel</button><button type="submit" class="primary" disabled=${isRunning}>Make it</button></div>
      <${CopyAs} recipe=${() => ({
        curl: curl("POST", "/api/v1/tenants", { json: { name: name || "NAME" } }),
        python: python(call("client.tenants.create", [name || "NAME"])),
        cli: command("tenant", "create", name || "NAME"),
      })} />
    </form>
  <//>`;
}

function TenantDialog({ me, tenant, name, onClose, onChanged }) {
  const root = `/api/v1/tenants/${path(name)}`;
  const keys = useLoaded(() => all(`${root}/keys`, { most: 2000 }), [name]);
  const usage = useLoaded(() => all(usageUrl("adapter", name)), [name]);
  return html`<${Dialog} title=${name} onClose=${onClose} isWide>
    ${tenant && html`<${LimitsForm} tenant=${tenant} root=${root} onChanged=${onChanged} />`}
    <h3>Keys</h3>
    ${keys.error && html`<${Failure} error=${keys.error} />`}
    ${keys.value ? html`<${Keys} keys=${keys.value.items} root=${`${root}/keys`} of=${name} me=${me} onChanged=${() => keys.reload(true)} />` : !keys.error && html`<${Loading} what="keys" />`}
    <h3>Usage of the last day</h3>
    ${usage.error && html`<${Failure} error=${usage.error} />`}
    ${usage.value && html`<${UsageTable} rows=${usage.value.items} by="adapter" title="Adapter" />`}
  <//>`;
}

function limitsRecipe(name, { weight, ...limits }, root) {
  const flags = Object.entries(limits).flatMap(([limit, value]) => [`--${limit.replaceAll("_", "-")}`, value ?? "none"]);
  return {
    curl: curl("PATCH", root, { json: { limits, weight } }),
    python: python(call("client.tenants.update", [name], { limits, weight })),
    cli: command("tenant", "set", name, "--weight", weight, flags),
  };
}

function LimitsForm({ tenant, root, onChanged }) {
  const [values, setValues] = useState(() => ({ ...tenant.limits, weight: tenant.weight }));
  const [isSaved, setSaved] = useState(false);
  const [act, { isRunning, error }] = useAction(async () => {
    const { weight, ...limits } = values;
    await api.patch(root, { limits, weight });
    setSaved(true);
    onChanged();
  });
  const set = (name, text) => {
    setSaved(false);
    setValues({ ...values, [name]: text === "" ? null : Number(text) });
  };
  return html`<form class="stack" onSubmit=${(event) => {
    event.preventDefault();
    void act();
  }}>
    <h3>Limits</h3>
    <div class="fields">
      <label><span>Weight</span><input type="number" min="0.01" step="any" required value=${values.weight} onInput=${(event) => set("weight", event.currentTarget.value)} /></label>
      ${LIMITS.map(([name, text]) => html`<label key=${name}><span>${text}</span>
        <input type="number" min="0" step=${name === "max_kv_share" ? "any" : 1} placeholder="no limit" value=${values[name] ?? ""} onInput=${(event) => set(name, event.currentTarget.value)} /></label>`)}
    </div>
    <div aria-live="polite">${isSaved && html`<${Note}>Saved. It holds from now on.<//>`}${error && html`<${Failure} error=${error} />`}</div>
    <div class="actions end"><button type="submit" disabled=${isRunning}>Save the limits</button></div>
    <${CopyAs} label="The limits as curl, Python or a command" recipe=${() => limitsRecipe(tenant.name, values, root)} />
  </form>`;
}
