// Every adapter as a tile by its bytes, in the colour of the memory that it is in.
import { all, api, path } from "../lib/api.js";
import { Certificate } from "../lib/certificate.js";
import { ago, bytes, number, percent } from "../lib/format.js";
import { html, useEffect, useState } from "../lib/html.js";
import { live } from "../lib/live.js";
import { CopyAs, call, commandFor, curl, python } from "../lib/recipe.js";
import { useStore } from "../lib/store.js";
import { Bar, Chip, Dialog, Empty, Failure, Heading, Legend, Loading, Note, useAction, useLoaded } from "../lib/ui.js";

const TIERS = [
  ["device", "on the device"],
  ["loading", "loading"],
  ["host", "in the host's memory"],
  ["disk", "on disk"],
  ["quarantined", "quarantined"],
];
const SHOWN = 1000;
const NAMED_WIDTH = 60; // pixels of a tile that its name fits on

function kindOf(one) {
  return one.state === "quarantined" ? "quarantined" : one.tier;
}

function memoryParts(memory) {
  const parts = [
    ["kv-used", "KV in use", memory.kv_used_bytes],
    ["kv-idle", "KV kept for prefixes", memory.kv_idle_bytes],
    ["device", "adapters in use", memory.adapters_used_bytes],
    ["device-idle", "adapters idle", memory.adapters_idle_bytes],
    ["free", "free", memory.free_bytes],
  ];
  return parts.map(([kind, name, value]) => ({ kind, name, value, text: bytes(value) }));
}

const MOST = 5000;
const ROWS = 200; // of a page
const TIERS_MS = 3_000;
const PANEL_MS = 3_000;
const EVERYTHING_MS = 60_000; // at least: many rows cost a server no more than a few
const PAGE_MS = 24_000; // of so many rows
const UNKNOWN_PAGE_MS = 3_000; // where a version was loaded that the rows don't have

export function Residency({ me, query }) {
  const loaded = useLoaded(
    () => all("/api/v1/residency", { most: MOST }),
    [],
    (value) => Math.max(EVERYTHING_MS, PAGE_MS * Math.ceil((value?.items.length ?? 0) / ROWS)),
  );
  // where all are now, in one small answer without their names
  const tiers = useLoaded(() => api.get("/api/v1/residency/tiers"), [], TIERS_MS);
  const [newest, setNewest] = useState(new Map()); // rows that a panel has loaded since
  useEffect(() => setNewest(new Map()), [loaded.value]);
  const { now } = useStore(live);
  const [hidden, setHidden] = useState([]);
  const [wanted, setWanted] = useState(query.get("find") ?? "");
  const [open, setOpen] = useState(null);
  useEffect(() => setWanted(query.get("find") ?? ""), [query.get("find")]);
  const error = loaded.error ?? tiers.error;
  const memory = now?.engine?.memory ?? loaded.value?.first.memory;
  const rows = merged(loaded.value?.items ?? [], newest, tiers.value);
  const isUnknown = loaded.value?.isWhole && hasOthers(rows, tiers.value);
  useEffect(() => {
    // published since the rows were loaded
    if (!isUnknown) return undefined;
    const timer = setTimeout(() => loaded.reload(true), UNKNOWN_PAGE_MS * Math.ceil(rows.length / ROWS));
    return () => clearTimeout(timer);
  }, [isUnknown, loaded.value]);
  // weights, which versions of one digest share, as the memory above counts them
  const weights = new Map(TIERS.map(([kind]) => [kind, new Set()]));
  for (const one of rows) weights.get(kindOf(one))?.add(one.digest);
  const text = wanted.trim().toLowerCase();
  const shown = rows
    .filter((one) => !hidden.includes(kindOf(one)) && `${one.tenant}/${one.name}@${one.version}`.includes(text))
    .sort((one, other) => rank(one) - rank(other) || other.size_bytes - one.size_bytes);
  const tiles = tilesOf(shown);
  const largest = Math.max(1, ...shown.map((one) => one.size_bytes));
  const chosen = open && rows.find((one) => keyOf(one) === open);
  return html`
    <${Heading} title="Residency">
      Where each version's weights are now. ${me.is_admin ? "KV blocks and adapters share one budget of the device's memory." : "You see the weights that your own requests loaded."}
    <//>
    ${error && html`<${Failure} error=${error} again=${() => loaded.reload()} />`}
    ${memory &&
    html`<section class="card" aria-labelledby="budget-title">
      <div class="spread"><h2 id="budget-title">Device memory</h2><span class="num">${bytes(memory.budget_bytes)} for KV and adapters</span></div>
      <${Bar} label="Device memory" parts=${memoryParts(memory)} total=${memory.budget_bytes} />
      <${Legend} parts=${memoryParts(memory)} />
      <p class="muted small num">${number(memory.num_device_adapters)} adapters on the device; ${number(memory.num_host_adapters)} in the host's memory, ${bytes(memory.host_adapter_bytes)} of ${bytes(memory.host_budget_bytes)}</p>
    </section>`}
    <section class="card" aria-labelledby="map-title">
      <h2 id="map-title">Adapters</h2>
      ${!loaded.value && !error && html`<${Loading} what="adapters" />`}
      ${loaded.value && rows.length === 0 && html`<${Empty} title="No adapters yet"><a href="#/adapters">Upload one</a>, and it appears here.<//>`}
      ${rows.length > 0 &&
      html`
        <div class="row">
          <label><span class="hidden">Find a version</span>
            <input type="search" placeholder="Find a version" value=${wanted} onInput=${(event) => setWanted(event.currentTarget.value)} /></label>
          ${TIERS.map(([kind, name]) => html`<label class="inline small" key=${kind}>
            <input type="checkbox" checked=${!hidden.includes(kind)} onChange=${() => setHidden(hidden.includes(kind) ? hidden.filter((one) => one !== kind) : [...hidden, kind])} />
            <span class="row small"><span class=${`swatch part-${kind}`} aria-hidden="true"></span>${name} <span class="num">${number(weights.get(kind).size)}</span></span>
          </label>`)}
        </div>
        <ul class="tiles" aria-label="Versions, those nearest to the device first">
          ${tiles.slice(0, SHOWN).map((same) => html`<${Tile} key=${keyOf(same[0])} same=${same} largest=${largest} onOpen=${() => setOpen(keyOf(same[0]))} />`)}
        </ul>
        ${shown.length === 0 && html`<p class="muted">No version is called so in the tiers that are shown.</p>`}
        ${tiles.length > SHOWN && html`<p class="muted">The first ${number(SHOWN)} of ${number(tiles.length)}: find others by name.</p>`}
        ${!loaded.value?.isWhole && html`<p class="muted">There are more than ${number(rows.length)} versions; the map shows these.</p>`}
      `}
    </section>
    ${chosen && html`<${VersionPanel} key=${open} one=${chosen} same=${sameAs(chosen, rows)} onOther=${setOpen} me=${me} onClose=${() => setOpen(null)} onLoaded=${(row) => {
      setNewest((before) => new Map(before).set(keyOf(row), row));
      void tiers.reload(true);
    }} />`}
  `;
}

function keyOf(one) {
  return `${one.tenant}/${one.name}@${one.version}`;
}

// Versions of the same bytes in the same place are one tile: they share their weights.
function tilesOf(rows) {
  const tiles = new Map();
  for (const one of rows) {
    const key = `${one.digest}/${kindOf(one)}`;
    if (tiles.has(key)) tiles.get(key).push(one);
    else tiles.set(key, [one]);
  }
  return [...tiles.values()];
}

function sameAs(one, rows) {
  return rows.filter((row) => row.digest === one.digest && keyOf(row) !== keyOf(one));
}

function rank(one) {
  return TIERS.findIndex(([kind]) => kind === kindOf(one));
}

// The whole list, each in the tier where it is now.
function merged(everything, newest, tiers) {
  const rows = newest.size ? everything.map((one) => newest.get(keyOf(one)) ?? one) : everything;
  if (tiers === null) return rows;
  const now = new Map(Object.entries(tiers).flatMap(([tier, digests]) => digests.map((digest) => [digest, tier])));
  return rows.map((one) => {
    const tier = now.get(one.digest) ?? "disk";
    return one.tier === tier ? one : { ...one, tier };
  });
}

function hasOthers(rows, tiers) {
  if (tiers === null) return false;
  const known = new Set(rows.map((one) => one.digest));
  return Object.values(tiers).some((digests) => digests.some((digest) => !known.has(digest)));
}

const NAMED = 4; // versions of a tile that its label names

function Tile({ same, largest, onOpen }) {
  const [one] = same;
  const kind = kindOf(one);
  const width = Math.round(24 + 68 * Math.sqrt(one.size_bytes / largest));
  const side = `${width}px`;
  const where = TIERS.find(([name]) => name === kind)?.[1] ?? kind;
  const isPinned = same.some((version) => version.is_pinned);
  const names = same.slice(0, NAMED).map((version) => `${version.name}@${version.version} of ${version.tenant}`).join(", ");
  const more = same.length > NAMED ? ` and ${same.length - NAMED} more` : "";
  const words = `${names}${more}, ${where}, ${bytes(one.size_bytes)}${isPinned ? ", pinned" : ""}`;
  return html`<li><button type="button" class=${`tile part-${kind}${same.length > 1 ? " many" : ""}`} style=${{ width: side, height: side }} aria-label=${words} title=${words} onClick=${onOpen}>
    ${isPinned && html`<span class="pin"></span>`}
    ${width >= NAMED_WIDTH && html`<span class="name" aria-hidden="true">${one.name}@${one.version}</span>`}
  </button></li>`;
}

const MOST_SAME = 60;

// Other names of the same bytes, each of which opens its own panel.
function SameBytes({ same, onOther }) {
  if (!same.length) return null;
  return html`<details class="folded">
    <summary>${same.length === 1 ? "Another version has" : `${number(same.length)} other versions have`} the same bytes, and share its weights</summary>
    <div class="row">${same.slice(0, MOST_SAME).map((one) => html`<button type="button" class="small" key=${keyOf(one)} onClick=${() => onOther(keyOf(one))}>${one.name}@${one.version} of ${one.tenant}</button>`)}
      ${same.length > MOST_SAME && html`<span class="muted small">and ${number(same.length - MOST_SAME)} more</span>`}</div>
  </details>`;
}

function recipeOf(actions, one, root, isAdmin) {
  const tenant = isAdmin ? one.tenant : null;
  return {
    curl: actions.map((action) => curl("POST", `${root}/${action}`, { tenant })).join("\n"),
    python: python(actions.map((action) => call(`client.adapters.${action}`, [one.name, one.version])).join("\n"), { tenant }),
    cli: actions.map((action) => commandFor(tenant, "adapter", action, `${one.name}@${one.version}`)).join("\n"),
  };
}

function VersionPanel({ one: known, same, onOther, me, onClose, onLoaded }) {
  const root = `/api/v1/adapters/${path(known.name)}/versions/${known.version}`;
  const headers = me.is_admin ? { "X-Tenant": known.tenant } : {};
  const where = useLoaded(async () => {
    const { items } = await all(`/api/v1/residency?digest=${known.digest}`, { headers });
    return items.find((row) => keyOf(row) === keyOf(known)) ?? null;
  }, [keyOf(known), known.digest], PANEL_MS);
  const one = where.value ?? known;
  useEffect(() => {
    if (where.value) onLoaded(where.value);
  }, [where.value?.tier, where.value?.is_pinned]);
  const loaded = useLoaded(() => api.get(root, { headers }), [root, one.tenant]);
  const [told, setTold] = useState(null);
  const [act, { isRunning, error }] = useAction(async (action) => {
    const { is_done: isDone } = await api.post(`${root}/${action}`, undefined, { headers });
    setTold({ warm: "It is on the device.", pin: "It stays on the device now.", unpin: "It may be evicted again." }[action]);
    if (!isDone) setTold("The load has begun, and goes on.");
    // also for a map whose panel is closed meanwhile
    const row = await where.reload(true);
    if (row) onLoaded(row);
  });
  const facts = [
    ["Where", TIERS.find(([kind]) => kind === kindOf(one))?.[1] ?? one.tier],
    ["On the device", bytes(one.device_bytes)],
    ["In the host's memory", bytes(one.host_bytes)],
    ["Files", bytes(one.size_bytes)],
    ["Data type in memory", one.dtype ?? "–"],
    ["Precision lost in memory", one.precision_loss === null ? "–" : percent(one.precision_loss, 2)],
    ["Last used", ago(one.last_used_s)],
    ...(one.num_pins === null ? [] : [["Requests running", number(one.num_pins)], ["Requests per minute", number(one.uses_per_s * 60, 1)]]),
  ];
  return html`<${Dialog} title=${`${one.name}@${one.version}`} onClose=${onClose} isWide>
    <div class="row">
      <${Chip}>${one.tenant}<//>
      ${one.is_pinned && html`<${Chip} kind="accent">pinned<//>`}
      ${one.state === "quarantined" && html`<${Chip} kind="bad">quarantined<//>`}
      ${loaded.value?.aliases.map((alias) => html`<${Chip} kind="good">${alias}<//>`)}
    </div>
    <dl class="facts">${facts.map(([name, value]) => html`<div><dt>${name}</dt><dd class="num">${value}</dd></div>`)}</dl>
    <${SameBytes} same=${same} onOther=${onOther} />
    <h3>Certificate</h3>
    ${loaded.error && html`<${Failure} error=${loaded.error} />`}
    ${!loaded.value && !loaded.error && html`<${Loading} what="the certificate" />`}
    ${loaded.value && html`<${Certificate} version=${loaded.value} />`}
    <div aria-live="polite">${told && html`<${Note}>${told}<//>`}${error && html`<${Failure} error=${error} />`}</div>
    <div class="actions end">
      ${(!me.is_admin || me.tenant === one.tenant) && html`<a class="button" href=${`#/adapters/${encodeURIComponent(one.name)}`}>All its versions</a>`}
      <button type="button" disabled=${isRunning} onClick=${() => act("warm")}>Warm</button>
      ${me.is_admin && html`<button type="button" disabled=${isRunning} onClick=${() => act(one.is_pinned ? "unpin" : "pin")}>${one.is_pinned ? "Unpin" : "Pin"}</button>`}
    </div>
    <${CopyAs} recipe=${() => recipeOf(["warm", ...(me.is_admin ? [one.is_pinned ? "unpin" : "pin"] : [])], one, root, me.is_admin)} />
  <//>`;
}
