"""Which feature of which client is tested: the source of the tests, and of a table in the docs."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

COLUMNS = {
    "chat": "chat",
    "stream": "stream",
    "call": "call",
    "stream_call": "call, streamed",
    "result": "call and result",
    "agent": "agent",
    "parse": "parse",
    "stream_parse": "parse, streamed",
    "embeddings": "embeddings",
    "logprobs": "logprobs",
    "completion": "completion",
    "batch": "batch",
    "ignored": "ignored",
    "errors": "errors",
}
"""Heading of each feature's column."""
FOLDED = {
    "models": "chat",
    "stream_agent": "agent",
    "unknown_model": "errors",
    "context_window": "errors",
    "rate_limit": "errors",
    "count_tokens": "chat",
    "loglikelihood": "logprobs",
    "predict": "parse",
    "load": "completion",
    "bench": "stream",
    "sent_and_ignored": "ignored",
}
"""Features without a column of their own, and the column that also stands for them."""
NODE_GROUPS = ("node", "programs")
"""Environments of npm's packages: libraries, and programs that a Python script starts."""


@dataclass(frozen=True)
class Row:
    """A client on one of the server's APIs."""

    client: str
    group: str
    """Its environment: a file of requirements, ``node`` or ``programs``."""
    package: str
    script: str
    features: str
    """Tested, by their names in the script."""
    options: tuple[str, ...] = ()
    has_adapter: bool = True
    """Whether it can name an adapter; otherwise the base answers."""

    def __str__(self) -> str:
        return f"{self.client} {self.version.split('.')[0]}"

    @property
    def tested(self) -> tuple[str, ...]:
        return tuple(self.features.split())

    @property
    def version(self) -> str:
        """The version that is pinned."""
        if self.group in NODE_GROUPS:
            pinned = json.loads((HERE / self.group / "package.json").read_text())["dependencies"][self.package]
            return str(pinned)
        text = (HERE / "requirements" / f"{self.group}.txt").read_text()
        found = re.search(rf"^{re.escape(self.package)}(?:\[.*\])?==(\S+)", text, re.MULTILINE)
        assert found, f"{self.group}.txt has no {self.package}"
        return found[1]

    @property
    def path(self) -> Path:
        return HERE / ("node" if self.group == "node" else "python") / self.script


_ALL = "chat stream call stream_call result parse stream_parse embeddings logprobs completion unknown_model"
_PROXY = f"{_ALL} context_window rate_limit"
_INSPECT = "chat call result parse logprobs unknown_model"
_AGENTS = "chat stream call agent stream_agent parse stream_parse unknown_model"
_VERCEL = f"{_ALL} agent stream_agent".replace("logprobs ", "")
_RESPONSES = "chat stream call stream_call result parse stream_parse unknown_model"
_MESSAGES = "models chat stream call stream_call result parse count_tokens unknown_model"
_OLLAMA = "chat stream result parse stream_parse embeddings completion unknown_model"
_VERCEL_RESPONSES = f"{_RESPONSES} agent stream_agent"
ROWS = (
    Row("openai (Python)", "openai2", "openai", "openai_python.py", f"models {_ALL} batch"),
    Row("openai (Python)", "openai3", "openai", "openai_python.py", f"models {_ALL} batch"),
    Row("openai (Node)", "node", "openai", "openai_node.mjs", f"models {_ALL} agent"),
    Row(
        "langchain-openai",
        "openai3",
        "langchain-openai",
        "langchain_client.py",
        f"{_ALL} agent",
    ),
    Row("litellm `openai/`", "openai2", "litellm", "litellm_client.py", f"{_ALL} context_window"),
    Row("litellm `hosted_vllm/`", "openai2", "litellm", "litellm_client.py", f"{_ALL} context_window", ("vllm",)),
    Row("LiteLLM proxy, `openai/`", "proxy", "litellm", "litellm_proxy.py", _PROXY, ("openai",)),
    Row("LiteLLM proxy, `hosted_vllm/`", "proxy", "litellm", "litellm_proxy.py", _PROXY),
    Row(
        "instructor",
        "openai2",
        "instructor",
        "instructor_client.py",
        "chat call stream_call parse stream_parse unknown_model",
    ),
    Row(
        "pydantic-ai (chat)",
        "openai3",
        "pydantic-ai-slim",
        "pydantic_ai_client.py",
        "chat stream call stream_call agent parse stream_parse embeddings logprobs unknown_model",
    ),
    Row(
        "llama-index OpenAILike",
        "openai2",
        "llama-index-llms-openai-like",
        "llama_index_client.py",
        f"{_ALL} agent",
    ),
    Row("@ai-sdk/openai-compatible", "node", "@ai-sdk/openai-compatible", "ai_sdk.mjs", _VERCEL),
    Row("@ai-sdk/openai (chat)", "node", "@ai-sdk/openai", "ai_sdk.mjs", _VERCEL, ("chat",)),
    Row("openai-agents (chat)", "openai3", "openai-agents", "openai_agents.py", _AGENTS, ("chat",)),
    Row("lorax-client", "lorax", "lorax-client", "lorax_client.py", "stream logprobs completion"),
    Row(
        "text-generation (TGI)",
        "lorax",
        "text-generation",
        "lorax_client.py",
        "stream logprobs completion",
        ("tgi",),
        has_adapter=False,
    ),
    Row("lm-eval local-completions", "lm_eval", "lm-eval", "lm_eval_client.py", "loglikelihood completion"),
    Row("lm-eval local-chat-completions", "lm_eval", "lm-eval", "lm_eval_client.py", "chat", ("chat",)),
    Row(
        "huggingface_hub InferenceClient",
        "agents",
        "huggingface_hub",
        "hf_inference.py",
        "chat stream call result parse logprobs completion unknown_model",
    ),
    Row("smolagents", "agents", "smolagents", "smolagents_client.py", "chat stream call parse unknown_model"),
    Row("llm (the command)", "agents", "llm", "llm_client.py", "chat stream parse unknown_model"),
    Row("aider (the command)", "aider", "aider-chat", "aider_client.py", "chat stream unknown_model"),
    Row("Codex CLI", "programs", "@openai/codex", "codex_client.py", "chat sent_and_ignored unknown_model"),
    Row(
        "Claude Code",
        "programs",
        "@anthropic-ai/claude-code",
        "claude_code_client.py",
        "chat stream sent_and_ignored unknown_model",
    ),
    Row("Continue (`cn`)", "programs", "@continuedev/cli", "continue_client.py", "chat stream agent unknown_model"),
    Row("langgraph", "frameworks", "langgraph", "langgraph_client.py", "chat stream agent stream_agent unknown_model"),
    Row("inspect-ai `openai-api/`", "frameworks", "inspect-ai", "inspect_client.py", _INSPECT),
    Row("inspect-ai `vllm/`", "frameworks", "inspect-ai", "inspect_client.py", _INSPECT, ("vllm",)),
    Row("dspy", "frameworks", "dspy", "dspy_client.py", "chat predict embeddings unknown_model"),
    Row("crewai", "crewai", "crewai", "crewai_client.py", "chat parse predict unknown_model"),
    Row("guidellm", "torch", "guidellm", "guidellm_client.py", "bench"),
    Row("guidellm (completions)", "torch", "guidellm", "guidellm_client.py", "bench", ("completions",)),
    Row("TRL's client of AsyncGRPO", "torch", "trl", "trl_client.py", "load"),
    Row("openai (Python, responses)", "openai2", "openai", "openai_responses.py", _RESPONSES),
    Row("openai (Python, responses)", "openai3", "openai", "openai_responses.py", _RESPONSES),
    Row("openai (Node, responses)", "node", "openai", "openai_node_responses.mjs", _RESPONSES),
    Row(
        "pydantic-ai (responses)",
        "openai3",
        "pydantic-ai-slim",
        "pydantic_ai_client.py",
        "chat stream call stream_call agent parse stream_parse unknown_model",
        ("responses",),
    ),
    Row("@ai-sdk/openai", "node", "@ai-sdk/openai", "ai_sdk.mjs", _VERCEL_RESPONSES, ("responses",)),
    Row("openai-agents", "openai3", "openai-agents", "openai_agents.py", _AGENTS),
    Row("anthropic (Python)", "openai3", "anthropic", "anthropic_python.py", f"{_MESSAGES} agent"),
    Row("anthropic (Node)", "node", "@anthropic-ai/sdk", "anthropic_node.mjs", _MESSAGES),
    Row("ollama", "ollama", "ollama", "ollama_client.py", f"models logprobs {_OLLAMA}"),
    Row("langchain-ollama", "ollama", "langchain-ollama", "langchain_ollama_client.py", _OLLAMA),
)


@dataclass(frozen=True)
class HandRun:
    """A program that was tried by hand, since it is too large for a test's environment."""

    client: str
    version: str
    date: str
    """Day of the trial, as ``2026-11-29``."""
    features: str


HAND_RUNS = (
    HandRun("promptfoo", "0.123.1", "2026-11-30", "chat call parse unknown_model"),
    HandRun("Open WebUI (OpenAI's connection)", "0.12.4", "2026-11-29", "models chat stream"),
    HandRun("Open WebUI (Ollama's connection)", "0.12.4", "2026-11-29", "models chat stream"),
)


def state(row: Row | HandRun, column: str) -> str:
    """Return what a cell of the table says."""
    if any(FOLDED.get(name, name) == column for name in row.features.split()):
        return "✓" if isinstance(row, Row) else row.date
    return "—"


def rendered() -> str:
    """Return the table as Markdown."""
    lines = [f"| client | version | {' | '.join(COLUMNS.values())} |", "| --- " * (len(COLUMNS) + 2) + "|"]
    for row in (*ROWS, *HAND_RUNS):
        lines.append(f"| {row.client} | {row.version} | {' | '.join(state(row, column) for column in COLUMNS)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(rendered())
