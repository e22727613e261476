// Send an adapter's files as the SDK does: announce the weights by their digest, send what is missing in
// pieces, publish. Dropping the same files again goes on where the last attempt stopped.
import { ApiError, Unreachable, api, path, send } from "./api.js";
import { Sha256 } from "./sha256.js";

const PIECE_BYTES = 4 * 1024 * 1024;
const HASHED_BYTES = 1024 * 1024;
const TRIES = 6;
const EXTRAS = {
  "chat_template.jinja": "chat_template",
  "generation_config.json": "generation_config",
  tool_parser: "tool_parser",
  reasoning_parser: "reasoning_parser",
  "chat_template_kwargs.json": "chat_template_kwargs",
};

const CONFIG = "adapter_config.json";
const INDEX = "adapter_model.safetensors.index.json";
// as loraserve.adapter_folder has them: the preferred one first
const WEIGHTS = ["adapter_model.safetensors", INDEX, "adapter_model.bin", "adapters.safetensors"];
const TOKENIZER = ["tokenizer.json", "tokenizer.model"];

// Which of the dropped files are an adapter's: the config (null where a GGUF file holds it), the files of
// weights, their index (null where there is one file), and extra files. Throws an Error in words where
// something is missing. Several files of weights are sent one after the other, as one.
export async function sorted(files) {
  const byName = new Map([...files].map((file) => [file.name, file]));
  const found = { config: byName.get(CONFIG) ?? null, index: null, hasTokenizer: TOKENIZER.some((name) => byName.has(name)) };
  const name = WEIGHTS.find((one) => byName.has(one)) ?? ggufOf(byName);
  if (!name || (!found.config && !name.endsWith(".gguf"))) {
    const missing = [!found.config && CONFIG, !name && WEIGHTS[0]].filter(Boolean);
    throw new Error(`Missing: ${missing.join(" and ")}. Drop the folder that PEFT's save_pretrained or mlx-lm wrote, or a GGUF file of LoRA.`);
  }
  found.weights = [byName.get(name)];
  if (name.endsWith(".gguf")) found.config = null;
  if (name === INDEX) {
    found.index = byName.get(INDEX);
    found.weights = await shardsOf(found.index, byName);
  }
  found.extras = Object.keys(EXTRAS).filter((one) => byName.has(one)).map((one) => [EXTRAS[one], byName.get(one)]);
  return found;
}

function ggufOf(byName) {
  const found = [...byName.keys()].filter((name) => name.endsWith(".gguf"));
  if (found.length > 1) throw new Error(`${found.length} GGUF files: drop one adapter.`);
  return found[0];
}

async function shardsOf(index, byName) {
  let names;
  try {
    names = [...new Set(Object.values(JSON.parse(await index.text()).weight_map))].sort();
  } catch {
    throw new Error(`${INDEX} isn't an index of weights. Save the adapter again.`);
  }
  const absent = names.find((name) => !byName.has(name));
  if (absent !== undefined || !names.length) throw new Error(`Missing: ${absent ?? "shards"}, which ${INDEX} names. Drop the whole folder.`);
  return names.map((name) => byName.get(name));
}

// The files of a drop, those in dropped folders too, and the name of the folder where it is one.
export async function dropped(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  if (!entries.length) return { files: [...transfer.files], folder: null };
  const files = [];
  for (const entry of entries) await collect(entry, files);
  return { files, folder: entries.length === 1 && entries[0].isDirectory ? entries[0].name : null };
}

async function collect(entry, files) {
  if (entry.isFile) {
    files.push(await new Promise((found, failed) => entry.file(found, failed)));
    return;
  }
  const reader = entry.createReader();
  for (;;) {
    const some = await new Promise((found, failed) => reader.readEntries(found, failed));
    if (!some.length) return;
    for (const one of some) if (one.isFile) await collect(one, files);
  }
}

async function digestOf(file, tell, signal) {
  const hash = new Sha256();
  for (let at = 0; at < file.size; at += HASHED_BYTES) {
    signal.throwIfAborted();
    hash.update(new Uint8Array(await file.slice(at, at + HASHED_BYTES).arrayBuffer()));
    tell({ stage: "reading", done: Math.min(at + HASHED_BYTES, file.size), total: file.size });
  }
  return hash.hex();
}

function isWorthRetrying(error) {
  return error instanceof Unreachable || (error instanceof ApiError && [408, 429, 503].includes(error.status));
}

async function sendWeights(file, sha256, tell, signal) {
  let upload = await api.post("/api/v1/uploads", { sha256, size: file.size }, { signal });
  let tries = 0;
  while (!upload.is_complete) {
    const first = upload.received;
    const last = Math.min(first + PIECE_BYTES, file.size);
    const resumed = tries ? `after ${tries} interruptions` : "";
    tell({ stage: "sending", done: first, total: file.size, resumed });
    try {
      const answer = await send("PATCH", `/api/v1/uploads/${path(upload.id)}`, {
        body: file.slice(first, last),
        headers: { "Content-Range": `bytes ${first}-${last - 1}/${file.size}`, "Content-Type": "application/octet-stream" },
        signal,
      });
      upload = await answer.json();
      tries = 0;
    } catch (error) {
      if (error instanceof ApiError && error.code === "upload_offset_mismatch") {
        upload = { ...upload, received: error.received };
        continue;
      }
      if (!isWorthRetrying(error) || (tries += 1) >= TRIES) throw error;
      tell({ stage: "waiting", done: first, total: file.size });
      await new Promise((wake) => setTimeout(wake, 500 * 2 ** tries));
      upload = await api.get(`/api/v1/uploads/${path(upload.id)}`, { signal }).catch(() => upload);
    }
  }
}

// Send and publish the files that `sorted` found.
export async function publish(name, files, { notes, tags }, { isPromoting, isDryRun, tell, signal }) {
  const { config, index, extras } = files;
  const weights = files.weights.length === 1 ? files.weights[0] : new Blob(files.weights);
  let parsed;
  try {
    parsed = config && JSON.parse(await config.text());
  } catch (error) {
    throw new Error(`${CONFIG} isn't JSON: ${error.message}`);
  }
  const sha256 = await digestOf(weights, tell, signal);
  await sendWeights(weights, sha256, tell, signal);
  tell({ stage: "verifying", done: weights.size, total: weights.size });
  const body = { ...(parsed && { config: parsed }), blob: sha256, ...(index && { index: await index.text() }) };
  for (const [field, file] of extras) body[field] = (await file.text()).trim();
  const root = `/api/v1/adapters/${path(name)}/versions`;
  const made = await api.post(`${root}?promote=${isPromoting}&dry_run=${isDryRun}`, body, { signal });
  const facts = { ...(notes && { notes }), ...(Object.keys(tags).length && { tags }) };
  if (!isDryRun && Object.keys(facts).length) await api.patch(`${root}/${made.version}`, facts, { signal });
  return made;
}
