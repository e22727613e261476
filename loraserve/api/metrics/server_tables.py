"""Tables of the metrics that are read from the server's own objects, a table for each object.

Labels are tiers, uses, states and causes: a fixed number of samples, however many adapters and
tenants there are. Only vLLM's own names label adapters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from loraserve.api.grammar.checker import OUTCOMES
from loraserve.api.metrics.routing import AdapterRouting
from loraserve.api.metrics.table import Table, counter, gauge, histogram
from loraserve.api.version_chat import formats, renderer
from loraserve.batches.records import ENDED_STATES
from loraserve.batches.runner import LINE_OUTCOMES
from loraserve.registry.health.certificates import VERDICTS
from loraserve.registry.health.checks import SKIPPED
from loraserve.registry.operations import ENDED

if TYPE_CHECKING:
    from loraserve.api.grammar.checker import GrammarChecker
    from loraserve.api.result_cache import ResultCache
    from loraserve.api.version_chat.formats import VersionChats
    from loraserve.api.version_chat.renderer import TemplateRenderer
    from loraserve.batches.runner import BatchRunner
    from loraserve.conversations.stored_responses import StoredResponses
    from loraserve.registry.health.base_precision import BasePrecisions
    from loraserve.registry.registry import Registry
    from loraserve.tenancy.billing.meter import UsageMeter
    from loraserve.tenancy.limits.admission import Admissions
    from loraserve.tenancy.limits.pauses import Pauses
    from loraserve.tenancy.limits.shares import Shares

CHECKS: Table[GrammarChecker] = (
    counter(
        "loraserve_grammar_checks",
        "Grammars of requests by outcome: compiled, cached, refused, or too complex.",
        lambda c: {outcome: c.num_by_outcome[outcome] for outcome in OUTCOMES},
        "outcome",
    ),
    histogram("loraserve_grammar_check_seconds", "Time of each compilation before the engine.", lambda c: c.check_s),
    gauge(
        "loraserve_grammar_checks_waiting",
        "Requests that wait until a grammar can be compiled.",
        lambda c: c.num_waiting,
    ),
)


TEMPLATES: Table[TemplateRenderer] = (
    counter(
        "loraserve_template_renderings",
        "Questions to the processes of versions' chat templates, by outcome: rendered, refused, or killed.",
        lambda t: {outcome: t.num_by_outcome[outcome] for outcome in renderer.OUTCOMES},
        "outcome",
    ),
    histogram("loraserve_template_render_seconds", "Time of each, with the way to its process.", lambda t: t.render_s),
    gauge("loraserve_template_renderings_waiting", "Questions that wait for a process.", lambda t: t.num_waiting),
    counter("loraserve_template_process_starts", "Processes for chat templates.", lambda t: t.num_starts),
)

VERSION_CHATS: Table[VersionChats] = (
    counter(
        "loraserve_version_chat_lookups",
        "Uses of versions' own chat formats and defaults, by outcome: loaded, or cached.",
        lambda v: {outcome: v.num_by_outcome[outcome] for outcome in formats.OUTCOMES},
        "outcome",
    ),
    gauge("loraserve_version_chat_bytes", "Bytes of those that are kept.", lambda v: v.num_bytes),
)


RESULT_CACHE: Table[ResultCache] = (
    counter(
        "loraserve_result_cache_requests",
        "Requests that asked for the result cache, by outcome: hit, miss, or off for their tenant.",
        lambda c: c.num_by_outcome,
        "outcome",
    ),
    counter(
        "loraserve_result_cache_tokens",
        "Tokens of answers that were kept, given in place of the engine's.",
        lambda c: c.num_replayed_tokens,
    ),
    counter("loraserve_result_cache_dropped", "Answers dropped with a version or tenant.", lambda c: c.num_dropped),
    gauge("loraserve_result_cache_answers", "Answers that are kept.", lambda c: c.num_answers),
    gauge("loraserve_result_cache_bytes", "Bytes of them.", lambda c: c.num_bytes),
)


ROUTING: Table[AdapterRouting] = (
    gauge(
        "vllm:lora_requests_info",
        "As vLLM's: the value is the time.",
        lambda routing: routing.requests_info(),
        "max_lora",
        "running_lora_adapters",
        "waiting_lora_adapters",
    ),
    gauge("vllm:max_gpu_lora_adapters", "As vLLM's.", lambda routing: routing.max_lora),
    gauge("vllm:num_gpu_loaded_lora_adapters", "As vLLM's.", lambda routing: routing.num_loaded(), "model_name"),
    gauge(
        "vllm:lora_adapter_loaded",
        "As vLLM's: 1 for each adapter in memory, of those that were requested last.",
        lambda routing: routing.loaded(),
        "adapter_name",
        "level",
        "pinned",
        "tenant",
    ),
)
"""Table for routers with adapters, such as those of the Gateway API Inference Extension."""


PAUSES: Table[Pauses] = (
    gauge("loraserve_paused_tenants", "Tenants whose new requests wait until they resume.", lambda p: p.num_paused),
)

ADMISSIONS: Table[Admissions] = (
    counter(
        "loraserve_rate_limited",
        "Requests over a limit of their tenant, by limit.",
        lambda a: a.num_refused,
        "reason",
    ),
    gauge(
        "loraserve_servers",
        "Servers on this database, including this one: each grants its part of the tenants' limits.",
        lambda a: a.num_servers,
    ),
)

BASE_PRECISIONS: Table[BasePrecisions] = (
    gauge(
        "loraserve_base_token_agreement",
        "Part of a text's positions at which the served base has the float base's likeliest token; none: not measured.",
        lambda p: _measured(p, "top1_agreement"),
        "quantization",
    ),
    gauge(
        "loraserve_base_divergence_nats",
        "Mean KL divergence of the served base's next tokens from the float base's; none: not measured.",
        lambda p: _measured(p, "mean_divergence"),
        "quantization",
    ),
    counter("loraserve_base_measurements", "Measurements of what rounding costs the base.", lambda p: p.num_measured),
)


def _measured(precisions: BasePrecisions, field: str) -> dict[str, float]:
    known = precisions.current
    if known is None or known.measured is None:
        return {}
    return {known.quantization: getattr(known.measured.precision, field)}


SHARES: Table[Iterable[Shares]] = (
    counter(
        "loraserve_share_refusals",
        "Requests refused for lack of a shared resource: the tenant (or address) held its share, or nothing was free.",
        lambda all: {(one.name, reason): num for one in all for reason, num in one.num_refused.items()},
        "room",
        "reason",
    ),
    gauge(
        "loraserve_shares_held",
        "Amount in use of each shared resource.",
        lambda all: {s.name: s.total for s in all},
        "room",
    ),
)

REGISTRY: Table[Registry] = (
    counter(
        "loraserve_certificates",
        "Certificates by verdict (skipped: the engine was unavailable; rejected: it can never serve the version).",
        lambda r: {verdict: r.certificates.num_by_verdict[verdict] for verdict in VERDICTS},
        "verdict",
    ),
    counter(
        "loraserve_late_certificates",
        "Certificates for versions that had none for how this server computes its base.",
        lambda r: {
            verdict: r.certificate_backfill.num_by_verdict[verdict] for verdict in VERDICTS if verdict != SKIPPED
        },
        "verdict",
    ),
    counter(
        "loraserve_quarantined_refusals",
        "Requests for quarantined versions, which were refused.",
        lambda r: r.num_quarantined_refused,
    ),
    counter(
        "loraserve_base_mismatch_refusals",
        "Requests for versions of another base, which were refused.",
        lambda r: r.num_of_another_base_refused,
    ),
    counter(
        "loraserve_numerics_strikes",
        "Answers with NaN or infinite logits, for requests of the version's owner.",
        lambda r: r.numeric_failures.num_failures,
    ),
    counter(
        "loraserve_numerics_quarantines",
        "Versions quarantined for NaN or infinite logits.",
        lambda r: r.numeric_failures.num_quarantined,
    ),
    counter(
        "loraserve_shadow_comparisons_lost",
        "Comparisons that could not be stored in the database.",
        lambda r: r.shadow_hours.num_lost,
    ),
    counter(
        "loraserve_damaged_versions",
        "Versions quarantined because their stored bytes are corrupt or missing.",
        lambda r: r.corruption.num_quarantined,
    ),
    counter(
        "loraserve_operations",
        "Operations that ended on this server.",
        lambda r: {state: r.operations.num_ended[state] for state in ENDED},
        "state",
    ),
    gauge("loraserve_operations_running", "Operations running on this server.", lambda r: r.operations.num_running),
    counter("loraserve_collected_blobs", "Unreferenced blobs deleted.", lambda r: r.collector.num_blobs),
    counter("loraserve_collected_bytes", "Bytes of unreferenced blobs deleted.", lambda r: r.collector.num_bytes),
    gauge(
        "loraserve_doomed_blobs",
        "Unreferenced blobs that will be deleted after the grace period.",
        lambda r: r.collector.num_gc_candidates,
    ),
    counter(
        "loraserve_wrong_totals",
        "Totals of tenants' adapters and bytes that differed from what they count, and were set right.",
        lambda r: r.collector.num_wrong_totals,
    ),
    gauge("loraserve_ephemeral_adapters", "Ephemeral adapters that have a name.", lambda r: len(r.ephemeral)),
    counter("loraserve_ephemeral_loads", "Ephemeral versions loaded.", lambda r: r.ephemeral.num_loaded),
    counter(
        "loraserve_ephemeral_expiries",
        "Ephemeral adapters unloaded at the end of their time.",
        lambda r: r.ephemeral.num_expired,
    ),
    gauge("loraserve_operator_pins", "Adapters that operators have pinned.", lambda r: r.pins.num_wanted),
    gauge("loraserve_operator_pins_held", "Pinned adapters on this server's device.", lambda r: r.pins.num_held),
)

RESPONSES: Table[StoredResponses] = (
    counter(
        "loraserve_stored_responses",
        "Responses by what became of their storing: stored, lost (not stored, though asked for), expired.",
        lambda r: {"stored": r.num_stored, "lost": r.num_lost, "expired": r.num_expired},
        "outcome",
    ),
)

BATCHES: Table[BatchRunner] = (
    gauge(
        "loraserve_batches",
        "Batches of all servers that haven't ended, by state; counted every 15 s.",
        lambda r: dict(r.num_by_state),
        "state",
    ),
    gauge("loraserve_batches_running", "Batches that this server works on.", lambda r: r.num_running),
    counter(
        "loraserve_batches_ended",
        "Batches that ended on this server, by their last state.",
        lambda r: {state: r.num_ended[state] for state in ENDED_STATES},
        "state",
    ),
    gauge(
        "loraserve_batch_lines_live",
        "Lines of batches that this server computes, or that wait for their turn.",
        lambda r: r.num_live_lines,
    ),
    counter(
        "loraserve_batch_lines",
        "Lines of batches by outcome (completed, failed: recorded; retried: refused for now and tried again).",
        lambda r: {outcome: r.num_lines[outcome] for outcome in LINE_OUTCOMES},
        "outcome",
    ),
)

BILLING: Table[UsageMeter] = (
    counter(
        "loraserve_billed_tokens",
        "Tokens billed: prompt, of these cached, completion, and of these cached_completion, of kept answers.",
        lambda m: {
            "prompt": m.recorded.prompt_tokens,
            "cached": m.recorded.cached_tokens,
            "completion": m.recorded.completion_tokens,
            "cached_completion": m.recorded.cached_completion_tokens,
        },
        "kind",
    ),
    counter(
        "loraserve_billed_cached_requests",
        "Requests billed whose answers the result cache had.",
        lambda m: m.recorded.num_cached_requests,
    ),
    counter(
        "loraserve_undelivered_tokens",
        "Tokens generated for clients that had left, or for answers that failed.",
        lambda m: m.recorded.undelivered_tokens,
    ),
    gauge(
        "loraserve_usage_lag_seconds",
        "Age of the oldest usage that isn't in the database yet; 0 if there is none.",
        lambda m: m.lag_s,
    ),
    gauge("loraserve_usage_journal_bytes", "Bytes in this server's usage journal.", lambda m: m.journal_bytes),
    counter(
        "loraserve_usage_write_failures",
        "Failed attempts to write usage, by destination.",
        lambda m: {"journal": m.num_failed_writes, "database": m.num_failed_flushes},
        "where",
    ),
    counter(
        "loraserve_usage_journals_recovered",
        "Journals of killed servers that this server recorded.",
        lambda m: m.num_recovered_journals,
    ),
)
