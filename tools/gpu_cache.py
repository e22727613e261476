"""Compile what `make gpu` and a GPU's engine launch, without a GPU, for its machine.

    python3.12 -P tools/gpu_cache.py --capability 90                     # .gpu/triton-cache.tar.xz
    python3 -P tools/gpu_cache.py --capability 80,90 --check              # nothing is kept

The parts of `make gpu` run on tensors without memory; where a kernel would be launched, Triton
compiles it as it would for the launch, and puts it into its cache. `make gpu` unpacks the file.
Triton finds a kernel there only with the very same build of Triton: run this with the Python and
the triton of the GPU's machine; torch may be any. With --check, a kernel that keeps registers in
memory fails.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from benchmarks.gpu import stand_ins  # noqa: E402 (once it can be found)

stand_ins.install()

import torch  # noqa: E402
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

from benchmarks.gpu import close, machine, prepared  # noqa: E402
from benchmarks.gpu.machine import Machine  # noqa: E402
from benchmarks.gpu.parts import BY_NAME, PARTS  # noqa: E402
from benchmarks.gpu.sass import local_accesses  # noqa: E402
from loraserve.engine.execution import gpu_runner  # noqa: E402
from loraserve_kernels import ops  # noqa: E402
from loraserve_kernels.common.quantized import QuantizedWeight  # noqa: E402
from loraserve_kernels.common.quantized import quantize as really_quantize  # noqa: E402

ENGINE_FORMATS = ("none", "int8", "int4", "nf4", "fp8")
NOT_OURS = ("peft", "tools")
"""Parts that launch others' kernels, or what another part launches."""
LAUNCHERS = "LORASERVE_GPU_LAUNCHERS"
"""Set for processes whose kernels are kept: what launches them is compiled too."""
USED = re.compile(r"\b(REG|STACK|LOCAL):(\d+)")


class Driver:
    """Stands for a GPU's driver: Triton asks it for the target alone while it compiles."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)
        self.utils = SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": 232448})
        self.launcher_cls = None

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


class Compiled:
    """Kernels by their hash, and what went wrong."""

    def __init__(self) -> None:
        self.kernels: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self.spills: list[str] = []
        self.once: list[str] = []

    def launch(self, function: Any) -> Any:
        """What `kernel[grid]` returns: a call that compiles for its arguments."""

        def compile_it(*args: Any, **options: Any) -> None:
            started = cpu_seconds()
            kernel = function.run(*args, grid=(1,), warmup=True, **options)
            if kernel is None or kernel.hash in self.kernels:
                return
            self.kernels[kernel.hash] = kernel.name
            self.seconds[kernel.hash] = cpu_seconds() - started
            if LAUNCHERS in os.environ:
                compile_launcher(kernel)
            self._look(kernel)

        return compile_it

    def _look(self, kernel: Any) -> None:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()

            def read(what: str) -> str:
                command = [triton.knobs.nvidia.cuobjdump.path, what, file.name]
                return subprocess.run(command, capture_output=True, text=True, check=True).stdout

            usage = {name: int(number) for name, number in USED.findall(read("-res-usage"))}
            if not usage.get("STACK") and not usage.get("LOCAL"):
                return
            accesses, in_loops = local_accesses(read("-sass"))
        words = f"{kernel.name}: {usage}, {accesses} loads and stores, {in_loops} of them in loops, {described(kernel)}"
        (self.spills if in_loops or usage.get("LOCAL") else self.once).append(words[:1200])


def cpu_seconds() -> float:
    """Seconds of processors that this process and those that it has waited for have used."""
    return sum(os.times()[:4])


def described(kernel: Any) -> str:
    """What a kernel was compiled for: its options, its pointers' types, and its constants."""
    names = kernel.src.fn.arg_names
    constants = {names[path[0]]: value for path, value in kernel.src.constants.items() if len(path) == 1}
    types = {name: kind for name, kind in kernel.src.signature.items() if name not in constants}
    options = {name: getattr(kernel.metadata, name) for name in ("num_warps", "num_stages", "maxnreg")}
    return f"{options}, {constants}, {types}"


def compile_launcher(kernel: Any) -> None:
    """Put the C code that launches such a kernel into the cache, where this Triton has such code.

    It links with the driver's library, in whose place `make_driver_library` put an empty one: what
    is built here is loaded where the driver is.
    """
    from triton.backends.nvidia import driver
    from triton.runtime import build

    if not hasattr(driver, "make_launcher"):
        return
    # without a driver what was built can't be loaded, and would be built again for each kernel
    with mock.patch.object(build, "_load_module_from_path", return_value=mock.MagicMock()):
        driver.CudaUtils()
        driver.CudaLauncher(kernel.src, kernel.metadata)


def make_driver_library(folder: Path) -> None:
    """Build a library without functions that is called as CUDA's driver is."""
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "/dev/null", "-o"]
    subprocess.run([*command, str(folder / "libcuda.so.1")], check=True)


def quantize(weight: torch.Tensor, format: str, *args: Any, **options: Any) -> QuantizedWeight:
    """A weight without memory: of the shapes that eight rows of it have."""
    few = really_quantize(torch.zeros(8, weight.shape[1], dtype=weight.dtype), format, *args, **options)
    changed: dict[str, Any] = {"out_features": weight.shape[0]}
    for field in dataclasses.fields(few):
        value = getattr(few, field.name)
        if isinstance(value, torch.Tensor):
            shape = tuple(weight.shape[0] if size == 8 else size for size in value.shape)
            transposed = value.dim() == 2 and value.stride(0) == 1 and value.shape[0] != 1
            changed[field.name] = (
                torch.empty(shape[::-1], dtype=value.dtype, device="meta").t()
                if transposed
                else torch.empty(shape, dtype=value.dtype, device="meta")
            )
    return dataclasses.replace(few, **changed)


def run_part(name: str, shard: int, num_shards: int, capability: int) -> dict[str, Any]:
    """Run every so manieth group of a part's cases; what was compiled, and how cases ended."""
    compiled = Compiled()
    triton.runtime.driver.set_active(Driver(capability))
    device = Machine(torch.device("meta"), False, machine._NO_RATES, 50 << 20, None, is_warming=True)
    ends: Counter[str] = Counter()
    nothing: dict[str, Any] = {"check": "", "ok": True}

    def found() -> dict[str, Any]:
        return {
            "part": name,
            "kernels": compiled.kernels,
            "seconds": compiled.seconds,
            "spills": compiled.spills,
            "once": compiled.once,
            "ends": dict(ends),
        }

    patches = [
        # what a GPU alone does, on tensors that are on no device
        mock.patch.object(ops, "_may_meet", return_value=True),
        mock.patch.object(gpu_runner, "to_host", side_effect=lambda tensor: tensor),
        mock.patch.object(torch.Tensor, "cpu", lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype)),
        mock.patch.object(triton.runtime.jit.JITFunction, "__getitem__", lambda self, grid: compiled.launch(self)),
        mock.patch.multiple(
            Machine,
            synchronize=lambda self: None,
            free=lambda self: None,
            capture=lambda self, work: (work(), work)[1],
            has_fp8=True,
        ),
        mock.patch.multiple(
            close, against_float64=lambda *a, **k: dict(nothing), same_bits=lambda *a, **k: dict(nothing)
        ),
    ]
    for patch in patches:
        patch.start()
    if name == "engine":
        compile_engines(device, ends, shard, num_shards)
        return found()
    module = importlib.import_module(f"benchmarks.gpu.{BY_NAME[name].module}")
    for loaded in list(sys.modules.values()):
        if getattr(loaded, "__name__", "").startswith("benchmarks.gpu") and hasattr(loaded, "quantize"):
            loaded.quantize = quantize  # type: ignore[attr-defined]
        for check in ("against_float64", "same_bits"):
            if getattr(loaded, "__name__", "").startswith("benchmarks.gpu") and hasattr(loaded, check):
                setattr(loaded, check, lambda *a, **k: dict(nothing))
    groups: dict[str, int] = {}
    for case in module.cases(device):
        group = groups.setdefault(case.group or case.name, len(groups))
        if group % num_shards != shard:
            continue
        try:
            case.run()
            ends["whole"] += 1
        except Exception as error:
            # a number of a tensor without memory is asked for, behind the last launch or before
            if os.environ.get("GPU_CACHE_TRACE"):
                traceback.print_exc()
            ends[f"ended early: {type(error).__name__}"] += 1
    return found()


def compile_engines(device: Machine, ends: Counter[str], shard: int, num_shards: int) -> None:
    """Compile what an engine's start and its steps launch, in every format: of one layer, since no
    kernel depends on their number.
    """
    from benchmarks.gpu import engine_world, model

    model.quantize = quantize  # type: ignore[attr-defined]
    for format in ENGINE_FORMATS[shard::num_shards]:
        world = engine_world.make_engine(device, format, max_num_seqs=256, num_tokens=2048)
        runner = world.runner
        runner.warm_up(gpu_runner._WARM_UP_ROWS)
        with torch.inference_mode():
            for size in world.sizes:
                runner._prepare_padding(size)
                for with_lora in (True, False):
                    runner._decode(size, with_lora)
        world.close()
        ends["whole"] += 1


def table(capability: str, found: Sequence[dict[str, Any]]) -> None:
    """Print each part's kernels, those that no part before it has, and the seconds of one core."""
    seen: set[str] = set()
    print(f"| sm_{capability} | kernels | of these new | in memory in loops | once | seconds | longest | cases |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in dict.fromkeys(one["part"].split("/")[0] for one in found):
        own = [one for one in found if one["part"].split("/")[0] == name]
        seconds: dict[str, float] = {}
        for one in own:
            for key, took in one["seconds"].items():
                seconds[key] = max(took, seconds.get(key, 0.0))
        ends = Counter[str]()
        for one in own:
            ends.update(one["ends"])
        print(
            f"| {name} | {len(seconds)} | {len(seconds.keys() - seen)} | {sum(len(one['spills']) for one in own)} | "
            f"{sum(len(one['once']) for one in own)} | "
            f"{sum(seconds.values()):.0f} | {max(seconds.values(), default=0.0):.1f} | "
            f"{', '.join(f'{count} {end}' for end, count in ends.items())} |"
        )
        seen |= seconds.keys()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", default="90", help="90 for an H100 or H200; several, separated by commas")
    parser.add_argument("--only", default="", help="parts of make gpu, separated by commas")
    parser.add_argument(
        "--check", action="store_true", help="keep nothing, and fail where a loop has registers in memory"
    )
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes at a time")
    parser.add_argument("--out", type=Path, default=prepared.CACHE, help="the packed file")
    parser.add_argument(
        "--cache", type=Path, help="Triton's cache, kept: what an earlier call compiled isn't compiled again"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        name, shard, num_shards, capability = options.one.split("/")
        print(json.dumps(run_part(name, int(shard), int(num_shards), int(capability))))
        return 0
    names = [name for name in options.only.split(",") if name] or [p.name for p in PARTS if p.name not in NOT_OURS]
    started = time.monotonic()
    with ExitStack() as stack:
        folder = options.cache or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loraserve-triton-")))
        folder = folder.resolve()
        environment = {**os.environ, "TRITON_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
        environment.pop("TRITON_INTERPRET", None)
        if not options.check:
            library = folder / "driver"
            library.mkdir(parents=True, exist_ok=True)
            make_driver_library(library)
            environment |= {"TRITON_LIBCUDA_PATH": str(library), "LD_LIBRARY_PATH": str(library), LAUNCHERS: "1"}

        def start(job: str) -> dict[str, Any]:
            command = [sys.executable, "-P", __file__, "--one", job]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                return {
                    "part": job,
                    "kernels": {},
                    "seconds": {},
                    "spills": [f"{job}: the process ended with {done.returncode}"],
                    "once": [],
                    "ends": {},
                }
            return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]

        shards = {name: len(ENGINE_FORMATS) if name == "engine" else BY_NAME[name].num_shards for name in names}
        jobs = [
            f"{name}/{shard}/{shards[name]}/{capability}"
            for capability in options.capability.split(",")
            for name in names
            for shard in range(shards[name])
        ]
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            found = list(pool.map(start, jobs))
        kernels: set[str] = set()
        for capability in options.capability.split(","):
            own = [one for job, one in zip(jobs, found, strict=True) if job.endswith(f"/{capability}")]
            table(capability, own)
            kernels |= {key for one in own for key in one["kernels"]}
        # candidates of tile sizes may: the clock says what they are worth
        spills, once = (
            sorted({text for one in found if one["part"].split("/")[0] != "tune" for text in one[name]})
            for name in ("spills", "once")
        )
        print(
            f"triton {triton.__version__}, capability {options.capability}: {len(kernels)} kernels in "
            f"{time.monotonic() - started:.0f} s, {len(spills)} that keep registers in memory in a loop, "
            f"{len(once)} that put some away once"
        )
        for text in (*spills, *once):
            print(f"- {text}")
        if options.check:
            return 1 if spills else 0
        num_bytes = prepared.pack(folder, options.out)
        print(f"{options.out}: {num_bytes / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
