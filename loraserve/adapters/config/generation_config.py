"""``generation_config.json`` of a version or the base: defaults of fields that a request lacks.

The fields that requests have too are read. Whatever else would change the answer is refused by name
in a version's file, and named in a warning in the base's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from loraserve.adapters.problems import Problems
from loraserve.adapters.strict_json import parse_object, shown
from loraserve.errors import AdapterBaseMismatch, AdapterFormatError, AdapterRejected, AdapterUnsupported
from loraserve.limits import LIMITS
from loraserve.types import Struct

FILE = "generation_config.json"
_MAX_DEPTH = 8
_MAX_INT = 1 << 31

_HARMLESS = frozenset(
    {
        # what transformers writes for itself
        *("_commit_hash", "_from_model_config", "generation_kwargs", "transformers_version"),
        # how it computes, and in which form it returns what it computed
        *("cache_config", "cache_implementation", "compile_config", "disable_compile", "use_cache"),
        *("output_attentions", "output_hidden_states", "output_logits", "output_scores", "return_dict_in_generate"),
        *("remove_invalid_values", "renormalize_logits", "token_healing", "trust_remote_code"),
        # assisted generation, which keeps the answer
        *("assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind", "is_assistant"),
        *("max_matching_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule"),
        *("prompt_lookup_num_tokens", "target_lookbehind"),
        # of padding, of encoders, and of beams, of which there is one
        *("bos_token_id", "decoder_start_token_id", "pad_token_id", "early_stopping", "length_penalty", "low_memory"),
        # the length with the prompt, which a request's own context bounds; vLLM reads it neither
        "max_length",
    }
)
_NEUTRAL: Mapping[str, object] = {
    "begin_suppress_tokens": [],
    "bad_words_ids": [],
    "constraints": [],
    "diversity_penalty": 0,
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": [],
    "forced_bos_token_id": None,
    "forced_decoder_ids": [],
    "forced_eos_token_id": None,
    "guidance_scale": 1,
    "max_time": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "penalty_alpha": 0,
    "sequence_bias": {},
    "stop_strings": [],
    "suppress_tokens": [],
    "top_h": None,
    "typical_p": 1,
    "watermarking_config": None,
}
"""Field that isn't implemented → the value with which it does nothing, as null does."""


SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of requests that have defaults under the same names."""


class GenerationDefaults(Struct, frozen=True):
    """Defaults of requests for one version or the base; None and empty: the API's own.

    Attributes:
        max_new_tokens: length of an answer whose request names none, where there is room.
        max_default_tokens: the base's, which only caps what such an answer would have otherwise.
        stop_token_ids: tokens that end an answer, in addition to the base's own.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    max_default_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    def only_ends(self) -> GenerationDefaults:
        """Keep the stop tokens alone."""
        return GenerationDefaults(stop_token_ids=self.stop_token_ids)

    def over(self, base: GenerationDefaults) -> GenerationDefaults:
        """Fill what these defaults lack with the base's."""
        found = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) not in (None, ())}
        return msgspec.structs.replace(base, **found)

    def max_tokens(self, otherwise: int | None) -> int | None:
        """Choose the length of an answer whose request names none; None: all the room.

        Args:
            otherwise: the route's own default.
        """
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        bounds = [number for number in (otherwise, self.max_default_tokens) if number is not None]
        return min(bounds, default=None)

    def as_fields(self) -> dict[str, int | float]:
        """List the sampling defaults by the names that requests have for them."""
        named = {name: getattr(self, name) for name in SAMPLING_FIELDS}
        named["max_tokens"] = self.max_tokens(None)
        return {name: value for name, value in named.items() if value is not None}


NO_DEFAULTS = GenerationDefaults()


def read_generation_config(data: bytes, vocab_size: int) -> tuple[GenerationDefaults, tuple[str, ...]]:
    """Read the defaults, and the names of the ignored fields.

    Args:
        vocab_size: of the base's logits, which have a number for each token that may end an answer.

    Raises:
        AdapterRejected: a field is malformed, isn't implemented, or is unknown; lists every reason.
    """
    config = parse_object(data, what=FILE, max_depth=_MAX_DEPTH)
    reader = _Reader({name: value for name, value in config.items() if value is not None})
    defaults = reader.read(vocab_size)
    reader.problems.raise_if_any()
    return defaults, tuple(sorted(_HARMLESS & config.keys()))


def read_base_defaults(data: bytes) -> tuple[GenerationDefaults, tuple[str, ...]]:
    """Read the defaults in the base's file, and a warning for each field that doesn't count.

    Its ``eos_token_id`` are the base's end tokens, which `read_config` reads and checks.
    """
    try:
        config = parse_object(data, what=FILE, max_depth=_MAX_DEPTH)
    except AdapterRejected as error:
        return NO_DEFAULTS, (str(error),)
    reader = _Reader({name: value for name, value in config.items() if value is not None and name != "eos_token_id"})
    read = reader.read_sampling()
    reader.refuse_others()
    defaults = msgspec.structs.replace(read, max_new_tokens=None, max_default_tokens=read.max_new_tokens)
    return defaults, tuple(reader.problems.texts)


class _Reader:
    def __init__(self, config: Mapping[str, Any]) -> None:
        self.problems = Problems()
        self._config = config
        self._seen: set[str] = set()

    def read(self, vocab_size: int) -> GenerationDefaults:
        defaults = msgspec.structs.replace(
            self.read_sampling(), stop_token_ids=self._stop_token_ids(vocab_size), stop_strings=self._stop_strings()
        )
        self.refuse_others()
        return defaults

    def read_sampling(self) -> GenerationDefaults:
        temperature = self._number("temperature", "a number from 0 to 100", lambda value: 0 <= value <= 100)
        do_sample = self._take("do_sample", "true or false", lambda value: isinstance(value, bool))
        return GenerationDefaults(
            temperature=0.0 if do_sample is False else temperature,
            top_p=self._number("top_p", "a number from 0 to 1", lambda value: 0 <= value <= 1),
            top_k=self._integer("top_k", -1),
            min_p=self._number("min_p", "a number from 0 to 1", lambda value: 0 <= value <= 1),
            repetition_penalty=self._number(
                "repetition_penalty", "a number above 0, and 100 at most", lambda value: 0 < value <= 100
            ),
            max_new_tokens=self._integer("max_new_tokens", 1),
        )

    def refuse_others(self) -> None:
        """Add a problem for each field that isn't read and would change answers, or isn't known."""
        for name in sorted(self._config.keys() - self._seen - _HARMLESS):
            self._refuse_unless_neutral(name, self._config[name])

    def _take(self, name: str, expected: str, is_right: Callable[[Any], bool]) -> Any:
        """Take the field's value; None if it's absent or wrong."""
        self._seen.add(name)
        value = self._config.get(name)
        if value is None or is_right(value):
            return value
        self.problems.add(AdapterFormatError, f"{FILE}: {name} is {shown(value)}; expected {expected}.")
        return None

    def _number(self, name: str, expected: str, is_in_range: Callable[[float], bool]) -> float | None:
        def is_right(value: object) -> bool:
            return _is_number(value) and is_in_range(value)  # type: ignore[arg-type]

        value = self._take(name, expected, is_right)
        return None if value is None else float(value)

    def _integer(self, name: str, least: int) -> int | None:
        def is_right(value: object) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and least <= value < _MAX_INT

        found: int | None = self._take(name, f"an integer of {least} or more", is_right)
        return found

    def _stop_token_ids(self, vocab_size: int) -> tuple[int, ...]:
        most = LIMITS.max_stop_token_ids

        def is_right(value: object) -> bool:
            ids = value if isinstance(value, list) else [value]
            return len(ids) <= most and all(isinstance(id_, int) and not isinstance(id_, bool) for id_ in ids)

        value = self._take("eos_token_id", f"a token id, or a list of at most {most}", is_right)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                self.problems.add(
                    AdapterBaseMismatch,
                    f"{FILE}: eos_token_id {shown(token_id)} is not a token of this base: ids go from 0 to "
                    f"{vocab_size - 1}.",
                )
        return tuple(dict.fromkeys(ids))

    def _stop_strings(self) -> tuple[str, ...]:
        most, most_bytes, in_all = LIMITS.max_stop_strings, LIMITS.max_stop_bytes, LIMITS.max_stop_bytes_in_all

        def is_right(value: object) -> bool:
            texts = value if isinstance(value, list) else [value]
            sizes = [len(text.encode()) if isinstance(text, str) else 0 for text in texts]
            return len(texts) <= most and all(0 < size <= most_bytes for size in sizes) and sum(sizes) <= in_all

        expected = f"a string, or a list of at most {most}, each of 1 to {most_bytes} bytes and {in_all} in all"
        value = self._take("stop_strings", expected, is_right)
        return () if value is None else (value,) if isinstance(value, str) else tuple(value)

    def _refuse_unless_neutral(self, name: str, value: object) -> None:
        if name in _NEUTRAL:
            neutral = _NEUTRAL[name]
            if value == neutral and isinstance(value, bool) == isinstance(neutral, bool):
                return
            text = f"{FILE}: {name} is {shown(value)}, which would change answers and isn't implemented."
        else:
            text = f"{FILE}: the field {shown(name)} isn't known."
        self.problems.add(AdapterUnsupported, text)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
