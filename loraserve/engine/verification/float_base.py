"""The base before it was rounded: the checkpoint's own weights, read while they are multiplied."""

from __future__ import annotations

from pathlib import Path

import torch

from loraserve.errors import LoraserveError
from loraserve.model.checkpoint.original import OriginalBase
from loraserve.types import BaseSpec


class FloatBase:
    """A base's float weights, of which a block at a time is in memory.

    Attributes:
        note: reason why no adapter is compared with them, in words for people; empty if each is.
    """

    def __init__(self, model_dir: Path, base: BaseSpec, device: torch.device) -> None:
        """Read the headers of the checkpoint's files.

        Args:
            base: as it is served.
            device: where blocks of weights are multiplied.
        """
        self._base = OriginalBase(model_dir, device, base.max_model_len)
        self._files = self._stamps()
        self.note = ""
        if self._base.stored_formats:
            formats = " and ".join(self._base.stored_formats)
            self.note = f"the checkpoint's own weights are {formats}: there is no float base to compare with"
        elif (base.quantization, base.dtype) == ("none", "float32"):
            self.note = "the base is served in float32: nothing is rounded"

    def open(self) -> OriginalBase:
        """Open the base.

        Raises:
            FloatsUnavailable: its files aren't those that it was loaded from any more.
        """
        try:
            found = self._stamps()
        except OSError as error:
            raise FloatsUnavailable(f"The base's files can't be read: {error.strerror}.") from error
        if found != self._files:
            raise FloatsUnavailable("The base's files have changed since it was loaded.")
        return self._base

    def _stamps(self) -> list[tuple[str, int, int]]:
        stats = [(path, path.stat()) for path in self._base.files]
        return [(path.name, stat.st_size, stat.st_mtime_ns) for path, stat in stats]


class FloatsUnavailable(LoraserveError):
    """The checkpoint's own weights can't be compared with; the message is for tenants."""

    code = "engine_error"
