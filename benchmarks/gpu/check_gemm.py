"""Weight-only linears on the device: every format, few rows and many, odd shapes, biases, float32
out; with LoRA's expand in the epilogue.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.adapters import Fleet, make_fleet
from benchmarks.gpu.close import against_float64, dtype_name, same_bits
from benchmarks.gpu.fused_gemm import weight_only_linear_lora
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.parts import Case, Row
from benchmarks.gpu.shapes import module_shapes
from loraserve_kernels.common.quantized import QuantizedWeight, quantize
from loraserve_kernels.cpu.lora.layout import SITES
from loraserve_kernels.gpu.gemm.gemm import MAX_DECODE_ROWS, weight_only_linear
from loraserve_kernels.gpu.lora.plan import GpuLoraPlan

Weight = Tensor | QuantizedWeight
FORMATS = ("plain", "int8", "int4", "int4 with zeros", "int4, groups of 32", "nf4", "fp8")


def make_weight(machine: Machine, format: str, out_features: int, in_features: int, dtype: torch.dtype) -> Weight:
    """A random weight in a format by its name in `FORMATS`."""
    weight = machine.randn(out_features, in_features, std=in_features**-0.5)
    if format == "plain":
        return weight.to(dtype)
    name, _, kind = format.partition(",") if "," in format else format.partition(" ")
    return quantize(weight, name, 32 if kind.strip() == "groups of 32" else None, has_zeros=kind == "with zeros").to(
        machine.device
    )


def dequantized(weight: Weight) -> Tensor:
    return weight.double() if isinstance(weight, Tensor) else weight.dequantize(torch.float64)


def formats(machine: Machine) -> Sequence[str]:
    return [format for format in FORMATS if format != "fp8" or machine.has_fp8]


def cases(machine: Machine) -> Iterator[Case]:
    shapes = [(130, 256)] if machine.is_tiny else [(4096, 14_336), (1000, 4096), (28_672, 4096)]
    # an odd number of rows has a bias; each kind of step is another kernel to compile
    rows = (3, 70) if machine.is_tiny else (3, 32, 64, 16, 300)
    for shape in shapes:
        for dtype, format in product(machine.dtypes, formats(machine)):
            if machine.is_tiny and dtype == torch.bfloat16 and format not in ("plain", "int8", "nf4"):
                continue
            name = f"{format}, {dtype_name(dtype)}, {shape[0]}×{shape[1]}"
            yield Case(name, lambda f=format, d=dtype, s=shape: _check(machine, f, d, s, rows))
    for dtype in machine.dtypes:
        fleet = cache(lambda dtype=dtype: _fleet(machine, dtype))
        for format in ("int4",) if machine.is_tiny else ("plain", "int8", "int4", "nf4"):
            name = f"epilogue, {format}, {dtype_name(dtype)}"
            yield Case(name, lambda f=format, d=dtype, a=fleet: _check_epilogue(machine, f, d, a()))


def _check(machine: Machine, format: str, dtype: torch.dtype, shape: tuple[int, int], rows: Sequence[int]) -> list[Row]:
    weight = make_weight(machine, format, *shape, dtype)
    wide, bias = dequantized(weight), machine.randn(shape[0], dtype=dtype)
    x = machine.randn(max(rows), shape[1], dtype=dtype)
    found, name = [], f"{format} {shape[0]}×{shape[1]}"
    for num_rows in rows:
        has_bias = num_rows % 2 == 1
        result = weight_only_linear(x[:num_rows], weight, bias if has_bias else None)
        expected = x[:num_rows].double() @ wide.T + (bias.double() if has_bias else 0)
        # many rows multiply with the weight rounded to the activations' dtype
        factor = 2.0 if num_rows > MAX_DECODE_ROWS and isinstance(weight, QuantizedWeight) else 1.0
        note = f"{dtype_name(dtype)}, {num_rows} rows"
        found.append(against_float64(f"linear {name}", result, expected, factor=factor, note=note))
    few = min(MAX_DECODE_ROWS, max(rows))
    head = weight_only_linear(x[:few], weight, None, out_dtype=torch.float32)
    # tensor cores cut off sums a little short of float32; two codes in a byte may be rounded to the
    # activations' dtype
    is_packed = isinstance(weight, QuantizedWeight) and weight.is_packed
    factor = torch.finfo(dtype).eps / torch.finfo(torch.float32).eps if is_packed else 1024
    note = f"{dtype_name(dtype)}, {few} rows"
    expected = x[:few].double() @ wide.T
    found.append(against_float64(f"linear {name} into float32", head, expected, factor=factor, note=note))
    chosen = [i for i in (0, 15, 16, 31, 63) if i < few]
    together = weight_only_linear(x[:few], weight, None)[chosen]
    alone = torch.cat([weight_only_linear(x[i : i + 1], weight, None) for i in chosen])
    label = f"linear {name}: a row alone and among {few}"
    found.append(same_bits(label, together, alone, note=dtype_name(dtype), products_in=dtype))
    return found


def _fleet(machine: Machine, dtype: torch.dtype) -> Fleet:
    return make_fleet(machine, module_shapes(machine.is_tiny), (16, 8, 33), dtype, stored=(dtype, torch.int8))


def _check_epilogue(machine: Machine, format: str, dtype: torch.dtype, fleet: Fleet) -> list[Row]:
    """Against float64 as well as, for base rows, against the linear alone."""
    shapes, found = module_shapes(machine.is_tiny), []
    for site in ("qkv",) if machine.is_tiny else ("qkv", "gate_up", "down"):
        width, in_features = sum(shapes[name][0] for name in SITES[site]), shapes[SITES[site][0]][1]
        weight = make_weight(machine, format, width, in_features, dtype)
        wide = dequantized(weight)
        for num_rows in (5,) if machine.is_tiny else (1, 30, 64):
            slots = [([*fleet.slots, 0])[i % 4] for i in range(num_rows)]
            plan = GpuLoraPlan(fleet.pool, max_num_tokens=64, max_work_items=1000, block_m=16)
            plan.fill(np.array(slots, dtype=np.int32))
            x = machine.randn(num_rows, in_features, dtype=dtype)
            result = weight_only_linear_lora(x, weight, plan, site, 0)
            expected = fleet.add_to(x, x.double() @ wide.T, slots, site, 0, None)
            name, note = f"linear {format} and LoRA {site} in one", f"{dtype_name(dtype)}, {num_rows} rows"
            found.append(against_float64(name, result, expected, note=note))
            is_base = torch.tensor([slot == 0 for slot in slots], device=machine.device)
            base = weight_only_linear(x, weight, None)
            found.append(same_bits(f"{name}: base rows", result[is_base], base[is_base], note=note, products_in=dtype))
    return found
