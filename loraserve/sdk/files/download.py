"""A version's two files brought into a directory, whole or not at all."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from loraserve import errors
from loraserve.sdk.answers import Answer
from loraserve.sdk.call import Call, read_nothing
from loraserve.sdk.file_piece import Progress
from loraserve.sdk.files.peft_directory import CONFIG_FILE, WEIGHTS_FILE
from loraserve.sdk.retry import RetryPolicy
from loraserve.sdk.transport.steps import Fetch, Pause, Steps, Work

_DIGEST = re.compile(r'(?:W/)?"([0-9a-f]{64})"')
_BROKEN = (errors.ConnectionFailed, errors.ClientTimeout, errors.Overloaded)


class _Part:
    """A file beside its place, hashed as it's written; opened anew at each try."""

    def __init__(self, path: Path, tell: Callable[[int], None]) -> None:
        self.path = path
        self._beside = path.with_name(f".{path.name}.part")
        self._tell = tell
        self._file: BinaryIO | None = None
        self._hash = hashlib.sha256()
        self.num_bytes = 0

    def begin(self, _answer: Answer, _num_bytes: int | None) -> None:
        self.close()
        self._file = self._beside.open("wb")
        self._hash, self.num_bytes = hashlib.sha256(), 0

    def take(self, piece: bytes) -> None:
        if self._file is None:
            raise errors.InvariantViolation("Bytes came before their file was opened.")
        self._file.write(piece)
        self._hash.update(piece)
        self.num_bytes += len(piece)
        self._tell(self.num_bytes)

    def finish(self, answer: Answer) -> bool:
        """Close the file. True if its bytes are those that the answer's ETag names.

        Raises:
            UnexpectedAnswer: the ETag names none.
        """
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
        self.close()
        named = _DIGEST.fullmatch(answer.etag or "")
        if named is None:
            raise errors.UnexpectedAnswer(
                f"The server sent {self.path.name} without its digest, so that it can't be checked.",
                hint="Is this a loraserve server, and of the same version as this client?",
            )
        return named[1] == self._hash.hexdigest()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def commit(self) -> None:
        self._beside.replace(self.path)

    def discard(self) -> None:
        self.close()
        self._beside.unlink(missing_ok=True)


def download(
    version_path: str,
    total_bytes: int,
    directory: Path,
    policy: RetryPolicy,
    *,
    overwrite: bool,
    on_progress: Callable[[Progress], object] | None,
) -> Steps[None]:
    """Both files of the version at `version_path` are in `directory`, and hash to what the server says.

    Raises:
        AlreadyExists: one of them is there, and `overwrite` is False.
        AdapterCorrupt: what came isn't what the server said, again and again.
    """
    yield Work(lambda: _prepare(directory, overwrite))
    done_bytes = 0

    def tell(num_bytes: int) -> None:
        if on_progress is not None:
            on_progress(Progress(done_bytes + num_bytes, max(total_bytes, done_bytes + num_bytes)))

    # The config last: who finds one finds the weights too.
    parts = [_Part(directory / name, tell) for name in (WEIGHTS_FILE, CONFIG_FILE)]
    try:
        for part in parts:
            call = Call("GET", f"{version_path}/files/{part.path.name}", read_nothing)
            yield from _fetch(call, part, policy)
            done_bytes += part.num_bytes
        for part in parts:
            yield Work(part.commit)
    finally:
        for part in parts:
            part.discard()


def _fetch(call: Call[None], part: _Part, policy: RetryPolicy) -> Steps[None]:
    attempt = 0
    while True:
        failure: errors.LoraserveError
        try:
            answer: Answer = yield Fetch(call, part.begin, part.take)
            if (yield Work(lambda answer=answer: part.finish(answer))):  # type: ignore[misc]
                return
            failure = errors.AdapterCorrupt(f"{part.path.name} didn't arrive as the server has it: its digest differs.")
        except _BROKEN as error:
            failure = error
        delay = policy.delay_after_failure(attempt)
        if delay is None:
            raise failure
        yield Pause(delay)
        attempt += 1


def _prepare(directory: Path, overwrite: bool) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    there = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if (directory / name).exists()]
    if there and not overwrite:
        raise errors.AlreadyExists(
            f"{directory} holds {' and '.join(there)} already.",
            hint="Name another directory, or overwrite them (--force).",
        )
