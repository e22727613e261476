"""Bodies of LoRAX's and TGI's routes, and their translation to a completion's fields."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from loraserve.api.inference.schemas import MAX_MODEL_LENGTH, CompletionBody
from loraserve.errors import InvalidRequest, UnsupportedParameter
from loraserve.limits import LIMITS

_BASE_ADAPTER_IDS = frozenset({"", "__base_model__"})
"""LoRAX's names of the base without an adapter."""
_LOCAL = "local"
"""The only `adapter_source`: adapters come from this server's registry, never from a request."""
_SEED_BITS = 63


def _drop_nulls(value: Any) -> Any:
    return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, hide_input_in_errors=True)


class GenerateParameters(_Body):
    """Fields of ``parameters``, those of LoRAX and of TGI together."""

    adapter_id: str | None = Field(default=None, max_length=MAX_MODEL_LENGTH)
    adapter_source: str | None = Field(default=None, max_length=64)
    merged_adapters: Any = None
    max_new_tokens: int | None = Field(default=None, ge=1, lt=1 << 31)
    """Length of the answer at most; None: as long as the context has room for."""
    do_sample: bool = False
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_k: int | None = Field(default=None, ge=0, lt=1 << 31)
    top_p: float | None = Field(default=None, gt=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0, le=100)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    seed: int | None = Field(default=None, ge=0, le=(1 << 64) - 1)
    # checked by `sampling`, as a completion's
    stop: Any = None
    ignore_eos_token: bool = False
    truncate: int | None = Field(default=None, ge=1, lt=1 << 31)
    """Tokens of the prompt's end that are kept."""
    best_of: int = Field(default=1, ge=1, le=LIMITS.max_n)
    response_format: Any = None
    grammar: Any = None
    return_full_text: bool = False
    details: bool = False
    decoder_input_details: bool = False
    return_k_alternatives: int | None = Field(default=None, ge=1, le=LIMITS.max_completion_logprobs)
    top_n_tokens: int | None = Field(default=None, ge=1, le=LIMITS.max_completion_logprobs)

    @property
    def is_sampled(self) -> bool:
        """Whether tokens are drawn, by LoRAX's rule; otherwise the likeliest is taken."""
        if self.temperature == 0:
            return False
        cuts = (self.temperature, 1.0), (self.top_p, 1.0), (self.top_k, 0)
        return self.do_sample or any(value not in (None, neutral) for value, neutral in cuts)

    @property
    def num_top(self) -> int:
        """Number of the likeliest tokens that the answer reports beside each of its own."""
        return max(self.return_k_alternatives or 0, self.top_n_tokens or 0)


class GenerateBody(_Body):
    inputs: str = Field(min_length=1)
    parameters: Annotated[GenerateParameters, BeforeValidator(_drop_nulls)] = GenerateParameters()
    stream: bool = False


def check_parameters(parameters: GenerateParameters, *, is_stream: bool) -> None:
    """Check that the parameters go together, and ask for nothing that isn't implemented.

    Raises:
        UnsupportedParameter: a field would change the answer and isn't implemented.
        InvalidRequest: two fields contradict each other.
    """
    if parameters.adapter_source not in (None, "", _LOCAL):
        raise UnsupportedParameter(
            "adapter_source is not supported: this server loads adapters from its own registry alone.",
            param="adapter_source",
            hint=f'Publish the adapter, and send its name as adapter_id without adapter_source, or with "{_LOCAL}".',
        )
    if parameters.merged_adapters:
        raise UnsupportedParameter(
            "merged_adapters is not supported, and ignoring it would change the answer.",
            param="merged_adapters",
            hint="Send the weighted sum as adapter_id: a+0.5*b.",
        )
    for name in ("response_format", "grammar"):
        value = getattr(parameters, name)
        if value and value != {"type": "text"}:
            raise UnsupportedParameter(
                f"{name} is not supported on this route, and ignoring it would change the answer.",
                param=name,
                hint="Send the request without it.",
            )
    if is_stream and parameters.decoder_input_details:
        raise InvalidRequest(
            "decoder_input_details is for answers in one piece; this one is a stream.", param="decoder_input_details"
        )
    if parameters.best_of > 1 and is_stream:
        raise InvalidRequest("best_of over 1 is for answers in one piece; this one is a stream.", param="best_of")
    if parameters.best_of > 1 and not parameters.is_sampled:
        raise InvalidRequest(
            "best_of over 1 needs sampling: without it, all answers are the same.",
            param="best_of",
            hint="Send do_sample: true, or a temperature.",
        )


def completion_body(body: GenerateBody, base_id: str) -> CompletionBody:
    """Convert the request to a completion, one choice per sequence of `best_of`."""
    parameters = body.parameters
    model = parameters.adapter_id
    has_tokens = body.stream or parameters.details or parameters.decoder_input_details or parameters.best_of > 1
    temperature = 1.0 if parameters.temperature is None else parameters.temperature
    return CompletionBody(
        model=base_id if model is None or model in _BASE_ADAPTER_IDS else model,
        prompt=body.inputs,
        n=parameters.best_of,
        stream=body.stream,
        max_tokens=parameters.max_new_tokens,
        temperature=temperature if parameters.is_sampled else 0.0,
        top_p=1.0 if parameters.top_p is None else parameters.top_p,
        top_k=parameters.top_k or 0,
        repetition_penalty=parameters.repetition_penalty,
        presence_penalty=parameters.presence_penalty,
        frequency_penalty=parameters.frequency_penalty,
        stop=parameters.stop,
        seed=None if parameters.seed is None else parameters.seed & ((1 << _SEED_BITS) - 1),
        # both leave the stop string at the end of the text
        include_stop_str_in_output=True,
        ignore_eos=parameters.ignore_eos_token,
        logprobs=parameters.num_top if has_tokens else None,
    )
