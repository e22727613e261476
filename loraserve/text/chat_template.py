"""The base model's chat template: messages in, prompt text out, as `transformers` renders it."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from loraserve.errors import ConfigError, InvalidRequest, NoChatTemplate
from loraserve.template_variables import reserved_problem
from loraserve.text.tokenizer import Tokenizer, read_json_object

_MAX_TEMPLATE_BYTES = 1 << 20
_MAX_PRODUCT = 1 << 20
"""The longest string or list that ``*`` may make inside a template."""

_FAILURES = (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError, RecursionError)
"""Errors of a template that doesn't fit its messages."""

_TOOLS_IN_MESSAGE = re.compile(r"""message(?:\.tools\b|\[['"]tools['"]\])""")
"""Phi-4-mini's templates write the tools that the system's message has."""

_deadline: ContextVar[float | None] = ContextVar("chat_template_deadline", default=None)


class _TooExpensive(Exception):
    """The template ran over its time or its output bound."""


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which also stops at the deadline.

    It doesn't multiply strings without end.
    """

    intercepted_binops = frozenset({"*", "**"})

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _check_deadline()
        return super().call(context, obj, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        _check_deadline()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _check_deadline()
        return super().getitem(obj, argument)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise jinja2.exceptions.SecurityError("** is not available in a chat template")
        for sequence, count in ((left, right), (right, left)):
            if (
                isinstance(sequence, str | bytes | list | tuple)
                and isinstance(count, int)
                and len(sequence) * count > _MAX_PRODUCT
            ):
                raise _TooExpensive
        return super().call_binop(context, operator, left, right)


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %} … {% endgeneration %}``: the assistant's tokens, marked for training.

    When serving it is its content.
    """

    tags = {"generation"}  # noqa: RUF012 (jinja's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _check_deadline() -> None:
    deadline = _deadline.get()
    if deadline is not None and time.monotonic() > deadline:
        raise _TooExpensive


class TemplateText:
    """Text of chat templates, and what follows from it.

    Args:
        sources: text of each template, by its name; the usual one is called ``default``.
        read: variables that they look at and don't set.

    Attributes:
        source: text of the template, or of all of them.
    """

    def __init__(self, sources: Mapping[str, str], read: Iterable[str]) -> None:
        self.sources = sources
        self.source = "\n".join(sources.values())
        self._read = set(read)
        self._has_tools_in_message = _TOOLS_IN_MESSAGE.search(self.source) is not None

    def reads(self, variable: str) -> bool:
        """Check whether a template looks at a variable of that name that it doesn't set itself."""
        return variable in self._read

    @property
    def read(self) -> frozenset[str]:
        """Variables that a template looks at and doesn't set itself."""
        return frozenset(self._read)

    @property
    def takes_tools(self) -> bool:
        """Whether tools reach the prompt."""
        return self.reads("tools") or self._has_tools_in_message

    @property
    def takes_tool_calls(self) -> bool:
        """Whether the calls of earlier messages reach the prompt."""
        return "tool_calls" in self.source

    def _with_tools(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> list[Mapping[str, Any]]:
        """Put the tools into the first message, for a template that looks for them there."""
        if self.reads("tools") or not self._has_tools_in_message:
            return list(messages)
        functions = json.dumps([tool.get("function", tool) for tool in tools], ensure_ascii=False)
        has_system = bool(messages) and messages[0].get("role") == "system"
        first = messages[0] if has_system else {"role": "system", "content": ""}
        return [{**first, "tools": functions}, *messages[1 if has_system else 0 :]]


class CompiledTemplate(TemplateText):
    """Renders templates in this process.

    Args:
        sources: text of each template, by its name.
        special_tokens: the special tokens that templates write (``bos_token``, …).
        max_output_chars, timeout_s: bounds on one rendering.
        now: the clock behind ``strftime_now``.

    Attributes:
        subject: what messages call the template.

    Raises:
        ConfigError: a template isn't valid Jinja; its cause is Jinja's error.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        max_output_chars: int = 4 << 20,
        timeout_s: float = 2.0,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.subject = "the model's chat template"
        self._max_output_chars = max_output_chars
        self._timeout_s = timeout_s
        self._special_tokens = special_tokens
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda format: now().strftime(format)
        self._templates: dict[str, jinja2.Template] = {}
        # of each template that was rendered, whether it reads content as a list of parts
        self._takes_parts: dict[jinja2.Template, bool] = {}
        read: set[str] = set()
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
                read |= jinja2.meta.find_undeclared_variables(environment.parse(source))
            except jinja2.TemplateError as error:
                raise ConfigError(f"{self._subject_first} ({name}) is not valid Jinja: {error}") from error
        super().__init__(sources, read)

    @property
    def is_available(self) -> bool:
        return bool(self._templates)

    @property
    def _subject_first(self) -> str:
        return self.subject[0].upper() + self.subject[1:]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the prompt for `messages`.

        `variables` (``chat_template_kwargs``) reach the template under their own names.

        Raises:
            NoChatTemplate: the model has none.
            InvalidRequest: the template refuses these messages, or the rendering is over its
                bounds.
        """
        template = self._template(has_tools=bool(tools))
        extra = dict(variables or {})
        check_variables(extra)
        given = self._with_tools(messages, tools) if tools else list(messages)
        context = self._context(extra) | {
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        token = _deadline.set(time.monotonic() + self._timeout_s)
        try:
            messages = _in_parts(given) if self._reads_parts_alone(template) else given
            return self._run(template, {**context, "messages": messages})
        except _TooExpensive:
            raise InvalidRequest(
                f"These messages make {self.subject} exceed its limits "
                f"({self._timeout_s:g} s, {self._max_output_chars} characters).",
                param="messages",
            ) from None
        except jinja2.TemplateError as error:
            # Templates refuse with words of their own ("roles must alternate"); they are the
            # model's, not the caller's input.
            reason = error.message if isinstance(error, _Refused) else type(error).__name__
            raise InvalidRequest(
                f"{self._subject_first} refuses these messages: {reason}.", param="messages"
            ) from error
        except _FAILURES as error:
            raise InvalidRequest(
                f"{self._subject_first} can't render these messages ({type(error).__name__}).", param="messages"
            ) from error
        finally:
            _deadline.reset(token)

    def _context(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Collect what every rendering has, with no message."""
        own: dict[str, Any] = {"messages": [], "tools": None, "documents": None, "add_generation_prompt": False}
        return {**self._special_tokens, **variables, **own}

    def _reads_parts_alone(self, template: jinja2.Template) -> bool:
        """Check whether a template leaves out content that isn't a list of parts.

        Those of models of images and text do, as a rule: they look at the type of each part. It is
        found once, with no variable of a request, for a user's message or one of the system.
        """
        found = self._takes_parts.get(template)
        if found is None:
            found = any(self._drops_text(template, roles) for roles in (("user",), ("system", "user")))
            self._takes_parts[template] = found
        return found

    def _drops_text(self, template: jinja2.Template, roles: Sequence[str]) -> bool:
        """Check whether a text of these messages reaches the prompt as parts, and not as text.

        Raises:
            _TooExpensive: the template ran over its time, which proves nothing.
        """
        marks = [f"CONTENT{secrets.token_hex(8)}" for _ in roles]
        messages: list[Mapping[str, Any]] = [
            {"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)
        ]

        def kept(given: Sequence[Mapping[str, Any]]) -> set[str]:
            try:
                text = self._run(template, {**self._context({}), "messages": given})
            except (jinja2.TemplateError, *_FAILURES):
                return set()
            return {mark for mark in marks if mark in text}

        return kept(messages) < kept(_in_parts(messages))

    def render_continued(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the prompt for `messages` up to the end of the last one's text, left open.

        Raises:
            NoChatTemplate, InvalidRequest: as `render`; or the template leaves that text out.
        """
        mark = f"CONTINUES{secrets.token_hex(8)}"
        last = messages[-1]
        marked = [*messages[:-1], {**last, "content": f"{last['content']}{mark} "}]
        text, found, after = self.render(marked, False, tools, variables).rpartition(mark)
        if not found:
            raise InvalidRequest(
                f"{self._subject_first} leaves out the last message, so it can't be continued.",
                param="continue_final_message",
            )
        # a template that trims messages would have trimmed this one's end, too
        return text if after.startswith(" ") else text.rstrip()

    def _template(self, *, has_tools: bool) -> jinja2.Template:
        if has_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        raise NoChatTemplate(
            "This model has no chat template, so it can't take messages.",
            param="messages",
            hint="Use /v1/completions with a prompt.",
        )

    def _run(self, template: jinja2.Template, context: dict[str, Any]) -> str:
        chunks: list[str] = []
        num_chars = 0
        for chunk in template.generate(context):
            num_chars += len(chunk)
            if num_chars > self._max_output_chars:
                raise _TooExpensive
            _check_deadline()
            chunks.append(chunk)
        return "".join(chunks)


class ChatTemplate(CompiledTemplate):
    """Renders the template in the model's directory.

    That is ``chat_template.jinja``, or ``chat_template`` in ``tokenizer_config.json`` or
    ``chat_template.json``.

    Args:
        model_dir: where the template is. A model without one is fine until `render` is called.
        tokenizer: for the special tokens that templates write; read from `model_dir` when not
            given.
        file: template of ``--chat-template``, in the place of those; it has to show messages.
        max_output_chars, timeout_s, now: as of `CompiledTemplate`.

    Raises:
        ConfigError: the template isn't valid Jinja, or the file can't be used.
    """

    def __init__(
        self,
        model_dir: str | Path,
        tokenizer: Tokenizer | None = None,
        *,
        file: Path | None = None,
        max_output_chars: int = 4 << 20,
        timeout_s: float = 2.0,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        config = tokenizer.config if tokenizer else read_json_object(Path(model_dir) / "tokenizer_config.json")
        sources = _read_sources(Path(model_dir), config) if file is None else {"default": _read_file(file)}
        try:
            super().__init__(
                sources,
                special_tokens(config),
                max_output_chars=max_output_chars,
                timeout_s=timeout_s,
                now=now,
            )
        except ConfigError as error:
            if file is None:
                raise
            raise ConfigError(f"--chat-template {file} is not valid Jinja: {error.__cause__}") from error.__cause__
        if file is not None:
            self._check_shows_messages(file)

    def _check_shows_messages(self, file: Path) -> None:
        """Check that a user's message reaches the prompt, alone or after one of the system.

        Raises:
            ConfigError: it doesn't.
        """
        mark, reason = f"CONTENT{secrets.token_hex(8)}", "its text isn't in the prompt"
        user = {"role": "user", "content": mark}
        for messages in ([user], [{"role": "system", "content": "Be brief."}, user]):
            try:
                if mark in self.render(messages):
                    return
            except InvalidRequest as error:
                reason = error.message.removesuffix(".")
        raise ConfigError(
            f"--chat-template {file} can't show a user's message: {reason}.",
            hint="Give a Jinja file that renders `messages`, such as a checkpoint's chat_template.jinja.",
        )


def check_variables(variables: Mapping[str, Any]) -> None:
    """Check that no variable has a field of its own.

    Raises:
        InvalidRequest
    """
    if problem := reserved_problem(variables):
        raise InvalidRequest(f"chat_template_kwargs {problem}.", param="chat_template_kwargs")


def _in_parts(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Turn each text content of messages into a list of one part."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


class _Refused(jinja2.TemplateError):
    """The template called ``raise_exception``."""


def _raise_exception(message: object) -> NoReturn:
    raise _Refused(str(message)[:200])


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters and sorts keys; models were trained on plain JSON.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Read ``bos_token`` and its like, as the strings that templates write."""
    tokens: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"):
        value = config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _read_file(file: Path) -> str:
    """Read the template that ``--chat-template`` names.

    Raises:
        ConfigError: it isn't there, is too large, or isn't text.
    """
    try:
        if file.stat().st_size > _MAX_TEMPLATE_BYTES:
            raise ConfigError(f"--chat-template {file} is larger than {_MAX_TEMPLATE_BYTES} bytes.")
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--chat-template {file} can't be read: {error.strerror or error}.", hint="Give the path of a Jinja file."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--chat-template {file} isn't text in UTF-8.") from error


def _read_sources(model_dir: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Read the source of each template by name.

    The file ``chat_template.jinja`` stands before the configuration's, and that before
    ``chat_template.json``, which models of images and text have.
    """
    sources: dict[str, str] = {}
    configured = config.get("chat_template")
    if configured is None:
        configured = read_json_object(model_dir / "chat_template.json").get("chat_template")
    if isinstance(configured, str):
        sources["default"] = configured
    elif isinstance(configured, list):
        for entry in configured:
            if (
                isinstance(entry, Mapping)
                and isinstance(entry.get("name"), str)
                and isinstance(entry.get("template"), str)
            ):
                sources[entry["name"]] = entry["template"]
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        if path.stat().st_size > _MAX_TEMPLATE_BYTES:
            raise ConfigError(f"{path} is larger than {_MAX_TEMPLATE_BYTES} bytes.")
        sources["default"] = path.read_text(encoding="utf-8")
    return sources
