import { html } from "../lib/html.js";
export function Tenants() { return html`<h1 id="title" tabindex="-1">Tenants</h1>`; }
