"""The loop in which a team of threads runs one kernel after the other; compiled by numba.

Each kernel is a C function of its argument block's address that any number of threads enter and
that shares its work out by a counter, as everywhere in this package. Between two kernels the
threads meet at a barrier. They spin there, since the next kernel is microseconds away; a thread
that has spun for long offers its core to others, among which the one that it waits for may be.
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

from loraserve_kernels.cpu.simd import STAMP, fetch_add, load_int, pause

# The argument block, in int64 words. The counter of arrivals is on a cache line of its own.
ARRIVED, TABLE, FIRST, LAST, TEAM_SIZE, YIELD, NUM_WORDS = 0, 8, 9, 10, 11, 12, 13

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
    """Return what the C function at an address, which takes nothing, returns as an int."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(_I32, [])
        return builder.sext(builder.call(builder.inttoptr(values[0], kind.as_pointer()), []), _I64)

    return types.int64(types.intp), codegen


@intrinsic
def _acquire(typingctx: Any, address: Any) -> Any:
    """Return the int64 at `address`, and see what was written before it was."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(values[0], _I64.as_pointer()), "acquire", 8)

    return types.int64(types.intp), codegen


@numba.njit
def _run(args):  # type: ignore[no-untyped-def]
    table, team = load_int(args, TABLE), 1
    if load_int(args, TEAM_SIZE) != 0:
        team = _ask(load_int(args, TEAM_SIZE))
    expected = 0
    for number in range(load_int(args, FIRST), load_int(args, LAST)):
        function = load_int(table, number * ENTRY_WORDS + FUNCTION)
        if function == 0:
            continue
        _call(function, load_int(table, number * ENTRY_WORDS + ARGS))
        expected += team
        if fetch_add(args, 1) + 1 < expected:
            spins = 0
            while _acquire(args) < expected:
                pause()
                spins += 1
                if spins > _SPINS and load_int(args, YIELD) != 0:
                    _ask(load_int(args, YIELD))


@functools.cache
def compiled() -> Any:
    """Return the loop, compiled or read from numba's cache.

    It is a C function of the argument block's address.
    """
    stamp = STAMP

    def run_kernels(args):  # type: ignore[no-untyped-def]
        if stamp != 0:
            _run(args)

    return numba.cfunc(types.void(types.intp), cache=True)(run_kernels)
