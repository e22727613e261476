// One adapter: its versions with their certificates, and its aliases with their splits and shadows.
import { all, api, path } from "../lib/api.js";
import { Certificate, checkOf } from "../lib/certificate.js";
import { Compare, isCompared, useTraffic } from "../lib/compare.js";
import { Evaluation } from "../lib/evaluation.js";
import { bytes, day, number, percent, seconds } from "../lib/format.js";
import { html, useState } from "../lib/html.js";
import { VersionMetrics } from "../lib/metrics.js";
import { CopyAs, Expression, call, command, curl, python } from "../lib/recipe.js";
import { tagsOf } from "../lib/tags.js";
import { Bar, Chip, Confirm, Dialog, Empty, Failure, Heading, Loading, Note, useAction, useLoaded } from "../lib/ui.js";
import { Upload } from "./adapters.js";
import { KEYS_WRITE } from "./keys.js";

const PART_KINDS = ["decode", "queue", "prefill", "adapter", "other"];

export function Adapter({ me, rest }) {
  const [name] = rest;
  const root = `/api/v1/adapters/${path(name)}`;
  const loaded = useLoaded(async () => {
    const [adapter, versions, aliases] = await Promise.all([
      api.get(root),
      all(`${root}/versions?include=notes`, { most: 400 }),
      all(`${root}/aliases`),
    ]);
    return { adapter, versions: versions.items, aliases: aliases.items };
  }, [name]);
  const whose = useKeyNames(me);
  const traffic = useTraffic(root, loaded.value?.aliases ?? []);
  const [dialog, setDialog] = useState(null);
  const back = html`<a class="button" href="#/adapters">All adapters</a>`;
  if (loaded.error && !loaded.value) {
    return html`<${Heading} title=${name} actions=${back} /><${Failure} error=${loaded.error} again=${() => loaded.reload()} />`;
  }
  if (!loaded.value) return html`<${Heading} title=${name} actions=${back} /><${Loading} what=${name} />`;
  const { adapter, versions, aliases } = loaded.value;
  const changed = () => loaded.reload(true);
  const close = () => setDialog(null);
  return html`
    <${Heading} title=${adapter.name} actions=${html`<a class="button" href=${`#/playground?model=${encodeURIComponent(name)}`}>Ask it</a>${back}`}>
      ${adapter.notes || "No notes."}
    <//>
    <div class="row">
      ${Object.entries(adapter.tags).map(([tag, value]) => html`<${Chip}>${tag}: ${value}<//>`)}
      ${adapter.fallback && html`<${Chip} kind="accent">falls back to ${adapter.fallback}<//>`}
      <button type="button" class="small" onClick=${() => setDialog({ kind: "notes" })}>Edit notes and tags</button>
    </div>
    ${loaded.error && html`<${Failure} error=${loaded.error} />`}
    <section class="card" aria-labelledby="aliases-title">
      <div class="spread">
        <h2 id="aliases-title">Aliases</h2>
        <button type="button" class="small" onClick=${() => setDialog({ kind: "alias", alias: null })}>New alias</button>
      </div>
      ${aliases.length === 0 && html`<p class="muted">No alias names a version: requests have to say which one they mean.</p>`}
      ${aliases.map((alias) => html`<${Alias} key=${alias.name} alias=${alias} versions=${versions} root=${root} traffic=${traffic} setDialog=${setDialog} />`)}
    </section>
    <section class="card" aria-labelledby="versions-title">
      <h2 id="versions-title">Versions</h2>
      ${versions.length === 0 && html`<${Empty} title="No versions">All of them were deleted.<//>`}
      <div class="scroll" tabindex="0" role="region" aria-label="Versions">
        <table>
          <thead><tr><th scope="col">Version</th><th scope="col">State</th><th scope="col" class="num">Effect kept</th><th scope="col">Notes and tags</th><th scope="col" class="num">Rank</th><th scope="col" class="num">Size</th><th scope="col">Published</th><th scope="col">By</th><th scope="col"><span class="hidden">Details</span></th></tr></thead>
          <tbody>
            ${versions.map((version) => html`<tr key=${version.version}>
              <td class="figures">${version.version} ${version.aliases.map((alias) => html`<${Chip} kind="good">${alias}<//>`)}</td>
              <td><${VersionState} version=${version} /></td>
              <td class="num">${effectOf(version)}</td>
              <td class="small">${version.notes && html`<span>${version.notes} </span>`}${Object.entries(version.tags).map(([tag, value]) => html`<${Chip}>${tag}: ${value}<//>`)}</td>
              <td class="num">${number(version.rank)}</td>
              <td class="num">${bytes(version.size_bytes)}</td>
              <td class="small figures">${day(version.created_at)}</td>
              <td class="small" title=${version.created_by}>${whose(version.created_by)}</td>
              <td><button type="button" class="small" onClick=${() => setDialog({ kind: "version", version })}>
                Certificate<span class="hidden"> of version ${version.version}</span></button></td>
            </tr>`)}
          </tbody>
        </table>
      </div>
    </section>
    <${VersionMetrics} versions=${versions} />
    <${Upload} name=${name} onPublished=${changed} />
    ${dialog?.kind === "notes" && html`<${Notes} adapter=${adapter} root=${root} onClose=${close} onChanged=${changed} />`}
    ${dialog?.kind === "version" && html`<${VersionDialog} version=${dialog.version} root=${root} onClose=${close} onChanged=${changed} />`}
    ${dialog?.kind === "alias" && html`<${AliasDialog} adapter=${name} alias=${dialog.alias} versions=${versions} root=${root} onClose=${close} onChanged=${changed} />`}
    ${dialog?.kind === "shadow" && html`<${ShadowDialog} alias=${dialog.alias} root=${root} onClose=${close} />`}
    ${dialog?.kind === "rollback" &&
    html`<${Confirm} title=${`Roll back ${dialog.alias.name}?`} label="Roll back" isDanger onClose=${close}
      run=${async () => {
        await api.post(`${root}/aliases/${path(dialog.alias.name)}/rollback`, undefined, { headers: { "If-Match": `"r${dialog.alias.revision}"` } });
        changed();
      }}>
      <p>${name}@${dialog.alias.name} goes back to what it named before. Requests that run finish on the version they began with.</p>
      <${CopyAs} recipe=${() => ({
        curl: curl("POST", `${root}/aliases/${path(dialog.alias.name)}/rollback`),
        python: python(call("client.adapters.rollback", [name, dialog.alias.name])),
        cli: command("adapter", "rollback", name, dialog.alias.name),
      })} />
    <//>`}
  `;
}

// Names of keys by their ids, where this key may list them.
function useKeyNames(me) {
  const mayList = me.is_admin || me.scopes.includes(KEYS_WRITE);
  const loaded = useLoaded(async () => (mayList ? (await all("/api/v1/keys", { most: 2000 })).items : []), [mayList]);
  const names = new Map((loaded.value ?? []).map((key) => [key.id, key.name]));
  return (id) => names.get(id) ?? (id === me.key_id ? "this key" : id.length > 10 ? `key …${id.slice(-6)}` : id || "–");
}

// What rounding the base leaves of a version's effect, as its certificate measured it.
function effectOf(version) {
  const parity = checkOf(version, "parity");
  const kept = (parity?.certificate ?? parity)?.effect_kept;
  return typeof kept === "number" ? percent(kept) : "–";
}

function VersionState({ version }) {
  const verdict = checkOf(version, "parity")?.status;
  if (version.state === "ready" && verdict === "degraded") return html`<${Chip} kind="warn">degraded<//>`;
  if (version.state === "ready" && verdict === "not_possible") return html`<${Chip} kind="warn">not certified<//>`;
  if (version.state === "ready") return html`<${Chip} kind="good">ready<//>`;
  if (version.state === "quarantined") return html`<${Chip} kind="bad">quarantined<//>`;
  return html`<${Chip} kind="warn">${version.state === "other_base" ? "of another base" : version.state}<//>`;
}

function partsOf(alias) {
  const parts = alias.split ?? [{ version: alias.version, weight: 1 }];
  const total = parts.reduce((sum, part) => sum + part.weight, 0);
  return parts.map((part, index) => ({
    kind: PART_KINDS[index % PART_KINDS.length],
    name: `version ${part.version}`,
    value: part.weight / total,
    text: percent(part.weight / total),
  }));
}

function Alias({ alias, versions, root, traffic, setDialog }) {
  const parts = partsOf(alias);
  return html`<div class="stack">
    <div class="spread">
      <h3>${alias.name}</h3>
      <div class="actions">
        ${alias.shadow && html`<button type="button" class="small" onClick=${() => setDialog({ kind: "shadow", alias })}>Shadow, hour by hour</button>`}
        <button type="button" class="small" onClick=${() => setDialog({ kind: "alias", alias })}>Move or split<span class="hidden"> ${alias.name}</span></button>
        <button type="button" class="small" onClick=${() => setDialog({ kind: "rollback", alias })}>Roll back<span class="hidden"> ${alias.name}</span></button>
      </div>
    </div>
    <${Bar} isThin label=${`Traffic of ${alias.name}`} parts=${parts} total=${1} />
    <p class="small num">${parts.map((part) => `${part.name}: ${part.text}`).join(" · ")}${alias.shadow ? ` · shadow: version ${alias.shadow.version}, ${percent(alias.shadow.share)} of requests` : ""}</p>
    ${isCompared(alias) && html`<${Compare} alias=${alias} versions=${versions} root=${root} loaded=${traffic} />`}
  </div>`;
}

// An alias's move elsewhere, whoever moved it meanwhile.
function aliasRecipe(adapter, name, { version, split, shadow }, root) {
  const weights = split && new Expression(`{${split.map((part) => `${part.version}: ${part.weight}`).join(", ")}}`);
  const words = [
    ...(split ? ["--split", split.map((part) => `${part.version}=${part.weight}`).join(",")] : [version]),
    ...(shadow ? ["--shadow", `${shadow.version}=${shadow.share}`] : []),
  ];
  return {
    curl: curl("PUT", `${root}/aliases/${path(name)}`, { json: { version, split, shadow } }),
    python: python(call("client.adapters.set_alias", [adapter, name, ...(split ? [] : [version])], {
      split: weights,
      shadow: shadow && new Expression(`(${shadow.version}, ${shadow.share})`),
    })),
    cli: command("adapter", "alias", adapter, name, words),
  };
}

function AliasDialog({ adapter, alias, versions, root, onClose, onChanged }) {
  const choices = versions.filter((version) => version.state === "ready").map((version) => version.version);
  const newest = choices[0] ?? versions[0]?.version ?? 1;
  const [name, setName] = useState(alias?.name ?? "");
  const [parts, setParts] = useState(
    (alias?.split ?? [{ version: alias?.version ?? newest, weight: 1 }]).map((part) => ({ version: part.version, percent: Math.round(part.weight * 100) })),
  );
  const [shadow, setShadow] = useState({ version: alias?.shadow?.version ?? null, percent: Math.round((alias?.shadow?.share ?? 0.1) * 100) });
  const total = parts.reduce((sum, part) => sum + part.percent, 0);
  const change = (index, value) => setParts(parts.map((part, at) => (at === index ? { ...part, ...value } : part)));
  const unused = choices.find((version) => !parts.some((part) => part.version === version));
  const bodyOf = () => {
    const given = parts.filter((part) => part.percent > 0);
    if (!given.length) throw new Error("At least one version needs a share.");
    const body = given.length === 1
      ? { version: given[0].version }
      : { split: given.map((part) => ({ version: part.version, weight: part.percent / total })) };
    if (shadow.version !== null) {
      const isKept = alias?.shadow && Math.round(alias.shadow.share * 100) === shadow.percent;
      body.shadow = { version: shadow.version, share: isKept ? alias.shadow.share : shadow.percent / 100 };
    }
    return body;
  };
  const [act, { isRunning, error }] = useAction(async () => {
    const body = bodyOf();
    const headers = alias ? { "If-Match": `"r${alias.revision}"` } : { "If-None-Match": "*" };
    await api.put(`${root}/aliases/${path(name)}`, body, { headers });
    onChanged();
    onClose();
  });
  return html`<${Dialog} title=${alias ? `Move or split ${alias.name}` : "New alias"} onClose=${onClose}>
    <form class="stack" onSubmit=${(event) => {
      event.preventDefault();
      void act();
    }}>
      ${!alias && html`<label><span>Name</span><input required maxlength="63" pattern="[a-z0-9][a-z0-9._\\-]*" value=${name} autocomplete="off" spellcheck=${false}
        onInput=${(event) => setName(event.currentTarget.value)} /></label>`}
      <p class="muted small">Each request is drawn by these weights and keeps its version; an end user named in "user" stays on one.</p>
      ${parts.map((part, index) => html`<div class="split" key=${index}>
        <select aria-label=${`Version of part ${index + 1}`} value=${part.version} onChange=${(event) => change(index, { version: Number(event.currentTarget.value) })}>
          ${(choices.includes(part.version) ? choices : [part.version, ...choices]).map((version) => html`<option value=${version} selected=${version === part.version}>version ${version}</option>`)}
        </select>
        <input type="range" min="0" max="100" value=${part.percent} aria-label=${`Share of version ${part.version}`}
          aria-valuetext=${percent(total ? part.percent / total : 0)} disabled=${parts.length === 1}
          onInput=${(event) => change(index, { percent: Number(event.currentTarget.value) })} />
        <span class="num">${percent(total ? part.percent / total : 0)}</span>
        ${parts.length > 1
          ? html`<button type="button" class="quiet small" aria-label=${`Remove version ${part.version}`} onClick=${() => setParts(parts.filter((_, at) => at !== index))}>✕</button>`
          : html`<span></span>`}
      </div>`)}
      <div><button type="button" class="small" disabled=${unused === undefined || parts.length >= 8}
        onClick=${() => setParts([...parts, { version: unused, percent: 10 }])}>Split with another version</button></div>
      <div class="split">
        <select aria-label="Shadow" value=${shadow.version ?? ""} onChange=${(event) => setShadow({ ...shadow, version: Number(event.currentTarget.value) || null })}>
          <option value="" selected=${shadow.version === null}>no shadow</option>
          ${choices.map((version) => html`<option value=${version} selected=${version === shadow.version}>shadow: version ${version}</option>`)}
        </select>
        <input type="range" min="1" max="100" value=${shadow.percent} aria-label="Share of requests that the shadow copies"
          aria-valuetext=${percent(shadow.percent / 100)} disabled=${shadow.version === null}
          onInput=${(event) => setShadow({ ...shadow, percent: Number(event.currentTarget.value) })} />
        ${shadow.version === null ? html`<span></span>` : html`<span class="num">${percent(shadow.percent / 100)}</span>`}
        <span></span>
      </div>
      ${total === 0 && html`<${Note} kind="warn">At least one version needs a share.<//>`}
      ${error && html`<${Failure} error=${error.status === 412 ? new Error("Somebody moved this alias meanwhile. Close this, and look at it again.") : error} />`}
      <div class="actions end">
        <button type="button" onClick=${onClose}>Cancel</button>
        <button type="submit" class="primary" disabled=${isRunning || total === 0}>Save</button>
      </div>
      <${CopyAs} recipe=${() => aliasRecipe(adapter, name || "NAME", bodyOf(), root)} />
    </form>
  <//>`;
}

function VersionDialog({ version, root, onClose, onChanged }) {
  const [told, setTold] = useState(null);
  const [shown, setShown] = useState(version);
  const at = `${root}/versions/${version.version}`;
  const [verify, verifying] = useAction(async () => {
    setShown(await api.post(`${at}/verify`));
    setTold("Verified again.");
    onChanged();
  });
  const [warm, warming] = useAction(async () => {
    const { is_done: isDone } = await api.post(`${at}/warm`);
    setTold(isDone ? "Its weights are on the device." : "The load has begun, and goes on.");
  });
  const error = verifying.error ?? warming.error;
  return html`<${Dialog} title=${`${version.name}@${version.version}`} onClose=${onClose} isWide>
    <div class="row"><${VersionState} version=${shown} />${Object.entries(shown.tags).map(([tag, value]) => html`<${Chip}>${tag}: ${value}<//>`)}</div>
    ${shown.notes && html`<p>${shown.notes}</p>`}
    <h3>Certificate</h3>
    <${Certificate} version=${shown} />
    <h3>Evaluation</h3>
    <${Evaluation} version=${shown} />
    <dl class="facts">
      ${[
        ["Digest", shown.digest.slice(0, 16)],
        ["Rank", number(shown.rank)],
        ["Size", bytes(shown.size_bytes)],
        ["Data type", shown.dtype],
        ["Modules", shown.target_modules.join(", ")],
        ["Files for chats", shown.extra_files.map((file) => file.name).join(", ") || "the base's"],
        ["Published", day(shown.created_at)],
        ["By the key", shown.created_by || "–"],
      ].map(([name, value]) => html`<div><dt>${name}</dt><dd class="num">${value}</dd></div>`)}
    </dl>
    <div aria-live="polite">${told && html`<${Note}>${told}<//>`}${error && html`<${Failure} error=${error} />`}</div>
    <div class="actions end">
      <button type="button" disabled=${verifying.isRunning} onClick=${() => verify()}>Verify again</button>
      <button type="button" disabled=${warming.isRunning} onClick=${() => warm()}>Warm</button>
    </div>
    <${CopyAs} label="Verify and warm as curl, Python or a command" recipe=${() => ({
      curl: `${curl("POST", `${at}/verify`)}\n${curl("POST", `${at}/warm`)}`,
      python: python(["verify", "warm"].map((what) => call(`client.adapters.${what}`, [version.name, version.version])).join("\n")),
      cli: ["verify", "warm"].map((what) => command("adapter", what, `${version.name}@${version.version}`)).join("\n"),
    })} />
  <//>`;
}

function notesRecipe(adapter, notes, tags, root) {
  const gone = Object.keys(adapter.tags).filter((name) => !(name in tags));
  return {
    curl: curl("PATCH", root, { json: { notes, tags } }),
    python: python(call("client.adapters.update", [adapter.name], { notes, tags })),
    cli: command(
      "adapter", "set", adapter.name, "--notes", notes,
      Object.entries(tags).flatMap(([name, value]) => ["--tag", `${name}=${value}`]), gone.flatMap((name) => ["--untag", name]),
    ),
  };
}

function Notes({ adapter, root, onClose, onChanged }) {
  const [notes, setNotes] = useState(adapter.notes);
  const [tags, setTags] = useState(Object.entries(adapter.tags).map(([name, value]) => `${name}=${value}`).join("\n"));
  const [act, { isRunning, error }] = useAction(async () => {
    await api.patch(root, { notes, tags: tagsOf(tags) });
    onChanged();
    onClose();
  });
  return html`<${Dialog} title="Notes and tags" onClose=${onClose}>
    <form class="stack" onSubmit=${(event) => {
      event.preventDefault();
      void act();
    }}>
      <label><span>Notes</span><textarea value=${notes} onInput=${(event) => setNotes(event.currentTarget.value)}></textarea></label>
      <label><span>Tags, a line of NAME=VALUE each</span><textarea class="mono" value=${tags} onInput=${(event) => setTags(event.currentTarget.value)}></textarea></label>
      ${error && html`<${Failure} error=${error} />`}
      <div class="actions end"><button type="button" onClick=${onClose}>Cancel</button><button type="submit" class="primary" disabled=${isRunning}>Save</button></div>
      <${CopyAs} recipe=${() => notesRecipe(adapter, notes, tagsOf(tags), root)} />
    </form>
  <//>`;
}

function ShadowDialog({ alias, root, onClose }) {
  const loaded = useLoaded(() => all(`${root}/aliases/${path(alias.name)}/shadow`, { most: 200 }), [alias.name]);
  const hours = loaded.value?.items ?? [];
  const sum = (field) => hours.reduce((total, hour) => total + hour[field], 0);
  const compared = sum("num_requests") - sum("num_failed");
  return html`<${Dialog} title=${`Shadow of ${alias.name}: version ${alias.shadow.version}`} onClose=${onClose} isWide>
    ${loaded.error && html`<${Failure} error=${loaded.error} />`}
    ${!loaded.value && !loaded.error && html`<${Loading} what="the comparison" />`}
    ${loaded.value && hours.length === 0 && html`<${Empty} title="Nothing compared yet">Copies of ${percent(alias.shadow.share)} of the requests run on the shadow; their figures appear here.<//>`}
    ${hours.length > 0 &&
    html`<dl class="facts">
        ${[
          ["Requests copied", number(sum("num_requests"))],
          ["Failed on the shadow", number(sum("num_failed"))],
          ["Equal answers", compared ? percent(sum("num_equal") / compared, 1) : "–"],
          ["Tokens before the first that differs", sum("num_tokens") ? percent(sum("num_agreed_tokens") / sum("num_tokens"), 1) : "–"],
          ["Mean time, live", compared ? seconds(sum("live_ms") / compared / 1000) : "–"],
          ["Mean time, shadow", compared ? seconds(sum("shadow_ms") / compared / 1000) : "–"],
        ].map(([name, value]) => html`<div><dt>${name}</dt><dd class="num">${value}</dd></div>`)}
      </dl>
      <div class="scroll" tabindex="0" role="region" aria-label="Hours">
        <table>
          <thead><tr><th scope="col">Hour</th><th scope="col">Versions</th><th scope="col" class="num">Requests</th><th scope="col" class="num">Equal</th><th scope="col" class="num">Agreed tokens</th></tr></thead>
          <tbody>${hours.map((hour) => html`<tr><td class="figures">${day(hour.hour)}</td><td class="figures">${hour.version} and ${hour.shadow_version}</td><td class="num">${number(hour.num_requests)}</td><td class="num">${number(hour.num_equal)}</td><td class="num">${hour.num_tokens ? percent(hour.num_agreed_tokens / hour.num_tokens, 1) : "–"}</td></tr>`)}</tbody>
        </table>
      </div>`}
  <//>`;
}
