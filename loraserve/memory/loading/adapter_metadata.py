"""Metadata of a loaded adapter, which goes wherever the weights go."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from loraserve.memory.devices.base import HostAdapter


@dataclass(frozen=True, slots=True)
class AdapterMetadata:
    """Metadata of an adapter, apart from its weights.

    Attributes:
        invocation_token_ids: tokens from whose last occurrence in a prompt an aLoRA acts, and
            without which it doesn't; empty if the adapter acts on every token.
        precision_loss: largest relative error, over the adapter's modules, of ``scaling · B A`` as
            served against as uploaded; see `loading.precision`.
        dtype: name of the dtype that its matrices are held in: fp32, bf16, fp16 or int8.
        head: classification head, [num_labels, hidden_size] float32 in the host's memory, a part of
            the packed adapter; None: it has none.
        num_extra_rows: rows of its embedding and head beyond the base's.
        read_s: seconds that its load took: to read, verify, compile and pack it.
    """

    invocation_token_ids: tuple[int, ...] = ()
    precision_loss: float = 0.0
    dtype: str = ""
    head: Tensor | None = field(default=None, compare=False)
    num_extra_rows: int = 0
    read_s: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True, eq=False)
class LoadedAdapter:
    """An adapter in host memory, packed for its device, with its metadata."""

    host: HostAdapter
    metadata: AdapterMetadata

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory."""
        return self.host.num_bytes
