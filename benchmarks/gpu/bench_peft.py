"""Tokens a second of decode steps in which every row has an adapter: our decoder, and transformers
with PEFT's mixed batch, for the same shape.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from benchmarks.gpu import peft_model
from benchmarks.gpu.bench_decode import RANK, World, make_world
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.parts import Case, Row
from benchmarks.gpu.shapes import llama

NUM_LAYERS = 8
CONTEXT = 128
MIXES = ((32, 32), (1, 1), (32, 1), (64, 8), (64, 32))
PEFT_STEPS = 8
OUR_STEPS = 20


class Both:
    """Our decoder and PEFT's, with as many layers; made when they are needed."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.mixes = ((2, 2),) if machine.is_tiny else MIXES
        self.num_layers = 2 if machine.is_tiny else NUM_LAYERS
        self.num_adapters = max(adapters for _, adapters in self.mixes)
        self.world = cache(self._world)
        self.peer = cache(self._peer)

    def _world(self) -> World:
        rows = sorted({rows for rows, _ in self.mixes})
        return make_world(self.machine, "none", rows, self.num_adapters, num_layers=self.num_layers, context=CONTEXT)

    def _peer(self) -> Any:
        config = {**llama(self.machine.is_tiny), "num_hidden_layers": self.num_layers}
        dtype = torch.float32 if self.machine.is_tiny else torch.bfloat16
        model = peft_model.make_model(config, self.machine.device, dtype)
        return peft_model.add_adapters(model, [RANK] * self.num_adapters)

    def measure(self, num_rows: int, num_adapters: int) -> Row:
        peer = self.peer()
        ours_ms = self.world().loop_ms(self.world().row_slots(num_rows, num_adapters), OUR_STEPS)
        peft_s = self._peft_step_s(peer, num_rows, num_adapters)
        row: Row = {"layers": self.num_layers, "rows": num_rows, "adapters": num_adapters, "context": CONTEXT}
        if ours_ms is not None:
            row |= {
                "ours": num_rows / ours_ms * 1e3,
                "peft": num_rows / peft_s,
                "ratio": peft_s / (ours_ms / 1e3),
            }
        return row

    @torch.inference_mode()
    def _peft_step_s(self, model: Any, num_rows: int, num_adapters: int) -> float:
        """Seconds of a step, after a prefill and two steps that aren't counted."""
        device, context, steps = (
            self.machine.device,
            4 if self.machine.is_tiny else CONTEXT,
            1 if self.machine.is_tiny else PEFT_STEPS,
        )
        names = [f"a{i % num_adapters}" for i in range(num_rows)]
        ids = torch.randint(3, 100, (num_rows, context), device=device)
        state = model(input_ids=ids, adapter_names=names, use_cache=True, logits_to_keep=1)

        def step(state: Any) -> Any:
            tokens = state.logits[:, -1:].argmax(-1)
            return model(input_ids=tokens, adapter_names=names, past_key_values=state.past_key_values, use_cache=True)

        for _ in range(1 if self.machine.is_tiny else 2):
            state = step(state)
        self.machine.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            state = step(state)
            # tokens are the host's after each step, as they are with ours
            state.logits[:, -1].argmax(-1).tolist()
        return (time.perf_counter() - start) / steps


def cases(machine: Machine) -> Iterator[Case]:
    """Raises: ModuleNotFoundError: transformers or PEFT is missing."""
    import peft  # noqa: F401 (said once, before anything is made)
    import transformers  # noqa: F401

    both = Both(machine)
    for rows, adapters in both.mixes:
        yield Case(f"{rows} rows, {adapters} adapters", lambda r=rows, a=adapters: [both.measure(r, a)])
