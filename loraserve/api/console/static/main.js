// The page: signing in, the navigation, and the view that the address names.
import { all, api, send } from "./lib/api.js";
import { html, render, useEffect, useRef, useState } from "./lib/html.js";
import { follow, live, stop } from "./lib/live.js";
import { actFor, knowMe, session, signOut } from "./lib/session.js";
import { Store, useStore } from "./lib/store.js";
import { Failure, Loading, useAction, useLoaded } from "./lib/ui.js";
import { Adapter } from "./views/adapter.js";
import { Adapters } from "./views/adapters.js";
import { Login } from "./views/login.js";
import { Overview } from "./views/overview.js";
import { Playground } from "./views/playground.js";
import { Residency } from "./views/residency.js";
import { Slow } from "./views/slow.js";
import { Tenants } from "./views/tenants.js";

const VIEWS = [
  ["overview", "Overview", Overview],
  ["residency", "Residency", Residency],
  ["slow", "Why was it slow?", Slow],
  ["adapters", "Adapters", Adapters],
  ["playground", "Playground", Playground],
  ["tenants", "Tenants", Tenants],
];

const place = new Store(read());

function read() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [view, ...rest] = path.split("/").map(decode);
  return { view: view || "overview", rest, query: new URLSearchParams(query), hash: location.hash };
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

window.addEventListener("hashchange", () => place.set(read()));

function themeNow() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

function ThemeToggle() {
  const [theme, setTheme] = useState(themeNow());
  const other = theme === "dark" ? "light" : "dark";
  const toggle = () => {
    document.documentElement.dataset.theme = other;
    try {
      localStorage.setItem("loraserve.theme", other);
    } catch {
      // It holds for this page alone.
    }
    setTheme(other);
    window.dispatchEvent(new Event("loraserve:theme"));
  };
  return html`<button type="button" class="quiet small" onClick=${toggle}>
    ${other === "dark" ? "Dark theme" : "Light theme"}
  </button>`;
}

function TenantChoice({ me }) {
  const { tenant } = useStore(session);
  const { value } = useLoaded(() => (me.is_admin ? all("/api/v1/tenants") : null), [me.key_id]);
  if (!me.is_admin) return html`<p class="who">Tenant <strong>${me.tenant}</strong></p>`;
  const names = value?.items.map((one) => one.name) ?? [];
  return html`<label class="who">
    <span>Acting for</span>
    <select
      value=${tenant ?? ""}
      onChange=${(event) => actFor(event.currentTarget.value)}
    >
      <option value="">all tenants</option>
      ${(tenant && !names.includes(tenant) ? [tenant, ...names] : names).map(
        (name) => html`<option value=${name} selected=${name === tenant}>${name}</option>`,
      )}
    </select>
  </label>`;
}

const DOCS = document.documentElement.dataset.docs;

// The document of the API needs the key, so it is asked for here and given to the browser as a file.
function Links() {
  const [act, { isRunning, error }] = useAction(async () => {
    const answer = await send("GET", "/api/v1/openapi.json");
    const url = URL.createObjectURL(await answer.blob());
    const link = document.createElement("a");
    link.href = url;
    link.download = "loraserve-openapi.json";
    link.click();
    // the browser reads it after the click
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  });
  return html`<ul class="links small">
    ${DOCS && html`<li><a href=${DOCS} target="_blank" rel="noopener noreferrer">Documentation</a></li>`}
    <li><button type="button" class="link" disabled=${isRunning} onClick=${() => act()}>OpenAPI document</button></li>
    ${error && html`<li><${Failure} error=${error} /></li>`}
  </ul>`;
}

function ServerState() {
  const { state, now, why } = useStore(live);
  if (state === "away") return html`<p class="server bad" role="status"><span class="dot" aria-hidden="true"></span>Not connected: ${why}</p>`;
  if (!now) return html`<p class="server" role="status"><span class="dot" aria-hidden="true"></span>Connecting …</p>`;
  if (!now.is_ready) return html`<p class="server warn" role="status"><span class="dot" aria-hidden="true"></span>Not ready: ${now.status ?? "the engine is starting"}</p>`;
  return html`<p class="server good" role="status"><span class="dot" aria-hidden="true"></span>Ready</p>`;
}

function Page() {
  const { key, me, tenant } = useStore(session);
  const { view, rest, query, hash } = useStore(place);
  const [isOpen, setOpen] = useState(false);
  const first = useRef(true);
  const found = VIEWS.find(([name]) => name === view);
  useEffect(() => {
    setOpen(false);
    document.title = `${found ? found[1] : "Not found"} · loraserve`;
    // a reader of the screen begins with the new view's title
    if (!first.current) document.getElementById("title")?.focus();
    first.current = false;
  }, [hash]);
  useEffect(() => {
    follow();
    return stop;
  }, [tenant]);
  const View = view === "adapters" && rest[0] ? Adapter : found?.[2];
  return html`<a class="skip" href="#main" onClick=${(event) => {
      event.preventDefault();
      document.getElementById("main").focus();
    }}>Skip to the content</a>
    <div class="frame">
      <div class="side">
        <div class="brand">
          <a href="#/overview">loraserve</a>
          <button type="button" class="menu" aria-expanded=${isOpen} aria-controls="nav" onClick=${() => setOpen(!isOpen)}>
            Menu
          </button>
        </div>
        <div id="nav" class=${isOpen ? "nav open" : "nav"}>
          <nav aria-label="Views">
            <ul>
              ${VIEWS.map(
                ([name, text]) => html`<li>
                  <a href=${`#/${name}`} aria-current=${name === view ? "page" : undefined}>${text}</a>
                </li>`,
              )}
            </ul>
          </nav>
          <div class="foot">
            <${Links} />
            <${ServerState} />
            <${TenantChoice} me=${me} />
            <div class="actions">
              <${ThemeToggle} />
              ${key && html`<button type="button" class="quiet small" onClick=${() => signOut()}>Sign out</button>`}
            </div>
          </div>
        </div>
      </div>
      <main id="main" tabindex="-1">
        ${View
          ? html`<${View} key=${`${tenant ?? ""}/${view}/${rest.join("/")}`} me=${me} tenant=${tenant} rest=${rest} query=${query} />`
          : html`<div class="state"><h1 id="title" tabindex="-1">There is no such view</h1><p><a href="#/overview">To the overview</a></p></div>`}
      </main>
    </div>`;
}

function App() {
  const { key, me } = useStore(session);
  const loaded = useLoaded(async () => {
    if (key !== null && !me) knowMe(await api.get("/api/v1/whoami"));
  }, [key]);
  if (key === null) return html`<${Login} />`;
  if (!me) {
    return html`<main class="login">
      ${loaded.error
        ? html`<${Failure} error=${loaded.error} again=${() => loaded.reload()} /><button type="button" onClick=${() => signOut()}>Sign out</button>`
        : html`<${Loading} what="the console" />`}
    </main>`;
  }
  return html`<${Page} />`;
}

render(html`<${App} />`, document.getElementById("app"));
