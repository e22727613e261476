// Versions by metric: what their evaluations measured on the same data, and the numbers in their tags.
import { figure, inOrder } from "./evaluation.js";
import { html, useState } from "./html.js";
import { Chip } from "./ui.js";

const TAG = "tag ";
const BASE = "base";

// The data that most versions were evaluated on come first: {sha256, name, versions}.
function dataOf(versions) {
  const found = new Map();
  for (const version of versions) {
    const one = version.evaluation;
    if (!one) continue;
    const data = found.get(one.data_sha256) ?? { sha256: one.data_sha256, name: one.data_name, count: 0 };
    found.set(one.data_sha256, { ...data, count: data.count + 1 });
  }
  return [...found.values()].sort((one, other) => other.count - one.count);
}

function numericTags(version) {
  const numbers = Object.entries(version.tags).filter(([, value]) => value.trim() !== "" && Number.isFinite(Number(value)));
  return numbers.map(([name, value]) => [`${TAG}${name}`, Number(value)]);
}

function rowsOf(versions, sha256) {
  const rows = versions.map((version) => {
    const isMeasured = version.evaluation?.data_sha256 === sha256;
    const values = { ...(isMeasured ? version.evaluation.metrics : {}), ...Object.fromEntries(numericTags(version)) };
    return { key: version.version, title: `version ${version.version}`, aliases: version.aliases, values };
  });
  const newest = versions.find((version) => version.evaluation?.data_sha256 === sha256);
  const base = newest?.evaluation.base_metrics ?? {};
  return Object.keys(base).length ? [...rows, { key: BASE, title: "the base", aliases: [], values: base }] : rows;
}

// Best of the versions by a metric of an evaluation, of which more is better; nobody says so of a tag.
function bestOf(rows, name) {
  if (name.startsWith(TAG)) return null;
  const values = rows.filter((row) => row.key !== BASE && row.values[name] !== undefined).map((row) => row.values[name]);
  return values.length > 1 ? Math.max(...values) : null;
}

function shown(name, value) {
  if (value === undefined) return "–";
  return name.startsWith(TAG) ? Number(value.toPrecision(5)).toString() : figure(name, value);
}

export function VersionMetrics({ versions }) {
  const data = dataOf(versions);
  const [chosen, setChosen] = useState(null);
  const [order, setOrder] = useState(null); // {name, isRising}
  const sha256 = data.some((one) => one.sha256 === chosen) ? chosen : (data[0]?.sha256 ?? null);
  const rows = rowsOf(versions, sha256);
  const names = new Set(rows.flatMap((row) => Object.keys(row.values)));
  const metrics = inOrder(Object.fromEntries([...names].filter((name) => !name.startsWith(TAG)).map((name) => [name, 0])));
  const columns = [...metrics, ...[...names].filter((name) => name.startsWith(TAG)).sort()];
  if (!columns.length || versions.length < 2) return null;
  const worth = (row) => row.values[order.name] ?? (order.isRising ? Infinity : -Infinity);
  const sorted = order ? [...rows].sort((one, other) => (order.isRising ? 1 : -1) * (worth(one) - worth(other))) : rows;
  const sortBy = (name) => setOrder(order?.name === name && !order.isRising ? { name, isRising: true } : { name, isRising: false });
  const best = new Map(columns.map((name) => [name, bestOf(rows, name)]));
  return html`<section class="card" aria-labelledby="metrics-title">
    <div class="spread">
      <h2 id="metrics-title">Versions by metric</h2>
      ${data.length > 1 &&
      html`<label class="row"><span>Data</span><select value=${sha256} onChange=${(event) => setChosen(event.currentTarget.value)}>
        ${data.map((one) => html`<option value=${one.sha256} selected=${one.sha256 === sha256}>${one.name} (${one.sha256.slice(0, 8)})</option>`)}</select></label>`}
      ${data.length === 1 && html`<span class="muted small">evaluated on ${data[0].name}</span>`}
    </div>
    <div class="scroll" tabindex="0" role="region" aria-label="Metrics of versions"><table>
      <thead><tr><th scope="col">Version</th>
        ${columns.map((name) => html`<th scope="col" class="num" key=${name} aria-sort=${order?.name === name ? (order.isRising ? "ascending" : "descending") : "none"}>
          <button type="button" class="link" onClick=${() => sortBy(name)}>${name.replace(TAG, "").replaceAll("_", " ")}${order?.name === name ? (order.isRising ? " ↑" : " ↓") : ""}</button></th>`)}
      </tr></thead>
      <tbody>${sorted.map((row) => html`<tr key=${row.key}>
        <th scope="row">${row.title} ${row.aliases.map((alias) => html`<${Chip} kind="good">${alias}<//>`)}</th>
        ${columns.map((name) => html`<td class="num" key=${name}>${row.key !== BASE && best.get(name) !== null && row.values[name] === best.get(name)
          ? html`<strong>${shown(name, row.values[name])}</strong><span class="hidden"> best</span>`
          : shown(name, row.values[name])}</td>`)}
      </tr>`)}</tbody>
    </table></div>
  </section>`;
}
