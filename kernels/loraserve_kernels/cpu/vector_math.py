"""The process's choice of vector mathematics, made before threads share it."""

from __future__ import annotations

import torch


def choose_functions() -> None:
    """After the call, elementwise functions are as exact in this process as they should be.

    Cheap; once before the first that many threads share.

    MKL chooses the machine code of each of its vector functions at the first call. Where several
    threads make that call at once, one of them may be given the code of the lowest accuracy (errors
    near 1e-4), for its part of that one call. A table of angles that is made so is wrong for as
    long as the process lives.

    Source: pytorch issue 188792.
    """
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype)
        for function in (torch.cos, torch.sin, torch.sqrt, torch.exp, torch.log, torch.tanh):
            function(one)
