// The versions of an alias side by side: those of its split, and its shadow.
import { all, api, path } from "./api.js";
import { evaluationOf } from "./evaluation.js";
import { number, percent, seconds } from "./format.js";
import { html } from "./html.js";
import { Chip, Failure, Loading, useLoaded } from "./ui.js";

const EVERY_MS = 5000;
const MINUTES = 60;
// A difference below these isn't marked: a percentile is up to 25 % too long, and few requests say little.
const WORSE_BY = 1.3;
const FEWEST = 20;

// Columns: the version with the largest weight first, the shadow last.
function columnsOf(alias, versions) {
  const parts = alias.split ?? [{ version: alias.version, weight: 1 }];
  const total = parts.reduce((sum, part) => sum + part.weight, 0);
  const answering = [...parts]
    .sort((one, other) => other.weight - one.weight)
    .map((part, index) => ({ version: part.version, role: "answer", share: part.weight / total, title: index === 0 ? "main" : "canary" }));
  const shadow = alias.shadow ? [{ version: alias.shadow.version, role: "shadow", share: alias.shadow.share, title: "shadow" }] : [];
  return [...answering, ...shadow].map((column) => ({ ...column, of: versions.find((one) => one.version === column.version) }));
}

function agreement(hours, column, since) {
  const mine = hours.filter((hour) => hour.shadow_version === column.version && Date.parse(hour.hour) + 3_600_000 > since);
  const sum = (field) => mine.reduce((total, hour) => total + hour[field], 0);
  const compared = sum("num_requests") - sum("num_failed");
  return {
    equal: compared ? sum("num_equal") / compared : null,
    tokens: sum("num_tokens") ? sum("num_agreed_tokens") / sum("num_tokens") : null,
  };
}

function failures(traffic) {
  return traffic?.num_requests ? traffic.num_failed / traffic.num_requests : null;
}

function isWorse(mine, main, value) {
  if ((mine?.num_requests ?? 0) < FEWEST || (main?.num_requests ?? 0) < FEWEST) return false;
  const [here, there] = [value(mine), value(main)];
  return here !== null && there !== null && here !== undefined && there !== undefined && here > there * WORSE_BY;
}

function Value({ text, isBad }) {
  return html`<td class="num">${text}${isBad && html` <${Chip} kind="bad">worse<//>`}</td>`;
}

const TIMES = [
  ["First token, p50", (one) => one?.first_token_s?.p50],
  ["First token, p95", (one) => one?.first_token_s?.p95],
  ["Per token, p50", (one) => one?.per_token_s?.p50],
  ["Per token, p95", (one) => one?.per_token_s?.p95],
];

function certificateOf(version) {
  const check = version?.checks?.find((one) => one.name === "parity");
  if (!check) return "–";
  const kept = check.certificate?.effect_kept;
  if (typeof kept === "number") return `${check.status}, ${Math.round(100 * kept)} % of its effect kept`;
  const difference = check.certificate?.max_difference;
  return difference === undefined || difference === null ? check.status : `${check.status}, off by ${difference.toPrecision(2)}`;
}

export function isCompared(alias) {
  return Boolean(alias.split || alias.shadow);
}

// One adapter's traffic for all of its aliases, if any of them has versions to compare.
export function useTraffic(root, aliases) {
  const isWanted = aliases.some(isCompared);
  return useLoaded(
    async () => (isWanted ? api.get(`${root}/traffic?minutes=${MINUTES}`) : null),
    [root, isWanted],
    isWanted ? EVERY_MS : 0,
  );
}

export function Compare({ alias, versions, root, loaded }) {
  const columns = columnsOf(alias, versions);
  const loadedHours = useLoaded(
    async () => (alias.shadow ? (await all(`${root}/aliases/${path(alias.name)}/shadow`, { most: 50 })).items : []),
    [root, alias.name, alias.shadow?.version],
    alias.shadow ? EVERY_MS : 0,
  );
  const error = loaded.error ?? loadedHours.error;
  if (!loaded.value) return error ? html`<${Failure} error=${error} />` : html`<${Loading} what="the comparison" />`;
  const traffic = loaded.value;
  const hours = loadedHours.value ?? [];
  const rows = columns.map((column) =>
    traffic.data.find((one) => one.version === column.version && one.role === column.role && one.digest === column.of?.digest));
  // a shadow's copies wait at the lowest priority: their times are no judgement of the version
  const judged = columns.map((column, index) => index > 0 && column.role === "answer");
  const agreements = columns.map((column) => (column.role === "shadow" ? agreement(hours, column, Date.parse(traffic.since)) : null));
  const count = (field) => rows.map((row) => html`<${Value} text=${number(row?.[field] ?? 0)} />`);
  return html`<div class="stack compare">
    ${error && html`<${Failure} error=${error} />`}
    <div class="scroll" tabindex="0" role="region" aria-label=${`Versions of ${alias.name} side by side`}>
      <table>
        <thead><tr>
          <th scope="col"><span class="hidden">Figure</span></th>
          ${columns.map((column) => html`<th scope="col" class="num">version ${column.version}<br />${column.title}</th>`)}
        </tr></thead>
        <tbody>
          <tr><th scope="row">Share</th>${columns.map((column) => html`<${Value} text=${percent(column.share)} />`)}</tr>
          <tr><th scope="row">Requests</th>${count("num_requests")}</tr>
          <tr><th scope="row">Failed</th>${rows.map((row, index) => html`<${Value}
            text=${row?.num_requests ? `${number(row.num_failed)} (${percent(failures(row), 1)})` : "–"}
            isBad=${index > 0 && row?.num_failed > 1 && isWorse(row, rows[0], failures)} />`)}</tr>
          ${TIMES.map(([name, value]) => html`<tr><th scope="row">${name}</th>${rows.map((row, index) => html`<${Value}
            text=${seconds(value(row))} isBad=${judged[index] && isWorse(row, rows[0], value)} />`)}</tr>`)}
          <tr><th scope="row">Prompt tokens</th>${count("prompt_tokens")}</tr>
          <tr><th scope="row">Tokens</th>${count("completion_tokens")}</tr>
          <tr><th scope="row">Certificate</th>${columns.map((column) => html`<${Value} text=${certificateOf(column.of)} />`)}</tr>
          ${columns.some((column) => column.of?.evaluation) && html`
            <tr><th scope="row">Evaluation</th>${columns.map((column) => html`<${Value} text=${evaluationOf(column.of)} />`)}</tr>`}
          ${alias.shadow && html`
            <tr><th scope="row">Equal answers</th>${agreements.map((one) => html`<${Value} text=${one ? percent(one.equal, 1) : ""} />`)}</tr>
            <tr><th scope="row">Tokens before the first that differs</th>${agreements.map((one) => html`<${Value} text=${one ? percent(one.tokens, 1) : ""} />`)}</tr>`}
        </tbody>
      </table>
    </div>
    <p class="muted small">Requests on this server since ${new Date(traffic.since).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" })}${alias.shadow ? "; agreement since the beginning of that hour, on all servers. A shadow's first token includes its wait at the lowest priority." : "."}</p>
  </div>`;
}
