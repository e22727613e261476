"""Memory of the host that is taken as it is written to, and given back to the system piece by piece."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from loraserve.errors import ConfigError
from loraserve.limits import GIB


class HostMemory:
    """A range of addresses. A page of it takes memory from its first write until it is given back.

    Attributes:
        data: [num_bytes] uint8. What was given back, or never written, has any value.
    """

    def __init__(self, num_bytes: int) -> None:
        """
        Raises:
            ConfigError: the system refuses as many addresses.
        """
        try:
            self._map = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise ConfigError(
                f"The system gives no {num_bytes / GIB:.1f} GiB of memory: {error.strerror}.",
                hint="Lower --memory-budget.",
            ) from error
        self.data: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)

    def give_back(self, start: int, num_bytes: int) -> None:
        """These bytes take no memory; both numbers are multiples of the system's page."""
        self._map.madvise(mmap.MADV_DONTNEED, start, num_bytes)
