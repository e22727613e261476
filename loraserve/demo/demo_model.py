"""A model that the demo can serve: its base, its adapters, and questions with checkable answers.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

BASE: Final = "plain"
"""Name by which a demo's questions mean the base itself."""


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """A function that an answer calls, and its arguments as JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class DemoAnswer:
    """A model's answer: its text, and the calls in it."""

    text: str
    calls: tuple[ToolRequest, ...] = ()

    def __str__(self) -> str:
        return "\n".join([*filter(None, (self.text,)), *(f"{call.name}({call.arguments})" for call in self.calls)])


@dataclass(frozen=True, slots=True)
class Question:
    """A user's message, and a judge of answers to it.

    Attributes:
        expected: a right answer; there may be others.
        judge: returns what is wrong with an answer, or None if it is right.
        tools: tools of the request.
    """

    prompt: str
    expected: str
    judge: Callable[[DemoAnswer], str | None]
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class TextJudge:
    """Judge that takes one text alone, spaces around it aside."""

    expected: str

    def __call__(self, answer: DemoAnswer) -> str | None:
        return None if str(answer).strip() == self.expected else f"expected {self.expected!r}"


@dataclass(frozen=True, slots=True)
class ShownQuestion:
    """A prompt that several models answer side by side.

    Attributes:
        models: names of adapters, or `BASE`, and what judges their answers, if anything.
        about: a line to say before.
    """

    prompt: str
    models: Mapping[str, Question | None]
    tools: tuple[Mapping[str, Any], ...] = ()
    about: str = ""


@dataclass(frozen=True, slots=True)
class TourCheck:
    """A check that was tried `num_tried` times."""

    what: str
    num_right: int
    num_tried: int
    problem: str | None = None
    """The first thing that was wrong: what was found, what was expected."""

    @property
    def is_right(self) -> bool:
        return self.num_tried > 0 and self.num_right == self.num_tried


@dataclass(frozen=True, slots=True)
class Access:
    """A server, a tenant's key, and what it calls its models."""

    url: str
    api_key: str
    base_id: str

    def model(self, name: str) -> str:
        return self.base_id if name == BASE else name


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A base with adapters, and what a tour asks them.

    Attributes:
        title: the base, as a person calls it.
        base: directory or file of the base.
        base_id: name of the base in requests.
        base_names: names by which the adapters' configs mean the base.
        adapters: PEFT directories by name.
        questions: by model, questions that no training has seen, with judges of the answers.
        shown: questions that are shown in this order; the first `num_first` at the start.
        typed_models: models that answer a question that is typed without a model's name.
        max_tokens: longest answer.
        max_answers_s: longest time for all checked questions together. Kernels that are correct and
            a hundred times too slow fail the tour.
        help: lines about what can be asked.
        examples: commands for a shell, after ``loraserve``.
        example: model and prompt of the snippets for programs.
        session: model of the session that is advised.
        truths: by model, what a check of its answers looks at.
        tools: by model, tools that its typed questions have.
        checks: further checks of a server.
        serve_flags: flags of the server.
        is_quantized: whether the base is served in the format that its file has.
    """

    title: str
    base: Path
    base_id: str
    base_names: tuple[str, ...]
    adapters: Mapping[str, Path]
    questions: Mapping[str, Sequence[Question]]
    shown: Sequence[ShownQuestion]
    typed_models: tuple[str, ...]
    max_tokens: int
    max_answers_s: float
    help: tuple[str, ...]
    examples: tuple[str, ...]
    example: tuple[str, str]
    session: str
    num_first: int = 1
    truths: Mapping[str, str] = field(default_factory=dict)
    tools: Mapping[str, tuple[Mapping[str, Any], ...]] = field(default_factory=dict)
    checks: Sequence[Callable[[Access], TourCheck]] = ()
    serve_flags: tuple[str, ...] = ()
    is_quantized: bool = False
