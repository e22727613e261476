"""Uploads in other containers than PEFT's, turned into PEFT's two files before a publish."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, Protocol, TypeVar

from loraserve.adapters.format.containers import (
    Container,
    ConvertedFiles,
    convert_files,
    needs_conversion,
    write_safetensors,
)
from loraserve.adapters.format.peft_format import CONFIG_FILE
from loraserve.background import Pause, Throttle
from loraserve.errors import AdapterFormatError
from loraserve.limits import LIMITS
from loraserve.registry.health.inspection import Inspected
from loraserve.types import BaseSpec

CONTAINER = "container"
"""Name of the check that names what a version was read from."""


class Uploaded(Protocol):
    """Weights as they were uploaded."""

    @property
    def first_bytes(self) -> bytes:
        """Enough of the first bytes to recognize the format."""
        ...

    def read(self) -> memoryview: ...


class ConversionTarget(Protocol):
    """Something that converted weights are written to."""

    def write(self, data: bytes | bytearray | memoryview) -> None: ...


T = TypeVar("T", bound=ConversionTarget)


@dataclass(frozen=True, slots=True)
class Converted(Generic[T]):
    """PEFT's two files of an upload.

    Attributes:
        weights: the new weights, which the caller discards.
        notes: what was read as what, for people.
    """

    config: bytes
    weights: T
    notes: tuple[str, ...]


async def convert_upload(
    config: bytes,
    weights: Uploaded,
    base: BaseSpec,
    stage: Callable[[], Awaitable[T]],
    drop: Callable[[T], object],
    *,
    index: bytes | None,
    containers: Sequence[Container],
    slots: asyncio.Semaphore,
    throttle: Throttle,
) -> Converted[T] | None:
    """Convert an upload to PEFT's files; None: it is these already.

    Args:
        stage: returns where the new weights are written.
        drop: discards that after a failure.
        index: index of several shards that the weights are, one after the other.
        slots: taken while the upload is in memory.

    Raises:
        AdapterRejected: its container can't be read.
        QuotaExceeded, RateLimited, Overloaded, StorageError: the new weights can't be stored.
    """
    first = await asyncio.to_thread(lambda: weights.first_bytes)
    if not needs_conversion(config, first, index, containers):
        if not config:
            raise AdapterFormatError(
                f"The upload has no {CONFIG_FILE}, and its weights aren't in a file that holds its own config.",
                hint=f"Send the {CONFIG_FILE} that was saved with the weights.",
            )
        return None
    async with slots:
        files = await throttle.run_in_pieces(partial(_convert, config, weights, base, index, containers))
        target = await stage()
        try:
            await throttle.run_in_pieces(partial(_write, files, target))
        except BaseException:
            await asyncio.to_thread(drop, target)
            raise
    return Converted(files.config, target, files.notes)


def with_container(inspected: Inspected, notes: Sequence[str]) -> Inspected:
    """Add a check to the inspection that names what the files were read from."""
    if not notes:
        return inspected
    check = {"name": CONTAINER, "status": "passed", "detail": "; ".join(notes)}
    first, *others = inspected.checks
    return replace(inspected, checks=(first, check, *others))


def _convert(
    config: bytes,
    weights: Uploaded,
    base: BaseSpec,
    index: bytes | None,
    containers: Sequence[Container],
    pause: Pause,
) -> ConvertedFiles:
    data = weights.read()
    pause()
    files = convert_files(config, data, base, index, containers)
    if files.num_bytes > LIMITS.max_upload_bytes:
        raise AdapterFormatError(
            f"The adapter's tensors take {files.num_bytes:,} bytes as safetensors; "
            f"at most {LIMITS.max_upload_bytes:,} are allowed."
        )
    return files


def _write(files: ConvertedFiles, target: ConversionTarget, pause: Pause) -> None:
    for piece in write_safetensors(files.tensors):
        target.write(piece)
        pause()
