// Publishes an adapter's files by the console's own modules, outside of a browser, and prints the version.
// node console_upload.mjs STATIC_FOLDER URL KEY NAME FILE…
import { openAsBlob } from "node:fs";
import { basename } from "node:path";

const [folder, url, key, name, ...paths] = process.argv.slice(2);
globalThis.document = { documentElement: { dataset: {} } };
globalThis.sessionStorage = { getItem: (item) => (item === "loraserve.key" ? key : null), removeItem() {}, setItem() {} };
const { fetch } = globalThis;
globalThis.fetch = (path, init) => fetch(new URL(path, url), init);
const { publish, sorted } = await import(`${folder}/lib/upload.js`);
const given = await Promise.all(paths.map(async (path) => new File([await openAsBlob(path)], basename(path))));
try {
  const files = await sorted(given);
  const how = { isPromoting: true, isDryRun: false, tell() {}, signal: new AbortController().signal };
  const version = await publish(name, files, { notes: "", tags: {} }, how);
  process.stdout.write(JSON.stringify({ version, hasTokenizer: files.hasTokenizer }));
} catch (error) {
  process.stdout.write(JSON.stringify({ error: [error.message, ...(error.problems ?? [])].join(" ") }));
}
