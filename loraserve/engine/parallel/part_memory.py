"""Memory of an adapter's parts, which all ranks of a machine map: a part is copied to no rank."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from loraserve.engine.parallel.messages import HoldAdapter, Region
from loraserve.errors import AdapterUnavailable
from loraserve.model.parallel.part_bytes import aligned
from loraserve_kernels.common.packed import PackedAdapter, PackedExperts
from loraserve_kernels.common.sites import COLUMNS, EXPERT_MODULES
from loraserve_kernels.common.sizes import RECORD_WORDS


class PartMemory:
    """Anonymous memory with a region of pages for each rank. It is freed with this object.

    Args:
        sizes: bytes of each rank's region, whole pages.

    Raises:
        AdapterUnavailable: the system has no more of it, or no descriptor for it.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._fd: int | None = None
        try:
            self._fd = os.memfd_create("loraserve-parts", os.MFD_CLOEXEC)
            os.ftruncate(self._fd, sum(sizes))
            self._pages = mmap.mmap(self._fd, sum(sizes))
        except OSError as error:
            self.close()
            raise AdapterUnavailable(
                f"Memory for the ranks' parts of this adapter version can't be had: {error.strerror}.",
                hint="Raise the limit of open files (ulimit -n), or lower --host-cache.",
            ) from error
        self.num_bytes = sum(sizes)
        self._starts = [0, *accumulate(sizes)]

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the memory; ranks that have mapped it keep it until they unmap it."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def region(self, rank: int) -> RegionWriter:
        """Build what allocates a rank's arrays."""
        return RegionWriter(self._pages, self._starts[rank])

    def hold_message(self, number: int, rank: int, part: PackedAdapter) -> HoldAdapter:
        """Build the message by which a rank maps its part."""
        start = self._starts[rank]
        base = _address(self._pages) + start

        def region(tensor: Tensor) -> Region:
            first = tensor.data_ptr() - base if tensor.numel() else 0
            return Region(dtype=str(tensor.dtype).removeprefix("torch."), start=first, count=tensor.numel())

        return HoldAdapter(
            number=number,
            path=f"/proc/{os.getpid()}/fd/{self._fd}",
            offset=start,
            num_bytes=self._starts[rank + 1] - start,
            num_layers=part.num_layers,
            records=part.records.tobytes(),
            data=region(part.data),
            floats=region(part.floats),
            row_ids=region(part.row_ids),
            norms=tuple((layer, norm, region(weight)) for (layer, norm), weight in part.norms.items()),
            expert_records=b"" if part.experts is None else part.experts.records.tobytes(),
            experts=() if part.experts is None else tuple(sorted(part.experts.rows, key=part.experts.rows.__getitem__)),
        )


class RegionWriter:
    """Gives out arrays of a region, one after the other."""

    def __init__(self, pages: mmap.mmap, start: int) -> None:
        self._pages, self._next = pages, start

    def allocate(self, count: int, dtype: torch.dtype) -> Tensor:
        """Allocate that many zeros."""
        if not count:
            return torch.empty(0, dtype=dtype)
        tensor = torch.frombuffer(self._pages, dtype=dtype, count=count, offset=self._next)
        self._next += aligned(tensor.nbytes)
        return tensor


def map_part(message: HoldAdapter, module_shapes: dict[str, tuple[int, int]]) -> PackedAdapter:
    """Map a rank's part of an adapter, in memory that it shares with rank 0.

    Raises:
        OSError: the memory is gone.
    """
    fd = os.open(message.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        pages = mmap.mmap(fd, message.num_bytes, offset=message.offset)
    finally:
        os.close(fd)

    def view(region: Region) -> Tensor:
        dtype: torch.dtype = getattr(torch, region.dtype)
        if not region.count:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(pages, dtype=dtype, count=region.count, offset=region.start)

    shapes = [module_shapes.get(module, (0, 0)) for module in COLUMNS]
    records, of_experts = (
        np.frombuffer(bytearray(data), np.int64) for data in (message.records, message.expert_records)
    )
    return PackedAdapter(
        data=view(message.data),
        floats=view(message.floats),
        row_ids=view(message.row_ids),
        records=records.reshape(message.num_layers, len(COLUMNS), RECORD_WORDS),
        in_features=tuple(shape[1] for shape in shapes),
        out_features=tuple(shape[0] for shape in shapes),
        norms={(layer, norm): view(region) for layer, norm, region in message.norms},
        experts=PackedExperts.of(
            of_experts.reshape(-1, len(EXPERT_MODULES), RECORD_WORDS),
            {place: row for row, place in enumerate(message.experts)},
            module_shapes,
        ),
    )


def _address(pages: mmap.mmap) -> int:
    return torch.frombuffer(pages, dtype=torch.uint8, count=1).data_ptr()
