"""lorax-client, and (option ``tgi``) TGI's text-generation, on /generate."""

from __future__ import annotations

from typing import Any

from probe import KEY, QUESTION, SCRIPT_OPTIONS, TEXT_MODEL, URL, feature, run

HEADERS = {"Authorization": f"Bearer {KEY}"}
OPTIONS: dict[str, Any] = {"max_new_tokens": 48}
if "tgi" in SCRIPT_OPTIONS:
    # its `generate` names no adapter: the base answers
    from text_generation import Client
else:
    from lorax import Client  # type: ignore[no-redef]

    OPTIONS["adapter_id"] = TEXT_MODEL
client: Any = Client(URL, headers=HEADERS)


@feature
def completion() -> str:
    return client.generate(QUESTION, **OPTIONS).generated_text


@feature
def stream() -> list[str]:
    return [event.token.text for event in client.generate_stream(QUESTION, **OPTIONS) if not event.token.special]


@feature
def logprobs() -> list[Any]:
    details = client.generate(QUESTION, decoder_input_details=True, **OPTIONS).details
    assert details.prefill, "no tokens of the prompt"
    return [[token.text, token.logprob] for token in details.tokens]


run()
