"""Schemes in which a quantized checkpoint stores its linears. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum

from loraserve.model.config.wrappers import wrapped_names


class Layout(StrEnum):
    """Set of tensors that a weight is stored in."""

    NAIVE = "naive"
    """``weight`` in a dtype of eight bits, ``weight_scale``, and ``weight_zero_point`` where codes
    aren't symmetric.
    """
    PACKED = "packed"
    """``weight_packed``: int32 words of codes, the first in the lowest bits; ``weight_scale``,
    ``weight_shape``, and ``weight_zero_point`` where codes aren't symmetric.
    """
    GPTQ = "gptq"
    """``qweight`` [inputs of a word, outputs]: int32 words of codes, the first in the lowest bits;
    ``qzeros`` [groups, outputs of a word], ``scales`` [groups, outputs], and often ``g_idx``
    [inputs], the group of each input.
    """
    AWQ = "awq"
    """``qweight`` [inputs, outputs of a word], ``qzeros`` and ``scales`` as GPTQ's; a word's
    outputs are in the order 0, 2, 4, 6, 1, 3, 5, 7.
    """
    FP8 = "fp8"
    """``weight`` in float8 where the linear is quantized, and ``weight_scale``, or
    ``weight_scale_inv`` for blocks; both are multiplied with.
    """
    BITSANDBYTES = "bitsandbytes"
    """``weight`` and what hangs on it: ``weight.absmax``, ``weight.quant_state.bitsandbytes__nf4``
    …
    """
    GGUF = "gguf"
    """``weight``: rows of blocks, as llama.cpp's types have them."""
    MXFP4 = "mxfp4"
    """``_blocks`` of a parameter of all experts [experts, outputs, groups, 16] uint8: the codes of
    two inputs in a byte; ``_scales`` [experts, outputs, groups] uint8: exponents of two plus 127.
    """


@dataclass(frozen=True, slots=True)
class Scheme:
    """Format in which a linear's weight is stored.

    Attributes:
        format: ``int8``, ``int4``, ``fp8``, ``nf4`` or ``mxfp4``.
        group_size: inputs that share a scale; None: one scale per output channel or per tensor, as
            the tensor's shape says.
        is_symmetric: False: each group has a zero point.
        has_input_scale: the checkpoint has a scale for rounding activations, which isn't used.
        rotation: inputs of an orthogonal Hadamard block by which the weight is rotated, and its
            input must be; 0: neither.
        block_rows: outputs that share a scale, for a group of inputs; 0: each has its own.
        zero_offset: number that is added to a stored zero; GPTQ's first format has 1.
        is_reordered: inputs that share a scale don't stand side by side (``desc_act``).
        has_rounded_inputs: the weight was calibrated for activations that are rounded to int8 by
            row, as our kernels round them.
        block_type: name of llama.cpp's type, of `Layout.GGUF`.
    """

    format: str
    layout: Layout
    group_size: int | None = None
    is_symmetric: bool = True
    has_input_scale: bool = False
    rotation: int = 0
    block_rows: int = 0
    zero_offset: int = 0
    is_reordered: bool = False
    has_rounded_inputs: bool = False
    block_type: str = ""

    def identity(self) -> dict[str, object]:
        """Collect the settings that decide how tensors are read; JSON-able.

        What came later is there where it isn't the default, so that digests stay as they were.
        """
        later = {"rotation", "block_rows", "zero_offset", "is_reordered", "has_rounded_inputs", "block_type"}
        return {name: value for name, value in asdict(self).items() if name not in later or value}


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """Selection of a checkpoint's linears that are stored quantized, and their formats.

    Attributes:
        method: as the config names it: ``compressed-tensors``, ``bitsandbytes``, ``gptq``,
            ``awq``, ``auto-round``, ``fp8``, ``fbgemm_fp8``, ``mxfp4`` or ``gguf``.
        targets: (target, scheme) in the order in which they are tried: a module's path, ``re:`` and
            an expression that its path begins with, or ``Linear``.
        ignore: targets whose linears are stored in a float dtype.
        rotations: (target, block) of linears that are rotated by Hadamard blocks of that many
            inputs.
        by_path: scheme of every quantized weight by its path, the embedding's too; where it is
            given, targets aren't tried.
        is_wrapped: whether targets may be by the names of a model of images and text.
    """

    method: str
    targets: tuple[tuple[str, Scheme], ...]
    ignore: tuple[str, ...]
    rotations: tuple[tuple[str, int], ...] = ()
    by_path: Mapping[str, Scheme] | None = None
    is_wrapped: bool = False

    @property
    def has_embedding(self) -> bool:
        """Whether the embedding may be quantized, as a linear is."""
        return self.by_path is not None

    def scheme(self, path: str) -> Scheme | None:
        """Find how the weight of the linear at this path is stored; None: in a float dtype.

        A path is ``model.layers.0.self_attn.q_proj``, for example. With all methods but
        compressed-tensors it's the answer for a linear whose tensors are quantized: the files show
        which are, and the config may contradict them.
        """
        if self.by_path is not None:
            return self.by_path.get(path)
        names = wrapped_names(path) if self.is_wrapped else (path,)
        if any(_is_match(names, ignored) for ignored in self.ignore):
            return None
        scheme = next((scheme for target, scheme in self.targets if _is_match(names, target)), None)
        rotation = next((block for target, block in self.rotations if _is_match(names, target)), 0)
        return scheme if scheme is None or not rotation else replace(scheme, rotation=rotation)

    def identity(self) -> dict[str, object]:
        """Collect the settings that decide how tensors are read; JSON-able."""
        if self.by_path is not None:
            return {"method": self.method, "types": {path: one.block_type for path, one in self.by_path.items()}}
        # rotations stand alone: without any, digests are as they were before there were any
        targets = [[target, scheme.identity()] for target, scheme in self.targets]
        rotations = {"rotations": [list(rotation) for rotation in self.rotations]} if self.rotations else {}
        return {"method": self.method, "targets": targets, "ignore": list(self.ignore), **rotations}


def _is_match(names: Sequence[str], target: str) -> bool:
    """Check whether a target means the linear that has one of these names."""
    if target.startswith("re:"):
        return any(re.match(target.removeprefix("re:"), name) for name in names)
    return target == "Linear" or target in names
