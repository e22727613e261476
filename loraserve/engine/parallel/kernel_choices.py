"""Choice of kernels for all ranks: each is made once, by the clock of the rank that needs it first.

Results of ranks are summed, or go from one to the next; and the engine that follows this one has
the same kernels, whichever of its ranks needs them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from loraserve.types import KernelChoice
from loraserve_kernels.common.arithmetic import Arithmetic
from loraserve_kernels.cpu.linear.chooser import chooser

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Kind = tuple[str, int, int]
_POLL_S = 0.005


def share_choices(store: Store, check: Callable[[], None] = lambda: None) -> None:
    """Make choices together with the ranks that have this store.

    Args:
        check: called while this process waits for another's choice; it raises if that won't come.
    """

    def ask(kind: Kind) -> Arithmetic | None:
        key = _key(kind)
        if store.add(f"{key}/asked", 1) == 1:
            return None
        while not store.check([key]):
            check()
            time.sleep(_POLL_S)
        return Arithmetic(*json.loads(store.get(key)))

    def publish(kind: Kind, arithmetic: Arithmetic) -> None:
        store.set(_key(kind), json.dumps([arithmetic.name, arithmetic.kernel, arithmetic.instructions]))

    chooser().ask, chooser().on_choice = ask, publish


def choose_alone() -> None:
    """Make choices without other ranks from now on."""
    chooser().ask = chooser().on_choice = None


def chosen_kernels() -> list[KernelChoice]:
    """List the kernels that this process computes linears with on a CPU."""
    return [
        KernelChoice(format, out_features, in_features, one.name, one.kernel, one.instructions)
        for format, out_features, in_features, one in chooser().taken()
    ]


def adopt_kernels(kernels: Iterable[KernelChoice]) -> None:
    """Compute with kernels that another process of this machine has chosen."""
    for one in kernels:
        arithmetic = Arithmetic(one.arithmetic, one.kernel, one.instructions)
        chooser().adopt(one.format, one.out_features, one.in_features, arithmetic)


def _key(kind: Kind) -> str:
    return "kernel/" + "/".join(map(str, kind))
