"""Part of a base that one stage of a pipeline holds: some of its layers. Imports no torch.

The first stage has the embedding, the last one the last norm and the head.
"""

from __future__ import annotations

from dataclasses import dataclass

from loraserve.model.config.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Stage:
    """Place in a pipeline, and the layers there.

    Attributes:
        index: from the embedding on.
        size: stages of the pipeline.
        whole: the base's config.
    """

    index: int
    size: int
    whole: ModelConfig

    @property
    def layers(self) -> range:
        """The base's layers that this stage has.

        Where their number isn't a multiple, the last stages have one less: they have the head.
        """
        return range(self._start(self.index), self._start(self.index + 1))

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.size - 1

    def has_tensor(self, name: str) -> bool:
        """Check whether this stage reads a norm, by its name in the checkpoint."""
        architecture = self.whole.architecture
        if name == architecture.norm:
            return self.is_last
        return any(name.startswith(f"{architecture.layers}.{layer}.") for layer in self.layers)

    def _start(self, index: int) -> int:
        return -(-self.whole.num_layers * index // self.size)
