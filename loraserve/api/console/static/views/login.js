// Sign in with an API key.
import { ApiError, api } from "../lib/api.js";
import { html, useRef } from "../lib/html.js";
import { session, signIn } from "../lib/session.js";
import { useStore } from "../lib/store.js";
import { Failure, useAction } from "../lib/ui.js";

function explained(error) {
  if (error instanceof ApiError && error.status === 401) {
    return new Error("The server doesn't know this key. Check that it is whole, and that it wasn't revoked.");
  }
  if (error instanceof ApiError && error.status === 403) {
    return new Error('This key may not read adapters. The console needs a key with the scope "adapters:read".');
  }
  return error;
}

export function Login() {
  const { notice } = useStore(session);
  const field = useRef(null);
  const [act, { isRunning, error }] = useAction(async () => {
    const key = field.current.value.trim();
    // a header can't carry other characters, and no key has them
    if (!/^[\x21-\x7e]+$/.test(key)) throw new Error("Paste an API key, such as sk-lora-….");
    try {
      signIn(key, await api.get("/api/v1/whoami", { as: key }));
    } catch (failure) {
      field.current?.focus();
      throw explained(failure);
    }
  });
  return html`<main class="login">
    <form
      class="card"
      onSubmit=${(event) => {
        event.preventDefault();
        void act();
      }}
    >
      <p class="wordmark">loraserve</p>
      <h1>Sign in</h1>
      ${notice && !error && html`<div class="note note-warn" role="alert"><p>${notice}</p></div>`}
      ${error && html`<${Failure} error=${error} />`}
      <label>
        <span>API key</span>
        <input ref=${field} type="password" name="key" autocomplete="off" spellcheck=${false} autofocus required
          aria-describedby="key-help" />
      </label>
      <p class="muted small" id="key-help">
        A tenant's key shows what is its tenant's; an admin key shows all. It stays in this tab until you close it or
        sign out.
      </p>
      <button type="submit" class="primary" disabled=${isRunning}>${isRunning ? "Signing in …" : "Sign in"}</button>
    </form>
  </main>`;
}
