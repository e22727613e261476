// A version's evaluation: its metrics, beside the base's of the same run.
import { day, number, percent } from "./format.js";
import { html } from "./html.js";

const SHARES = ["exact_match", "accuracy", "regex_match", "json_match"];

export function figure(name, value) {
  if (value === undefined || value === null) return "–";
  return SHARES.includes(name) ? percent(value, 1) : Number(value.toPrecision(4)).toString();
}

export function inOrder(metrics) {
  const place = (name) => (SHARES.includes(name) ? SHARES.indexOf(name) : SHARES.length);
  return Object.keys(metrics).sort((one, other) => place(one) - place(other) || one.localeCompare(other));
}

// The first metric, for a cell.
export function evaluationOf(version) {
  const evaluation = version?.evaluation;
  if (!evaluation) return "–";
  const [name] = inOrder(evaluation.metrics);
  return `${name.replaceAll("_", " ")} ${figure(name, evaluation.metrics[name])}`;
}

export function Evaluation({ version }) {
  const evaluation = version.evaluation;
  if (!evaluation) return html`<p class="muted">It wasn't evaluated yet. On a terminal: <code>loraserve adapter eval ${version.name}@${version.version} DATA.jsonl</code></p>`;
  return html`<div class="stack">
    <p class="small">On <span class="num">${number(evaluation.num_lines)}</span> lines of ${evaluation.data_name}, ${day(evaluation.created_at)}.</p>
    <table>
      <thead><tr><th scope="col">Metric</th><th scope="col" class="num">Version ${version.version}</th><th scope="col" class="num">Base</th></tr></thead>
      <tbody>${inOrder(evaluation.metrics).map((name) => html`<tr key=${name}>
        <th scope="row">${name.replaceAll("_", " ")}</th>
        <td class="num">${figure(name, evaluation.metrics[name])}</td>
        <td class="num">${figure(name, evaluation.base_metrics[name])}</td>
      </tr>`)}</tbody>
    </table>
  </div>`;
}
