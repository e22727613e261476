"""Content blocks of a message, and the events of a stream that builds them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from loraserve.api.inference.chat.choice import ChatChoice, parse_arguments
from loraserve.text.tool_parsers.parser import ArgumentsDelta, CallStart, ReasoningDelta, TextDelta
from loraserve.types import FinishReason

if TYPE_CHECKING:
    from loraserve.engine_client.client import Chunk

Event = tuple[str, dict[str, Any]]
"""Name and payload of an event."""

_TEXT, _THINKING, _TOOL_USE = "text", "thinking", "tool_use"
_DELTAS = {
    _TEXT: ("text_delta", "text"),
    _THINKING: ("thinking_delta", "thinking"),
    _TOOL_USE: ("input_json_delta", "partial_json"),
}


@dataclass(slots=True)
class _OpenBlock:
    """Block that is still being made."""

    block: dict[str, Any]
    pieces: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        kind: str = self.block["type"]
        return kind

    def closed(self) -> dict[str, Any]:
        """Build the whole block."""
        text = "".join(self.pieces)
        if self.kind == _TOOL_USE:
            return self.block | {"input": parse_arguments(text)}
        return self.block | {self.kind: text}


class MessageContent:
    """Turn a choice's chunks into content blocks, in the order in which they were made.

    Attributes:
        blocks: those that are complete.
    """

    def __init__(self, choice: ChatChoice) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._choice = choice
        self._open: _OpenBlock | None = None

    def add(self, chunk: Chunk) -> list[Event]:
        """Convert what the chunk adds to events."""
        events: list[Event] = []
        for delta in self._choice.read(chunk):
            match delta:
                case TextDelta(text):
                    self._begin(_TEXT, events, text="")
                case ReasoningDelta(text):
                    self._begin(_THINKING, events, thinking="", signature="")
                case CallStart(index, name):
                    text = ""
                    events += self._close()
                    self._begin(_TOOL_USE, events, id=self._choice.calls[index].id, name=name, input={})
                case ArgumentsDelta(_, text):
                    pass
            if text and self._open is not None:
                self._open.pieces.append(text)
                kind, name = _DELTAS[self._open.kind]
                events.append(("content_block_delta", {"index": len(self.blocks), "delta": {"type": kind, name: text}}))
        return events

    def finish(self) -> list[Event]:
        """Finish the content; return the events of its end."""
        return self._close()

    @property
    def stop_reason(self) -> str:
        choice = self._choice
        if choice.finish_reason is FinishReason.LENGTH:
            return "max_tokens"
        if self.stop_sequence is not None:
            return "stop_sequence"
        return "tool_use" if choice.calls else "end_turn"

    @property
    def stop_sequence(self) -> str | None:
        """Sequence that ended the message; None: something else did."""
        choice = self._choice
        is_stop = choice.finish_reason is FinishReason.STOP and isinstance(choice.stop_reason, str)
        return str(choice.stop_reason) if is_stop else None

    def _begin(self, kind: str, events: list[Event], **fields: Any) -> None:
        """Begin a block, unless one of this kind is open; end the one before it."""
        if self._open is not None and self._open.kind == kind:
            return
        events += self._close()
        block = {"type": kind, **fields}
        self._open = _OpenBlock(block)
        events.append(("content_block_start", {"index": len(self.blocks), "content_block": block}))

    def _close(self) -> list[Event]:
        opened, self._open = self._open, None
        if opened is None:
            return []
        self.blocks.append(opened.closed())
        return [("content_block_stop", {"index": len(self.blocks) - 1})]
