"""The places of a step's program at which adapters' kernels run."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from loraserve_kernels.common.plan import LoraPlan
from loraserve_kernels.cpu.lora import kernel as k
from loraserve_kernels.cpu.program.program import Program, kernel

LORA_KERNELS = {
    torch.float32: "lora-float32",
    torch.bfloat16: "lora-bfloat16",
    torch.float16: "lora-float16",
    torch.int8: "lora-int8",
}
"""Dtype that adapters are stored in → its kernel: a site has a place for each."""

_NOWHERE: npt.NDArray[np.intp] = np.empty(0, dtype=np.intp)


class AdapterPlaces:
    """Places for the kernels of each site, layer and dtype; a step fills those that it needs.

    All sites of a step are given the same words, since one runs after the other.
    """

    def __init__(self, program: Program, places: Mapping[tuple[str, bool], npt.NDArray[np.intp]]) -> None:
        """Begin with all places empty.

        Args:
            places: (site, whether of kept rows) → numbers of the kernels, [layers, dtypes].
        """
        self._program, self._places = program, places
        # (whether of kept rows, dtype's column) → sites at which its kernel runs, and its numbers
        self._filled: dict[tuple[bool, int], tuple[frozenset[str], npt.NDArray[np.intp]]] = {}

    def fill(self, plan: LoraPlan | None, kept: LoraPlan | None, num_threads: int) -> list[object]:
        """Write which rows belong to which adapters; return the memory that the kernels use.

        It must live until they have run.

        Args:
            plan: of all rows; kept: of those that the last layer continues with.
        """
        return [*self._fill(plan, num_threads, is_kept=False), *self._fill(kept, num_threads, is_kept=True)]

    def _fill(self, plan: LoraPlan | None, num_threads: int, *, is_kept: bool) -> list[object]:
        blocks, words, alive = self._program.blocks, dict[int, int](), list[object]()
        if plan is not None:
            adapters = [segment.adapter for segment in plan.segments]
            stride = max(1, *(adapter.most_ranks for adapter in adapters))
            scratch = np.empty((plan.num_tokens, stride), dtype=np.float32)
            words = {k.SCRATCH: scratch.ctypes.data, k.SCRATCH_STRIDE: stride, k.TILES: 0}
            alive += [plan, scratch]
            if any(adapter.has_rows for adapter in adapters):
                tiles = np.empty((num_threads, k.TILE_FLOATS), dtype=np.float32)
                words[k.TILES] = tiles.ctypes.data
                alive.append(tiles)
        for column, dtype in enumerate(LORA_KERNELS):
            table = None if plan is None else plan.tables.get(dtype)
            sites = frozenset[str]() if plan is None or table is None else plan.sites
            numbers = self._choose(is_kept, column, sites)
            if table is not None and len(numbers):
                counters = dict.fromkeys(kernel(LORA_KERNELS[dtype]).counters, 0)
                for word, value in (words | counters).items():
                    blocks[numbers, word] = value
                blocks[numbers, k.SEGMENTS], blocks[numbers, k.NUM_SEGMENTS] = table.ctypes.data, len(table)
        return alive

    def _choose(self, is_kept: bool, column: int, sites: frozenset[str]) -> npt.NDArray[np.intp]:
        """Let a dtype's kernel run at these sites alone; return its numbers."""
        before, numbers = self._filled.get((is_kept, column), (frozenset(), _NOWHERE))
        if sites != before:
            self._program.put(numbers, None)
            places = [self._places[site, is_kept] for site in sorted(sites) if (site, is_kept) in self._places]
            numbers = np.concatenate([_NOWHERE, *(of_site[:, column] for of_site in places)])
            self._program.put(numbers, kernel(list(LORA_KERNELS.values())[column]))
            self._filled[is_kept, column] = sites, numbers
        return numbers
