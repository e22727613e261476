"""Turn a body's fields into `SamplingParams`.

It makes the checks that need the base model, and the seeds.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from loraserve.adapters.config.generation_config import NO_DEFAULTS, SAMPLING_FIELDS, GenerationDefaults
from loraserve.api.grammar.checker import Grammar
from loraserve.api.inference.fields import fields_of
from loraserve.api.inference.schemas import InferenceBody
from loraserve.errors import ContextLengthExceeded, InvalidRequest
from loraserve.limits import LIMITS
from loraserve.types import BaseSpec, SamplingParams, ThinkingBudget

ALL_THE_ROOM = -1
"""`max_tokens` of an answer that may be as long as the context has room for."""
_MIN_TOP_P = 1e-9
_MAX_NAMED_KEYS = 4
"""Ids in `logit_bias` that its error names."""
_MASK = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling fields of a body, checked against the base.

    `params` makes them for one prompt and one choice.
    """

    body: InferenceBody
    logit_bias: dict[int, float]
    stop: tuple[str, ...]
    logprobs: int | None
    prompt_logprobs: int | None
    grammar: Grammar | None = None
    """Grammar of the answers; None: any text."""
    bad_words: tuple[tuple[int, ...], ...] = ()

    def params(self, *, max_tokens: int, seed: int, thinking: ThinkingBudget | None = None) -> SamplingParams:
        body = self.body
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(body.min_tokens, max_tokens),
            temperature=body.temperature,
            top_k=max(0, body.top_k),
            # 0 keeps the likeliest token alone, as OpenAI's does
            top_p=max(body.top_p, _MIN_TOP_P),
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias=self.logit_bias,
            seed=seed,
            stop_token_ids=tuple(body.stop_token_ids),
            ignore_eos=body.ignore_eos,
            logprobs=self.logprobs,
            logprob_token_ids=tuple(body.logprob_token_ids),
            prompt_logprobs=self.prompt_logprobs,
            grammar="" if self.grammar is None else self.grammar.text,
            tokenizer="" if self.grammar is None else self.grammar.tokenizer,
            grammar_bytes=0 if self.grammar is None else self.grammar.num_bytes,
            allowed_token_ids=tuple(body.allowed_token_ids or ()),
            bad_words=self.bad_words,
            thinking=thinking,
        )

    def constrained(self, grammar: Grammar) -> Sampling:
        """Restrict the sampling to answers that follow a grammar."""
        return replace(self, grammar=grammar)


def read_sampling(
    body: InferenceBody,
    num_ids: int,
    *,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    bad_words: tuple[tuple[int, ...], ...] = (),
    defaults: GenerationDefaults = NO_DEFAULTS,
) -> Sampling:
    """Read the sampling parameters of the body.

    Args:
        num_ids: the bound of the ids that the body may name.
        logprobs, prompt_logprobs: how many of the likeliest tokens the route shows; what the body
            requests in addition is added.
        bad_words: tokens of the body's, from `PromptReader.bad_words`.
        defaults: of fields that the body doesn't have.

    Raises:
        InvalidRequest: a field is out of range for this model; `param` names it.
    """
    check_token_ids(body.stop_token_ids, num_ids, "stop_token_ids")
    check_token_ids(body.allowed_token_ids or (), num_ids, "allowed_token_ids")
    check_token_ids(body.logprob_token_ids, num_ids, "logprob_token_ids")
    if body.logprob_token_ids and logprobs is None:
        raise InvalidRequest("logprob_token_ids needs logprobs.", param="logprob_token_ids")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs isn't for streams: send stream: false.", param="prompt_logprobs")
    wanted = [number for number in (prompt_logprobs, body.prompt_logprobs) if number is not None]
    return Sampling(
        body=_with_defaults(body, defaults),
        logit_bias=_read_logit_bias(body.logit_bias, num_ids),
        stop=defaults.stop_strings if body.stop is None else _read_stop(body.stop),
        logprobs=logprobs,
        prompt_logprobs=max(wanted, default=None),
        bad_words=bad_words,
    )


def _with_defaults(body: InferenceBody, defaults: GenerationDefaults) -> InferenceBody:
    """Fill what the body lacks with defaults, and add the stop tokens."""
    given = {name: getattr(defaults, name) for name in SAMPLING_FIELDS if name not in body.model_fields_set}
    update: dict[str, object] = {name: value for name, value in given.items() if value is not None}
    if defaults.stop_token_ids and not body.ignore_eos:
        update["stop_token_ids"] = list(dict.fromkeys((*body.stop_token_ids, *defaults.stop_token_ids)))
    return body.model_copy(update=update) if update else body


def cache_ttl_s(sampling: Sampling) -> float | None:
    """Read the seconds for which `cache` lets the answer be kept; None: it isn't requested.

    Raises:
        InvalidRequest: the field is wrong, or the answer is drawn again each time.
    """
    body, value = sampling.body, sampling.body.cache
    if value is None:
        return None
    ttl = fields_of(value, "cache", ("ttl",)).get("ttl")
    if ttl is None:
        raise InvalidRequest("cache.ttl is missing: the seconds for which the answer is kept.", param="cache.ttl")
    if isinstance(ttl, bool) or not isinstance(ttl, int | float) or not 0 < ttl <= LIMITS.max_result_cache_ttl_s:
        raise InvalidRequest(
            f"cache.ttl should be a number of seconds above 0, and at most {LIMITS.max_result_cache_ttl_s:.0f}.",
            param="cache.ttl",
        )
    if body.temperature > 0 and body.seed is None:
        raise InvalidRequest(
            f"cache is for answers that are the same each time; with temperature {body.temperature:g} and "
            "without a seed each one is drawn anew.",
            param="cache",
            hint="Send temperature: 0 or a seed, or the request without cache.",
        )
    return float(ttl)


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Check that the logits have these ids.

    Raises:
        InvalidRequest: an id is not one of theirs (a tokenizer may have more tokens than the model
            has).
    """
    if token_ids and min(token_ids) >= 0 and max(token_ids) < vocab_size:
        return
    for position, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{param}.{position} is not a token of this model: ids go from 0 to {vocab_size - 1}.",
                param=f"{param}.{position}",
            )


def choose_max_tokens(
    asked: int | None, default: int | None, num_prompt_tokens: int, base: BaseSpec, param: str
) -> int:
    """Choose the requested maximum of tokens, or the default as far as the context has room.

    A default of None is all the room.

    Raises:
        ContextLengthExceeded: the prompt, or the prompt and what was requested, is longer than the
            context.
    """
    room = base.max_model_len - num_prompt_tokens
    if asked is None and room >= 1:
        return room if default is None else min(default, room)
    wanted = max(1, asked or 0)
    if wanted <= room:
        return wanted
    raise ContextLengthExceeded(
        f"This model's maximum context length is {base.max_model_len} tokens. However, you requested "
        f"{num_prompt_tokens + wanted} tokens ({num_prompt_tokens} in the {param}, {wanted} in the completion). "
        f"Please reduce the length of the {param} or completion.",
        param=param,
    )


def choose_seeds(seed: int | None, num_choices: int) -> list[int]:
    """Choose one seed per choice: random ones, or derived from the caller's, the first choice's."""
    if seed is None:
        return [secrets.randbits(63) for _ in range(num_choices)]
    first = seed & _MASK
    return [first, *(_derive(first, index) for index in range(1, num_choices))]


def _derive(seed: int, index: int) -> int:
    digest = hashlib.blake2b(f"choice {index} of seed {seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & _MASK


def _read_logit_bias(value: object, vocab_size: int) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequest("logit_bias should be an object of token id to bias.", param="logit_bias")
    if len(value) > LIMITS.max_logit_bias:
        raise InvalidRequest(f"logit_bias has more than {LIMITS.max_logit_bias} entries.", param="logit_bias")
    biases: dict[int, float] = {}
    wrong = [key for key in value if not _is_token_key(key, vocab_size)]
    if wrong:
        # an error repeats no text of the body's
        ids = [key for key in wrong if key.isascii() and key.isdigit() and len(key) < 20][:_MAX_NAMED_KEYS]
        named = f", such as {', '.join(ids)}" if ids else ""
        raise InvalidRequest(
            f"logit_bias has a key that is not a token of this model{named}: "
            f"it has {vocab_size}, whose ids go from 0 to {vocab_size - 1}.",
            param="logit_bias",
        )
    for key, bias in value.items():
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise InvalidRequest("logit_bias should have numbers from -100 to 100.", param="logit_bias")
        biases[int(key)] = float(bias)
    return biases


def _is_token_key(key: str, vocab_size: int) -> bool:
    return key.isascii() and key.isdigit() and len(key) < 20 and int(key) < vocab_size


def _read_stop(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise InvalidRequest("stop should be a string or a list of strings.", param="stop")
    if len(stops) > LIMITS.max_stop_strings:
        raise InvalidRequest(f"stop has more than {LIMITS.max_stop_strings} strings.", param="stop")
    if sum(len(stop.encode()) for stop in stops) > LIMITS.max_stop_bytes_in_all:
        raise InvalidRequest(f"stop has more than {LIMITS.max_stop_bytes_in_all} bytes in all.", param="stop")
    for position, stop in enumerate(stops):
        if not stop:
            raise InvalidRequest("stop has an empty string.", param=f"stop.{position}")
        if len(stop.encode()) > LIMITS.max_stop_bytes:
            raise InvalidRequest(
                f"stop.{position} is longer than {LIMITS.max_stop_bytes} bytes.", param=f"stop.{position}"
            )
    return tuple(stops)
