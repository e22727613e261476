// Parts that several views share.
import { html, useCallback, useEffect, useRef, useState } from "./html.js";

export function Heading({ title, children, actions }) {
  return html`<header class="heading">
    <div>
      <h1 tabindex="-1" id="title">${title}</h1>
      ${children && html`<p class="lead">${children}</p>`}
    </div>
    ${actions && html`<div class="actions">${actions}</div>`}
  </header>`;
}

export function Loading({ what }) {
  return html`<div class="state" role="status">
    <span class="spinner" aria-hidden="true"></span>
    <p>Loading ${what} …</p>
  </div>`;
}

export function Empty({ title, children }) {
  return html`<div class="state">
    <p class="state-title">${title}</p>
    <div class="muted">${children}</div>
  </div>`;
}

export function Failure({ error, again }) {
  return html`<div class="note note-bad" role="alert">
    <p>${error.message}</p>
    ${error.problems?.length > 1 &&
    html`<ul>
      ${error.problems.slice(0, 5).map((one) => html`<li>${one}</li>`)}
      ${error.problems.length > 5 && html`<li>and ${error.problems.length - 5} more</li>`}
    </ul>`}
    ${again && html`<button type="button" onClick=${again}>Try again</button>`}
  </div>`;
}

export function Note({ kind = "info", children }) {
  return html`<div class=${`note note-${kind}`} role="status">${children}</div>`;
}

export function Chip({ kind = "plain", title, children }) {
  return html`<span class=${`chip chip-${kind}`} title=${title}>${children}</span>`;
}

// What `load` returns, loaded now, again on `reload`, and every `everyMs` while the page is seen;
// `everyMs` may be a function of the value, so that what is costly is asked for less often.
export function useLoaded(load, inputs, everyMs = 0) {
  const [state, setState] = useState({ value: null, error: null, isLoading: true });
  const latest = useRef(0);
  const value = useRef(null);
  const reload = useCallback(async (isQuiet = false) => {
    const number = (latest.current += 1);
    if (!isQuiet) setState((before) => ({ ...before, isLoading: true }));
    try {
      const loaded = await load();
      if (number === latest.current) {
        value.current = loaded;
        setState({ value: loaded, error: null, isLoading: false });
      }
      return loaded;
    } catch (error) {
      if (number === latest.current) setState((before) => ({ ...before, error, isLoading: false }));
      return null;
    }
  }, inputs);
  useEffect(() => {
    let timer = null;
    const again = () => {
      const pause = typeof everyMs === "function" ? everyMs(value.current) : everyMs;
      if (!pause) return;
      timer = setTimeout(async () => {
        if (document.visibilityState === "visible") await reload(true);
        if (timer !== null) again();
      }, pause);
    };
    setState({ value: null, error: null, isLoading: true });
    void reload();
    again();
    return () => {
      clearTimeout(timer);
      timer = null;
      latest.current += 1;
    };
  }, inputs);
  return { ...state, reload };
}

// An action behind a button: one at a time, its failure kept to be shown.
export function useAction(run) {
  const [state, setState] = useState({ isRunning: false, error: null });
  const act = async (...args) => {
    setState({ isRunning: true, error: null });
    try {
      await run(...args);
      setState({ isRunning: false, error: null });
    } catch (error) {
      setState({ isRunning: false, error });
    }
  };
  return [act, state];
}

let numDialogs = 0;

export function Dialog({ title, onClose, children, isWide }) {
  const element = useRef(null);
  // a question may stand above another dialog
  const id = useRef(null);
  id.current ??= `dialog-title-${(numDialogs += 1)}`;
  useEffect(() => {
    const dialog = element.current;
    const before = document.activeElement;
    dialog.showModal();
    return () => {
      dialog.close();
      before?.focus?.();
    };
  }, []);
  return html`<dialog
    ref=${element}
    class=${isWide ? "wide" : ""}
    aria-labelledby=${id.current}
    onCancel=${(event) => {
      event.preventDefault();
      onClose();
    }}
    onClick=${(event) => event.target === element.current && onClose()}
  >
    <div class="dialog">
      <header>
        <h2 id=${id.current}>${title}</h2>
        <button type="button" class="quiet" onClick=${onClose} aria-label="Close">✕</button>
      </header>
      ${children}
    </div>
  </dialog>`;
}

export function Confirm({ title, children, label, isDanger, run, onClose }) {
  const [act, { isRunning, error }] = useAction(async () => {
    await run();
    onClose();
  });
  return html`<${Dialog} title=${title} onClose=${onClose}>
    <div class="stack">
      <div>${children}</div>
      ${error && html`<${Failure} error=${error} />`}
      <div class="actions end">
        <button type="button" onClick=${onClose}>Cancel</button>
        <button type="button" class=${isDanger ? "danger" : "primary"} disabled=${isRunning} onClick=${() => act()}>
          ${label}
        </button>
      </div>
    </div>
  <//>`;
}

export function Copy({ text, label = "Copy" }) {
  const [isCopied, setCopied] = useState(false);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      // Over plain HTTP there is no clipboard: the text can be selected.
      return;
    }
    setCopied(true);
    setTimeout(() => setCopied(false), 1500);
  };
  return html`<button type="button" class="small" onClick=${copy} aria-live="polite">
    ${isCopied ? "Copied" : label}
  </button>`;
}

// Parts of one whole as a bar, and in words below it.
export function Bar({ parts, total, label, isThin }) {
  const shown = parts.filter((part) => part.value > 0);
  const words = shown.map((part) => `${part.name} ${part.text}`).join(", ");
  return html`<div class=${isThin ? "bar thin" : "bar"} role="img" aria-label=${`${label}: ${words || "nothing"}`}>
    ${shown.map(
      (part) => html`<span
        class=${`part part-${part.kind}`}
        style=${{ width: `${(100 * part.value) / total}%` }}
        title=${`${part.name}: ${part.text}`}
      ></span>`,
    )}
  </div>`;
}

export function Legend({ parts }) {
  return html`<ul class="legend">
    ${parts.map(
      (part) => html`<li>
        <span class=${`swatch part-${part.kind}`} aria-hidden="true"></span>${part.name}
        ${part.text && html`<span class="num">${part.text}</span>`}
      </li>`,
    )}
  </ul>`;
}

export function Choice({ label, value, options, onChange }) {
  return html`<div class="choice" role="group" aria-label=${label}>
    ${options.map(
      ([name, text]) => html`<button type="button" aria-pressed=${value === name} onClick=${() => onChange(name)}>
        ${text}
      </button>`,
    )}
  </div>`;
}
