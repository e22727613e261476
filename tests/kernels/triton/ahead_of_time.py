"""One kernel compiled as its first launch on a GPU would compile it, without a GPU,
and what the machine code says.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CAPABILITIES = [pytest.param(80, marks=pytest.mark.campaign), 90]
"""Two generations of GPUs: what the newer takes, the older all but always takes too."""


_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")


@dataclass(frozen=True)
class Machine:
    """What became of a kernel. `opcodes` are in order of the code, with their suffixes."""

    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    opcodes: tuple[str, ...]

    @property
    def is_lean(self) -> bool:
        """Nothing is kept in the device's memory for want of registers."""
        spills = {op for op in self.opcodes if op.split(".")[0] in ("LDL", "STL")}
        return self.stack_bytes == self.local_bytes == 0 and not spills

    def count(self, pattern: str) -> int:
        """How many instructions match from their start."""
        return sum(1 for op in self.opcodes if re.match(pattern, op))


def compile_for(
    capability: int,
    fn: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    folder: Path,
    *,
    num_warps: int,
    has_fp_fusion: bool = True,
    uneven: Collection[str] = (),
) -> Machine:
    """As for arguments that are multiples of 16, pointers too, but those in `uneven`."""
    names = fn.arg_names
    assert set(names) == set(signature) | set(constants), set(names) ^ (set(signature) | set(constants))
    # in order: Triton's cache finds an entry by it
    wide = [name for name, kind in signature.items() if kind[0] in "*i" and name not in uneven]
    source = ASTSource(
        fn,
        signature={name: signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in wide},
    )
    options = {"num_warps": num_warps, "enable_fp_fusion": has_fp_fusion}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    usage, instructions = dump(compiled, folder)
    return Machine(
        int(usage["REG"]),
        int(usage["STACK"]),
        int(usage["LOCAL"]),
        compiled.metadata.shared,
        tuple(opcode for opcode, _ in instructions),
    )


def dump(compiled: Any, folder: Path) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Return a compiled kernel's resources by name, and its instructions with their operands."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", str(cubin)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {name: found[1] for name in ("REG", "STACK", "LOCAL") if (found := re.search(rf"\b{name}:(\d+)", text))}
    return usage, _INSTRUCTION.findall(text)
