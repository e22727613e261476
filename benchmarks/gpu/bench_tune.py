"""Tile sizes for this device, by shape: each candidate's time beside the default's, and a file of
the best that the kernels read (`loraserve_kernels.gpu.tuning`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu.adapters import SiteAdapters
from benchmarks.gpu.check_attention import LLAMA, Heads, make_attending
from benchmarks.gpu.check_gemm import make_weight
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.parts import Case, Row
from benchmarks.gpu.shapes import site_shapes
from loraserve_kernels.gpu import tuning
from loraserve_kernels.gpu.attention import paged
from loraserve_kernels.gpu.gemm import gemm
from loraserve_kernels.gpu.lora import apply as lora

GAIN = 1.03
"""A candidate must be that many times as fast as the default to be kept: less is noise."""
REPLAYS = 10
FILE = "gpu-tuned.json"
BUILD = Path(__file__).resolve().parents[2] / "build"

DECODE = ((64, 4, 3), (64, 4, 6), (64, 8, 4), (32, 4, 5), (128, 4, 4), (128, 8, 4), (128, 8, 3))
"""block_n, num_warps, num_stages."""
PREFILL = (
    (128, 128, 64, 8, 4, 3),
    (128, 128, 64, 8, 8, 4),
    (128, 256, 64, 8, 8, 3),
    (64, 128, 64, 8, 4, 4),
    (64, 256, 64, 8, 8, 3),
    (128, 128, 128, 8, 8, 2),
)
"""block_m, block_n, block_k, rows_first, num_warps, num_stages."""
SHRINK = ((4, 3), (4, 5), (8, 4), (2, 4))
"""num_warps, num_stages."""
EXPAND = ((128, 4, 2), (128, 4, 3), (256, 4, 3), (256, 8, 2), (64, 4, 3))
"""block, num_warps, num_stages."""
ATTEND_DECODE = ((32, 4, 2), (32, 4, 4), (64, 4, 3), (64, 4, 2), (16, 2, 4))
ATTEND_CHUNK = ((64, 4, 2), (64, 8, 3), (32, 4, 3), (128, 4, 2), (128, 8, 2))
"""block_n, num_warps, num_stages."""

Call = Callable[[], Tensor]


class Tuner:
    """The best so far, written after each shape."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.best: dict[str, dict[str, dict[str, int]]] = {}
        self.times: dict[str, float] = {}

    def tune(
        self, kernel: str, key: str, fields: Sequence[str], candidates: Sequence[tuple[int, ...]], calls: Sequence[Call]
    ) -> Row:
        """Time the calls with each candidate's tile sizes; return the shape's row.

        A candidate that doesn't compile, or that differs from the default, is left out, and named.
        """
        machine, left_out = self.machine, []
        default = calls[0]().clone()
        machine.synchronize()
        timing = machine.time(calls, REPLAYS)
        default_us = timing.us if timing else None
        best_us, best = default_us, None
        for numbers in candidates[:2] if machine.is_tiny else candidates:
            sizes = dict(zip(fields, numbers, strict=True))
            with mock.patch.object(tuning, "active", lambda s=sizes: {kernel: {key: s}}):
                try:
                    result = calls[0]()
                    machine.synchronize()
                except Exception as error:
                    if "illegal" in str(error) or "CUDA error" in str(error):
                        raise
                    # too much shared memory, or too many registers
                    left_out.append(f"{numbers}: {type(error).__name__}")
                    continue
                if not machine.is_warming and not _is_close(result, default):
                    left_out.append(f"{numbers}: other results")
                    continue
                timing = machine.time(calls, REPLAYS)
            if machine.is_tiny and best is None:
                best = sizes
            if timing is not None and best_us is not None and default_us is not None and timing.us < best_us:
                best_us = timing.us
                best = sizes if default_us > GAIN * timing.us else best
        if best is not None:
            self.best.setdefault(kernel, {})[key] = best
            self._write()
        row: Row = {"kernel": kernel, "shape": key, "note": "; ".join(left_out)[:120]}
        if default_us is not None and best_us is not None:
            sizes_text = " ".join(f"{name}={value}" for name, value in (best or {}).items())
            row |= {"us": default_us, "best_us": best_us, "gain": default_us / best_us, "sizes": sizes_text}
        return row

    def _write(self) -> None:
        machine = self.machine
        if machine.results is None or machine.is_warming:
            return
        facts = machine.facts()
        # once beside the tables, once where the next call on this machine finds it
        for folder in (machine.results, *(() if machine.is_tiny else (BUILD,))):
            tuning.write(folder / FILE, facts["device"], self.best, {"versions": facts["versions"]})


def _is_close(result: Tensor, default: Tensor) -> bool:
    wide, size = default.double(), default.double().abs().max().clamp_min(1e-30)
    error = float((result.double() - wide).abs().max().nan_to_num(nan=float("inf")) / size)
    return error <= 4 * float(torch.finfo(default.dtype).eps)


def cases(machine: Machine) -> Iterator[Case]:
    tuner = Tuner(machine)
    sites = site_shapes(machine.is_tiny)
    formats = ("int4",) if machine.is_tiny else ("int8", "plain", "int4")
    for format in formats:
        for site in ("qkv",) if machine.is_tiny else ("gate_up", "down", "qkv", "o"):
            for rows in (2,) if machine.is_tiny else (32, 1, 64):
                name = f"decode linear, {format}, {site}, {rows} rows"
                yield Case(name, lambda f=format, s=site, r=rows: [_linear(tuner, f, s, r)], group=f"{format} {site}")
    yield Case("attention, decode", lambda: [_attend_decode(tuner)])
    yield Case("attention, chunk", lambda: [_attend_chunk(tuner)])
    for site in ("qkv",) if machine.is_tiny else tuple(sites):
        for block_m in (16,) if machine.is_tiny else (16, 32):
            yield Case(f"LoRA, {site}, tiles of {block_m}", lambda s=site, b=block_m: _lora(tuner, s, b))
    for format in formats if machine.is_tiny else ("int8", "int4"):
        for site in ("qkv",) if machine.is_tiny else ("gate_up", "down", "qkv", "o"):
            rows = 70 if machine.is_tiny else 2048
            name = f"prompt linear, {format}, {site}"
            yield Case(name, lambda f=format, s=site, r=rows: [_linear(tuner, f, s, r)])
    yield Case("the file, read again", lambda: [_read_again(tuner)])


def _linear(tuner: Tuner, format: str, site: str, num_rows: int) -> Row:
    machine, shape = tuner.machine, site_shapes(tuner.machine.is_tiny)[site]
    dtype = torch.float16 if machine.is_tiny else torch.bfloat16
    weights = [make_weight(machine, format, shape.width, shape.in_features, dtype)]
    size = weights[0].nbytes if isinstance(weights[0], Tensor) else weights[0].num_bytes
    is_prompt = num_rows > gemm.MAX_DECODE_ROWS
    while len(weights) < (2 if is_prompt else machine.num_copies(size, 16)):
        weights.append(make_weight(machine, format, shape.width, shape.in_features, dtype))
    x = machine.randn(num_rows, shape.in_features, dtype=dtype)
    calls = [lambda w=w: gemm.weight_only_linear(x, w, None) for w in weights]
    kind = gemm.kind_of(weights[0])
    if is_prompt:
        fields = ("block_m", "block_n", "block_k", "rows_first", "num_warps", "num_stages")
        key = f"{kind}/{shape.width}x{shape.in_features}"
        return tuner.tune("prefill_gemm", key, fields, PREFILL, calls)
    most = next(most for most in gemm.DECODE_CONFIGS if num_rows <= most)
    key = f"{kind}/{shape.width}x{shape.in_features}/{most}"
    return tuner.tune("decode_gemm", key, ("block_n", "num_warps", "num_stages"), DECODE, calls)


def _attend(tuner: Tuner, kernel: str, query_lens: list[int], context_lens: list[int], candidates: Any) -> Row:
    machine = tuner.machine
    heads = Heads(4, 2, 32) if machine.is_tiny else LLAMA
    dtype = torch.float16 if machine.is_tiny else torch.bfloat16
    step = make_attending(machine, heads, query_lens, context_lens, dtype)
    caches = [(step.k_cache, step.v_cache)]
    while len(caches) < machine.num_copies(2 * step.k_cache.nbytes, 16):
        caches.append((step.k_cache.clone(), step.v_cache.clone()))
    out = torch.empty_like(step.q)

    def call(k: Tensor, v: Tensor) -> Tensor:
        paged.paged_attention(step.q, k, v, step.plan, out, scale=heads.scale)
        return out

    key = f"{heads.head_dim}/{heads.num_heads // heads.num_kv_heads}"
    calls = [lambda k=k, v=v: call(k, v) for k, v in caches]
    return tuner.tune(kernel, key, ("block_n", "num_warps", "num_stages"), candidates, calls)


def _attend_decode(tuner: Tuner) -> Row:
    # short contexts and long ones: one choice serves both
    contexts = [20, 9] if tuner.machine.is_tiny else [512] * 32 + [4096] * 32
    return _attend(tuner, "attend_decode", [1] * len(contexts), contexts, ATTEND_DECODE)


def _attend_chunk(tuner: Tuner) -> Row:
    rows, context = (20, 40) if tuner.machine.is_tiny else (2048, 2048)
    return _attend(tuner, "attend_chunk", [rows], [context], ATTEND_CHUNK)


def _lora(tuner: Tuner, site: str, block_m: int) -> list[Row]:
    """Shrink, then expand of its sums: 32 rows of as many adapters, or prompts of eight."""
    machine, shape = tuner.machine, site_shapes(tuner.machine.is_tiny)[site]
    dtype = torch.float16 if machine.is_tiny else torch.bfloat16
    count, each = (2, 1) if machine.is_tiny else (32, 1) if block_m == 16 else (8, 128)
    copies = machine.num_copies(count * 16 * shape.weights_per_rank * dtype.itemsize, 16)
    adapters = SiteAdapters(machine, site, shape, [16] * count, copies, dtype)
    plan = adapters.plan([i for i in range(count) for _ in range(each)], block_m)
    x, y = (machine.randn(count * each, width, dtype=dtype) for width in (shape.in_features, shape.width))
    # sums of a few numbers, so that adding them again and again stays finite
    x, result = x * 0.01, torch.empty_like(y)

    def whole(layer: int) -> Tensor:
        result.copy_(y)
        lora.apply_lora(x, result, plan, site, layer)
        return result

    calls = [lambda i=i: whole(i) for i in range(copies)]
    widths = "+".join(str(width) for width in shape.out_features)
    rows = [tuner.tune("shrink", f"{shape.in_features}/{block_m}", ("num_warps", "num_stages"), SHRINK, calls)]
    fields = ("block", "num_warps", "num_stages")
    rows.append(tuner.tune("expand", f"{widths}/16/{block_m}", fields, EXPAND, calls))
    return rows


def _read_again(tuner: Tuner) -> Row:
    """Check that kernels of another process read what was written."""
    machine = tuner.machine
    path = Path() if machine.results is None else machine.results / FILE
    if machine.is_warming or not tuner.best:
        return {"kernel": "file", "shape": "", "note": "no shape has better tile sizes than its default"}
    found = tuning.read(path)
    if found != tuner.best:
        raise RuntimeError(f"{path} has other tile sizes than were found")
    config = gemm.DECODE_CONFIGS[16]
    for key, sizes in found.get("decode_gemm", {}).items():
        with mock.patch.object(tuning, "active", return_value=found):
            used = asdict(tuning.tuned("decode_gemm", key, config))
        if any(used[name] != value for name, value in sizes.items()):
            raise RuntimeError(f"a kernel reads {used} for {key}, not {sizes}")
    return {"kernel": "file", "shape": path.name, "note": f"{sum(map(len, found.values()))} shapes"}
