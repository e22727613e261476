"""How fast the CPU kernels are, beside what this machine can read: LoRA, paged attention, linears.

Prints Markdown tables.

    OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=20000 python kernels/benchmarks/cpu_lora.py

Weights are those of a whole model (12 layers at hidden 768, or some of 22 at 2048), gone through
layer by layer, so that none is still in a cache from the run before. The best of several runs
counts, since others may share the machine.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from loraserve_kernels import ops
from loraserve_kernels.common.plan import make_plan
from loraserve_kernels.common.quantized import quantize
from loraserve_kernels.cpu.attention import paged as cpu_attention
from loraserve_kernels.cpu.linear import gemm
from loraserve_kernels.cpu.linear.chooser import chooser
from loraserve_kernels.cpu.lora import apply as cpu_lora
from loraserve_kernels.cpu.lora.layout import LAYER_SITES, SITES, LoraModule, PackedAdapter, pack_adapter

RANKS = (8, 16, 32, 64)
# (adapters, rows of each)
STEPS = ((1, 1), (8, 1), (32, 1), (32, 4), (1, 64), (8, 64), (1, 512))
CONTEXTS = (64, 256, 1024, 2000)


@dataclass(frozen=True, slots=True)
class Base:
    """A base's shape; `layers` is as many as are measured."""

    name: str
    hidden: int
    kv: int
    intermediate: int
    layers: int
    heads: int

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Module → (out_features, in_features)."""
        h, i = self.hidden, self.intermediate
        return {
            "q_proj": (h, h),
            "k_proj": (self.kv, h),
            "v_proj": (self.kv, h),
            "o_proj": (h, h),
            "gate_proj": (i, h),
            "up_proj": (i, h),
            "down_proj": (h, i),
        }


BASES = {"S": Base("S", 768, 256, 2048, 12, 12), "M": Base("M", 2048, 256, 5632, 4, 32)}


def best_s(work: Callable[[], object], times: int) -> float:
    """Seconds of the fastest of several runs."""
    work()
    elapsed = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        elapsed.append(time.perf_counter() - start)
    return min(elapsed)


def read_bytes_per_s() -> float:
    """What all of torch's threads together read."""
    large = torch.ones(64 << 20)
    return large.nbytes / best_s(large.sum, 8)


def make_adapter(base: Base, rank: int, dtype: torch.dtype) -> PackedAdapter:
    modules = [
        LoraModule(layer, module, torch.randn(rank, k), torch.randn(n, rank), 0.5)
        for layer in range(base.layers)
        for module, (n, k) in base.shapes.items()
    ]
    return pack_adapter(modules, num_layers=base.layers, module_shapes=base.shapes, dtype=dtype)


def lora(base: Base, dtype: torch.dtype, read: float, times: int) -> None:
    adapters = [make_adapter(base, RANKS[i % len(RANKS)], dtype) for i in range(32)]
    print(
        f"\n### LoRA, {base.name}: hidden {base.hidden}, {base.layers} layers × 4 sites, ranks {RANKS} in turn, "
        f"{dtype}\n"
    )
    print(
        "| adapters | rows of each | PyTorch by segment, ms | one launch, ms | of reading the weights once | GFLOP/s |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for num_adapters, num_rows in STEPS:
        used = [adapters[i % 32] for i in range(num_adapters)]
        segments = [(adapter, i * num_rows, (i + 1) * num_rows) for i, adapter in enumerate(used)]
        num_tokens = num_adapters * num_rows
        tensors = {
            site: (
                torch.randn(num_tokens, base.shapes[m[0]][1]),
                torch.randn(num_tokens, sum(base.shapes[n][0] for n in m)),
            )
            for site, m in ((site, SITES[site]) for site in LAYER_SITES)
        }

        def step(apply: Callable[..., None]) -> None:
            plan = make_plan(segments, num_tokens)  # noqa: B023
            for layer in range(base.layers):
                for site, (x, y) in tensors.items():  # noqa: B023
                    apply(x, y, plan, site, layer)

        by_segment, at_once = (
            best_s(lambda apply=apply: step(apply), times) for apply in (cpu_lora.apply_lora_torch, ops.apply_lora)
        )
        num_bytes = sum(adapter.num_bytes for adapter in used)
        rate = sum(2 * adapter.data.numel() * num_rows for adapter in used) / at_once / 1e9
        share = num_bytes / read / at_once
        print(
            f"| {num_adapters} | {num_rows} | {1e3 * by_segment:.2f} | {1e3 * at_once:.2f} | {100 * share:.0f} % | "
            f"{rate:.0f} |"
        )


def attend(base: Base, read: float, times: int) -> None:
    head_dim, kv_heads, block_size = 64, base.kv // 64, 16
    print(f"\n### Paged attention, one layer of {base.name}: {base.heads} heads, {kv_heads} key heads of {head_dim}\n")
    print(
        "| sequences | rows of each | context | gathered by PyTorch, µs | from the blocks, µs | "
        "of reading keys and values once |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    cases = [(32, 1, [context] * 32) for context in CONTEXTS]
    cases += [
        (32, 1, [64 + 60 * i for i in range(32)]),
        (1, 1, [2000]),
        (8, 64, [64] * 8),
        (1, 512, [512]),
        (1, 512, [2000]),
    ]
    for num_seqs, num_rows, contexts in cases:
        counts = [-(-context // block_size) for context in contexts]
        order = torch.randperm(sum(counts)).int()
        tables = torch.zeros(num_seqs, max(counts), dtype=torch.int32)
        used = 0
        for i, count in enumerate(counts):
            tables[i, :count] = order[used : used + count]
            used += count
        shape = (sum(counts), kv_heads, block_size, head_dim)
        # a cache for each of some layers: one alone would stay in the processor's
        caches = [
            (torch.randn(shape), torch.randn(shape))
            for _ in range(max(1, min(12, (256 << 20) // (8 * sum(counts) * 1024 * kv_heads))))
        ]
        starts = [i * num_rows for i in range(num_seqs + 1)]
        q = torch.randn(starts[-1], base.heads, head_dim)
        out = torch.empty_like(q)
        plan = cpu_attention.make_attention_plan(starts, contexts, tables, block_size)

        def step(apply: Callable[..., None]) -> None:
            for k, v in caches:  # noqa: B023
                apply(q, k, v, plan, out, scale=0.125)  # noqa: B023

        gathered, in_place = (
            best_s(lambda apply=apply: step(apply), times) / len(caches)
            for apply in (cpu_attention.attend_torch, cpu_attention.paged_attention)
        )
        share = sum(contexts) * kv_heads * head_dim * 8 / read / in_place
        label = str(contexts[0]) if len(set(contexts)) == 1 else f"{contexts[0]}…{contexts[-1]}"
        print(
            f"| {num_seqs} | {num_rows} | {label} | {1e6 * gathered:.0f} | {1e6 * in_place:.0f} | {100 * share:.0f} % |"
        )


def int8_weight(weight: Tensor) -> gemm.Int8Weight:
    rounded = quantize(weight, "int8")
    kernel = chooser().choose("int8", *weight.shape).kernel
    return gemm.pack_int8(rounded.codes, rounded.scales.flatten(), kernel)


def linears(base: Base, read: float, times: int) -> None:
    print(f"\n### Linears of one layer of {base.name} (qkv, o, gate_up, down), µs\n")
    print("| rows | float32, PyTorch | float32, blocked | of reading once | int8 | of reading once |")
    print("| --- | --- | --- | --- | --- | --- |")
    shapes = [
        (sum(base.shapes[m][0] for m in site), base.shapes[site[0]][1])
        for site in (SITES[name] for name in LAYER_SITES)
    ]
    weights = [torch.randn(n, k) for _ in range(base.layers) for n, k in shapes]
    packed, rounded = [gemm.pack_float(w) for w in weights], [int8_weight(w) for w in weights]
    num_bytes = sum(w.nbytes for w in weights)
    for num_rows in (1, 8, 32, 64, 512):
        inputs = {k: torch.randn(num_rows, k) for _, k in shapes}

        def run(apply: Callable[[Tensor, object], Tensor], of: list[object], inputs: dict[int, Tensor]) -> float:
            def step() -> None:
                for weight, form in zip(weights, of, strict=True):
                    apply(inputs[weight.shape[1]], form)

            return best_s(step, times)

        plain, blocked, int8 = (
            run(torch.nn.functional.linear, weights, inputs),
            run(gemm.float_linear, packed, inputs),
            run(gemm.int8_linear, rounded, inputs),
        )
        per_layer = 1e6 / base.layers
        print(
            f"| {num_rows} | {plain * per_layer:.0f} | {blocked * per_layer:.0f} | "
            f"{100 * num_bytes / read / blocked:.0f} % "
            f"| {int8 * per_layer:.0f} | {25 * num_bytes / read / int8:.0f} % |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="S,M", help="S, M or both")
    parser.add_argument(
        "--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"), help="what adapters are stored in"
    )
    parser.add_argument("--times", type=int, default=8, help="runs of each point")
    options = parser.parse_args()
    start = time.perf_counter()
    ops.warm_up(getattr(torch, options.dtype))
    policy = " ".join(f"{name}={os.environ.get(name, '')}" for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"))
    print(f"kernels ready in {time.perf_counter() - start:.2f} s; {torch.get_num_threads()} threads; {policy}")
    read = read_bytes_per_s()
    print(f"this machine reads {read / 1e9:.1f} GB/s; torch {torch.__version__}; numba: {cpu_lora.HAS_NUMBA}")
    for name in options.base.split(","):
        lora(BASES[name], getattr(torch, options.dtype), read, options.times)
        attend(BASES[name], read, options.times)
        linears(BASES[name], read, options.times)


if __name__ == "__main__":
    main()
