"""dspy, by its model class, its predictor with a typed signature, and its embedder."""

from __future__ import annotations

import os
import tempfile
from typing import Any

_SCRATCH = tempfile.TemporaryDirectory(prefix="dspy-", ignore_cleanup_errors=True)
os.environ |= {"HOME": _SCRATCH.name, "DSPY_CACHEDIR": _SCRATCH.name}
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # prices are otherwise fetched at import

import dspy
import dspy.lm15
from probe import BASE_URL, JSON_MODEL, KEY, MAX_TOKENS, QUESTION, TEXT_MODEL, feature, query_type, run

COMMON: dict[str, Any] = {"api_base": BASE_URL, "api_key": KEY}
# of a model that it doesn't know, dspy sends no schema unless its provider is declared to take them
dspy.lm15.register_provider(
    dspy.lm15.ProviderDefinition.chat(
        dspy.lm15.AccessPolicy(provider="loraserve", env_keys=("LORASERVE_API_KEY",), base_url=BASE_URL),
        compat=dspy.lm15.OpenAIChatCompat(),
    ),
    supports=dspy.lm15.ModelSupport(function_calling=True, response_schema=True),
)
Query = query_type()


def model(name: str) -> dspy.LM:
    return dspy.LM(f"loraserve/{name}", temperature=0, max_tokens=MAX_TOKENS, cache=False, num_retries=0, **COMMON)


@feature
def chat() -> str:
    (text,) = model(TEXT_MODEL)(QUESTION)
    return text


@feature
def predict() -> dict[str, Any]:
    """Return a typed field; the prompt is dspy's own, which the bundled model doesn't know."""
    signature = dspy.Signature("question: str -> query: Query", custom_types={"Query": Query})
    with dspy.context(lm=model(JSON_MODEL), adapter=dspy.JSONAdapter()):
        return dspy.Predict(signature)(question=QUESTION).query.model_dump()


@feature
def embeddings() -> list[list[float]]:
    embedder = dspy.Embedder(f"openai/{TEXT_MODEL}", caching=False, **COMMON)
    return embedder([QUESTION, "greet Anna"]).tolist()


@feature
def unknown_model() -> str:
    try:
        model("absent")(QUESTION)
    except Exception as error:
        return str(error)
    raise AssertionError("an absent model answered")


run()
