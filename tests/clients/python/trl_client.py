"""TRL's client of AsyncGRPO, which loads each policy's adapter under a name of its own."""

from __future__ import annotations

import os
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import requests
from accelerate import PartialState
from probe import KEY, QUESTION, URL, feature, run
from trl.experimental.async_grpo.vllm_client import VLLMClient

# TRL sends no key: HTTP clients take one out of the URL
SERVER = URL.replace("http://", f"http://trainer:{KEY}@")
ADAPTER = "french"
"""Folder below the server's --lora-dir."""


@feature
def load() -> dict[str, Any]:
    """Load a policy, ask it as the rollout worker does, and put the next one in its place."""
    PartialState()  # its logger wants one, which the trainer makes
    client = VLLMClient(SERVER, server_timeout=30)
    client.wait_for_server_ready()
    config = client.get_server_info()
    assert config["lora_config"]["max_lora_rank"] >= 16
    assert config["parallel_config"]["data_parallel_size"] == 1
    assert client.get_dtype().startswith("torch.")
    texts = []
    for version in (1, 2):
        client.pause()
        client.load_lora_adapter(f"policy-v{version}", ADAPTER)
        client.resume()
        if version > 1:
            client.unload_lora_adapter(f"policy-v{version - 1}")
        tokens = requests.post(f"{SERVER}/tokenize", json={"prompt": QUESTION}, timeout=60).json()["tokens"]
        body = {"model": f"policy-v{version}", "prompt": tokens, "max_tokens": 48, "temperature": 0.01, "top_p": 1.0}
        body |= {"top_k": -1, "repetition_penalty": 1.0, "n": 1, "return_token_ids": True, "logprobs": 0, "seed": 1}
        answer = requests.post(f"{SERVER}/v1/completions", json=body, timeout=60)
        answer.raise_for_status()
        (choice,) = answer.json()["choices"]
        assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"])
        texts.append(choice["text"])
    models = [model["id"] for model in requests.get(f"{SERVER}/v1/models", timeout=60).json()["data"]]
    client.unload_lora_adapter("policy-v2")
    return {"max_model_len": client.get_max_model_len(), "texts": texts, "models": models}


run()
