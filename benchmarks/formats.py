"""Formats that our server is measured in: a base's, its activations' and its adapters'."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Format:
    """Settings that a server is started with, and the bytes and the rate of its steps.

    Attributes:
        adapters: format that adapters are held in; `auto` is the one they are stored in.
        layer_bytes: of a weight of a layer's linears.
        head_bytes: of a weight of the head.
        rate: name of the rate of `benchmarks/machine.py` at which it's multiplied.
    """

    quantize: str
    layer_bytes: float
    head_bytes: float
    rate: str
    dtype: str = "auto"
    activations: str = "auto"
    adapters: str = "auto"

    @property
    def flags(self) -> list[str]:
        return ["--activation-dtype", self.activations, "--adapter-dtype", self.adapters]

    @property
    def adapter_bytes(self) -> float:
        """Return the bytes of an adapter's weight: the benchmarks' are stored in bfloat16."""
        return 1 if self.adapters == "int8" else 2


FLOAT, INT8, BFLOAT16 = "float32_ops_per_s", "int8_ops_per_s", "bfloat16_ops_per_s"
INT4_BYTES, INT4_FLOAT_BYTES, NF4_BYTES = 0.5 + 3 / 32, 0.5 + 5 / 32, 0.5 + 4 / 64
"""Four bits, and for each group a scale of 2 or 4 bytes, and int4's zero."""
FORMATS: Mapping[str, Format] = {
    "float32": Format("none", 4, 4, FLOAT, dtype="float32"),
    "bfloat16": Format("none", 2, 2, BFLOAT16, dtype="bfloat16"),
    "int8": Format("int8", 1, 1, INT8),
    "int8-float": Format("int8", 1, 1, FLOAT, activations="float"),
    "int8+int8": Format("int8", 1, 1, INT8, adapters="int8"),
    "int4": Format("int4", INT4_FLOAT_BYTES, 1, FLOAT, activations="float"),
    "int4-rounded": Format("int4", INT4_BYTES, 1, INT8, activations="int8"),
    "int4-rounded+int8": Format("int4", INT4_BYTES, 1, INT8, activations="int8", adapters="int8"),
    "nf4": Format("nf4", NF4_BYTES, 1, FLOAT),
    "fp8": Format("fp8", 1, 1, FLOAT),
}
"""By name; what follows a plus is the adapters' format, where it isn't the stored one."""
CALIBRATED: Mapping[str, Format] = {
    "int4-calibrated": Format("none", INT4_BYTES, 1, INT8),
    "int4-calibrated+int8": Format("none", INT4_BYTES, 1, INT8, adapters="int8"),
}
"""Formats of the checkpoint that `loraserve quantize` makes of a base."""
AS_STORED = CALIBRATED["int4-calibrated"]
"""Settings of a server on weights that are quantized already."""
SAME_FILE = "gguf"
"""Our format of a pair whose peer has a GGUF file: that file."""
_OF_FILE = f"{SAME_FILE}-"


def file_format(type_name: str) -> str:
    """Return the name of our format that is a GGUF file of this type."""
    return _OF_FILE + type_name


def file_type(name: str) -> str | None:
    """Return the type of the GGUF file that a format of ours is; None: it isn't one."""
    return name.removeprefix(_OF_FILE) if name.startswith(_OF_FILE) else None
