"""vLLM's and SGLang's LoRA kernels from a folder of their files, called without their servers.

README.md beside this file says how the folder is made.

What those files import of the rest of their projects is replaced by the little of it that they use.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.gpu.adapters import SiteAdapters
from benchmarks.gpu.machine import Machine

SCALING = 0.5
Config = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class PeerCall:
    """One way to run a peer's kernels.

    Attributes:
        add: adds the adapters' part of (x, y, layer) to y.
    """

    config: str
    add: Callable[[Tensor, Tensor, int], None]


class VllmKernels:
    """vLLM's shrink and expand: slabs padded to the highest rank, a table of pointers to slices."""

    def __init__(self, folder: Path, machine: Machine) -> None:
        _install_vllm(folder, machine)
        at = "vllm.lora.ops.triton_ops."
        self._shrink, self._expand, self._metadata, self._utils = (
            importlib.import_module(at + name)
            for name in ("lora_shrink_op", "lora_expand_op", "lora_kernel_metadata", "utils")
        )
        self._default = self._utils.get_lora_op_configs

    def calls(self, machine: Machine, adapters: SiteAdapters, row_adapters: list[int | None]) -> Iterator[PeerCall]:
        """Its default first, then what it can be tuned to."""
        # tables by address: those of the last shape's weights are gone
        self._utils._LORA_A_PTR_DICT.clear()
        self._utils._LORA_B_PTR_DICT.clear()
        most, count = max(adapters.ranks), len(adapters.ranks)
        a, b = _slabs(adapters, most)
        mapping = torch.tensor([-1 if i is None else i for i in row_adapters], device=machine.device)
        metadata = self._metadata.LoRAKernelMeta.make(count, max(len(row_adapters), 16), machine.device)
        metadata.prepare_tensors(mapping)
        shrunk = torch.empty((len(a[0]), len(row_adapters), most), dtype=torch.float32, device=machine.device)
        arguments = metadata.meta_args(len(row_adapters), True)

        def add(x: Tensor, y: Tensor, layer: int) -> None:
            self._shrink._lora_shrink(x, a[layer], shrunk, *arguments, SCALING)
            self._expand._lora_expand(shrunk, b[layer], y, *arguments, offset_start=0, add_inputs=True)

        self._tune(None, None)
        yield PeerCall("default", add)
        for block_m, block_k, split_k in product((16, 32), (128, 256), (1, 8)):
            self._tune({"block_m": block_m, "block_k": block_k, "split_k": split_k}, {"block_m": block_m})
            yield PeerCall(f"BLOCK_M {block_m}, BLOCK_K {block_k}, SPLIT_K {split_k}", add)

    def _tune(self, shrink: Config | None, expand: Config | None) -> None:
        def configs(op_type: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
            found = dict(self._default(op_type, *args, **kwargs))
            return {**found, **((shrink if op_type == "shrink" else expand) or {})}

        self._shrink.get_lora_op_configs = self._expand.get_lora_op_configs = configs


class SglangKernels:
    """SGLang's csgmv: segments of up to `chunk` rows of one adapter;
    rows of the base are an adapter of rank 0.
    """

    def __init__(self, folder: Path, machine: Machine) -> None:
        _install_sglang(folder, machine)
        at = "sglang.kernels.ops.lora.dense."
        self._shrink = importlib.import_module(at + "chunked_sgmv_shrink")
        self._expand = importlib.import_module(at + "chunked_sgmv_expand")
        self._shrink_default = self._shrink.get_lora_shrink_config
        self._expand_default = self._expand.get_lora_expand_config

    def calls(self, machine: Machine, adapters: SiteAdapters, row_adapters: list[int | None]) -> Iterator[PeerCall]:
        """Its own choice first (tuned for some shapes), then others."""
        most, num_slices = max(adapters.ranks), len(adapters.matrices(0, 0))
        a, b = _packed_slabs(adapters, most)
        widths = [pair[1].shape[1] for pair in adapters.matrices(0, 0)]
        offsets = torch.tensor([sum(widths[:i]) for i in range(num_slices + 1)], dtype=torch.int32)
        on_device = offsets.to(machine.device)
        for chunk in (16, 64) if len(row_adapters) > 256 else (16,):
            batch = self._batch(machine, adapters, row_adapters, chunk)

            def add(x: Tensor, y: Tensor, layer: int, batch: Any = batch) -> None:
                shrunk = self._shrink.chunked_sgmv_lora_shrink_forward(x, a[layer], batch, num_slices)
                self._expand.chunked_sgmv_lora_expand_forward(
                    shrunk, b[layer], batch, on_device, max(widths), y, slice_offsets_cpu=offsets
                )

            self._tune(None, None)
            yield PeerCall(f"its own choice, chunks of {chunk}", add)
            for block_n, block_k in product((16, 32), (128, 256)):
                self._tune({"BLOCK_N": block_n, "BLOCK_K": block_k}, {"BLOCK_N": 4 * block_n, "BLOCK_K": 16})
                yield PeerCall(f"chunks of {chunk}, BLOCK_N {block_n} and {4 * block_n}, BLOCK_K {block_k}", add)

    def _tune(self, shrink: Config | None, expand: Config | None) -> None:
        self._shrink.get_lora_shrink_config = self._shrink_default if shrink is None else lambda **_: shrink
        self._expand.get_lora_expand_config = self._expand_default if expand is None else lambda **_: expand

    def _batch(self, machine: Machine, adapters: SiteAdapters, row_adapters: list[int | None], chunk: int) -> Any:
        count = len(adapters.ranks)
        slots = torch.tensor([count if i is None else i for i in row_adapters])
        order = torch.argsort(slots, stable=True)
        owners, lengths = [], []
        for slot, num_rows in zip(
            *(part.tolist() for part in torch.unique_consecutive(slots[order], return_counts=True)), strict=True
        ):
            for start in range(0, num_rows, chunk):
                owners.append(slot)
                lengths.append(min(chunk, num_rows - start))

        def int32(values: Any) -> Tensor:
            return torch.as_tensor(values, dtype=torch.int32, device=machine.device)

        return SimpleNamespace(
            use_cuda_graph=False,
            bs=len(owners),
            num_segments=len(owners),
            seg_indptr=int32([sum(lengths[:i]) for i in range(len(lengths) + 1)]),
            weight_indices=int32(owners),
            lora_ranks=int32([*adapters.ranks, 0]),
            scalings=torch.full((count + 1,), SCALING, device=machine.device),
            max_len=chunk,
            seg_lens=int32(lengths),
            permutation=int32(order),
        )


@dataclass(frozen=True, slots=True)
class Peers:
    """Other projects' kernels whose files are there, by name.

    Attributes:
        failed: what became of those that couldn't be used, in words: it costs their columns alone.
    """

    kernels: dict[str, VllmKernels | SglangKernels]
    failed: dict[str, str]

    def fail(self, name: str, error: Exception) -> None:
        """Leave a peer out from now on: what failed once would take as long to fail again."""
        traceback.print_exception(error)
        self.kernels.pop(name, None)
        self.failed[name] = f"{type(error).__name__}: {error}"[:120]


def load(machine: Machine) -> Peers:
    found, folder = Peers({}, {}), machine.peers
    for name, package, make in (("vllm", "vllm", VllmKernels), ("csgmv", "sglang", SglangKernels)):
        if folder is None or not (folder / package).is_dir():
            continue
        try:
            found.kernels[name] = make(folder, machine)
        except Exception as error:
            # a file that asks for more of its project than is stood in for
            found.fail(name, error)
    return found


def _slabs(adapters: SiteAdapters, most: int) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """By layer, by slice: A [adapters, most, in] and B [adapters, out, most],
    zero behind an adapter's rank.
    """
    all_a, all_b = [], []
    for layer in range(adapters.num_layers):
        of_adapters = [adapters.matrices(i, layer) for i in range(len(adapters.ranks))]
        layer_a, layer_b = [], []
        for slice_, (first_a, first_b) in enumerate(of_adapters[0]):
            a = first_a.new_zeros(len(of_adapters), most, first_a.shape[1])
            b = first_b.new_zeros(len(of_adapters), first_b.shape[1], most)
            for i, matrices in enumerate(of_adapters):
                rank = adapters.ranks[i]
                a[i, :rank], b[i, :, :rank] = matrices[slice_][0], matrices[slice_][1].T
            layer_a.append(a)
            layer_b.append(b)
        all_a.append(layer_a)
        all_b.append(layer_b)
    return all_a, all_b


def _packed_slabs(adapters: SiteAdapters, most: int) -> tuple[list[Tensor], list[Tensor]]:
    """By layer: A [adapters, slices * most, in] with an adapter's slices one behind the other, B
    [adapters, sum of out, most].
    """
    all_a, all_b = [], []
    for layer in range(adapters.num_layers):
        rows_a, rows_b = [], []
        for i, rank in enumerate(adapters.ranks):
            matrices = adapters.matrices(i, layer)
            a = matrices[0][0].new_zeros(len(matrices) * most, matrices[0][0].shape[1])
            b = a.new_zeros(sum(pair[1].shape[1] for pair in matrices), most)
            torch.cat([pair[0] for pair in matrices], out=a[: rank * len(matrices)])
            b[:, :rank] = torch.cat([pair[1] for pair in matrices], dim=1).T
            rows_a.append(a)
            rows_b.append(b)
        all_a.append(torch.stack(rows_a))
        all_b.append(torch.stack(rows_b))
    return all_a, all_b


class _Anything:
    """An object of which every method can be called and does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def _module(name: str, **members: Any) -> None:
    module = ModuleType(name)
    module.__dict__.update(members)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


def _packages(name: str, folder: Path) -> None:
    """Every package on the way to `name`, whether its folder has an ``__init__.py`` or not;
    none of them is run.
    """
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        _module(".".join(parts[:i]), __path__=[str(folder.joinpath(*parts[:i]))])


def _install_vllm(folder: Path, machine: Machine) -> None:
    def has(capability: int) -> bool:
        major, minor = (0, 0) if machine.is_tiny else torch.cuda.get_device_capability(machine.device)
        return 10 * major + minor >= capability

    def register(**_: Any) -> None:
        # the files then keep to their plain functions
        raise AttributeError("no operators here")

    _packages("vllm.lora.ops.triton_ops", folder)
    flags = ("VLLM_LORA_ENABLE_DUAL_STREAM", "VLLM_BATCH_INVARIANT", "VLLM_LORA_DISABLE_PDL")
    _module("vllm.envs", VLLM_TUNED_CONFIG_FOLDER=None, **dict.fromkeys(flags, False))
    _module("vllm.logger", init_logger=lambda _: _Anything())
    platform = SimpleNamespace(is_cuda=lambda: not machine.is_tiny, has_device_capability=has, is_device_capability=has)
    _module("vllm.platforms", current_platform=platform)
    _module("vllm.triton_utils", tl=tl, triton=triton)
    _module("vllm.utils")
    _module("vllm.utils.math_utils", next_power_of_2=triton.next_power_of_2)
    _module(
        "vllm.utils.torch_utils",
        direct_register_custom_op=register,
        async_tensor_h2d=lambda data, dtype=None, device=None: torch.tensor(data, dtype=dtype).to(device),
    )


def _install_sglang(folder: Path, machine: Machine) -> None:
    class Off:
        def __getattr__(self, name: str) -> Any:
            return SimpleNamespace(get=lambda: False, is_set=lambda: False)

    name = "" if machine.is_tiny else torch.cuda.get_device_name(machine.device)
    _packages("sglang.kernels.ops.lora.dense", folder)
    _module("sglang.srt")
    _module("sglang.srt.environ", envs=Off())
    _module("sglang.srt.utils", cached_triton_kernel=lambda key_fn=None: lambda fn: fn, get_device_name=lambda *_: name)
    _module("sglang.srt.lora")
    _module("sglang.srt.lora.utils", LoRABatchInfo=SimpleNamespace)
