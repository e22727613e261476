"""Fields of chats by which clients switch a model's reasoning on and off, or bound it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loraserve.api.inference.schemas import ChatBody
from loraserve.errors import InvalidRequest
from loraserve.text.chat_format import ChatFormat

_SWITCHES = ("enable_thinking", "thinking")
"""Variables by which chat templates turn reasoning on and off."""
_EFFORT = "reasoning_effort"
_NO_EFFORT = "none"
_MAX_EFFORT = 32


class ThinkingSettings:
    """Reasoning that a chat asks for, in whichever of the clients' words.

    These are ``reasoning_effort`` (OpenAI), ``reasoning`` (OpenRouter), ``thinking`` (Anthropic,
    Z.ai), ``enable_thinking`` (Qwen) and ``think`` (Ollama). The first of them that says whether to
    reason decides; the template's own variables, in ``chat_template_kwargs``, go before them.

    Raises:
        InvalidRequest: a field is wrong; `param` names it.
    """

    def __init__(self, body: ChatBody) -> None:
        self._effort: str | None = None
        self._is_on: bool | None = None
        self._budget: int | None = None
        # fields that were sent, and the variables that would follow each
        self._sent: dict[str, set[str]] = {}
        self._thinking: list[str] = []
        if body.reasoning_effort is not None:
            self._set_effort(body.reasoning_effort, _EFFORT, _EFFORT)
        self._read_reasoning(body.reasoning)
        self._read_thinking(body.thinking)
        if body.enable_thinking is not None:
            self._switch("enable_thinking", is_on=body.enable_thinking)
        self._read_think(body.think)

    def variables(self, chat_format: ChatFormat) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Choose the variables for the template, and the fields that it can't follow.

        Args:
            chat_format: of the bound version.
        """
        template, found, ignored = chat_format.template, dict[str, Any](), list[str]()
        read = {name for name in (*_SWITCHES, _EFFORT) if template.reads(name)}
        switches = read - {_EFFORT}
        if self._effort is not None:
            found[_EFFORT] = self._effort
        if self._is_on is not None:
            found |= dict.fromkeys(switches, self._is_on)
        for name, followers in self._sent.items():
            if name == "thinking":
                ignored += self._unheard_of_thinking(chat_format, has_switch=bool(switches))
            elif not followers & read:
                ignored.append(name)
        return found, tuple(ignored)

    def _unheard_of_thinking(self, chat_format: ChatFormat, *, has_switch: bool) -> list[str]:
        """List the fields of `thinking` that change nothing; `thinking` itself if none does."""
        followed = {"type": has_switch, "budget_tokens": self.budget(chat_format) is not None}
        if not any(followed.values()):
            return ["thinking"]
        return [f"thinking.{name}" for name in self._thinking if not followed.get(name)]

    def budget(self, chat_format: ChatFormat) -> int | None:
        """Choose the bound on the answer's reasoning; None: there is none, or it can't be kept.

        Args:
            chat_format: of the bound version.
        """
        return self._budget if chat_format.bounds_thinking else None

    def _switch(self, name: str, *, is_on: bool) -> None:
        self._is_on = is_on if self._is_on is None else self._is_on
        self._sent.setdefault(name, set()).update(_SWITCHES)

    def _set_effort(self, value: object, name: str, param: str) -> None:
        if not isinstance(value, str) or not 0 < len(value) <= _MAX_EFFORT:
            raise InvalidRequest(f"{param} should be a string of 1 to {_MAX_EFFORT} characters.", param=param)
        self._effort = value if self._effort is None else self._effort
        self._sent.setdefault(name, set()).add(_EFFORT)
        if value == _NO_EFFORT:
            self._switch(name, is_on=False)

    def _read_reasoning(self, value: object) -> None:
        if value is None:
            return
        fields = _object(value, "reasoning")
        enabled, effort = fields.get("enabled"), fields.get("effort")
        if effort is not None:
            self._set_effort(effort, "reasoning", "reasoning.effort")
        if enabled is not None:
            self._switch("reasoning", is_on=_boolean(enabled, "reasoning.enabled"))

    def _read_thinking(self, value: object) -> None:
        if value is None:
            return
        fields = value if isinstance(value, dict) else {}
        kind, budget = fields.get("type"), fields.get("budget_tokens")
        if kind not in ("enabled", "disabled", "adaptive", "auto"):
            raise InvalidRequest("thinking.type should be enabled, disabled, adaptive or auto.", param="thinking.type")
        is_number = isinstance(budget, int) and not isinstance(budget, bool) and 1 <= budget < 1 << 31
        if budget is not None and not is_number:
            raise InvalidRequest(
                "thinking.budget_tokens should be an integer of 1 or more.", param="thinking.budget_tokens"
            )
        self._switch("thinking", is_on=kind != "disabled")
        self._thinking = [name for name, given in fields.items() if given is not None]
        self._budget = budget if kind == "enabled" else None

    def _read_think(self, value: object) -> None:
        if value is None:
            return
        if isinstance(value, str):
            self._set_effort(value, "think", "think")
        else:
            self._switch("think", is_on=_boolean(value, "think"))


def _object(value: object, param: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param} should be an object.", param=param)
    return value


def _boolean(value: object, param: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{param} should be true or false.", param=param)
    return value
