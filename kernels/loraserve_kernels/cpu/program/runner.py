"""The loop in which a team of threads runs one kernel after the other; compiled by numba.

Each kernel is a C function of its argument block's address that any number of threads enter and
that shares its work out by a counter, as everywhere in this package. Between two kernels the
threads that have joined meet at a barrier. They spin there, since the next kernel is microseconds
away; a thread that has spun for long offers its core to others, among which the one that it waits
for may be.

A thread joins when it comes, in the middle of any kernel: while the system keeps one from a core,
the others continue without it. One word has it all: which kernel runs, how many threads have
joined, and how many of them have ended it. A thread that joins or ends changes the word from what
it has read; the last to end a kernel begins the next.
"""

# numba has no types
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import functools
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from loraserve_kernels.cpu.compilation.compiler import compile_kernel
from loraserve_kernels.cpu.simd import STAMP, load_int, pause

# The argument block, in int64 words. The state is on a cache line of its own.
STATE, TABLE, LAST, YIELD, NUM_WORDS = 0, 8, 9, 10, 11

# The state: how many joined threads have ended the kernel, how many have joined, the kernel.
JOINED_BIT, KERNEL_BIT, COUNT_MASK = 16, 32, (1 << 16) - 1

# An entry of the table: the address of a kernel (0: nothing is run) and of its argument block.
FUNCTION, ARGS, ENTRY_WORDS = 0, 1, 2

_SPINS = 4096
"""Looks at the counter, some 10 ns each, before a waiting thread offers its core."""

_I32, _I64 = ir.IntType(32), ir.IntType(64)


@intrinsic
def _call(typingctx: Any, function: Any, args: Any) -> Any:
    """Call the C function at an address with an address."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_I64])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), [values[1]])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), codegen


@intrinsic
def _ask(typingctx: Any, function: Any) -> Any:
    """Call the C function at an address, which takes nothing and returns an int."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(_I32, [])
        return builder.sext(builder.call(builder.inttoptr(values[0], kind.as_pointer()), []), _I64)

    return types.int64(types.intp), codegen


@intrinsic
def _acquire(typingctx: Any, address: Any) -> Any:
    """Load the int64 at `address`, and see what was written before it was."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(values[0], _I64.as_pointer()), "acquire", 8)

    return types.int64(types.intp), codegen


@intrinsic
def _exchange(typingctx: Any, address: Any, expected: Any, value: Any) -> Any:
    """Write `value` to the int64 at `address` if it is `expected`; return what it was."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = builder.inttoptr(values[0], _I64.as_pointer())
        return builder.extract_value(builder.cmpxchg(pointer, values[1], values[2], "acq_rel", "acquire"), 0)

    return types.int64(types.intp, types.int64, types.int64), codegen


@numba.njit
def _change(args, state, value):  # type: ignore[no-untyped-def]
    """Change the state from what was read of it; return whether it was still that."""
    return _exchange(args, state, value) == state


@numba.njit
def _next(table, number, last):  # type: ignore[no-untyped-def]
    """Find the first kernel from `number` on; `last` if there is none before."""
    while number < last and load_int(table, number * ENTRY_WORDS + FUNCTION) == 0:
        number += 1
    return number


@numba.njit
def _end(args, table, number, last):  # type: ignore[no-untyped-def]
    """Count a thread that has ended kernel `number`, and wait until all have that have joined."""
    while True:
        state = _acquire(args)
        joined, ended = (state >> JOINED_BIT) & COUNT_MASK, (state & COUNT_MASK) + 1
        if ended == joined:
            if _change(args, state, (_next(table, number + 1, last) << KERNEL_BIT) | (joined << JOINED_BIT)):
                return
        elif _change(args, state, state + 1):
            break
    spins = 0
    while _acquire(args) >> KERNEL_BIT == number:
        pause()
        spins += 1
        if spins > _SPINS and load_int(args, YIELD) != 0:
            _ask(load_int(args, YIELD))


@numba.njit
def _run(args):  # type: ignore[no-untyped-def]
    table, last = load_int(args, TABLE), load_int(args, LAST)
    while True:
        state = _acquire(args)
        if state >> KERNEL_BIT >= last:
            # the others have done it all
            return
        if _change(args, state, state + (1 << JOINED_BIT)):
            break
    number = state >> KERNEL_BIT
    while number < last:
        entry = number * ENTRY_WORDS
        _call(load_int(table, entry + FUNCTION), load_int(table, entry + ARGS))
        _end(args, table, number, last)
        number = _acquire(args) >> KERNEL_BIT


@functools.cache
def compiled() -> Any:
    """Load the loop, compiled or read from numba's cache.

    It is a C function of the argument block's address.
    """
    stamp = STAMP

    def run_kernels(args):  # type: ignore[no-untyped-def]
        if stamp != 0:
            _run(args)

    return compile_kernel(run_kernels)
