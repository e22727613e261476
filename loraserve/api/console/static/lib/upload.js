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

// Which of the dropped files are an adapter's; throws an Error in words where something is missing.
export function sorted(files) {
  const byName = new Map([...files].map((file) => [file.name, file]));
  const config = byName.get("adapter_config.json");
  const weights = byName.get("adapter_model.safetensors") ?? byName.get("adapter_model.bin");
  if (!config || !weights) {
    const missing = [!config && "adapter_config.json", !weights && "adapter_model.safetensors"].filter(Boolean);
    const sharded = byName.has("adapter_model.safetensors.index.json") ? " (weights in several files: loraserve adapter push)" : "";
    throw new Error(`Missing: ${missing.join(" and ")}${sharded}. Drop the folder that PEFT's save_pretrained wrote.`);
  }
  const extras = Object.keys(EXTRAS).filter((name) => byName.has(name)).map((name) => [EXTRAS[name], byName.get(name)]);
  return { config, weights, extras };
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

export async function publish(name, files, { notes, tags }, { isPromoting, isDryRun, tell, signal }) {
  const { config, weights, extras } = sorted(files);
  let parsed;
  try {
    parsed = JSON.parse(await config.text());
  } catch (error) {
    throw new Error(`adapter_config.json isn't JSON: ${error.message}`);
  }
  const sha256 = await digestOf(weights, tell, signal);
  await sendWeights(weights, sha256, tell, signal);
  tell({ stage: "verifying", done: weights.size, total: weights.size });
  const body = { config: parsed, blob: sha256 };
  for (const [field, file] of extras) body[field] = (await file.text()).trim();
  const root = `/api/v1/adapters/${path(name)}/versions`;
  const made = await api.post(`${root}?promote=${isPromoting}&dry_run=${isDryRun}`, body, { signal });
  const facts = { ...(notes && { notes }), ...(Object.keys(tags).length && { tags }) };
  if (!isDryRun && Object.keys(facts).length) await api.patch(`${root}/${made.version}`, facts, { signal });
  return made;
}
