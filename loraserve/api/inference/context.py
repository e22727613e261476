"""Steps that completions and chat share before the engine: model, choices, requests, headers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import msgspec
from ulid import ULID

from loraserve.adapters.config.generation_config import NO_DEFAULTS, GenerationDefaults
from loraserve.api.inference.fields import ignored_header
from loraserve.api.inference.prompts import Prompt
from loraserve.api.inference.sampling import Sampling, choose_seeds
from loraserve.api.inference.schemas import MAX_MODEL_LENGTH, InferenceBody, PoolingBody, WeightedAdapter
from loraserve.api.inference.target import TargetSelector
from loraserve.api.result_cache import CacheUse
from loraserve.api.services import Services
from loraserve.engine_client.messages import GenerateRequest
from loraserve.errors import InvalidRequest, ModelNotFound, PermissionDenied, QuotaExceeded
from loraserve.limits import LIMITS
from loraserve.registry.binding import Binding
from loraserve.registry.model_name import LATEST_TAG, parse_terms, terms_of
from loraserve.types import AdapterRef, RequestId, ThinkingBudget

if TYPE_CHECKING:
    from loraserve.engine_client.client import Chunk
    from loraserve.tenancy.identity.auth import Caller
    from loraserve.text.tokenizer import Tokenizer


LAST_PRIORITY = 1 << 19
"""Priority of requests in the background: after all that a client can set, before shadows'."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """Adapter, sum of adapters or base that a request's ``model`` names."""

    binding: Binding
    tokenizer: Tokenizer
    """Tokenizer of the bound version, or of the base."""
    granted: tuple[str, ...] = ()
    """``OWNER/NAME``, with the name's key, of those that may be another tenant's."""
    asked: str | None = None
    """Name under which it was requested."""
    tenant: str = ""
    """Name of the tenant that requested it."""
    defaults: GenerationDefaults = NO_DEFAULTS
    """Defaults of fields that the request doesn't send, from the bound version and the base."""


async def resolve_model(
    services: Services,
    caller: Caller,
    model: str,
    adapters: Sequence[WeightedAdapter] | None = None,
    *,
    user: str | None = None,
) -> ResolvedModel:
    """Bind `model` for the whole request: to an adapter version, the sum of several, or the base.

    A name that the tenant has no model of is bound without Ollama's tag, or as
    `Settings.model_aliases` has it.

    Args:
        adapters: the sum, where `model` is the base alone.
        user: end user, which stays on one version of a split; None: each request is drawn by
            itself.

    Raises:
        ModelNotFound: the caller's tenant has no such model, or none such as one of the sum's.
        AdapterQuarantined: it, or one of the sum's, isn't served.
        AdapterCorrupt: the stored defaults of the version are damaged or missing.
        InvalidRequest: the sum isn't one, or is given in both ways at once.
    """
    try:
        return await _bind(services, caller, model, adapters, user=user)
    except (ModelNotFound, InvalidRequest) as error:
        is_name = isinstance(error, ModelNotFound) or error.param == "model"
        stand_ins = _stand_ins(model, services.settings.model_aliases) if is_name and adapters is None else ()
        if not stand_ins:
            raise
    *earlier, last = stand_ins
    for name in earlier:
        with contextlib.suppress(ModelNotFound):
            return await _bind(services, caller, name, user=user)
    return await _bind(services, caller, last, user=user)


def _stand_ins(model: str, aliases: Sequence[str]) -> tuple[str, ...]:
    """List names to try for a name that there is no model of: without Ollama's tag, by an alias."""
    bare = model.removesuffix(LATEST_TAG)
    alias = _alias_of(model, aliases) or _alias_of(bare, aliases)
    return (*(() if bare == model else (bare,)), *(() if alias is None else (alias,)))


def _alias_of(model: str, aliases: Sequence[str]) -> str | None:
    """Find the model that answers for a name by an alias; None: none does."""
    for alias in aliases:
        pattern, _, stands_in = alias.partition("=")
        if fnmatchcase(model, pattern.strip()):
            return stands_in.strip()
    return None


async def _bind(
    services: Services,
    caller: Caller,
    model: str,
    adapters: Sequence[WeightedAdapter] | None = None,
    *,
    user: str | None = None,
) -> ResolvedModel:
    # before it is bound: what came in a pause gets the version that was loaded meanwhile
    await services.pauses.wait(caller.tenant)
    base_id = services.engine.base.id
    if adapters is None:
        terms = parse_terms(model, base_id)
    elif model == base_id:
        terms = terms_of([(adapter.name, adapter.weight) for adapter in adapters])
    else:
        raise InvalidRequest(
            "The request has adapters, and a model that isn't the base; "
            "only one of the two fields may choose adapters.",
            param="adapters",
            hint="Send adapters with the base's id as model, or write the sum as model: a+0.5*b.",
        )
    binding = await services.registry.bind(caller.tenant, terms, sticky=user)
    granted = tuple("/".join(found) for term in terms if (found := term.adapter.granted) is not None)
    defaults = await services.version_chats.defaults(binding.adapter)
    tokenizer = await services.version_chats.tokenizer(binding.adapter)
    end = tokenizer.eos_token_id
    if tokenizer.base is not None and end is not None and end not in services.engine.base.eos_token_ids:
        stops = dict.fromkeys((*defaults.stop_token_ids, end))
        defaults = msgspec.structs.replace(defaults, stop_token_ids=tuple(stops))
    return ResolvedModel(binding, tokenizer, granted, model, caller.tenant_name, defaults)


_BASE_NAMES = {"lora_path": ("",), "adapter_id": ("", "__base_model__")}
"""Values of SGLang's and LoRAX's fields that choose no adapter."""


async def resolve_asked(services: Services, caller: Caller, body: InferenceBody) -> ResolvedModel:
    """Bind what `body` names, in `model` or in SGLang's or LoRAX's field.

    Raises:
        ModelNotFound, AdapterQuarantined: as `resolve_model`.
        InvalidRequest: a field is wrong, or the fields name different adapters.
    """
    base_id = services.engine.base.id
    model, field = _asked_model(body, base_id)
    # aliases are of models: an adapter that a field of its own names exists, or is an error
    bind = resolve_model if field == "model" else _bind
    try:
        return await bind(services, caller, model, body.adapters, user=body.user)
    except (ModelNotFound, InvalidRequest) as error:
        if isinstance(error, ModelNotFound) or error.param == "model":
            error.param = field
        raise


def _asked_model(body: InferenceBody, base_id: str) -> tuple[str, str]:
    """Find the model's name, and the field that it stands in."""
    model, by = body.model, "model"
    for field in _BASE_NAMES:
        name = _named_adapter(body, field)
        if name is None:
            continue
        if model == base_id:
            model, by = name, field
        elif name not in (model, model.removeprefix(f"{base_id}:")):
            raise InvalidRequest(
                f"{field} and {by} name different adapters; only one field may choose the adapter.",
                param=field,
                hint=f"Send the base's id as model, or the request without {field}.",
            )
    return model, by


def _named_adapter(body: InferenceBody, field: str) -> str | None:
    """Read the adapter that the field names; None: the base, or it leaves that to `model`."""
    value = getattr(body, field)
    values = value if isinstance(value, list) else [value]
    if len(values) > LIMITS.max_prompts or not all(
        name is None or (isinstance(name, str) and len(name) <= MAX_MODEL_LENGTH) for name in values
    ):
        raise InvalidRequest(
            f"{field} should be the name of an adapter, or a list with the same name for each prompt.", param=field
        )
    names = {None if name in _BASE_NAMES[field] else name for name in values}
    if len(names) > 1:
        raise InvalidRequest(
            f"{field} differs between prompts; one adapter is used for all prompts of a request.",
            param=field,
            hint="Send a request for each adapter.",
        )
    return names.pop() if names else None


def check_priority(body: InferenceBody | PoolingBody, caller: Caller) -> None:
    """Check that a tenant doesn't put its request before everyone else's.

    Raises:
        PermissionDenied: it does.
    """
    if body.priority < 0 and not caller.is_admin:
        raise PermissionDenied(
            "A priority below 0 (ahead of all other requests) needs an admin key.",
            hint="Send 0 or more, or an admin key.",
        )


def priority_of(body: InferenceBody | PoolingBody, caller: Caller) -> int:
    """Choose the priority of the request's sequences: the last, if no client waits for them."""
    return LAST_PRIORITY if caller.is_background else body.priority


def check_num_choices(num_prompts: int, n: int) -> None:
    """Check the number of choices that the request makes.

    Raises:
        InvalidRequest: they are more than one request may make.
    """
    if num_prompts * n > LIMITS.max_prompts:
        raise InvalidRequest(
            f"{num_prompts} prompts with n = {n} make {num_prompts * n} choices; "
            f"at most {LIMITS.max_prompts} are allowed in one request.",
            param="n",
        )


def check_num_candidates(prompts: Sequence[Prompt], sampling: Sampling) -> None:
    """Check how many log probabilities of the prompts' tokens the choices report.

    Raises:
        InvalidRequest: they are more than one answer may have.
    """
    if sampling.prompt_logprobs is None:
        return
    num_tokens = sampling.body.n * sum(len(prompt.token_ids) for prompt in prompts)
    num_candidates = num_tokens * (1 + sampling.prompt_logprobs)
    if num_candidates > LIMITS.max_prompt_candidates:
        raise InvalidRequest(
            f"The request asks for {num_candidates} log probabilities of its prompts' tokens; "
            f"at most {LIMITS.max_prompt_candidates} are allowed in one request.",
            param="logprobs" if sampling.body.prompt_logprobs is None else "prompt_logprobs",
            hint="Send fewer prompts at once, or ask for fewer of the likeliest tokens.",
        )


def use_cache(
    services: Services, caller: Caller, requests: Sequence[GenerateRequest], ttl_s: float | None
) -> CacheUse | None:
    """Look these requests, all of one HTTP request's, up in the result cache.

    None: it isn't requested.
    """
    if ttl_s is None:
        return None
    allowed = caller.policy.limits.max_cached_bytes
    return services.result_cache.begin(requests, services.engine.base.digest, ttl_s=ttl_s, tenant_bytes=allowed)


@dataclass(frozen=True, slots=True)
class InferenceContext:
    """Admitted HTTP request.

    It has its names, its prompts, and the engine's requests, choice by choice.
    """

    id: str
    created: int
    services: Services
    body: InferenceBody
    target: TargetSelector
    prompts: Sequence[Prompt]
    ignored: tuple[str, ...]
    tokenizer: Tokenizer
    """As in `ResolvedModel`."""
    granted: tuple[str, ...] = ()
    """Granted adapters, as in `ResolvedModel`."""

    @property
    def adapter(self) -> AdapterRef | None:
        """Adapter that answers now; None is the base. It may change once before the first token."""
        return self.target.adapter

    @classmethod
    def begin(
        cls,
        prefix: str,
        services: Services,
        body: InferenceBody,
        model: ResolvedModel,
        prompts: Sequence[Prompt],
        ignored: tuple[str, ...],
    ) -> InferenceContext:
        target = TargetSelector(model.binding, services.engine.base.id, model.asked, tenant=model.tenant)
        ident = f"{prefix}{ULID()}"
        return cls(
            ident, int(services.clock()), services, body, target, prompts, ignored, model.tokenizer, model.granted
        )

    def requests(
        self,
        caller: Caller,
        sampling: Sampling,
        max_tokens: Sequence[int],
        *,
        thinking: Sequence[ThinkingBudget | None] | None = None,
        shown_token_ids: tuple[int, ...] = (),
    ) -> list[GenerateRequest]:
        """Build the engine's requests in the order of the choices, prompt by prompt.

        Args:
            thinking: bound on the reasoning after each prompt; None: none has a bound.
            shown_token_ids: special tokens that what reads the text looks for.

        Raises:
            QuotaExceeded: they are more than the tenant may have waiting: they would never pass
                while others run.
        """
        policy, requests = caller.policy, list[GenerateRequest]()
        # a special token is a stop string too: it ends the text, and never stays in it
        special = {self.tokenizer.token_to_id(stop) for stop in sampling.stop} & self.tokenizer.special_token_ids
        shown_token_ids = (*shown_token_ids, *(token_id for token_id in special if token_id is not None))
        max_queued = self.services.admissions.part_of(policy.limits.max_queued_requests)
        num_choices = len(self.prompts) * self.body.n
        if max_queued and num_choices > max_queued:
            raise QuotaExceeded(
                f"The request makes {num_choices} choices; the tenant may have {max_queued} in the queue of "
                "one server.",
                hint="Ask for fewer with n, or send fewer prompts at once.",
            )
        for number, prompt in enumerate(self.prompts):
            for seed in choose_seeds(self.body.seed, self.body.n):
                requests.append(
                    GenerateRequest(
                        request_id=RequestId(f"{self.id}-{len(requests)}"),
                        tenant=caller.tenant,
                        adapter=self.adapter,
                        prompt_token_ids=prompt.token_ids,
                        params=sampling.params(
                            max_tokens=max_tokens[number],
                            seed=seed,
                            thinking=None if thinking is None else thinking[number],
                        ),
                        stop=sampling.stop,
                        include_stop_str_in_output=self.body.include_stop_str_in_output,
                        skip_special_tokens=self.body.skip_special_tokens,
                        shown_token_ids=shown_token_ids,
                        tokenizer=None if self.tokenizer.base is None else self.tokenizer,
                        priority=priority_of(self.body, caller),
                        is_background=caller.is_background,
                        timeout_s=self.body.timeout,
                        weight=policy.weight,
                        kv_share=1.0 if policy.limits.max_kv_share is None else policy.limits.max_kv_share,
                        max_queued=max_queued or 0,
                    )
                )
        return requests

    def prompt_of(self, index: int) -> Prompt:
        """Look up the prompt of the choice with this index."""
        return self.prompts[index // self.body.n]

    def headers(self, first: Chunk | None) -> dict[str, str]:
        """Build the headers of the response; `first` is its first chunk, if there is one yet."""
        return response_headers(first, self.target, self.ignored)


def response_headers(first: Chunk | None, target: TargetSelector, ignored: Sequence[str]) -> dict[str, str]:
    """Build the headers of a response: its timing, what answered, and what was ignored.

    Before the first chunk it isn't certain what answers, and there is no timing.
    """
    if first is None:
        return ignored_header(ignored)
    timing = (("queue", first.queue_s), ("adapter", first.adapter_s), ("prefill", first.prefill_s))
    headers = {"server-timing": ", ".join(f"{name};dur={seconds * 1000:.1f}" for name, seconds in timing)}
    return {**headers, **target.headers(), **ignored_header(ignored)}
