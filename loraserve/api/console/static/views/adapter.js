import { html } from "../lib/html.js";
export function Adapter() { return html`<h1 id="title" tabindex="-1">A</h1>`; }
