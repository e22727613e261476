// A value that components follow.
import { useEffect, useState } from "./html.js";

export class Store {
  #listeners = new Set();

  constructor(value) {
    this.value = value;
  }

  set(value) {
    this.value = value;
    for (const listener of [...this.#listeners]) listener();
  }

  subscribe(listener) {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }
}

export function useStore(store) {
  const [, redraw] = useState(0);
  useEffect(() => store.subscribe(() => redraw((count) => count + 1)), [store]);
  return store.value;
}
