// A tenant's keys: made with chosen scopes and an end, rotated, revoked. A tenant's own key sees what it may do.
import { api, path } from "../lib/api.js";
import { day } from "../lib/format.js";
import { html, useState } from "../lib/html.js";
import { CopyAs, Expression, call, command, curl, python } from "../lib/recipe.js";
import { Chip, Confirm, Copy, Failure, useAction } from "../lib/ui.js";

export const KEYS_WRITE = "keys:write";
const SCOPES = [
  ["inference", "ask models"],
  ["adapters:read", "see adapters, usage and figures"],
  ["adapters:write", "upload, and move aliases"],
  [KEYS_WRITE, "manage keys within its own scopes"],
];
const USUAL = ["inference", "adapters:read", "adapters:write"];
const LIFETIMES = [
  [0, "no end"],
  [1, "a day"],
  [30, "30 days"],
  [90, "90 days"],
  [365, "a year"],
];
const OVERLAPS = [
  [0, "ends at once"],
  [3600, "works for another hour"],
  [86_400, "works for another day"],
];
const DAY_MS = 86_400_000;

function isWithin(me, key) {
  return me.is_admin || key.scopes.every((scope) => me.scopes.includes(scope));
}

function StateOf({ made }) {
  if (made.revoked_at) return html`<${Chip}>revoked<//>`;
  if (!made.expires_at) return html`<${Chip} kind="good">works<//>`;
  if (new Date(made.expires_at) <= new Date()) return html`<${Chip}>expired<//>`;
  return html`<${Chip} kind="warn">until ${day(made.expires_at)}<//>`;
}

// `root` is where the keys are in the API; `of` the tenant that an admin names, null for the caller's own.
export function Keys({ keys, root, of, me, onChanged }) {
  const [made, setMade] = useState(null);
  const [acting, setActing] = useState(null); // {key, action}
  const close = () => setActing(null);
  const rows = [...keys].reverse();
  return html`<div class="stack">
    <div role="status">${made && html`<div class="note note-warn"><p>The key is shown this once:</p><div class="row"><code>${made.key}</code><${Copy} text=${made.key} /></div></div>`}</div>
    ${keys.length === 0
      ? html`<p class="muted">No keys yet.</p>`
      : html`<div class="scroll" tabindex="0" role="region" aria-label="Keys"><table>
      <thead><tr><th scope="col">Name</th><th scope="col">Begins with</th><th scope="col">Scopes</th><th scope="col">Made</th><th scope="col">State</th><th scope="col"><span class="hidden">Actions</span></th></tr></thead>
      <tbody>${rows.map((key) => html`<tr key=${key.id}>
        <td>${key.name}${key.id === me.key_id && html` <${Chip} kind="accent">yours<//>`}</td>
        <td class="mono">${key.prefix}…</td><td class="small">${key.scopes.join(", ")}</td><td class="small figures">${day(key.created_at)}</td>
        <td><${StateOf} made=${key} /></td>
        <td>${!key.revoked_at && isWithin(me, key) && html`<div class="actions">
          <button type="button" class="small" onClick=${() => setActing({ key, action: "rotate" })}>Rotate<span class="hidden"> ${key.name}</span></button>
          <button type="button" class="small" onClick=${() => setActing({ key, action: "revoke" })}>Revoke<span class="hidden"> ${key.name}</span></button>
        </div>`}</td>
      </tr>`)}</tbody>
    </table></div>`}
    <${NewKey} root=${root} of=${of} me=${me} onMade=${(key) => {
      setMade(key);
      onChanged();
    }} />
    ${acting?.action === "rotate" && html`<${Rotation} known=${acting.key} isOwn=${acting.key.id === me.key_id} root=${root} of=${of} onClose=${close} onMade=${(key) => {
      setMade(key);
      onChanged();
    }} />`}
    ${acting?.action === "revoke" && html`<${Confirm} title=${`Revoke ${acting.key.name}?`} label="Revoke" isDanger onClose=${close}
      run=${async () => {
        await api.delete(`${root}/${path(acting.key.id)}`);
        onChanged();
      }}>
      <p>Programs that use it stop working at once. It can't be undone.${acting.key.id === me.key_id ? " It is the key of this session: you will be signed out." : ""}</p>
      <${CopyAs} recipe=${() => ({
        curl: curl("DELETE", `${root}/${path(acting.key.id)}`),
        python: python(call("client.keys.revoke", [of, acting.key.id])),
        cli: command("key", "revoke", acting.key.id, of && ["--tenant", of]),
      })} />
    <//>`}
  </div>`;
}

function NewKey({ root, of, me, onMade }) {
  const mine = SCOPES.filter(([scope]) => me.is_admin || me.scopes.includes(scope));
  const [name, setName] = useState("");
  const [scopes, setScopes] = useState(() => mine.map(([scope]) => scope).filter((scope) => USUAL.includes(scope)));
  const [days, setDays] = useState(0);
  const bodyOf = () => ({
    name: name || "console",
    scopes,
    ...(days && { expires_at: new Date(Date.now() + days * DAY_MS).toISOString() }),
  });
  const [act, { isRunning, error }] = useAction(async () => {
    onMade(await api.post(root, bodyOf()));
    setName("");
  });
  const toggle = (scope) => setScopes(scopes.includes(scope) ? scopes.filter((one) => one !== scope) : [...scopes, scope]);
  const recipe = () => ({
    curl: curl("POST", root, { json: bodyOf() }),
    python: python(
      `made = ${call("client.keys.create", of ? [of] : [], {
        name: name || "console", scopes, expires_at: days ? new Expression(`datetime.now(UTC) + timedelta(days=${days})`) : undefined,
      })}\nprint(made.key)`,
      { imports: days ? ["from datetime import UTC, datetime, timedelta"] : [] },
    ),
    cli: command(
      "key", "create", of && ["--tenant", of], "--name", name || "console",
      scopes.flatMap((scope) => ["--scope", scope]), days > 0 && ["--expires-in", `${days}d`],
    ),
  });
  return html`<form class="stack" onSubmit=${(event) => {
    event.preventDefault();
    void act();
  }}>
    <div class="fields">
      <label><span>Name of a new key</span><input value=${name} maxlength="63" autocomplete="off" placeholder="console" onInput=${(event) => setName(event.currentTarget.value)} /></label>
      <label><span>Works for</span><select value=${days} onChange=${(event) => setDays(Number(event.currentTarget.value))}>
        ${LIFETIMES.map(([value, text]) => html`<option value=${value} selected=${value === days}>${text}</option>`)}</select></label>
    </div>
    <fieldset class="stack"><legend>Scopes</legend>
      ${mine.map(([scope, words]) => html`<label class="inline" key=${scope}><input type="checkbox" checked=${scopes.includes(scope)} onChange=${() => toggle(scope)} />
        <span><code>${scope}</code> <span class="muted small">${words}</span></span></label>`)}
    </fieldset>
    ${!me.is_admin && html`<p class="muted small">A key can have no scope that yours lacks, and ends with yours at the latest.</p>`}
    <div class="actions"><button type="submit" disabled=${isRunning || scopes.length === 0}>Make a key</button></div>
    ${error && html`<${Failure} error=${error} />`}
    <${CopyAs} recipe=${recipe} />
  </form>`;
}

// The session's own key ends later: the new one has to be read and signed in with before.
function Rotation({ known, isOwn, root, of, onClose, onMade }) {
  const overlaps = isOwn ? OVERLAPS.filter(([value]) => value > 0) : OVERLAPS;
  const [overlap, setOverlap] = useState(overlaps[0][0]);
  const at = `${root}/${path(known.id)}/rotate`;
  return html`<${Confirm} title=${`Rotate ${known.name}?`} label="Rotate" onClose=${onClose}
    run=${async () => onMade(await api.post(at, { overlap_s: overlap }))}>
    <div class="stack">
      <p>A new key of the same name, scopes and end takes its place.${isOwn ? " It is the key of this session: sign in with the new one before the old one ends." : ""}</p>
      <label><span>The old one</span><select value=${overlap} onChange=${(event) => setOverlap(Number(event.currentTarget.value))}>
        ${overlaps.map(([value, text]) => html`<option value=${value} selected=${value === overlap}>${text}</option>`)}</select></label>
      <${CopyAs} recipe=${() => ({
        curl: curl("POST", at, { json: { overlap_s: overlap } }),
        python: python(`made = ${call("client.keys.rotate", [of, known.id], { overlap_s: overlap || undefined })}\nprint(made.key)`),
        cli: command("key", "rotate", known.id, of && ["--tenant", of], overlap > 0 && ["--overlap", `${overlap / 3600}h`]),
      })} />
    </div>
  <//>`;
}
