"""Sort a body's fields: known ones, those that a route refuses by name, and ignored ones."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from types import NoneType
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from loraserve.api.http.json_body import json_object
from loraserve.api.http.request_record import MAX_MODEL_NAME
from loraserve.api.services import services_of
from loraserve.errors import InvalidRequest, UnsupportedParameter

Model = TypeVar("Model", bound=BaseModel)

_NUMBER = re.compile(r"[+-]?\d{1,20}(\.\d{1,20})?(e[+-]?\d{1,2})?", re.ASCII)
_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
_FIELD_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_MAX_NAMED = 20
_MAX_GUESSED, _MAX_KEPT_GUESSES = 4, 1024
"""Ignored fields of a request, and of all requests, for which a known one is looked for: 0.3 ms."""
_LIKENESS = 0.8
"""Likeness of two names from which one is a guess for the other: `temprature` has 0.95."""

_OFF: tuple[object, ...] = (False, 0, "", [], {})
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    # structure
    "tools": ([],),
    "functions": ([],),
    "function_call": ("none", "auto", ""),
    "format": ("",),
    "grammar": ("",),
    # sampling
    "bad_words": ([],),
    "bad_words_ids": ([],),
    "allowed_token_ids": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "sequence_bias": ({}, []),
    "use_beam_search": (False,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0,),
    "length_penalty": (1,),
    "exponential_decay_length_penalty": (),
    "early_stopping": (False,),
    "typical_p": (1,),
    "typ_p": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_h": (),
    "top_n_sigma": (-1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "penalty_alpha": (0,),
    "guidance_scale": (1,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "repeat_penalty": (1,),
    "encoder_repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "do_sample": (True,),
    "watermark": (False,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "dynatemp_range": (0,),
    "samplers": (),
    "sampling_seed": (),
    "logits_processors": ([],),
    "logit_processors": ([],),
    "custom_logit_processor": ("",),
    "thinking_token_budget": (-1,),
    "repetition_detection": (False,),
    "logprob_token_ids": ([],),
    "post_sampling_probs": (False,),
    # the prompt
    "suffix": ("",),
    "truncate": (False, "NONE", 0),
    "truncate_prompt_tokens": (),
    "truncation_side": ("left", ""),
    "chat_template": ("",),
    "documents": ([],),
    "continue_final_message": (False,),
    "web_search_options": (),
    "max_tokens_per_doc": (),
    "max_chunks_per_doc": (),
    "rank_fields": ([],),
    "instruction": ("",),
    "padding": (False,),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": ("", []),
    "input_extra": ([],),
    # the answer's form
    "verbosity": ("medium", ""),
    "audio": (),
    "prompt_logprobs": (False,),
    "return_tokens_as_token_ids": (False,),
    "max_new_tokens": (False,),
    "min_new_tokens": (0,),
    "n_predict": (False,),
    "num_predict": (),
    "max_length": (False,),
    "stop_regex": ("", []),
    "no_stop_trim": (False,),
    "t_max_predict_ms": (0, -1),
    # the adapter
    "lora": ([],),
    "lora_path": ("", []),
    "lora_request": (),
    "adapter_id": ("",),
    "adapter_source": ("", "local"),
    "merged_adapters": (),
    "kv_transfer_params": ({},),
}
"""Fields of OpenAI's, vLLM's, SGLang's, LoRAX's, TGI's, Transformers', Ollama's and llama.cpp's
requests that would change the answer and aren't implemented, with the values that have no effect,
as null does. An empty value may have one: ``web_search_options: {}`` for a search,
``thinking_token_budget: 0`` for no thought.
"""
_NEUTRAL_ALONE: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "container": (),
    "context_management": (),
    "thread": (),
    "temperature": (),
    "top_p": (1,),
    "top_k": (0, -1),
    "seed": (),
}
"""The same for fields that single routes refuse, where it isn't what is empty or off."""
_GUIDED = re.compile(r"guided_(?!decoding_backend$)[a-z_]+")
"""Fields of vLLM's before `structured_outputs`; those that are known have a model's field."""
_WITHOUT = "Send the request without it."
_HINTS = {
    "max_new_tokens": "Send max_tokens instead.",
    "n_predict": "Send max_tokens instead.",
    "num_predict": "Send max_tokens instead.",
    "min_new_tokens": "Send min_tokens instead.",
    "sampling_seed": "Send seed instead.",
    "format": "Send response_format instead.",
    "repeat_penalty": "Send repetition_penalty instead.",
    "samplers": "Send top_k, top_p and min_p alone: each is left out where it isn't sent.",
    "t_max_predict_ms": "Send timeout, in seconds, instead.",
    "functions": "Send tools instead.",
    "function_call": "Send tools and tool_choice instead.",
}


class IgnoredField(str):
    """Name of an ignored field.

    Attributes:
        meant: known field of which it may be a misspelling.
    """

    __slots__ = ("meant",)

    meant: str | None

    @classmethod
    def of(cls, name: str, meant: str | None) -> IgnoredField:
        field = cls(name)
        field.meant = meant
        return field


async def json_fields(request: Request) -> dict[str, Any]:
    """Parse the fields of the request's JSON object, unchecked; note which model they name.

    A dependency of the inference routes.

    Raises:
        InvalidRequest: the body isn't strict JSON, or isn't an object.
    """
    fields = await json_object(request, services_of(request).text_threads)
    model = fields.get("model")
    if isinstance(model, str):
        request.state.record.asked_model = model[:MAX_MODEL_NAME]
    return fields


def parse_body(model: type[Model], body: Mapping[str, Any]) -> tuple[Model, tuple[str, ...]]:
    """Check the known fields, and collect the names of the ignored fields (`IgnoredField`).

    Explicit nulls count as absent; a number may come as its text ("8"), and an integer as a whole
    float (8.0), as in vLLM.

    Raises:
        UnsupportedParameter: a field would change the answer and isn't implemented.
        InvalidRequest: a field is missing or wrong; `param` names it.
    """
    given = {name: value for name, value in body.items() if value is not None}
    _refuse_unsupported(model, given)
    numeric = _numeric_fields(model)
    known = {
        name: _as_number(value, numeric[name]) if name in numeric else value
        for name, value in given.items()
        if name in model.model_fields
    }
    try:
        fields = model.model_validate(known)
    except ValidationError as error:
        raise _invalid(error) from None
    fields = _with_synonyms(fields)
    if "stream_options" in given and "stream_options" in model.model_fields and not given.get("stream"):
        raise InvalidRequest("stream_options needs stream: true.", param="stream_options")
    # a field of the other kind that got so far has no effect, and so isn't ignored
    passed = given.keys() - model.model_fields.keys() - _UNSUPPORTED.keys() - _refused(model).keys()
    ignored = [name for name in given if name in passed]
    guesses = [_likely_field(name, model) for name in ignored[:_MAX_GUESSED]]
    return fields, (*map(IgnoredField.of, ignored, guesses), *ignored[_MAX_GUESSED:])


def _with_synonyms(fields: Model) -> Model:
    """Set what fields with other servers' names mean.

    Raises:
        InvalidRequest: the field is there under both names, with different values.
    """
    synonyms: Callable[[], Mapping[str, Mapping[str, object]]] = getattr(fields, "synonyms", dict)
    update: dict[str, object] = {}
    for name, meant in synonyms().items():
        for own, value in meant.items():
            if own in fields.model_fields_set and getattr(fields, own) != value:
                raise InvalidRequest(
                    f"{name} is another name of {own}, and the two have different values.",
                    param=name,
                    hint=f"Send {own} alone.",
                )
            update[own] = value
    return fields.model_copy(update=update) if update else fields


@lru_cache
def _numeric_fields(model: type[BaseModel]) -> Mapping[str, type[int] | type[float]]:
    """Find the fields of a model that are numbers, by name."""
    found: dict[str, type[int] | type[float]] = {}
    for name, field in model.model_fields.items():
        kinds = {field.annotation, *get_args(field.annotation)} - {None, NoneType}
        if kinds & {int, float} and kinds <= {int, float, int | None, float | None}:
            found[name] = int if int in kinds else float
    return found


def _as_number(value: object, kind: type[int] | type[float]) -> object:
    """Convert a text or a whole float to the number that it stands for; any other value stays."""
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = float(value) if kind is float or not _INTEGER.fullmatch(value) else int(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _likely_field(name: str, model: type[BaseModel]) -> str | None:
    """Find the model's field that `name` may be a misspelling of."""
    return _closest(name, tuple(model.model_fields)) if _FIELD_NAME.fullmatch(name) else None


@lru_cache(_MAX_KEPT_GUESSES)
def _closest(name: str, known: tuple[str, ...]) -> str | None:
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=_LIKENESS)), None)


@contextlib.contextmanager
def renamed(rename: Callable[[str], str], fields: Mapping[str, str]) -> Iterator[None]:
    """Name a wrong field as the body has it from which a chat's body was made.

    Args:
        rename: returns a place in the body for a place in the chat's.
        fields: the chat's fields that the body calls otherwise.
    """
    try:
        yield
    except InvalidRequest as error:
        if error.param is not None:
            place = rename(error.param)
            error.message = _renamed_in(error.message, error.param, place)
            error.param = place
        for name, own in fields.items():
            error.message = _renamed_in(error.message, name, own)
        raise


def _renamed_in(message: str, name: str, own: str) -> str:
    """Replace a field's name where it can't be a word: at the start, or with a mark of names."""
    is_word = name.isalpha()
    pattern = (
        rf"(?:^|(?<=in the )|(?<=of the )|(?<=your )){name}\b"
        if is_word
        else rf"(?<![\w.]){re.escape(name)}(?![\w.]*\w)"
    )
    return re.sub(pattern, lambda _: own, message)


def fields_of(value: object, param: str, known: Collection[str]) -> dict[str, Any]:
    """Read the fields of an object that may have only these; nulls count as absent.

    Raises:
        InvalidRequest: it isn't an object.
        UnsupportedParameter: it has others.
    """
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param} should be an object.", param=param)
    given = {name: item for name, item in value.items() if item is not None}
    if given.keys() - set(known):
        raise UnsupportedParameter(f"{param} may have only {', '.join(known)}.", param=param)
    return given


def ignored_header(names: Iterable[str]) -> dict[str, str]:
    """Build ``x-loraserve-ignored`` for the ignored fields.

    Names that aren't plain words are only counted. ``x-loraserve-did-you-mean`` has those that may
    be misspelt: ``temprature=temperature``.
    """
    names = list(names)
    plain = [name for name in names if _FIELD_NAME.fullmatch(name)][:_MAX_NAMED]
    others = len(names) - len(plain)
    if others:
        plain.append(f"({others} more)")
    meant = [f"{name}={name.meant}" for name in names if isinstance(name, IgnoredField) and name.meant is not None]
    headers = {"x-loraserve-ignored": plain, "x-loraserve-did-you-mean": meant}
    return {header: ", ".join(values) for header, values in headers.items() if values}


def _refuse_unsupported(model: type[BaseModel], given: Mapping[str, Any]) -> None:
    hints = _refused(model)
    for name, value in given.items():
        if (name in model.model_fields and name not in hints) or _is_neutral(name, value):
            continue
        if name in hints or name in _UNSUPPORTED or _GUIDED.fullmatch(name):
            raise UnsupportedParameter(
                f"{name} is not supported, and ignoring it would change the answer.",
                param=name,
                hint=hints.get(name) or _HINTS.get(name, _WITHOUT),
            )


def _refused(model: type[BaseModel]) -> Mapping[str, str]:
    """Look up the fields that this route alone refuses, with hints."""
    refused: Mapping[str, str] = getattr(model, "refused", {})
    return refused


def _is_neutral(name: str, value: object) -> bool:
    """Check whether the field has no effect, as null has none."""
    if name in _NEUTRAL_ALONE:
        neutral = _NEUTRAL_ALONE[name]
    elif _GUIDED.fullmatch(name):
        # the empty schema means any JSON
        neutral = (False, "", [])
    else:
        neutral = _UNSUPPORTED.get(name, _OFF)
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def _invalid(error: ValidationError) -> InvalidRequest:
    problems = error.errors(include_input=False, include_url=False, include_context=False)
    first = problems[0]
    param = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return InvalidRequest(f"{param} is missing.", param=param)
    message = first["msg"].removeprefix("Value error, ")
    return InvalidRequest(f"{param}: {message[:1].lower()}{message[1:]}.", param=param)
