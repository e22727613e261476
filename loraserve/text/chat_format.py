"""Format of a model's chats: its template, its tool calls and its reasoning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from loraserve.errors import UnsupportedParameter
from loraserve.text.answer_format import ANSWER, AnswerFormat, AnswerKind
from loraserve.text.chat_template import ChatTemplate
from loraserve.text.reasoning import ReasoningFormat, ReasoningParser, reasoning_format
from loraserve.text.tokenizer import Tokenizer
from loraserve.text.tool_parsers.format import LarkRules, Tool, ToolFormat
from loraserve.text.tool_parsers.generic import Generic
from loraserve.text.tool_parsers.parser import (
    ArgumentsDelta,
    CallStart,
    Delta,
    ReasoningDelta,
    TextDelta,
    ToolParser,
)
from loraserve.text.tool_parsers.table import tool_format
from loraserve.text.version_template import VersionTemplate
from loraserve.types import ThinkingBudget

AUTO = "auto"
THINKING_BUDGET = "thinking_token_budget"
"""Field of a request that bounds the answer's reasoning."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools of a request, and the calls that its answer may have.

    Attributes:
        shown: the tools as the chat template gets them.
        is_forced: whether the answer must be a call; otherwise the model chooses.
        is_parallel: whether it may have several calls.
    """

    tools: tuple[Tool, ...]
    shown: tuple[Mapping[str, Any], ...]
    is_forced: bool = False
    is_parallel: bool = True


class ChatFormat:
    """Format of chats with one model.

    Args:
        tool_call_parser, reasoning_parser: names of `TOOL_FORMATS` and `REASONING_FORMATS`;
            ``auto``: recognized in the template's text; ``none``: no format.
        variables: variables that the template has unless a request sets them.

    Attributes:
        tools: format of its tool calls; None: unknown.
        reasoning: format of its reasoning; None: it has none.
    """

    def __init__(
        self,
        template: ChatTemplate | VersionTemplate,
        tokenizer: Tokenizer,
        *,
        tool_call_parser: str = AUTO,
        reasoning_parser: str = AUTO,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.template = template
        self.variables: Mapping[str, Any] = variables or {}
        self.tools: ToolFormat | None = tool_format(
            tool_call_parser, tokenizer, template.source, takes_tools=template.takes_tools
        )
        self.reasoning: ReasoningFormat | None = reasoning_format(reasoning_parser, template.source)
        self._tokenizer = tokenizer

    def answer_format(
        self, prompt: str, tool_use: ToolUse | None, *, skip_special_tokens: bool = True
    ) -> ChatAnswerFormat | None:
        """Choose the format of answers to this prompt; None: they are only text."""
        tools = None if tool_use is None else self.tools
        is_open = False if self.reasoning is None else self.reasoning.is_open(prompt)
        reasoning = None if is_open is False else self.reasoning
        if tools is None and reasoning is None:
            return None
        return ChatAnswerFormat(self._tokenizer, tools, tool_use, reasoning, is_open, skip_special_tokens)

    @property
    def writes_tools(self) -> bool:
        """Whether messages tell the model of tools, in the place of its template."""
        return isinstance(self.tools, Generic)

    def shown(
        self, messages: list[dict[str, Any]], tool_use: ToolUse | None
    ) -> tuple[list[dict[str, Any]], tuple[Mapping[str, Any], ...] | None]:
        """Convert the messages and the tools to what the template gets."""
        tools = None if tool_use is None else tool_use.shown
        if not isinstance(self.tools, Generic):
            return messages, tools
        return self.tools.shown(messages, tools or ()), None

    @property
    def bounds_thinking(self) -> bool:
        """Whether a request may bound the answer's reasoning."""
        return self.reasoning is not None and self.reasoning.budget(self._tokenizer, 0, is_open=None) is not None

    def thinking_budget(self, prompt: str, num_tokens: int | None) -> ThinkingBudget | None:
        """Bound an answer's reasoning; None: there is no bound, or no reasoning.

        Args:
            prompt: text of the prompt, or its end.
            num_tokens: bound in the request; None and -1: none.

        Raises:
            UnsupportedParameter: the model's reasoning can't be ended by a token.
        """
        if num_tokens is None or num_tokens < 0:
            return None
        if self.reasoning is None:
            raise UnsupportedParameter(
                "thinking_token_budget is for models that reason; this one's chat template shows no markers of "
                "reasoning.",
                param=THINKING_BUDGET,
                hint="Send the request without it, or name the model's format with --reasoning-parser.",
            )
        is_open = self.reasoning.is_open(prompt)
        budget = self.reasoning.budget(self._tokenizer, num_tokens, is_open=is_open)
        if budget is None:
            markers = ", ".join(self.reasoning.closers)
            raise UnsupportedParameter(
                "thinking_token_budget needs markers of reasoning that are single tokens; of this model's format "
                f"({self.reasoning.name}: {markers}) some are several.",
                param=THINKING_BUDGET,
                hint="Send max_tokens.",
            )
        return None if is_open is False else budget


@dataclass(frozen=True, slots=True)
class ChatAnswerFormat:
    """Format of the answers to one request.

    Attributes:
        is_open: whether an answer begins with reasoning; None: decided by its beginning.
    """

    tokenizer: Tokenizer
    tools: ToolFormat | None
    tool_use: ToolUse | None
    reasoning: ReasoningFormat | None
    is_open: bool | None
    skip_special_tokens: bool = True

    @property
    def is_forced(self) -> bool:
        """Whether an answer must be a tool call."""
        return self.tool_use is not None and self.tool_use.is_forced

    @property
    def shown_token_ids(self) -> tuple[int, ...]:
        """Special tokens that the parsers need in the text."""
        ids: set[int] = set()
        if self.tools is not None:
            ids.update(self.tools.special_markers().values())
        if self.reasoning is not None:
            ids |= self.reasoning.shown_token_ids(self.tokenizer)
        return tuple(sorted(ids))

    def parser(self) -> AnswerParser:
        """Build a parser of one answer."""
        reasoning = None if self.reasoning is None else ReasoningParser(self.reasoning, is_open=self.is_open)
        if self.tools is None or self.tool_use is None:
            return AnswerParser(reasoning, None)
        hidden = self.tools.special_markers() if self.skip_special_tokens else ()
        calls = self.tools.parser(self.tool_use.tools, hidden)
        return AnswerParser(reasoning, calls, max_calls=None if self.tool_use.is_parallel else 1)

    def whole(self, wanted: AnswerFormat | None) -> AnswerFormat | None:
        """Write the form of whole answers, reasoning and calls included; None: any text.

        Args:
            wanted: the form of an answer that isn't a call; None: any text.

        Raises:
            InvalidRequest: a tool's schema is none, or over a bound; `param` names the place.
            UnsupportedParameter: a part of a strict tool's schema can't be enforced.
        """
        rules = LarkRules(self.tokenizer)
        tools, tool_use = self.tools, self.tool_use
        body: str | None = None if wanted is None else f"@{ANSWER}"
        if tools is not None and tool_use is not None:
            if self.is_forced:
                body = tools.add_calls(rules, tool_use.tools, is_parallel=tool_use.is_parallel)
            elif wanted is not None:
                start = tools.distinct_start(rules)
                calls = tools.add_calls(rules, tool_use.tools, is_parallel=tool_use.is_parallel, start=start)
                body = f"{calls} | @{ANSWER}"
            elif any(tool.is_strict for tool in tool_use.tools):
                body = tools.add_answer(rules, tool_use.tools, is_parallel=tool_use.is_parallel)
        if body is None:
            return None
        thought = "" if self.reasoning is None else self.reasoning.add_reasoning(rules, is_open=self.is_open)
        rules.add("start", f"{thought} ({body})")
        schemas = tuple(rules.schemas)
        if wanted is None or self.is_forced:
            return AnswerFormat(kind=AnswerKind.LARK, value=rules.text(), param="tools", schemas=schemas)
        return msgspec.structs.replace(wanted, around=rules.text(), schemas=schemas)


class AnswerParser:
    """Turn an answer's growing text into its reasoning, its content and its tool calls.

    Args:
        max_calls: number of calls to keep; further calls are dropped. None: all.
    """

    def __init__(
        self, reasoning: ReasoningParser | None, calls: ToolParser | None, *, max_calls: int | None = None
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._max_calls = max_calls

    def push(self, text: str) -> list[Delta]:
        """Parse more text; return the deltas that no further text can change."""
        deltas: Iterable[Delta] = (TextDelta(text),) if self._reasoning is None else self._reasoning.push(text)
        return self._joined(self._with_calls(deltas))

    def finish(self) -> list[Delta]:
        """Finish parsing; return the remaining deltas: no more text will come."""
        deltas: list[Delta] = [] if self._reasoning is None else self._with_calls(self._reasoning.finish())
        if self._calls is not None:
            deltas.extend(self._calls.finish())
        return self._joined(deltas)

    def _with_calls(self, deltas: Iterable[Delta]) -> list[Delta]:
        """Replace text by the content and the calls in it."""
        if self._calls is None:
            return list(deltas)
        found: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, TextDelta):
                found.extend(self._calls.push(delta.text))
            else:
                found.append(delta)
        return found

    def _joined(self, deltas: Sequence[Delta]) -> list[Delta]:
        """Join neighbours of one kind, and drop calls beyond `max_calls`."""
        joined: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, CallStart | ArgumentsDelta) and not self._is_wanted(delta.index):
                continue
            match (joined[-1] if joined else None), delta:
                case (TextDelta(before), TextDelta(text)):
                    joined[-1] = TextDelta(before + text)
                case (ReasoningDelta(before), ReasoningDelta(text)):
                    joined[-1] = ReasoningDelta(before + text)
                case (ArgumentsDelta(index, before), ArgumentsDelta(other, text)) if index == other:
                    joined[-1] = ArgumentsDelta(index, before + text)
                case _:
                    joined.append(delta)
        return joined

    def _is_wanted(self, index: int) -> bool:
        return self._max_calls is None or index < self._max_calls
