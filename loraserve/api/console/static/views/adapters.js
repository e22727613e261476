// The tenant's adapters, and the way to upload one.
import { all, path } from "../lib/api.js";
import { checkOf } from "../lib/certificate.js";
import { bytes, day, number } from "../lib/format.js";
import { html, useEffect, useRef, useState } from "../lib/html.js";
import { Chip, Empty, Failure, Heading, Loading, useLoaded } from "../lib/ui.js";
import { tagsOf } from "../lib/tags.js";
import { CopyAs, call, command, curl, python, word } from "../lib/recipe.js";
import { dropped, publish, sorted } from "../lib/upload.js";

const SHOWN = 200;

export function Adapters({ me, tenant }) {
  const loaded = useLoaded(() => all("/api/v1/adapters?include=notes", { most: 5000 }), [], 15_000);
  const [wanted, setWanted] = useState("");
  const whose = tenant ?? me.tenant;
  const found = (loaded.value?.items ?? []).filter((one) => matches(one, wanted.trim().toLowerCase()));
  return html`
    <${Heading} title="Adapters">
      The adapters of ${whose}.${me.is_admin && !tenant ? " Choose a tenant on the left to see its own." : ""}
    <//>
    <${Upload} onPublished=${() => loaded.reload(true)} />
    ${loaded.error && html`<${Failure} error=${loaded.error} again=${() => loaded.reload()} />`}
    ${!loaded.value && !loaded.error && html`<${Loading} what="adapters" />`}
    ${loaded.value &&
    html`<section class="card" aria-label="List of adapters">
      ${loaded.value.items.length === 0
        ? html`<${Empty} title="No adapters yet">
            Drop a PEFT folder above, or push one: <code>loraserve adapter push ./my-peft-dir --name support</code>
          <//>`
        : html`
            <label><span class="hidden">Find an adapter by name, note or tag</span>
              <input type="search" placeholder="Find by name, note or tag" value=${wanted} onInput=${(event) => setWanted(event.currentTarget.value)} /></label>
            <div class="scroll" tabindex="0" role="region" aria-label="Adapters">
              <table>
                <thead><tr><th scope="col">Adapter</th><th scope="col">Aliases</th><th scope="col" class="num">Versions</th><th scope="col">Notes and tags</th><th scope="col">Changed</th></tr></thead>
                <tbody>
                  ${found.slice(0, SHOWN).map((one) => html`<${Row} key=${one.name} one=${one} />`)}
                </tbody>
              </table>
            </div>
            ${found.length === 0 && html`<p class="muted">No adapter is called so.</p>`}
            ${found.length > SHOWN && html`<p class="muted">and ${number(found.length - SHOWN)} more: find them by name</p>`}
          `}
    </section>`}
  `;
}

function matches(one, wanted) {
  if (!wanted) return true;
  const tags = Object.entries(one.tags).map(([name, value]) => `${name}=${value}`);
  return [one.name, one.notes ?? "", ...tags].some((text) => text.toLowerCase().includes(wanted));
}

function Row({ one }) {
  return html`<tr>
    <td><a href=${`#/adapters/${encodeURIComponent(one.name)}`}>${one.name}</a></td>
    <td>${Object.entries(one.aliases).map(
      ([alias, version]) => html`<${Chip} kind=${alias === "live" ? "good" : "plain"}>${alias} → ${one.splits[alias]?.length ? "split" : version}<//>`,
    )}</td>
    <td class="num">${number(one.num_versions)}</td>
    <td>
      ${one.notes && html`<span class="small">${one.notes} </span>`}
      ${Object.entries(one.tags).map(([name, value]) => html`<${Chip}>${name}: ${value}<//>`)}
      ${one.num_versions_of_another_base > 0 && html`<${Chip} kind="warn">${one.num_versions_of_another_base} of another base<//>`}
    </td>
    <td class="small figures">${day(one.updated_at)}</td>
  </tr>`;
}

// The longest part of a folder's name that is an adapter's.
function nameOf(folder) {
  return folder.replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[^A-Za-z0-9]+/, "").slice(0, 128);
}

// An upload elsewhere: `folder` stands for where the files are.
function uploadRecipe(name, files, { notes, tags, isPromoting, isDryRun, folder }) {
  const root = `/api/v1/adapters/${path(name)}/versions`;
  const placed = (file) => `${folder}/${file.name}`;
  // several files of weights are sent one after the other, as one
  const isSplit = files.weights.length > 1;
  const joined = isSplit ? `${["cat", ...files.weights.map(placed)].map(word).join(" ")} > adapter.weights\n` : "";
  const form = { ...(files.config && { config: placed(files.config) }), weights: isSplit ? "adapter.weights" : placed(files.weights[0]) };
  if (files.index) form.index = placed(files.index);
  for (const [field, file] of files.extras) form[field] = placed(file);
  const facts = { ...(notes && { notes }), ...(Object.keys(tags).length && { tags }) };
  const described = Object.keys(facts).length && !isDryRun
    ? `\n# the answer names the version\n${curl("PATCH", `${root}/VERSION`, { json: facts })}`
    : "";
  return {
    curl: joined + curl("POST", `${root}?promote=${isPromoting}&dry_run=${isDryRun}`, { form }) + described,
    python: python(call("client.adapters.push", [folder], {
      name, ...facts, promote: isPromoting ? undefined : false, dry_run: isDryRun || undefined,
    })),
    cli: command(
      "adapter", "push", folder, "--name", name, notes !== "" && ["--notes", notes],
      Object.entries(tags).flatMap(([tag, value]) => ["--tag", `${tag}=${value}`]),
      !isPromoting && "--no-promote", isDryRun && "--dry-run",
    ),
  };
}

const STAGES = {
  reading: "Reading and hashing the weights",
  sending: "Sending the weights",
  waiting: "Interrupted; trying again",
  verifying: "Checking the files and comparing with the reference",
};

export function Upload({ name: fixedName, onPublished }) {
  const [files, setFiles] = useState(null);
  const [folder, setFolder] = useState(null);
  const [name, setName] = useState(fixedName ?? "");
  const [notes, setNotes] = useState("");
  const [tags, setTags] = useState("");
  const [isPromoting, setPromoting] = useState(true);
  const [isDryRun, setDryRun] = useState(false);
  const [isOver, setOver] = useState(false);
  const [progress, setProgress] = useState(null);
  const [outcome, setOutcome] = useState(null);
  const [error, setError] = useState(null);
  const ending = useRef(null);
  useEffect(() => () => ending.current?.abort(), []);

  const take = async (given, folder = null) => {
    setOutcome(null);
    setError(null);
    try {
      setFiles(await sorted(given));
      setFolder(folder);
      if (folder) setName((before) => before || nameOf(folder));
    } catch (problem) {
      setFiles(null);
      setError(problem);
    }
  };
  const run = async (event) => {
    event.preventDefault();
    const abort = new AbortController();
    ending.current = abort;
    setError(null);
    setOutcome(null);
    try {
      const facts = { notes: notes.trim(), tags: tagsOf(tags) };
      const version = await publish(name, files, facts, { isPromoting, isDryRun, tell: setProgress, signal: abort.signal });
      setOutcome(version);
      if (isDryRun) return;
      setFiles(null);
      onPublished?.(version);
    } catch (problem) {
      setError(abort.signal.aborted ? new Error("Stopped. Drop the same files again to go on.") : problem);
    } finally {
      ending.current = null;
      setProgress(null);
    }
  };

  return html`<section class="card" aria-labelledby="upload-title">
    <h2 id="upload-title">${fixedName ? "Upload a version" : "Upload an adapter"}</h2>
    <div class=${isOver ? "drop over" : "drop"}
      onDragOver=${(event) => {
        event.preventDefault();
        setOver(true);
      }}
      onDragLeave=${() => setOver(false)}
      onDrop=${async (event) => {
        event.preventDefault();
        setOver(false);
        const { files: given, folder } = await dropped(event.dataTransfer);
        take(given, folder);
      }}>
      <p>Drop an adapter's folder here, of PEFT or mlx-lm, or its files, or a GGUF file of LoRA.</p>
      <label class="button">
        <span>Choose the files</span>
        <input class="hidden" type="file" multiple onChange=${(event) => {
          take([...event.currentTarget.files]);
          event.currentTarget.value = "";
        }} />
      </label>
    </div>
    ${files &&
    html`<form class="stack" onSubmit=${run}>
      <p class="num">${files.weights.map((file) => file.name).join(", ")}, ${bytes(files.weights.reduce((sum, file) => sum + file.size, 0))}${[files.config, files.index, ...files.extras.map(([, file]) => file)].filter(Boolean).map((file) => `, ${file.name}`).join("")}</p>
      ${files.hasTokenizer &&
      html`<p class="small">The tokenizer in the folder isn't sent: the version gets the base's. If tokens were added in training, push the folder with loraserve adapter push.</p>`}
      ${!fixedName &&
      html`<label><span>Name of the adapter</span>
        <input required maxlength="128" pattern="[A-Za-z0-9][A-Za-z0-9._\\-]*([\\/:][A-Za-z0-9_][A-Za-z0-9._\\-]*)*" title="letters, digits, dots, dashes and underscores, in parts between slashes or colons" value=${name}
          onInput=${(event) => setName(event.currentTarget.value)} autocomplete="off" spellcheck=${false} /></label>`}
      <label><span>Notes</span><textarea rows="2" value=${notes} onInput=${(event) => setNotes(event.currentTarget.value)}></textarea></label>
      <label><span>Tags, a line of NAME=VALUE each</span><textarea class="mono" rows="2" value=${tags} onInput=${(event) => setTags(event.currentTarget.value)}></textarea></label>
      <label class="inline"><input type="checkbox" checked=${isDryRun} onChange=${() => setDryRun(!isDryRun)} />
        <span>Only check it, publish nothing</span></label>
      <label class="inline"><input type="checkbox" disabled=${isDryRun} checked=${isPromoting} onChange=${() => setPromoting(!isPromoting)} />
        <span>Set the alias live to this version</span></label>
      ${progress &&
      html`<div class="stack">
        <label><span>${STAGES[progress.stage]} ${progress.stage === "sending" ? `(${bytes(progress.done)} of ${bytes(progress.total)})` : ""}</span>
          <progress max=${progress.total} value=${progress.stage === "verifying" ? undefined : progress.done}></progress></label>
      </div>`}
      <div class="actions">
        <button type="submit" class="primary" disabled=${progress !== null}>${isDryRun ? "Check" : "Upload"}</button>
        ${progress && html`<button type="button" onClick=${() => ending.current?.abort()}>Stop</button>`}
      </div>
      <${CopyAs} recipe=${() => uploadRecipe(name || "NAME", files, {
        notes: notes.trim(), tags: tagsOf(tags), isPromoting, isDryRun, folder: `./${folder ?? "my-peft-dir"}`,
      })} />
    </form>`}
    <div aria-live="polite">
      ${outcome &&
      html`<div class=${`note ${outcome.state === "quarantined" ? "note-bad" : outcome.warnings.length ? "note-warn" : "note-info"}`}>
        <p>${outcome.version === null
          ? html`<strong>${outcome.name}</strong> can be published: rank ${number(outcome.rank)}, ${bytes(outcome.size_bytes)}${checkOf(outcome, "parity")?.status === "passed" ? ", and its answers are those of the reference" : ""}.`
          : outcome.state === "quarantined"
          ? html`Published <strong>${outcome.name}@${outcome.version}</strong>, but its certificate failed: it is in quarantine and isn't served.`
          : html`Published <a href=${`#/adapters/${encodeURIComponent(outcome.name)}`}>${outcome.name}@${outcome.version}</a>${checkOf(outcome, "parity")?.status === "passed" ? ", and verified it" : ""}.`}</p>
        ${outcome.warnings.map((warning) => html`<p class="small">Warning: ${warning}.</p>`)}
      </div>`}
      ${error && html`<${Failure} error=${error} />`}
    </div>
  </section>`;
}
