import { html } from "../lib/html.js";
export function Adapters() { return html`<h1 id="title" tabindex="-1">Adapters</h1>`; }
