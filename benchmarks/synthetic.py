"""Adapters by the thousand, in PEFT's format: a few sets of random weights, and in each adapter one
row of its own, so that each has its own digest.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save

from benchmarks.make_model import Size, adapter_config, adapter_tensors

RANKS = (8, 16, 32, 64)


class Adapters:
    """Adapter i has the rank ``ranks[i % len(ranks)]``.

    Nothing is written: an adapter's files are made when they're asked for, in a millisecond.
    """

    def __init__(self, size: Size, *, ranks: tuple[int, ...] = RANKS, targets: tuple[str, ...], seed: int = 0) -> None:
        self.ranks = ranks
        self._configs, self._weights, self._rows = [], [], []
        for i, rank in enumerate(ranks):
            tensors = adapter_tensors(size, rank=rank, targets=targets, dtype=torch.bfloat16, seed=seed + i)
            weights = save(tensors, metadata={"format": "pt"})
            header_bytes = int.from_bytes(weights[:8], "little")
            header = json.loads(weights[8 : 8 + header_bytes])
            name = min(name for name in tensors if name.endswith("lora_A.weight"))
            start = 8 + header_bytes + header[name]["data_offsets"][0]
            self._rows.append((start, tensors[name].shape[1]))
            self._weights.append(weights)
            self._configs.append(json.dumps(adapter_config(rank=rank, targets=targets)).encode())

    @staticmethod
    def name(number: int) -> str:
        return f"lora-{number:05d}"

    def num_bytes(self, number: int) -> int:
        return len(self._weights[number % len(self.ranks)])

    def files(self, number: int) -> tuple[bytes, bytes]:
        """adapter_config.json and adapter_model.safetensors."""
        kind = number % len(self.ranks)
        start, width = self._rows[kind]
        row = torch.randn(width, generator=torch.Generator().manual_seed(number)) * width**-0.5
        weights = bytearray(self._weights[kind])
        weights[start : start + 2 * width] = row.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
        return self._configs[kind], bytes(weights)

    def write(self, number: int, folder: Path) -> Path:
        """The adapter in a directory of its own, as PEFT's `save_pretrained` makes it."""
        out = folder / self.name(number)
        out.mkdir(parents=True, exist_ok=True)
        for name, data in zip(("adapter_config.json", "adapter_model.safetensors"), self.files(number), strict=True):
            (out / name).write_bytes(data)
        return out


def bytes_per_rank(size: Size, targets: tuple[str, ...]) -> int:
    """Bytes of each rank of an adapter in bfloat16."""
    return 2 * size.layers * sum(sum(size.modules[target]) for target in targets)
