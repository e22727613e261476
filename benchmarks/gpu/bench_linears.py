"""Base linears alone, by format and rows; and with adapters: the linear and then LoRA, or both with
the expand in the linear's epilogue.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu.adapters import SiteAdapters
from benchmarks.gpu.check_gemm import make_weight
from benchmarks.gpu.close import dtype_name
from benchmarks.gpu.fused_gemm import weight_only_linear_lora
from benchmarks.gpu.limits import SiteShape, linear_work, share
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.parts import Case, Row
from benchmarks.gpu.shapes import module_shapes, site_shapes
from loraserve_kernels.common.quantized import QuantizedWeight
from loraserve_kernels.gpu.gemm.gemm import MAX_DECODE_ROWS, weight_only_linear
from loraserve_kernels.ops import apply_lora

ROWS = (64, 1, 32, 2048, 65, 128, 192, 256)
BETWEEN = (65, 128, 192, 256)
"""Where the kernel for few rows ends: two sites and formats tell."""
RANK = 16
MAX_ADAPTERS = 32
MAX_COPIES = 12
"""Of a weight: more than the cache holds."""


def cases(machine: Machine) -> Iterator[Case]:
    sites = dict(site_shapes(machine.is_tiny))
    out_features, in_features = module_shapes(machine.is_tiny)["lm_head"]
    sites["lm_head"] = SiteShape(in_features, (out_features,))
    formats = ("int4",) if machine.is_tiny else ("plain", "int8", "int4", "nf4", *(("fp8",) if machine.has_fp8 else ()))
    for num_rows in (2,) if machine.is_tiny else ROWS:
        for format in formats:
            for site, shape in sites.items():
                if (machine.is_tiny and site != "qkv") or (site == "lm_head" and format in ("int4", "nf4")):
                    continue
                if num_rows in BETWEEN and (site not in ("gate_up", "down") or format not in ("plain", "int8")):
                    continue
                name = f"{site}, {format}, {num_rows} rows"
                yield Case(name, lambda s=site, h=shape, f=format, r=num_rows: [_measure(machine, s, h, f, r)])


def _measure(machine: Machine, site: str, shape: SiteShape, format: str, num_rows: int) -> Row:
    dtype = torch.float16 if machine.is_tiny else torch.bfloat16
    first = make_weight(machine, format, shape.width, shape.in_features, dtype)
    num_bytes = first.nbytes if isinstance(first, Tensor) else first.num_bytes
    weights = [first]
    while len(weights) < machine.num_copies(num_bytes, MAX_COPIES):
        weights.append(make_weight(machine, format, shape.width, shape.in_features, dtype))
    x = machine.randn(num_rows, shape.in_features, dtype=dtype)
    timing = machine.time([lambda w=w: weight_only_linear(x, w, None) for w in weights])
    limit_s = machine.rates.seconds(linear_work(shape, num_rows, num_bytes))
    us = timing.us if timing else None
    row: Row = {
        "site": site,
        "base": dtype_name(dtype) if format == "plain" else format,
        "rows": num_rows,
        "us": us,
        "limit_us": None if us is None else limit_s * 1e6,
        "share": share(limit_s, us / 1e6 if us else None),
        "host_us": timing.host_us if timing else None,
    }
    plain = [w if isinstance(w, Tensor) else w.dequantize(dtype) for w in weights[:3]]
    library = machine.time([lambda w=w: F.linear(x, w) for w in plain])
    row["torch"] = library.us / us if library and us else None
    if num_rows <= MAX_DECODE_ROWS and site != "lm_head":
        row |= _with_lora(machine, site, shape, weights, x)
    return row


def _with_lora(
    machine: Machine, site: str, shape: SiteShape, weights: list[Tensor | QuantizedWeight], x: Tensor
) -> Row:
    count = min(MAX_ADAPTERS, x.shape[0])
    adapters = SiteAdapters(machine, site, shape, [RANK] * count, len(weights), x.dtype)
    plan = adapters.plan(sorted(i % count for i in range(x.shape[0])), 16)

    def two_steps(layer: int) -> Tensor:
        y = weight_only_linear(x, weights[layer], None)
        apply_lora(x, y, plan, site, layer)
        return y

    def at_once(layer: int) -> Tensor:
        return weight_only_linear_lora(x, weights[layer], plan, site, layer)

    def calls(work: Callable[[int], Tensor]) -> list[Callable[[], Tensor]]:
        return [lambda i=i: work(i) for i in range(len(weights))]

    timing = machine.time(calls(two_steps))
    found: Row = {"two_step_us": timing.us if timing else None}
    try:
        a, b = two_steps(0).double(), at_once(0).double()
        error = float((a - b).abs().max() / a.abs().max())
        found |= {"epilogue_error": error, "ok": error <= 2 * torch.finfo(x.dtype).eps}
        timing = machine.time(calls(at_once))
        return found | {"epilogue_us": timing.us if timing else None}
    except Exception as failure:
        # a trial of this folder's: the base's figures stand without it, unless the device is lost
        traceback.print_exception(failure)
        machine.synchronize()
        return found | {"ok": False, "note": f"epilogue: {type(failure).__name__}: {failure}"[:120]}
