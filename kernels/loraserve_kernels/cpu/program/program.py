"""A step's kernels in order, each with its argument block, run in one region of threads.

A step has a hundred kernels of some microseconds each. Launched one by one, each takes as long
again for the interpreter, for allocations and for a thread to wake; so their argument blocks are
written once, and between steps only the words change that a step decides.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loraserve_kernels.cpu import threads
from loraserve_kernels.cpu.lora.apply import HAS_NUMBA

_BLOCK_WORDS = 64
"""Words of an argument block: enough for every kernel, and whole cache lines."""
_LINE_BYTES = 64


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """A compiled kernel.

    Attributes:
        address: of its C function.
        counters: words of its argument block that it counts in, from 0.
        handle: keeps the machine code alive.
    """

    address: int
    counters: tuple[int, ...]
    handle: Any


@functools.cache
def kernel(name: str) -> Kernel:
    """Load a kernel, compiled or read from numba's cache.

    Args:
        name: ``norm``, ``gate``, ``gather``, ``rotary``, ``attention``, ``quantize``, ``dot``,
            ``int4-dot``, ``int4-dot-half``, a kind of `DecodedWeight`, the kernel of a
            `G32Weight`, or ``lora-`` and the dtype that adapters are stored in.
    """
    from loraserve_kernels.cpu.attention import kernel as attention_kernel
    from loraserve_kernels.cpu.linear import decoded, row_quantization
    from loraserve_kernels.cpu.lora import kernel as lora_kernel
    from loraserve_kernels.cpu.program import gate_kernel, gather_kernel, norm_kernel, rotary_kernel

    own: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
        "norm": (norm_kernel.compiled, (norm_kernel.CLAIMED,)),
        "gate": (gate_kernel.compiled, (gate_kernel.CLAIMED,)),
        "gather": (gather_kernel.compiled, (gather_kernel.CLAIMED,)),
        "rotary": (rotary_kernel.compiled, (rotary_kernel.CLAIMED, rotary_kernel.OUTSIDE)),
        "attention": (attention_kernel.compiled, (attention_kernel.CLAIMED, attention_kernel.ENTERED)),
        "quantize": (row_quantization.compiled, (row_quantization.CLAIMED,)),
    }
    lora = (lora_kernel.CLAIMED, lora_kernel.FINISHED, lora_kernel.ENTERED)
    own |= {
        "lora-float32": (lora_kernel.compiled_float32, lora),
        "lora-bfloat16": (lora_kernel.compiled_bfloat16, lora),
        "lora-float16": (lora_kernel.compiled_float16, lora),
        "lora-int8": (lora_kernel.compiled_int8, lora),
    }
    if name in own:
        compiled, counters = own[name]
        handle = compiled()
        return Kernel(handle.address, counters, handle)
    handle = decoded.compiled_handle(name)
    return Kernel(handle.address, (0,), handle)


def warm_up() -> None:
    """Compile what every program runs, or read it from numba's cache: adapters' kernels aside."""
    if HAS_NUMBA:
        from loraserve_kernels.cpu.program import runner

        for name in ("norm", "gate", "gather", "rotary", "attention", "quantize"):
            kernel(name)
        runner.compiled()


class Program:
    """Kernels that a team of threads runs one after the other. One thread at a time runs it.

    Attributes:
        blocks: [kernels, words] int64, the argument blocks; set `freeze`. Each starts a cache line.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Kernel | None, Mapping[int, int]]] = []
        self.blocks: npt.NDArray[np.int64] = np.zeros((0, _BLOCK_WORDS), dtype=np.int64)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, kernel: Kernel | None, words: Mapping[int, int]) -> int:
        """Append a kernel, and return its number.

        Args:
            kernel: None: nothing is run in its place until `put` names one.
            words: word of the argument block → its value.
        """
        self._entries.append((kernel, words))
        return len(self._entries) - 1

    def freeze(self) -> None:
        """Lay out what was added; nothing can be added after this."""
        from loraserve_kernels.cpu.program import runner

        count = len(self._entries)
        self.blocks = _aligned(count * _BLOCK_WORDS).reshape(count, _BLOCK_WORDS)
        self._table = np.zeros((count, runner.ENTRY_WORDS), dtype=np.int64)
        self._table[:, runner.ARGS] = self.blocks.ctypes.data + 8 * _BLOCK_WORDS * np.arange(count)
        counters: dict[int, list[int]] = {}
        for number, (kernel, words) in enumerate(self._entries):
            for word, value in words.items():
                self.blocks[number, word] = value
            if kernel is not None:
                self._table[number, runner.FUNCTION] = kernel.address
                for word in kernel.counters:
                    counters.setdefault(word, []).append(number)
        self._counters = {word: np.array(numbers) for word, numbers in counters.items()}
        self._args = _aligned(runner.NUM_WORDS)
        self._args[runner.TABLE] = self._table.ctypes.data
        self._args[runner.YIELD] = _yield_address()
        self._loop = runner.compiled()
        self._call, self._loop_address = self._loop.ctypes, self._loop.address
        self._args_address = int(self._args.ctypes.data)
        self._state, self._last, self._kernel_bit = runner.STATE, runner.LAST, runner.KERNEL_BIT

    def put(self, numbers: Sequence[int] | npt.NDArray[np.intp], kernel: Kernel | None) -> None:
        """Run this kernel, or none, in these places."""
        self._table[numbers, 0] = 0 if kernel is None else kernel.address

    def reset(self) -> None:
        """Set every kernel's counters to 0, as they must be before it runs."""
        for word, numbers in self._counters.items():
            self.blocks[numbers, word] = 0

    def run(self, first: int, last: int, num_threads: int) -> None:
        """Run kernels ``first`` to ``last - 1``, each after the one before it has ended.

        The GIL is released meanwhile.
        """
        while first < last and not self._table[first, 0]:
            first += 1
        if first == last:
            return
        self._args[self._state] = first << self._kernel_bit
        self._args[self._last] = last
        threads.run(self._call, self._loop_address, self._args_address, num_threads)


def _aligned(num_words: int) -> npt.NDArray[np.int64]:
    """Allocate zeros that start a cache line."""
    memory = np.zeros(8 * num_words + _LINE_BYTES, dtype=np.uint8)
    start = -memory.ctypes.data % _LINE_BYTES
    return memory[start : start + 8 * num_words].view(np.int64)


@functools.cache
def _yield_address() -> int:
    """Look up the address of sched_yield; 0 where the system has none."""
    function = getattr(ctypes.CDLL(None), "sched_yield", None)
    return 0 if function is None else ctypes.cast(function, ctypes.c_void_p).value or 0
