"""Files on their way from the server: written beside their place, checked, then moved there."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import BinaryIO

from loraserve import errors
from loraserve.adapter_folder import CONFIG_FILE, WEIGHTS_FILE
from loraserve.contract.adapter import Version
from loraserve.contract.result import Answer
from loraserve.sdk.files.peft_directory import EXTRA_FILES, PARSER_FILES, VARIABLES_FILE

_DIGEST = re.compile(r'(?:W/)?"([0-9a-f]{64})"')
RETRIED = (errors.ConnectionFailed, errors.ClientTimeout, errors.Overloaded)


class PartialFile:
    """A file written beside its place and hashed meanwhile; each try begins it again."""

    def __init__(self, path: Path, report: Callable[[int], None]) -> None:
        self.path = path
        self._beside = path.with_name(f".{path.name}.part")
        self._report = report
        self._file: BinaryIO | None = None
        self._hash = hashlib.sha256()
        self.num_bytes = 0

    def begin(self) -> None:
        """Open the file, empty."""
        self.close()
        self._file = self._beside.open("wb")
        self._hash, self.num_bytes = hashlib.sha256(), 0

    def write(self, chunk: bytes) -> None:
        if self._file is None:
            raise errors.InvariantViolation("Bytes came before their file was opened.")
        self._file.write(chunk)
        self._hash.update(chunk)
        self.num_bytes += len(chunk)
        self._report(self.num_bytes)

    def finish(self, answer: Answer) -> bool:
        """Close the file; return whether its digest is the one in the answer's ETag.

        Raises:
            UnexpectedAnswer: the ETag has no digest.
        """
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
        self.close()
        named = _DIGEST.fullmatch(answer.etag or "")
        if named is None:
            raise errors.UnexpectedAnswer(
                f"The server sent {self.path.name} without its digest, so it can't be verified.",
                hint="Check that this is a loraserve server of the same version as this client.",
            )
        return named[1] == self._hash.hexdigest()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def commit(self) -> None:
        """Move the file to its place."""
        self._beside.replace(self.path)

    def discard(self) -> None:
        """Remove the file beside its place; no-op after `commit`."""
        self.close()
        self._beside.unlink(missing_ok=True)


def prepare_directory(directory: Path, overwrite: bool) -> None:
    """Create the directory.

    Raises:
        AlreadyExists: it holds one of an adapter's files, and `overwrite` is False.
    """
    directory.mkdir(parents=True, exist_ok=True)
    existing = [
        name
        for name in (CONFIG_FILE, WEIGHTS_FILE, *EXTRA_FILES.values(), *PARSER_FILES, VARIABLES_FILE)
        if (directory / name).exists()
    ]
    if existing and not overwrite:
        raise errors.AlreadyExists(
            f"{directory} holds {' and '.join(existing)} already.",
            hint="Name another directory, or overwrite them (--force).",
        )


def write_extras(directory: Path, downloaded: Collection[str], version: Version) -> None:
    """Write the version's parsers and variables; remove the extra files that it doesn't have."""
    for name in EXTRA_FILES.values():
        if name not in downloaded:
            (directory / name).unlink(missing_ok=True)
    variables = version.chat_template_kwargs
    for name, text in (
        ("tool_parser", version.tool_parser),
        ("reasoning_parser", version.reasoning_parser),
        (VARIABLES_FILE, json.dumps(variables, ensure_ascii=False) if variables else None),
    ):
        if text is None:
            (directory / name).unlink(missing_ok=True)
        else:
            (directory / name).write_text(text, encoding="utf-8")
