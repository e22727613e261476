import { html } from "../lib/html.js";
export function Residency() { return html`<h1 id="title" tabindex="-1">Residency</h1>`; }
