"""Whole models of random weights on the device: logits of mixed batches, bits in any batch,
graphs beside eager launches, base rows beside a base without adapters.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import peft_model
from benchmarks.gpu.adapters import Fleet, make_fleet
from benchmarks.gpu.close import dtype_name, holds, same_bits
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.model import RandomBase, make_base
from benchmarks.gpu.parts import Case, Row
from benchmarks.gpu.reference_model import ReferenceModel
from benchmarks.gpu.shapes import TINY_LLAMA
from benchmarks.gpu.steps import Steps
from loraserve_kernels.cpu.lora.layout import LAYER_MODULES

LLAMA: dict[str, Any] = {
    **TINY_LLAMA,
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
QWEN3: dict[str, Any] = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "rms_norm_eps": 1e-6}
TINY_QWEN3: dict[str, Any] = {**TINY_LLAMA, "architectures": ["Qwen3ForCausalLM"], "rms_norm_eps": 1e-6}

EPSILONS = 6
"""Of the dtype: how far a row's logits may be from the exact ones, by their length.

Each layer rounds half a dozen times; a row with another's adapter is far beyond it.
"""


@dataclass(slots=True)
class World:
    """A base, adapters, and sequences of which the first has none."""

    name: str
    machine: Machine
    config: dict[str, Any]
    dtype: torch.dtype
    base: RandomBase
    fleet: Fleet
    steps: Steps
    prompts: list[list[int]]
    slots: list[int]

    @property
    def note(self) -> str:
        return f"{self.name}, {dtype_name(self.dtype)}"

    @property
    def everyone(self) -> list[int]:
        return list(range(len(self.prompts)))

    def adapter(self, sequence: int) -> Any:
        return self.fleet.modules.get(self.slots[sequence])

    def decode(self, sequences: list[int], *, slots: list[int] | None = None, eagerly: bool = False) -> Tensor:
        """One more row of each of these sequences, whose prompts are in the cache but for their
        last tokens; as many rows as the step has room for.
        """
        slots = [self.slots[i] for i in sequences] if slots is None else slots
        positions = [len(self.prompts[i]) - 1 for i in sequences]
        has_lora = self.steps.fill(sequences, positions, [self.prompts[i][-1] for i in sequences], slots)
        run = self.steps.run if eagerly else self.steps.decode
        return run(len(sequences), has_lora).clone()


def make_world(machine: Machine, config: dict[str, Any], dtype: torch.dtype, format: str) -> World:
    base = make_base(machine, config, dtype=dtype, format=format, keep_weights=True)
    lens, ranks = ([4, 3, 6], (8, 12)) if machine.is_tiny else ([40, 5, 64, 2, 130, 17], (8, 64, 16))
    stored = (dtype, torch.int8) if format != "none" else ()
    layers = base.config.num_layers
    hidden, vocab = base.config.hidden_size, base.config.vocab_size
    shapes = {**base.config.module_shapes, "lm_head": (vocab, hidden), "embed_tokens": (hidden, vocab)}
    all_ranks = [dict.fromkeys(LAYER_MODULES, rank) for rank in ranks]
    fleet = make_fleet(machine, shapes, all_ranks, dtype, stored=stored, num_layers=layers, strength=4.0)
    rng = random.Random(1)
    prompts = [[rng.randrange(3, base.config.vocab_size) for _ in range(size)] for size in lens]
    slots = [([0, *fleet.slots])[i % (1 + len(ranks))] for i in range(len(lens))]
    sizes = [1, len(lens)]
    steps = Steps(
        machine, base, fleet.pool, max_num_seqs=max(sizes), max_len=max(lens) + 2, max_num_tokens=sum(lens), sizes=sizes
    )
    steps.capture()
    name = f"{config['architectures'][0].removesuffix('ForCausalLM')}, base {format}"
    return World(name, machine, config, dtype, base, fleet, steps, prompts, slots)


def cases(machine: Machine) -> Iterator[Case]:
    llama, qwen3 = (TINY_LLAMA, TINY_QWEN3) if machine.is_tiny else (LLAMA, QWEN3)
    bf16, fp16 = machine.dtypes
    kinds = [(llama, bf16, "none"), (qwen3, fp16, "int8")]
    if not machine.is_tiny:
        kinds += [(qwen3, bf16, "none"), (llama, bf16, "int4"), (llama, fp16, "nf4"), (llama, fp16, "none")]
        kinds += [(llama, bf16, "fp8")] if machine.has_fp8 else []
    for config, dtype, format in kinds:
        world = cache(lambda c=config, d=dtype, f=format: make_world(machine, c, d, f))
        name = f"{config['architectures'][0]}, {format}, {dtype_name(dtype)}"
        checks = {
            "float64": check_logits,
            "cobatched": check_cobatched,
            "graphs": check_graphs,
            "base rows": check_base_rows,
            "PEFT": check_peft,
        }
        for what, check in checks.items():
            if machine.is_tiny and config is qwen3 and what != "float64":
                continue
            yield Case(f"{name}: {what}", lambda w=world, c=check: c(w()), group=name)


def _compare(name: str, rows: Tensor, expected: Tensor, world: World) -> Row:
    """By rows: the length of the difference, by the row's own."""
    error = float(((rows.double() - expected.double()).norm(dim=1) / expected.double().norm(dim=1)).max())
    bound = EPSILONS * float(torch.finfo(world.dtype).eps)
    return {"check": name, "error": error, "bound": bound, "ok": error <= bound, "note": world.note}


def check_logits(world: World) -> list[Row]:
    """All rows of a mixed prefill, then a decode step; and that the adapters make more of a
    difference than may be wrong.
    """
    model = ReferenceModel(world.base.config, world.base.weights)
    expected = [model.logits(prompt, world.adapter(i)) for i, prompt in enumerate(world.prompts)]
    plain = [model.logits(prompt, None) for prompt in world.prompts]
    rows = [_compare("logits of a mixed prefill", prefill(world), torch.cat(expected), world)]
    last = torch.stack([logits[-1] for logits in expected])
    sampled = world.steps.prefill(world.everyone, world.prompts, world.slots, last_rows_only=True)
    rows.append(_compare("logits of a mixed prefill's last rows alone", sampled, last, world))
    rows.append(_compare("logits of a mixed decode step", world.decode(world.everyone), last, world))
    differences = [
        float((a - b).norm() / a.norm()) for i, (a, b) in enumerate(zip(expected, plain, strict=True)) if world.slots[i]
    ]
    is_telling = min(differences) > 4 * rows[0]["bound"]
    note = f"{world.note}; without its adapter a sequence's logits are {min(differences):.2g} off"
    rows.append(holds("the adapters make a difference", is_telling, note))
    return rows


def prefill(world: World) -> Tensor:
    return world.steps.prefill(world.everyone, world.prompts, world.slots)


def check_cobatched(world: World) -> list[Row]:
    """A decode row's bits are the same alone and in the step; also, where nothing is left to a
    library, a prompt's rows.
    """
    prefill(world)
    together = world.decode(world.everyone)
    some = world.everyone[:2] if world.machine.is_tiny else world.everyone
    alone = torch.cat([world.decode([i]) for i in some])
    rows = [
        same_bits("decode rows alone and cobatched", together[some], alone, note=world.note, products_in=world.dtype)
    ]
    most = 64
    if sum(map(len, world.prompts)) <= most or "none" not in world.name:
        chosen = [i for i in world.everyone if len(world.prompts[i]) > most] or world.everyone
        if sum(map(len, world.prompts)) <= most:
            chosen = some
        starts = [sum(map(len, world.prompts[:i])) for i in world.everyone]
        whole = prefill(world)
        parts = torch.cat([whole[starts[i] : starts[i] + len(world.prompts[i])] for i in chosen])
        single = torch.cat([world.steps.prefill([i], [world.prompts[i]], [world.slots[i]]) for i in chosen])
        rows.append(
            same_bits("a prompt's rows alone and cobatched", parts, single, note=world.note, products_in=world.dtype)
        )
    return rows


def check_graphs(world: World) -> list[Row]:
    prefill(world)
    replayed = world.decode(world.everyone)
    eager = world.decode(world.everyone, eagerly=True)
    rows = [same_bits("a decode step's graph and eager launches", replayed, eager, note=world.note)]
    base = [0] * len(world.everyone)
    # the other family, without LoRA's nodes
    rows.append(
        same_bits(
            "a base-only step's graph and eager launches",
            world.decode(world.everyone, slots=base),
            world.decode(world.everyone, slots=base, eagerly=True),
            note=world.note,
        )
    )
    return rows


def check_base_rows(world: World) -> list[Row]:
    """Rows without an adapter are those of a base that has never heard of any."""
    prefill(world)
    base = [i for i in world.everyone if world.slots[i] == 0]
    mixed = world.decode(world.everyone)[base]
    only = world.decode(world.everyone, slots=[0] * len(world.everyone))[base]
    return [
        same_bits(
            "base rows beside adapters and in a base-only step", mixed, only, note=world.note, products_in=world.dtype
        )
    ]


def check_peft(world: World) -> list[Row]:
    """Raises: ModuleNotFoundError: transformers or PEFT is missing."""
    try:
        model = peft_model.make_model(world.config, world.machine.device, torch.float32)
        ranks = [next(iter(modules.values())).lora_a.shape[0] for modules in world.fleet.modules.values()]
        wrapped = peft_model.add_adapters(model, ranks)
    except ModuleNotFoundError as error:
        return [{"check": "logits of a mixed prefill, PEFT's", "note": f"left out: {error.name} is missing"}]
    peft_model.set_weights(wrapped, world.base.weights, list(world.fleet.modules.values()))
    names = [f"a{world.fleet.slots.index(slot)}" if slot else peft_model.BASE for slot in world.slots]
    expected = peft_model.logits(wrapped, world.prompts, names, world.machine.device)
    return [_compare("logits of a mixed prefill, PEFT's", prefill(world), torch.cat(expected), world)]
