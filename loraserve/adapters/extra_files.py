"""Extra files of a version: chat template, its variables, defaults, tokenizer, names of parsers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Self

from loraserve.errors import AdapterFormatError
from loraserve.limits import LIMITS
from loraserve.template_variables import canonical_text, parse_variables
from loraserve.tokenizer_identity import MAX_BYTES as MAX_SUMMARY_BYTES
from loraserve.tokenizer_identity import TokenizerSummary
from loraserve.types import Digest, ExtraFile, VersionExtras

FILE_NAMES: Mapping[str, str] = {
    "chat_template": "chat_template.jinja",
    "generation_config": "generation_config.json",
    "tool_parser": "tool_parser",
    "reasoning_parser": "reasoning_parser",
    "chat_template_kwargs": "chat_template_kwargs.json",
    "tokenizer": "tokenizer_summary.json",
}
"""Part of an upload → name of the file in an adapter's folder."""
VARIABLES = "chat_template_kwargs"
"""Part of an upload that sets variables of the chat template."""
TOKENIZER = "tokenizer"
"""Part of an upload with the summary (`TokenizerSummary.text`) of the tokenizer that the adapter
was trained with. It is compared with the base's, and what differs is kept.
"""
INDEX, INDEX_FILE = "index", "adapter_model.safetensors.index.json"
"""Part of an upload with the index of several files of weights, and the file in its folder. The
weights are checked by it, and it isn't kept.
"""
MAX_BYTES: Mapping[str, int] = {
    "chat_template": LIMITS.max_chat_template_bytes,
    "generation_config": LIMITS.max_generation_config_bytes,
    "tool_parser": LIMITS.max_parser_name_bytes,
    "reasoning_parser": LIMITS.max_parser_name_bytes,
    "chat_template_kwargs": LIMITS.max_chat_template_kwargs_bytes,
    TOKENIZER: MAX_SUMMARY_BYTES,
    INDEX: LIMITS.max_adapter_header_bytes,
}
"""Part of an upload → its largest size."""


@dataclass(frozen=True, slots=True)
class ExtraFiles:
    """Extra files as they were uploaded, not inspected yet; None: absent.

    Attributes:
        chat_template_kwargs: variables of the chat template, as canonical JSON.
        tokenizer: summary of the adapter's own tokenizer; reduced to what differs from the base's
            once it is inspected.
        index: index of the files of weights, which is no part of the version; None: there is one
            file.
    """

    chat_template: bytes | None = None
    generation_config: bytes | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    chat_template_kwargs: str | None = None
    tokenizer: TokenizerSummary | None = None
    index: bytes | None = None

    @classmethod
    def read(cls, parts: Mapping[str, bytes]) -> Self:
        """Read the extra files in these parts of an upload.

        Args:
            parts: by the names of `FILE_NAMES` and `INDEX`.

        Raises:
            AdapterFormatError: one is empty, too large, or isn't text; lists every reason.
        """
        problems = [
            problem for name, data in parts.items() if (problem := _problem(name, data, MAX_BYTES[name])) is not None
        ]
        tokenizer, variables = None, None
        if VARIABLES in parts and not problems:
            try:
                parsed = parse_variables(parts[VARIABLES].decode())
                variables = canonical_text(parsed) if parsed else None
            except ValueError as error:
                problems.append(f"{FILE_NAMES[VARIABLES]} {error}")
        if TOKENIZER in parts and not problems:
            tokenizer = TokenizerSummary.parse(parts[TOKENIZER].decode())
            if tokenizer is None:
                problems.append(f"{TOKENIZER} isn't the summary of a tokenizer, as loraserve's client sends it")
        if problems:
            raise AdapterFormatError("The extra files of the version can't be read.", problems=problems)
        names = {name: parts[name].decode().strip() for name in ("tool_parser", "reasoning_parser") if name in parts}
        return cls(
            parts.get("chat_template"),
            parts.get("generation_config"),
            **names,
            chat_template_kwargs=variables,
            tokenizer=tokenizer,
            index=parts.get(INDEX),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the files."""
        return sum(len(data) for data in self.files)

    @property
    def files(self) -> tuple[bytes, ...]:
        """The files that are there, in the order of `VersionExtras.files`."""
        files = (self.chat_template, self.generation_config, self._tokenizer_file)
        return tuple(data for data in files if data is not None)

    @property
    def _tokenizer_file(self) -> bytes | None:
        return None if self.tokenizer is None else self.tokenizer.text().encode()

    def as_bytes(self) -> dict[str, bytes]:
        """Collect what is there, by the names of `FILE_NAMES`."""
        given = {name: getattr(self, name) for name in FILE_NAMES} | {TOKENIZER: self._tokenizer_file}
        return {
            name: value.encode() if isinstance(value, str) else value
            for name, value in given.items()
            if value is not None
        }

    def described(self) -> VersionExtras | None:
        """Describe the version's extras, which name the files by digest; None: it has none."""
        if not self.as_bytes():
            return None
        return VersionExtras(
            chat_template=_file(self.chat_template),
            generation_config=_file(self.generation_config),
            tool_parser=self.tool_parser,
            reasoning_parser=self.reasoning_parser,
            chat_template_kwargs=self.chat_template_kwargs,
            tokenizer=_file(self._tokenizer_file),
        )


NO_EXTRA_FILES = ExtraFiles()


def with_tokenizer(extras: ExtraFiles, files: Mapping[str, bytes]) -> ExtraFiles:
    """Add a tokenizer's files, by the names of `TOKENIZER_FILES`, to the extra files.

    Raises:
        AdapterFormatError: one can't be read, or two contradict each other.
    """
    try:
        found = TokenizerSummary.of_files(files)
    except ValueError as error:
        raise AdapterFormatError(
            f"The adapter's tokenizer can't be read: {error}.",
            hint="Save it again with tokenizer.save_pretrained(), or remove its files if training used the base's.",
        ) from None
    # a summary is what a version is downloaded with; the files themselves have more
    return extras if found is None else replace(extras, tokenizer=found)


def _problem(name: str, data: bytes, max_bytes: int) -> str | None:
    """Explain what keeps a part from being read; None: nothing does."""
    file = {**FILE_NAMES, INDEX: INDEX_FILE}.get(name, name)
    if len(data) > max_bytes:
        return f"{file} exceeds the limit of {max_bytes} bytes"
    if not data.strip():
        return f"{file} is empty"
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return f"{file} isn't UTF-8: byte {error.start} is invalid"
    return None


def _file(data: bytes | None) -> ExtraFile | None:
    return None if data is None else ExtraFile(blob=Digest(sha256(data).hexdigest()), num_bytes=len(data))
