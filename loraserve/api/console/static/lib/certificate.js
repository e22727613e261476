// A version's certificate in words.
import { html } from "./html.js";
import { percent, seconds } from "./format.js";

function figure(value) {
  return value === null || value === undefined ? "not finite" : Number(value.toPrecision(3)).toString();
}

export function checkOf(version, name) {
  return version.checks.find((check) => check.name === name) ?? null;
}

export function Certificate({ version }) {
  const parity = checkOf(version, "parity");
  const failed = version.checks.filter((check) => check.status === "failed");
  if (!parity) return html`<p>It has no certificate yet: the engine was busy or away as it was published. It gets one in idle time.</p>`;
  const facts = parity.certificate ?? parity;
  const has = typeof facts.tolerance === "number";
  return html`<div class="stack">
    ${parity.status === "passed" && has &&
    html`<p>
      On ${facts.num_probe_tokens} positions of test texts, the served version was compared with a plain float32
      evaluation of the same adapter. The largest difference of a logit was <strong class="num">${figure(facts.max_difference)}</strong>,
      of <span class="num">${figure(facts.tolerance)}</span> allowed; the likeliest token was the same in
      <strong class="num">${percent(facts.top1_agreement, facts.top1_agreement === 1 ? 0 : 1)}</strong> of the positions.
    </p>
    <p class="muted small">
      The adapter moves a logit of the base by up to <span class="num">${figure(facts.max_effect)}</span>; the base's own
      rounding moves it by <span class="num">${figure(facts.base_difference)}</span>. Precision lost in memory:
      ${percent(facts.precision_loss, 2)}. ${facts.seconds ? `Verified in ${seconds(facts.seconds)}.` : ""}
    </p>`}
    ${parity.status === "passed" && !has && html`<p>It passed: ${parity.detail}.</p>`}
    ${parity.status === "skipped" && html`<p>It wasn't compared yet: ${parity.detail}.</p>`}
    ${failed.map((check) => html`<div class="note note-bad"><p><strong>${check.name} failed:</strong> ${check.detail}. The version isn't served.</p></div>`)}
    ${version.warnings.map((warning) => html`<div class="note note-warn"><p>${warning}.</p></div>`)}
  </div>`;
}
