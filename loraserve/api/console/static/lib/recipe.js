// What an action of the console is elsewhere: its request for curl, the SDK and the command line. The key is
// in LORASERVE_API_KEY everywhere, and never in the text.
import { html, useState } from "./html.js";
import { session } from "./session.js";
import { Choice, Copy } from "./ui.js";

// A word for a shell; what needs no quotes gets none.
export function word(text) {
  const plain = String(text);
  return /^[A-Za-z0-9_@%+:,./-][A-Za-z0-9_@%+=:,./-]*$/.test(plain) ? plain : `'${plain.replaceAll("'", "'\\''")}'`;
}

// An expression of Python's, which JSON has no value for.
export class Expression {
  constructor(text) {
    this.text = text;
  }
}

// A value as Python writes it: lists and dicts on lines of their own once they are long.
export function literal(value, indent = 0) {
  if (value === null || value === undefined) return "None";
  if (value instanceof Expression) return value.text;
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const isList = Array.isArray(value);
  const [open, close] = isList ? "[]" : "{}";
  const parts = isList
    ? value.map((one) => literal(one, indent + 4))
    : Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${literal(one, indent + 4)}`);
  const line = `${open}${parts.join(", ")}${close}`;
  if (line.length + indent <= 88 && !line.includes("\n")) return line;
  const space = " ".repeat(indent);
  return `${open}\n${parts.map((part) => `${space}    ${part},\n`).join("")}${space}${close}`;
}

// `name("a", 1, key=…)`, from the arguments by place and those by name.
export function call(name, places, names = {}) {
  const given = [
    ...places.map((value) => literal(value, 4)),
    ...Object.entries(names).filter(([, value]) => value !== undefined).map(([key, value]) => `${key}=${literal(value, 4)}`),
  ];
  const line = `${name}(${given.join(", ")})`;
  if (line.length <= 88 && !line.includes("\n")) return line;
  return `${name}(\n${given.map((one) => `    ${one},\n`).join("")})`;
}

const PYTHON_KEY = 'os.environ["LORASERVE_API_KEY"]';

// `tenant`: that for which an admin acts, if not the session's.
export function python(text, { imports = [], tenant = session.value.tenant } = {}) {
  const client = call("Client", [location.origin]).slice(0, -1);
  const acting = tenant ? `, tenant=${literal(tenant)}` : "";
  return `${["import os", ...imports].join("\n")}\n\nfrom loraserve import Client\n\nclient = ${client}, api_key=${PYTHON_KEY}${acting})\n${text}`;
}

// `form` are files by the name of their part; a command that needs no body has neither.
export function curl(method, path, { json, form, tenant = session.value.tenant } = {}) {
  const lines = [
    `curl ${method === "GET" || json || form ? "" : `-X ${method} `}${word(location.origin + path)}`,
    '-H "Authorization: Bearer $LORASERVE_API_KEY"',
    ...(tenant ? [`-H ${word(`X-Tenant: ${tenant}`)}`] : []),
  ];
  if (json !== undefined) {
    if (method !== "POST") lines[0] = lines[0].replace("curl ", `curl -X ${method} `);
    lines.push("-H 'Content-Type: application/json'", `-d '${JSON.stringify(json, null, 2).replaceAll("'", "'\\''")}'`);
  }
  for (const [name, file] of Object.entries(form ?? {})) {
    // quotes of curl's own: a name may have its separators
    const quoted = /[,;"\\]/.test(file) ? `"${file.replace(/["\\]/g, "\\$&")}"` : file;
    lines.push(`-F ${word(`${name}=@${quoted}`)}`);
  }
  return lines.join(" \\\n  ");
}

// Words of `loraserve`; a false one is left out.
export function command(...words) {
  return commandFor(session.value.tenant, ...words);
}

export function commandFor(tenant, ...words) {
  const variables = [`LORASERVE_URL=${word(location.origin)}`, ...(tenant ? [`LORASERVE_TENANT=${word(tenant)}`] : [])];
  const given = words.flat().filter((one) => one !== false && one !== null && one !== undefined);
  return `${variables.join(" ")} loraserve ${given.map(word).join(" ")}`;
}

// The action in three languages, folded away below what does it here. `recipe` makes {curl, python, cli}
// when it is opened.
export function CopyAs({ recipe, label = "As curl, Python or a command" }) {
  const [isOpen, setOpen] = useState(false);
  const [kind, setKind] = useState("curl");
  let text = "";
  if (isOpen) {
    try {
      text = recipe()[kind];
    } catch (error) {
      text = `# ${error.message}`;
    }
  }
  return html`<details class="copy-as" onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary>${label}</summary>
    ${isOpen &&
    html`<div class="stack">
      <div class="spread">
        <${Choice} label="Kind of command" value=${kind} onChange=${setKind} options=${[["curl", "curl"], ["python", "Python"], ["cli", "CLI"]]} />
        <${Copy} text=${text} />
      </div>
      <pre tabindex="0" aria-label="The same elsewhere"><code>${text}</code></pre>
      <p class="muted small">The key is read from <code>LORASERVE_API_KEY</code>.</p>
    </div>`}
  </details>`;
}
