"""Comparison of a checkpoint's headers with a model of transformers, before a weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from loraserve.errors import MissingTensor, ShapeMismatch, UnexpectedTensor
from loraserve.model.checkpoint.headers import FLOATS, StoredTensor
from loraserve.model.checkpoint.stored_weights import StoredWeight
from loraserve.model.modelling.conversions import Conversions
from loraserve.model.modelling.skeleton import Skeleton


@dataclass(frozen=True, slots=True)
class TensorCheck:
    """Tensors that a checkpoint must have, and may have.

    Attributes:
        stored: weights that it holds quantized, by path.
        sinks: tensors that linears take.
        expert_sinks: tensors that experts take, by their names in the model or in the file.
        unread: tensors that aren't used.
        replaced: paths of the model's modules whose own tensors aren't read.
        tied_head: path of a head that is the embedding; None: it is one of its own.
        is_quantized: whether config.json says that some weights are.
    """

    skeleton: Skeleton
    conversions: Conversions
    stored: Mapping[str, StoredWeight]
    sinks: frozenset[str]
    expert_sinks: frozenset[str]
    unread: frozenset[str]
    replaced: frozenset[str]
    tied_head: str | None
    is_quantized: bool

    def check(self, tensors: Mapping[str, StoredTensor]) -> None:
        """Check the tensors of a checkpoint, by their names in the model.

        Raises:
            MissingTensor, UnexpectedTensor, ShapeMismatch, ModelError: what is wrong, by its name.
        """
        state = {name: tuple(value.shape) for name, value in self.skeleton.model.state_dict().items()}
        plain = {name for name in state if name.rpartition(".")[0] not in self.replaced and name not in self.stored}
        parameters = {name for name, _ in self.skeleton.model.named_parameters()} & plain
        parts = {name: expected for weight in self.stored.values() for name, expected in weight.expected().items()}
        self._check_floats(tensors, plain, parameters)
        self._check_missing(tensors, parameters, {*self.sinks, *parts})
        known = {*self.sinks, *parts, *plain, *self.unread, *self.conversions.gathered, *self.conversions.ignored}
        unexpected = [
            name
            for name in tensors
            if name not in known and not (self.tied_head is not None and name.startswith(f"{self.tied_head}."))
        ]
        if unexpected:
            raise UnexpectedTensor(
                f"The checkpoint holds {listed(unexpected)}, which transformers' {self.skeleton.architecture} with "
                "this config.json doesn't have: ignoring tensors would change the answers.",
                hint="Check config.json.",
            )
        for name, expected in parts.items():
            expected.check(tensors[name])
        self._check_shapes(tensors, state)

    def _check_missing(self, tensors: Mapping[str, StoredTensor], parameters: set[str], taken: set[str]) -> None:
        made = set(self.conversions.gathered.values())
        # merged tensors give several names of the model, of which the first alone is known; none is
        # a linear's
        needed = taken if made else taken | parameters
        missing = sorted(name for name in needed if name not in tensors)
        if missing:
            raise MissingTensor(
                f"The checkpoint lacks {listed(missing)}; transformers' {self.skeleton.architecture} with this "
                "config.json needs it.",
                hint="Fetch the checkpoint again, or check config.json.",
            )

    def _check_floats(self, tensors: Mapping[str, StoredTensor], plain: set[str], parameters: set[str]) -> None:
        """Refuse codes of quantized weights where no linear takes them, as of all experts."""
        gathered = self.conversions.gathered
        codes = [
            name
            for name, tensor in tensors.items()
            if (name in gathered or name in parameters) and tensor.dtype not in FLOATS
        ]
        if self.is_quantized:
            known = {*self.sinks, *self.expert_sinks, *plain, *self.unread, *gathered, *self.conversions.ignored}
            codes += [name for name in tensors if name not in known and ".experts." in name]
        if codes:
            raise UnexpectedTensor(
                f"The checkpoint holds {listed(sorted(codes))}, quantized; transformers' "
                f"{self.skeleton.architecture} has no linear of its own there, and other weights are floats.",
                hint="Give the float checkpoint; --quantize rounds its linears.",
            )

    def _check_shapes(self, tensors: Mapping[str, StoredTensor], state: Mapping[str, tuple[int, ...]]) -> None:
        for name, tensor in tensors.items():
            shape = state.get(name)
            is_float = name.rpartition(".")[0] not in self.stored
            if shape is not None and is_float and name not in self.conversions.gathered and tensor.shape != shape:
                raise ShapeMismatch(
                    f"The tensor {name} has the shape {list(tensor.shape)}; expected {list(shape)} from config.json.",
                    hint="Check that config.json belongs to this checkpoint.",
                )


def listed(names: list[str]) -> str:
    """Format some names for people."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
