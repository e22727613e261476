// The key, in this tab's session only, and the tenant that an admin acts for.
import { Store } from "./store.js";

const KEY = "loraserve.key";
const TENANT = "loraserve.tenant";

export const REVOKED =
  "You were signed out: the server doesn't accept this key any more. It was revoked or it expired, " +
  "or its tenant was deleted. Sign in with another key.";

// An empty key: the server requires none (--no-auth), so that nobody signs in.
const FIRST_KEY = document.documentElement.dataset.auth === "none" ? "" : null;

export const session = new Store({
  key: sessionStorage.getItem(KEY) ?? FIRST_KEY,
  tenant: sessionStorage.getItem(TENANT),
  me: null,
  notice: null,
});

export function signIn(key, me) {
  sessionStorage.setItem(KEY, key);
  session.set({ key, tenant: null, me, notice: null });
}

export function signOut(notice = null) {
  sessionStorage.removeItem(KEY);
  sessionStorage.removeItem(TENANT);
  session.set({ key: FIRST_KEY, tenant: null, me: null, notice });
}

export function knowMe(me) {
  session.set({ ...session.value, me });
}

export function actFor(tenant) {
  if (tenant) sessionStorage.setItem(TENANT, tenant);
  else sessionStorage.removeItem(TENANT);
  session.set({ ...session.value, tenant: tenant || null });
}
