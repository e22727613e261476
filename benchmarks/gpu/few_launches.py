"""A few launches of a process of their own, for tools that watch a process.

python -P -m benchmarks.gpu.few_launches lora|three
"""

from __future__ import annotations

import sys

from benchmarks.gpu import stand_ins


def main() -> None:
    stand_ins.install()
    import torch

    from benchmarks.gpu.adapters import SiteAdapters
    from benchmarks.gpu.check_attention import LLAMA, Heads, make_attending
    from benchmarks.gpu.check_gemm import make_weight
    from benchmarks.gpu.machine import Machine
    from benchmarks.gpu.shapes import site_shapes
    from loraserve_kernels.gpu.gemm.gemm import weight_only_linear
    from loraserve_kernels.ops import apply_lora

    machine = Machine.found(None, is_alone=False, is_warming=False)
    dtype = torch.float16 if machine.is_tiny else torch.bfloat16
    count = 2 if machine.is_tiny else 32
    shape = site_shapes(machine.is_tiny)["qkv"]
    adapters = SiteAdapters(machine, "qkv", shape, [16] * count, 1, dtype)
    plan = adapters.plan(list(range(count)), 16)
    x, y = (machine.randn(count, width, dtype=dtype) for width in (shape.in_features, shape.width))
    apply_lora(x, y, plan, "qkv", 0)
    if sys.argv[1] == "three":
        weight_only_linear(x, make_weight(machine, "int8", shape.width, shape.in_features, dtype), None)
        heads = Heads(4, 2, 32) if machine.is_tiny else LLAMA
        make_attending(machine, heads, [1] * count, [33 if machine.is_tiny else 1024] * count, dtype).run()
    machine.synchronize()


if __name__ == "__main__":
    main()
