"""A process that renders the chat templates of tenants' versions: it may be killed at any time.

    python -m loraserve.text.template_worker < frames > frames

A tenant's template may take all the time or memory that there is, or attack Jinja's sandbox. Here
that ends this process alone, which has no secret. Its frames (`loraserve.text.workers.child`) are
JSON: first a `TemplateSetup`, then `InspectTemplate`s and `RenderMessages`, each answered by a
`TemplateAnswer`.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import jinja2
import msgspec

from loraserve.errors import ConfigError, InvalidRequest
from loraserve.limits import LIMITS, MIB
from loraserve.tenant_cache import TenantCache
from loraserve.text.chat_template import CompiledTemplate
from loraserve.text.workers.child import limit_cpu, serve
from loraserve.types import Struct

MAX_WORK_BYTES = 192 * MIB
"""Memory that this process may take in addition to its modules'."""
RENDER_S = LIMITS.template_timeout_s / 2
"""Time after which a rendering ends by itself: the process needn't be killed for most."""
MAX_OUTPUT_CHARS = LIMITS.max_prompt_bytes
_NUM_COMPILED = 32
"""Compiled templates that a process keeps."""
_NICENESS = 5
_RECURSION_LIMIT = 1000
_SAMPLES: tuple[tuple[tuple[str, str], ...], ...] = (
    (("user", "Hello."),),
    (("system", "Be brief."), ("user", "Hello."), ("assistant", "Hello."), ("user", "And now?")),
)
"""Messages that a template is tried with. It has to render the first; others it may refuse."""


class TemplateSetup(Struct, frozen=True):
    """Special tokens that templates write, of the base's tokenizer."""

    special_tokens: Mapping[str, str]


class InspectTemplate(Struct, frozen=True, tag="inspect"):
    """Question: whether this is a template, and what it reads.

    Attributes:
        tenant: the caller's: tenants share no compiled template, so that its time reveals nothing
            about others.
    """

    source: str
    tenant: str


class RenderMessages(Struct, frozen=True, tag="render"):
    """Question: the prompt that a template makes of messages.

    Attributes:
        name: name of the version, for messages.
        tenant: as in `InspectTemplate`.
        continues_last: whether the prompt ends with the last message's text.
    """

    name: str
    source: str
    tenant: str
    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    tools: list[Any] | None = None
    variables: Mapping[str, Any] = {}
    continues_last: bool = False


class TemplateAnswer(Struct, frozen=True):
    """Answer: a prompt, or what a template is like, or why there is neither.

    Attributes:
        read: variables that the template looks at.
        problems: reasons why it can't be used.
        refused: which sample messages it refuses, in its own words.
        error: why these messages have no prompt; `param` names the field that is wrong.
        is_spent: whether the process has no memory left.
    """

    text: str = ""
    read: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    refused: str = ""
    error: str | None = None
    param: str | None = None
    is_spent: bool = False


class Templates:
    """Templates of this process, compiled once for each tenant while they are in use."""

    def __init__(self, setup: TemplateSetup) -> None:
        self._special_tokens = setup.special_tokens
        self._compiled: TenantCache[CompiledTemplate] = TenantCache(_NUM_COMPILED)

    def answer(self, question: InspectTemplate | RenderMessages) -> TemplateAnswer:
        """Answer a question; nothing that a template does is raised."""
        try:
            if isinstance(question, InspectTemplate):
                return self._inspect(question)
            return self._render(question)
        except MemoryError:
            self._compiled = TenantCache(_NUM_COMPILED)
            text = "it takes more memory than a template may"
            return TemplateAnswer(problems=(f"{text}",), error=text, param="messages", is_spent=True)

    def _inspect(self, question: InspectTemplate) -> TemplateAnswer:
        try:
            template = self._template(question)
        except ConfigError as error:
            return TemplateAnswer(problems=(_syntax(error.__cause__),))
        except (RecursionError, SyntaxError, ValueError, TypeError, ArithmeticError, AttributeError) as error:
            return TemplateAnswer(problems=(f"it can't be compiled ({type(error).__name__})",))
        template.subject = "it"
        refused = ""
        for number, sample in enumerate(_SAMPLES):
            messages = [{"role": role, "content": content} for role, content in sample]
            try:
                text = template.render(messages)
            except InvalidRequest as error:
                if number == 0 or error.message.startswith("These messages make"):
                    what = "a conversation" if number else "a user's message alone"
                    return TemplateAnswer(problems=(f"{what} has no prompt: {error.message}",))
                refused = error.message
            else:
                if number == 0 and not text.strip():
                    return TemplateAnswer(problems=("a user's message alone has an empty prompt",))
        return TemplateAnswer(read=tuple(sorted(template.read)), refused=refused)

    def _render(self, question: RenderMessages) -> TemplateAnswer:
        try:
            template = self._template(question)
        except (ConfigError, RecursionError, SyntaxError, ValueError, TypeError, ArithmeticError, AttributeError):
            # it was compiled when it was uploaded, by another release
            error = f"The chat template of {question.name} can't be compiled."
            return TemplateAnswer(error=error, param="messages")
        template.subject = f"the chat template of {question.name}"
        try:
            if question.continues_last:
                text = template.render_continued(question.messages, question.tools, question.variables)
            else:
                text = template.render(
                    question.messages, question.add_generation_prompt, question.tools, question.variables
                )
        except InvalidRequest as error:
            return TemplateAnswer(error=error.message, param=error.param)
        return TemplateAnswer(text=text)

    def _template(self, question: InspectTemplate | RenderMessages) -> CompiledTemplate:
        tenant, source = question.tenant, question.source
        template = self._compiled.get(tenant, source)
        if template is None:
            template = CompiledTemplate(
                {"default": source}, self._special_tokens, max_output_chars=MAX_OUTPUT_CHARS, timeout_s=RENDER_S
            )
            self._compiled.put(tenant, source, template, 1)
        return template


def _syntax(error: BaseException | None) -> str:
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"line {error.lineno}: {str(error.message)[:200]}"
    return f"it isn't valid Jinja ({type(error).__name__})"


def _prepare(setup: bytes) -> Callable[[bytes], bytes]:
    templates = Templates(msgspec.json.decode(setup, type=TemplateSetup))
    decoder: msgspec.json.Decoder[InspectTemplate | RenderMessages] = msgspec.json.Decoder(
        InspectTemplate | RenderMessages
    )
    # the first one is slow: a question's time shouldn't have that
    templates.answer(InspectTemplate(source="{{ messages[0].content }}", tenant=""))
    for limit, value in ((resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NOFILE, 8), (resource.RLIMIT_NPROC, 0)):
        with suppress(OSError, ValueError):
            resource.setrlimit(limit, (value, value))

    def answer(question: bytes) -> bytes:
        limit_cpu(2 * LIMITS.template_timeout_s)
        try:
            return msgspec.json.encode(templates.answer(decoder.decode(question)))
        except UnicodeEncodeError:
            return msgspec.json.encode(TemplateAnswer(error="The prompt isn't valid Unicode.", param="messages"))

    return answer


def main() -> int:
    """Answer frames until there are no more."""
    return serve(_prepare, max_work_bytes=MAX_WORK_BYTES, niceness=_NICENESS, recursion_limit=_RECURSION_LIMIT)


if __name__ == "__main__":
    sys.exit(main())
