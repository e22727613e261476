"""Every bound, in one place. `GET /api/v1/limits` shows them."""

from __future__ import annotations

from dataclasses import asdict, dataclass

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
UNBOUNDED_S = 86_400.0
"""Stands for no bound: JSON, which the engine's process reads, has no infinity."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what a client, a file or a tenant may ask for. Sizes in bytes, times in seconds."""

    # HTTP
    max_body_bytes: int = 2 * MIB
    max_upload_bytes: int = 2 * GIB
    max_header_bytes: int = 16 * KIB
    max_headers: int = 100
    max_trailer_bytes: int = 8 * KIB
    """Bytes between two of a chunked body's own, or after its last: sizes, extensions,
    trailers (which are dropped).
    """
    max_json_depth: int = 32
    max_json_containers: int = 16_384
    """Objects and arrays in one body.

    A body of nothing else takes a second to read, and nothing else runs for half of it.
    """
    max_connections: int = 8192
    handshake_s: float = 5.0
    """Time for a connection's TLS handshake, and for a proxy's header before it."""
    max_unproven_requests: int = 4096
    """Requests whose key isn't looked at yet, by address."""
    max_lingering_requests: int = 256
    """Refused requests whose bodies are read on for a moment, by address."""
    max_live_requests: int = 4096
    """Requests whose key is proven."""
    max_management_requests: int = 256
    """Live requests that ask for no tokens."""
    max_body_bytes_in_flight: int = 128 * MIB
    """Bytes of all live requests' bodies, as far as they are in memory."""
    share_of_free: float = 1.0
    """Most that a tenant (an address, before the key is proven) may have of each of these and of
    uploads and downloads, as a multiple of what is free.
    """
    # inference
    max_prompt_bytes: int = 1 * MIB
    max_n: int = 128
    max_prompts: int = 128
    max_pooled_inputs: int = 2048
    """Texts of one request for embeddings, pairs or documents of one for scores."""
    max_live_pooled_inputs: int = 64
    """Of one request's inputs, those that are in the engine at once; the others follow them."""
    silent_stream_s: float = 10.0
    """Seconds without a first token after which a stream begins with a comment, and between two."""
    max_stop_strings: int = 64
    max_stop_bytes: int = 512
    max_stop_bytes_in_all: int = 4096
    max_stop_token_ids: int = 64
    max_logit_bias: int = 300
    max_allowed_token_ids: int = 1024
    max_bad_words: int = 64
    max_bad_word_bytes: int = 128
    max_completion_logprobs: int = 20
    max_logprob_token_ids: int = 128
    max_prompt_candidates: int = 1024 * 1024
    """Log probabilities of prompts' tokens in one answer: their own and those of the likeliest."""
    max_chat_top_logprobs: int = 20
    max_messages: int = 1024
    max_tools: int = 128
    """Tools in a request, and calls in one message."""
    max_tools_bytes: int = 256 * KIB
    """Size of a request's tools as JSON."""
    max_grammar_bytes: int = 128 * KIB
    """Size of a schema, regex, grammar or list of choices as it is compiled."""
    max_choices: int = 1024
    """Texts in a list of answers to choose from."""
    grammar_timeout_s: float = 3.0
    """Time that compiling a grammar may take."""
    max_checked_grammar_bytes: int = 16 * MIB
    """Budget of the server's cache of checked grammars, half of it at most one tenant's."""
    max_grammar_cache_bytes: int = 128 * MIB
    """Budget of the engine's cache of compiled grammars, whose bytes are measured before; half of
    it at most one tenant's.
    """
    max_speculation_bytes: int = 64 * MIB
    """Budget of the engine's indices of texts, in which it looks for tokens to propose."""
    max_draft_tokens: int = 4096
    """Tokens of a request up to which a draft base proposes its next ones."""
    max_ranks: int = 16
    """Processes that share a base (--tensor-parallel times --pipeline-parallel)."""
    max_queued_requests: int = 1024
    max_queue_wait_s: float = 600.0
    max_request_timeout_s: float = 3600.0
    """What a request may name as its own timeout."""
    max_pause_s: float = 300.0
    """Seconds after which a tenant's pause (/pause) ends by itself."""
    max_shadow_requests: int = 16
    """Copies of requests that run on shadow versions at once; beyond it a request has no copy."""
    max_shadow_requests_per_tenant: int = 4
    shadow_timeout_s: float = 300.0
    shadow_flush_s: float = 5.0
    """What was compared is in the database that soon."""
    shadow_retention_s: float = 90 * 86_400.0
    """After which an hour's comparison is forgotten."""
    # traces
    max_queued_spans: int = 4096
    """Spans that wait for the collector. More are dropped, and counted."""
    max_traced_choices: int = 16
    """Choices of one request whose stages are spans."""
    max_span_attribute_length: int = 256
    # answers that are kept for requests that ask for it
    result_cache_share: float = 0.5
    """Part of the budget that one tenant's answers may take at most."""
    max_cached_answer_bytes: int = 256 * KIB
    """A longer answer isn't kept."""
    max_result_cache_ttl_s: float = 86_400.0
    # stored responses
    response_ttl_s: float = 30 * 86_400.0
    """Time for which a response can be continued."""
    response_sweep_s: float = 600.0
    store_response_s: float = 2.0
    """Seconds that an answer waits for the database to store it."""
    max_stored_response_bytes: int = 4 * MIB
    """A longer response isn't stored."""
    max_stored_responses_per_tenant: int = 10_000
    """Kept: the oldest make room, as they do for max_stored_bytes_per_tenant."""
    max_stored_bytes_per_tenant: int = 256 * MIB
    max_conversation_responses: int = 256
    """Responses that one continues, the first included."""
    max_conversation_bytes: int = 4 * MIB
    stalled_reader_s: float = 30.0
    min_body_bytes_per_s: int = 16 * KIB
    """Pace of a request's body: one that has fallen behind by stalled_reader_s ends,
    however fast it began.
    """
    min_read_bytes_per_s: int = 4 * KIB
    """Pace of an answer that waits for its reader, by the same measure."""
    # adapters
    max_adapter_header_bytes: int = 1 * MIB
    max_adapter_config_bytes: int = 64 * KIB
    max_chat_template_bytes: int = 64 * KIB
    """Bytes of a version's own template. The base's, which the operator chose, may have a MiB."""
    max_generation_config_bytes: int = 16 * KIB
    max_chat_template_kwargs_bytes: int = 4 * KIB
    max_parser_name_bytes: int = 64
    max_added_tokens: int = 1024
    """Tokens that a version's tokenizer may have beside the base's."""
    max_added_token_bytes: int = 256
    max_extra_rows: int = 1024
    """Rows that an adapter's embedding and head may have beyond the base's."""
    template_timeout_s: float = 2.0
    """Time that a version's template may take for one prompt. Then its process is killed."""
    max_version_chat_bytes: int = 16 * MIB
    """Budget of the server's cache of versions' templates and defaults, half of it at most one
    tenant's.
    """
    max_adapter_tensors: int = 8192
    max_tensor_name_bytes: int = 512
    max_rank: int = 512
    max_labels: int = 128
    """Of an adapter's classification head."""
    max_adapter_patterns: int = 2048
    max_adapter_regexes: int = 64
    """Of those that are no plain text."""
    max_adapter_regex_length: int = 4096
    max_adapter_regex_bytes: int = 1 * MIB
    """What one may take once it is compiled."""
    max_adapter_regex_steps: int = 1_000_000
    """Steps of a config's regexes that RE2 doesn't take,
    on all names of the base's modules in all: about a second.
    """
    max_factors_bytes: int = 1 * GIB
    """Of the float32 factors that an adapter of a kind other than LoRA is unfolded to: a small file
    can hold a large update.
    """
    max_load_bytes: int = 1 * GIB
    """Of the host's memory, for the loads of adapters that run at once: their files, what these
    unfold to and the packed copies. An adapter that needs more is loaded alone.
    """
    max_scaling: float = 1e4
    max_delta: float = 65504.0
    """Bound on scaling · B A, element by element: what half precision can hold."""
    max_verifications: int = 64
    """Running or waiting for their turn."""
    verification_timeout_s: float = 120.0
    late_certificates_interval_s: float = 60.0
    """How often versions are looked for that were published without a certificate,
    since the engine was away.
    """
    base_precision_interval_s: float = 10.0
    """How often the server looks whether what rounding costs its base is known."""
    adapter_load_deadline_s: float = 60.0
    """For so long a request waits for its adapter: for its load,
    or for a place when everything on the device is in use.
    """
    max_composition_terms: int = 8
    max_composition_weight: float = 10.0
    """Of a term, either way of zero, and of what the weights of one version add up to."""
    # management
    max_page_size: int = 200
    max_compared_requests: int = 9
    """Requests that are answered side by side in one stream."""
    min_live_interval_s: float = 0.5
    max_live_interval_s: float = 60.0
    max_live_stream_s: float = 900.0
    """Longest stream of live figures; a client that still wants them asks again."""
    history_s: float = 3600.0
    """Seconds of which the live figures' history has a point each `history_interval_s`."""
    history_interval_s: float = 20.0
    history_window_s: float = 60.0
    """Seconds over which a point's percentiles are taken."""
    max_tallied_tenants: int = 1024
    """Tenants whose requests are counted one by one for their own figures; the others' counts
    begin again with their next request.
    """
    slow_requests_s: float = 3600.0
    """Seconds for which the slowest requests are kept."""
    max_slow_requests_per_minute: int = 8
    """Slowest requests of each tenant and minute that are kept."""
    max_slow_request_minutes: int = 2048
    """Minutes of all tenants that have such; the oldest go first."""
    traffic_s: float = 3600.0
    """Seconds for which requests are summed by the version that answered."""
    traffic_slot_s: float = 300.0
    """Seconds of one such sum: a comparison of versions begins at one of these instants."""
    max_traffic_versions: int = 1024
    """Versions of all tenants that have such sums, at most some 20 kB each; the tenant that has the
    most loses the one that it used longest ago.
    """
    max_adapters_per_tenant: int = 100_000
    max_keys_per_tenant: int = 1000
    """A tenant's keys that work."""
    max_ended_keys_per_tenant: int = 1000
    """A tenant's revoked and expired keys that are still listed; beyond it, the oldest go."""
    max_admin_keys: int = 100
    """Operators' keys that work."""
    max_key_overlap_s: float = 30 * 86_400.0
    """Time for which a rotated key may work on."""
    max_tenants: int = 100_000
    min_tenant_weight: float = 0.001
    max_tenant_weight: float = 1000.0
    server_beat_s: float = 1.0
    """How often a server says that it lives, to those that share its tenants' limits."""
    server_silence_s: float = 10.0
    """After which one counts no more."""
    unasked_tokens_reserved: int = 1024
    """Of a tenant's tokens per minute, for an answer whose length the request doesn't bound."""
    max_grants_per_adapter: int = 1000
    max_grants_per_tenant: int = 1000
    """Of one owner to one tenant, which finds them all in its list of models."""
    max_priced_adapters: int = 256
    """In one tenant's price table."""
    max_name_length: int = 63
    max_adapter_name_length: int = 128
    max_aliases_per_adapter: int = 100
    max_operator_pins: int = 1000
    max_split_versions: int = 16
    max_notes_bytes: int = 8 * KIB
    max_tags: int = 64
    max_tag_value_length: int = 256
    max_evaluations_per_version: int = 32
    """Kept: the oldest make room."""
    max_evaluation_metrics: int = 32
    max_evaluation_settings: int = 16
    pin_sync_s: float = 2.0
    """How often a server compares what its engine keeps on the device with what operators have
    pinned, on whichever server.
    """
    max_named_residents: int = 256
    """Adapters that vllm:lora_adapter_loaded names: those that were requested last."""
    max_listed_models: int = 10_000
    max_staged_bytes: int = 16 * GIB
    """Bytes of all running uploads on this server; one tenant gets half of them at most."""
    live_load_wait_s: float = 30.0
    """Longest wait of a load by vLLM's or SGLang's route for an upload's slot."""
    max_concurrent_uploads: int = 16
    max_concurrent_uploads_per_tenant: int = 8
    stalled_upload_s: float = 5.0
    """Time behind min_body_bytes_per_s at which an upload gives its place to a tenant that has
    none, when there is no other place.
    """
    max_concurrent_verifications_per_tenant: int = 2
    max_open_uploads_per_tenant: int = 64
    """Resumable ones that have neither expired nor been deleted, nor been published."""
    upload_chunk_bytes: int = 16 * MIB
    """After so many bytes of a resumable upload they are durable:
    what a broken connection can lose.
    """
    max_upload_chunks: int = 4096
    """Of one resumable upload: it isn't made of crumbs."""
    upload_ttl_s: float = 86_400.0
    """How long a resumable upload is kept after its last piece."""
    gc_grace_s: float = 3600.0
    """Between a blob's being found needless and its end: longer than any publish takes."""
    gc_interval_s: float = 1800.0
    gc_mark_s: float = 300.0
    """After so long a blob that a killed server was deleting is no longer taken to be:
    longer than a store takes for one.
    """
    max_concurrent_operations: int = 4
    """Of one server: pulls."""
    pull_grace_s: float = 60.0
    """What a pull may wait for its source beyond what its bytes take at min_pull_bytes_per_s."""
    min_pull_bytes_per_s: int = 256 * KIB
    """Of a pull on the whole, after its grace: a source that sends a byte now and then holds no
    place. max_upload_bytes take 2.3 hours at most.
    """
    max_operations_per_tenant: int = 1000
    """Kept: the oldest that have ended make room."""
    operation_heartbeat_s: float = 2.0
    operation_lost_s: float = 60.0
    """After so long without a sign of its server, an operation has failed."""
    max_ephemeral_versions: int = 1024
    """Of one server. Each takes a descriptor."""
    max_ephemeral_versions_per_tenant: int = 256
    min_ephemeral_ttl_s: float = 1.0
    max_ephemeral_ttl_s: float = 7 * 86_400.0
    ephemeral_sweep_s: float = 1.0
    """After so long at most, an ephemeral adapter's memory is free once its time is over or its
    last request has ended.
    """
    max_lora_path_bytes: int = 4096
    max_concurrent_downloads: int = 16
    max_concurrent_downloads_per_tenant: int = 4
    max_idempotency_key_bytes: int = 255
    max_idempotency_keys_per_key: int = 10_000
    idempotency_ttl_s: float = 86_400.0
    # files and batches
    max_batch_file_bytes: int = 200 * MIB
    max_batch_lines: int = 50_000
    max_batch_line_bytes: int = 2 * MIB
    max_custom_id_length: int = 512
    max_batch_errors: int = 50
    """Faults of one input file that are reported: the first that are found."""
    max_files_per_tenant: int = 1000
    max_file_name_length: int = 255
    max_live_batches_per_tenant: int = 64
    """Batches that haven't ended."""
    max_batches_per_tenant: int = 1000
    """Kept: the oldest that have ended make room."""
    batch_window_s: float = 86_400.0
    """Seconds after which a batch's remaining lines are not computed any more."""
    min_file_ttl_s: int = 3600
    max_file_ttl_s: int = 30 * 86_400
    batch_file_ttl_s: int = 30 * 86_400
    """How long an input is kept if its upload doesn't say."""
    max_metadata_pairs: int = 16
    max_metadata_key_length: int = 64
    max_metadata_value_length: int = 512
    max_batch_requests: int = 16
    """Lines of batches that one server computes at once, and no more than a quarter of its
    sequences.
    """
    max_batch_requests_per_batch: int = 8
    max_running_batches: int = 64
    """Batches on one server, one of each tenant's; the others wait for their turn."""
    max_waiting_lines: int = 64
    """Lines of one batch that were refused for now, while others are tried."""
    max_batch_wait_s: float = 60.0
    """Longest wait before a line that was refused for now is tried again."""
    batch_chunk_s: float = 3.0
    """After so long at most, a line's result is durable: what a kill can lose, and is computed
    again.
    """
    max_batch_chunk_bytes: int = 4 * MIB
    max_batch_chunk_lines: int = 256
    max_batch_output_bytes: int = 2 * GIB
    batch_poll_s: float = 2.0
    """Seconds between a server's looks for batches that no server runs."""
    batch_lease_s: float = 15.0
    """After so long, another server goes on with the batches of one that was killed."""
    file_sweep_s: float = 300.0
    """How often files are deleted whose time is over. They are gone for clients at once."""
    # metering
    usage_journal_s: float = 0.25
    """After so long at most, what a client was given is in the server's journal, which a kill
    leaves whole; at the end of an answer, before its last piece.
    """
    usage_flush_s: float = 1.0
    """And after so long in the database."""
    max_usage_journal_bytes: int = 4 * MIB
    """Beyond it the journal is summed up. It grows only while the database is away."""
    max_usage_rows: int = 50_000
    """In one answer as CSV."""
    # how long an answer of the database may be used again
    auth_cache_s: float = 5.0
    resolve_cache_s: float = 2.0
    outage_grace_s: float = 60.0

    def as_dict(self) -> dict[str, int | float]:
        return asdict(self)


LIMITS = Limits()

DEFAULT_RESULT_CACHE_BYTES = 64 * MIB
DEFAULT_EPHEMERAL_BYTES = 1 * GIB
DEFAULT_EPHEMERAL_TTL_S = 3600.0

NAME_PATTERN = r"[a-z0-9][a-z0-9._-]{0,62}"
"""Names of tenants and aliases."""
ADAPTER_NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]*([/:][A-Za-z0-9_][A-Za-z0-9._-]*)*"
"""Names of adapters, of at most `Limits.max_adapter_name_length` characters."""
