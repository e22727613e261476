"""Choice of kernels for all ranks, whose results are summed: rank 0's, by its clock."""

from __future__ import annotations

import json
from collections.abc import Callable

from torch._C._distributed_c10d import Store

from loraserve_kernels.common.arithmetic import Arithmetic
from loraserve_kernels.cpu.linear.chooser import chooser

Kind = tuple[str, int, int]


def publish_choices(store: Store | None) -> None:
    """Have other ranks know of each choice that this process makes from now on; None: no more."""
    if store is None:
        chooser().on_choice = None
        return

    def publish(kind: Kind, arithmetic: Arithmetic) -> None:
        store.set(_key(kind), json.dumps([arithmetic.name, arithmetic.kernel, arithmetic.instructions]))

    chooser().on_choice = publish


def follow_choices(store: Store) -> None:
    """Take rank 0's choices in the place of ones of this process's own, waiting for each."""

    def ask(kind: Kind) -> Arithmetic:
        return Arithmetic(*json.loads(store.get(_key(kind))))

    asked: Callable[[Kind], Arithmetic] = ask
    chooser().ask = asked


def _key(kind: Kind) -> str:
    return "kernel/" + "/".join(map(str, kind))
