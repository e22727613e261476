"""A response object: what was asked for, how far its answer is, and what came of it."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from loraserve.api.errors import openai_envelope
from loraserve.api.http.json_body import dump_json
from loraserve.api.inference.chat.turn import ChatTurn
from loraserve.api.openai.responses.body import ResponseBody
from loraserve.api.openai.responses.output import ResponseOutput
from loraserve.api.openai.responses.tools import ResponseTools
from loraserve.errors import LoraserveError
from loraserve.types import TIMEOUT, FinishReason

_FAILURES = frozenset({"rate_limit_exceeded"})
"""Codes that OpenAI's types of a failed response have; all others are the server's errors."""


class ResponseAnswer:
    """Answer to one request for a response.

    Attributes:
        output: what was generated so far.
        is_stored: whether it can be continued; as asked for, until it is known.
    """

    def __init__(self, turn: ChatTurn, body: ResponseBody, tools: ResponseTools) -> None:
        self.output = ResponseOutput(turn.choices[0], tools)
        self.is_stored = body.store
        self._turn = turn
        self._body = body

    @property
    def previous_id(self) -> str | None:
        return self._body.previous_response_id

    @property
    def final_status(self) -> str:
        return "incomplete" if self._turn.choices[0].finish_reason is FinishReason.LENGTH else "completed"

    @cached_property
    def _completed_at(self) -> int:
        # of the first reading: what is stored is what is answered
        return int(self._turn.context.services.clock())

    def in_progress(self) -> dict[str, Any]:
        """Return the response as its stream begins."""
        return self._response("in_progress", [])

    def final(self) -> dict[str, Any]:
        """Return the whole response."""
        status, details = self.final_status, None
        if status == "incomplete":
            is_late = self._turn.choices[0].stop_reason == TIMEOUT
            details = {"reason": "timeout" if is_late else "max_output_tokens"}
        response = self._response(status, self.output.items)
        return response | {
            "incomplete_details": details,
            "completed_at": self._completed_at if status == "completed" else None,
            "usage": self._usage(),
        }

    def failed(self, error: LoraserveError) -> dict[str, Any]:
        """Return the response of an answer that an error has ended."""
        code = error.code if error.code in _FAILURES else "server_error"
        detail = {"code": code, "message": openai_envelope(error)["error"]["message"]}
        return self._response("failed", self.output.items) | {"error": detail, "usage": self._usage()}

    def as_stored(self) -> bytes:
        """Return the JSON to store: the whole response without its log probabilities."""
        response = self.final()
        response["output"] = [_without_logprobs(item) for item in response["output"]]
        return dump_json(response)

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body, context = self._body, self._turn.context
        reasoning, sampled = body.reasoning or {}, self._turn.sampling.body
        return {
            "id": context.id,
            "object": "response",
            "created_at": context.created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": body.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": reasoning.get("effort"), "summary": None},
            "service_tier": "default",
            "store": self.is_stored,
            "temperature": sampled.temperature,
            "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs,
            "top_p": sampled.top_p,
            "truncation": body.truncation,
            "usage": None,
            "user": body.user,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._turn.usage.as_dict()
        cached = usage.pop("prompt_tokens_details")["cached_tokens"]
        return {
            "input_tokens": usage.pop("prompt_tokens"),
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage.pop("completion_tokens"),
            "output_tokens_details": {"reasoning_tokens": self._turn.choices[0].num_reasoning_tokens},
            # the sum, and the cost where the tenant has prices
            **usage,
        }


def _without_logprobs(item: dict[str, Any]) -> dict[str, Any]:
    if item["type"] != "message":
        return item
    return item | {"content": [part | {"logprobs": []} for part in item["content"]]}
