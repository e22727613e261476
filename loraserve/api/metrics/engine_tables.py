"""Tables of the metrics of the engine: of its process, and of the statistics that it reports.

Labels are tiers, uses, states and causes: a fixed number of samples, however many adapters and
tenants there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loraserve.api.metrics.table import Table, counter, gauge, histogram
from loraserve.types import EngineStats

if TYPE_CHECKING:
    from loraserve.engine_client.interface import ServingEngine

ENGINE: Table[ServingEngine] = (
    gauge("loraserve_engine_up", "1 while the engine computes.", lambda e: e.is_ready),
    counter("loraserve_engine_restarts", "Engine processes started after the first.", lambda e: e.num_restarts),
    counter("loraserve_engine_hangs", "Engine processes killed for lack of progress.", lambda e: e.num_hangs),
)

STEPS: Table[EngineStats] = (
    gauge("loraserve_requests_running", "Sequences that take part in steps.", lambda s: s.num_running),
    gauge("loraserve_requests_waiting", "Sequences in the queue.", lambda s: s.num_waiting),
    gauge(
        "loraserve_requests_waiting_for_adapter",
        "Waiting sequences whose adapter isn't on the device yet.",
        lambda s: s.num_waiting_for_adapter,
    ),
    counter("loraserve_engine_steps", "Forward passes.", lambda s: s.num_steps),
    counter("loraserve_engine_step_seconds", "Seconds spent in forward passes.", lambda s: s.step_s),
    counter(
        "loraserve_parallel_micro_batches",
        "Parts of steps that several ranks computed.",
        lambda s: s.num_micro_batches,
    ),
    counter(
        "loraserve_parallel_seconds",
        "Seconds in which a rank waited for other ranks' parts of steps and received them.",
        lambda s: {
            (str(rank), kind): seconds
            for rank, one in enumerate(s.ranks)
            for kind, seconds in (("collective", one.sum_s), ("transfer", one.transfer_s))
        },
        "rank",
        "kind",
    ),
    counter(
        "loraserve_parallel_bytes",
        "Bytes that a rank received of other ranks within steps.",
        lambda s: {
            (str(rank), kind): count
            for rank, one in enumerate(s.ranks)
            for kind, count in (("collective", one.sum_bytes), ("transfer", one.transfer_bytes))
        },
        "rank",
        "kind",
    ),
    counter("loraserve_preemptions", "Sequences that were preempted and start over.", lambda s: s.num_preemptions),
    counter(
        "loraserve_fair_preemptions",
        "Preemptions in favor of a tenant below its share, or of a tenant above its cap.",
        lambda s: s.num_fair_preemptions,
    ),
    counter("loraserve_request_timeouts", "Requests that reached their own timeout.", lambda s: s.num_timeouts),
    gauge("loraserve_tenants_active", "Tenants with a request in the engine.", lambda s: s.num_tenants),
    counter("loraserve_engine_prompt_tokens", "Prompt tokens computed.", lambda s: s.prompt_tokens),
    counter("loraserve_engine_generation_tokens", "Tokens sampled.", lambda s: s.generation_tokens),
    gauge(
        "loraserve_kv_blocks",
        "KV blocks by state.",
        lambda s: {
            "used": s.num_kv_blocks_used,
            "cached": s.num_kv_blocks_cached,
            "free": max(0, s.num_kv_blocks - s.num_kv_blocks_used - s.num_kv_blocks_cached),
        },
        "state",
    ),
    counter(
        "loraserve_prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        lambda s: s.prefix_tokens_queried,
    ),
    counter("loraserve_prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda s: s.prefix_tokens_hit),
    counter(
        "loraserve_prefix_cache_base_hits",
        "Prompt tokens of activated adapters found in the prefix cache, before the adapter acts.",
        lambda s: s.base_prefix_tokens_hit,
    ),
    gauge(
        "loraserve_state_snapshots",
        "Snapshots of recurrent states that prompts may begin from.",
        lambda s: s.num_state_snapshots,
    ),
    counter(
        "loraserve_state_snapshot_evictions",
        "Snapshots of recurrent states that gave their place to others.",
        lambda s: s.state_snapshot_evictions,
    ),
    counter("loraserve_invariant_violations", "Broken invariants: bugs.", lambda s: s.invariant_violations),
)

MEMORY: Table[EngineStats] = (
    gauge(
        "loraserve_adapters_resident",
        "Adapters by memory tier.",
        lambda s: {"device": s.device_adapters, "host": s.host_adapters},
        "tier",
    ),
    gauge(
        "loraserve_adapter_bytes",
        "Adapter bytes by memory tier.",
        lambda s: {"device": s.device_adapter_bytes, "host": s.host_adapter_bytes},
        "tier",
    ),
    gauge(
        "loraserve_adapter_budget_bytes",
        "Most bytes that adapters may take of a memory tier.",
        lambda s: {"device": s.device_adapter_budget_bytes, "host": s.host_adapter_budget_bytes},
        "tier",
    ),
    gauge(
        "loraserve_adapter_load_bytes",
        "Host memory that loads of adapters hold: files, what these unfold to, packed copies.",
        lambda s: s.load_bytes,
    ),
    gauge(
        "loraserve_adapter_load_budget_bytes",
        "Most host memory of the loads of adapters that run at once; a larger adapter is loaded alone.",
        lambda s: s.load_budget_bytes,
    ),
    gauge("loraserve_adapter_pins", "Pins held by running sequences.", lambda s: s.num_pins),
    counter(
        "loraserve_adapter_lookups",
        "Requests for an adapter, by the tier where they found it.",
        lambda s: {
            "device": s.adapter_lookups_device,
            "host": s.adapter_lookups_host,
            "disk": s.adapter_lookups_disk,
        },
        "tier",
    ),
    gauge(
        "loraserve_device_memory_budget_bytes",
        "Most bytes that KV blocks and adapters may take together.",
        lambda s: s.device_bytes,
    ),
    gauge(
        "loraserve_device_memory_bytes",
        "Bytes of that budget by their use now.",
        lambda s: {
            "kv_used": s.kv_bytes_used,
            "kv_idle": s.kv_bytes_idle,
            "adapters_used": s.adapter_bytes_used,
            "adapters_idle": s.adapter_bytes_idle,
            "free": s.free_bytes,
        },
        "use",
    ),
    counter(
        "loraserve_adapter_evictions",
        "Adapters evicted, by tier and cause: another adapter, or KV blocks.",
        lambda s: {
            ("device", "adapter"): s.device_evictions - s.device_evictions_for_kv,
            ("device", "kv"): s.device_evictions_for_kv,
            ("host", "adapter"): s.host_evictions,
        },
        "tier",
        "cause",
    ),
    counter(
        "loraserve_kv_block_evictions",
        "Idle prefix blocks that lost their content, by cause: another sequence's KV, or an adapter.",
        lambda s: {"kv": s.kv_evictions - s.kv_evictions_for_adapters, "adapter": s.kv_evictions_for_adapters},
        "cause",
    ),
    counter("loraserve_adapter_loads", "Adapters read into memory.", lambda s: s.adapter_loads),
    counter("loraserve_adapter_load_failures", "Loads that failed.", lambda s: s.adapter_load_failures),
    counter(
        "loraserve_adapters_brought_back",
        "Loads of popular adapters that were evicted, before any request waits for them.",
        lambda s: s.adapters_brought_back,
    ),
    counter(
        "loraserve_adapter_load_seconds",
        "Seconds of loading threads, failed loads included.",
        lambda s: s.adapter_load_s,
    ),
    histogram(
        "loraserve_adapter_load_duration_seconds",
        "Successful loads by the tier they lead to: host (read, verified, compiled, packed) or device (copied).",
        lambda s: {"host": s.host_load_s, "device": s.device_load_s},
        "tier",
    ),
    histogram(
        "loraserve_adapter_wait_seconds",
        "Time that requests waited for their adapter; 0 if it was on the device.",
        lambda s: s.adapter_wait_s,
    ),
    histogram(
        "loraserve_step_loading_delay_seconds",
        "Time of each step that its thread spent on adapters: requesting, admitting and evicting them.",
        lambda s: s.step_adapter_s,
    ),
)

GRAMMARS: Table[EngineStats] = (
    gauge(
        "loraserve_constrained_requests", "Live requests whose answers follow a grammar.", lambda s: s.num_constrained
    ),
    gauge("loraserve_grammars", "Compiled grammars in the engine's memory.", lambda s: s.num_grammars),
    gauge("loraserve_grammar_bytes", "Bytes that they take, as estimated.", lambda s: s.grammar_bytes),
    counter("loraserve_grammars_compiled", "Grammars compiled in the engine.", lambda s: s.grammars_compiled),
    counter(
        "loraserve_grammar_failures",
        "Requests that ended because their grammar could not be followed.",
        lambda s: s.grammar_failures,
    ),
    counter(
        "loraserve_late_masks",
        "Masks of allowed tokens that a step did not wait for: their rows were computed again.",
        lambda s: s.late_masks,
    ),
    histogram(
        "loraserve_grammar_compile_seconds", "Time of each compilation in the engine.", lambda s: s.grammar_compile_s
    ),
    histogram("loraserve_mask_seconds", "Processor time of each mask of allowed tokens.", lambda s: s.mask_s),
    histogram(
        "loraserve_mask_wait_seconds",
        "Time that each step with masks waited for them after its forward pass.",
        lambda s: s.mask_wait_s,
    ),
)


SPECULATION: Table[EngineStats] = (
    counter(
        "loraserve_speculation_drafts",
        "Times that tokens were proposed for a request in a step.",
        lambda s: s.num_drafts,
    ),
    counter(
        "loraserve_speculation_proposed_tokens",
        "Proposed tokens by where they are from: the request's own text, earlier ones of its tenant and adapter, "
        "the draft base, or the request's grammar.",
        lambda s: {
            "request": s.proposed_own_tokens,
            "history": s.proposed_history_tokens,
            "draft": s.proposed_draft_tokens,
            "grammar": s.proposed_grammar_tokens,
        },
        "source",
    ),
    counter(
        "loraserve_speculation_accepted_tokens",
        "Proposed tokens that were what was sampled.",
        lambda s: {
            "request": s.accepted_own_tokens,
            "history": s.accepted_history_tokens,
            "draft": s.accepted_draft_tokens,
            "grammar": s.accepted_grammar_tokens,
        },
        "source",
    ),
    counter("loraserve_speculation_draft_seconds", "Time spent in the draft base.", lambda s: s.draft_s),
    gauge("loraserve_speculation_bytes", "Bytes of texts that are searched.", lambda s: s.speculation_bytes),
)


def _kv_usage(stats: EngineStats) -> float:
    """Compute which part of the KV blocks that sequences could have is in use."""
    if not stats.num_kv_blocks_available:
        # without an engine there are none at all
        return 1.0 if stats.num_kv_blocks else 0.0
    return stats.num_kv_blocks_used / (stats.num_kv_blocks_used + stats.num_kv_blocks_available)


VLLM: Table[EngineStats] = (
    gauge("vllm:num_requests_running", "As vLLM's.", lambda s: s.num_running),
    gauge("vllm:num_requests_waiting", "As vLLM's.", lambda s: s.num_waiting),
    gauge(
        "vllm:kv_cache_usage_perc",
        "As vLLM's: 1 is full.",
        _kv_usage,
    ),
    gauge(
        "vllm:cache_config_info",
        "As vLLM's: the value is 1.",
        lambda s: {(str(s.kv_block_size), str(s.num_kv_blocks)): 1.0},
        "block_size",
        "num_gpu_blocks",
    ),
    gauge("vllm:num_cpu_loaded_lora_adapters", "As vLLM's.", lambda s: s.host_adapters),
    counter("vllm:spec_decode_num_drafts", "As vLLM's.", lambda s: s.num_drafts),
    counter(
        "vllm:spec_decode_num_draft_tokens",
        "As vLLM's.",
        lambda s: (
            s.proposed_own_tokens + s.proposed_history_tokens + s.proposed_draft_tokens + s.proposed_grammar_tokens
        ),
    ),
    counter(
        "vllm:spec_decode_num_accepted_tokens",
        "As vLLM's.",
        lambda s: (
            s.accepted_own_tokens + s.accepted_history_tokens + s.accepted_draft_tokens + s.accepted_grammar_tokens
        ),
    ),
)
