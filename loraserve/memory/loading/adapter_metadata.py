"""What is known of a loaded adapter beside its weights. It goes where they go: from the loader to the device, to the host's memory and back."""

from __future__ import annotations

from dataclasses import dataclass

from loraserve.memory.devices.base import HostAdapter


@dataclass(frozen=True, slots=True)
class AdapterMetadata:
    """
    Attributes:
        invocation_token_ids: aLoRA's: the adapter acts from their last occurrence in a prompt on, and not at all where they don't occur. Empty: on every token.
        precision_loss: the largest relative error, over the adapter's modules, of ``scaling · B A`` as it's served against as it was uploaded; see `memory.precision`.
        dtype: what its matrices are held in: fp32, bf16, fp16 or int8.
    """

    invocation_token_ids: tuple[int, ...] = ()
    precision_loss: float = 0.0
    dtype: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedAdapter:
    """An adapter in host memory, as its device wants it, and what is known of it."""

    host: HostAdapter
    metadata: AdapterMetadata

    @property
    def num_bytes(self) -> int:
        """Of host memory."""
        return self.host.num_bytes
