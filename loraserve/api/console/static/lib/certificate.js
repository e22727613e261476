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
  const isCompared = has && (parity.status === "passed" || parity.status === "degraded" || parity.status === "not_possible");
  const isPriced = typeof facts.answer_divergence === "number";
  return html`<div class="stack">
    ${parity.status === "degraded" && html`<div class="note note-warn"><p><strong>Degraded:</strong> ${facts.reason || parity.detail} The version is served.</p></div>`}
    ${parity.status === "not_possible" && html`<div class="note note-warn"><p><strong>Not possible:</strong> ${facts.reason || parity.detail} The version is served.</p></div>`}
    ${isCompared && isPriced && html`<p>
      Rounding the base leaves <strong class="num">${typeof facts.effect_kept === "number" ? percent(facts.effect_kept, 0) : "nothing to measure"}</strong>
      of the adapter’s effect; <span class="num">${percent(facts.min_effect_kept, 0)}</span> is expected. Over
      <span class="num">${facts.num_answer_tokens}</span> tokens of its own answers, the likeliest token is that of the
      float base in <strong class="num">${percent(facts.answer_agreement, 0)}</strong>
      (without the adapter <span class="num">${percent(facts.base_agreement, 0)}</span>), at
      <span class="num">${figure(facts.answer_divergence)}</span> nats of divergence
      (without it <span class="num">${figure(facts.base_divergence)}</span>).
    </p>`}
    ${isCompared && !isPriced && facts.rounding_note && html`<p>What rounding costs isn’t measured: ${facts.rounding_note}.</p>`}
    ${isCompared && facts.num_probe_tokens > 0 &&
    html`<p>
      The engine computes it as it should: on ${facts.num_probe_tokens} positions of test texts, a logit differs from a
      plain float32 evaluation on the same weights by at most <strong class="num">${figure(facts.max_difference)}</strong>,
      of <span class="num">${figure(facts.tolerance)}</span> allowed${typeof facts.module_difference === "number" ? html`, and what a module adds by at most <strong class="num">${figure(facts.module_difference)}</strong> of it` : ""}; the likeliest token is the same in
      <strong class="num">${percent(facts.top1_agreement, facts.top1_agreement === 1 ? 0 : 1)}</strong> of the positions.
    </p>
    <p class="muted small">
      The adapter moves a logit of the base by up to <span class="num">${figure(facts.max_effect)}</span>; the base’s own
      difference is <span class="num">${figure(facts.base_difference)}</span>. Precision lost in memory:
      ${percent(facts.precision_loss, 2)}. ${facts.seconds ? `Verified in ${seconds(facts.seconds)}.` : ""}
    </p>`}
    ${parity.status === "passed" && !has && html`<p>It passed: ${parity.detail}.</p>`}
    ${parity.status === "skipped" && html`<p>It wasn't compared yet: ${parity.detail}.</p>`}
    ${["container", "names"].map((name) => checkOf(version, name)).filter(Boolean).map((check) => html`<p class="muted small">Files: ${check.detail}.</p>`)}
    ${failed.map((check) => html`<div class="note note-bad"><p><strong>${check.name} failed:</strong> ${check.detail}. The version isn't served.</p></div>`)}
    ${version.warnings.filter((warning) => warning !== parity.detail).map((warning) => html`<div class="note note-warn"><p>${warning}.</p></div>`)}
  </div>`;
}
