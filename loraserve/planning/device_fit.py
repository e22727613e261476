"""Comparison of an adapter's size with the device of a running engine, by its shape alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from loraserve.adapters.ir import AdapterIR
from loraserve.errors import AdapterUnsupported
from loraserve.planning.adapters import ITEMS, STORED, shape_of
from loraserve.types import BaseSpec, EngineStats
from loraserve_kernels.common.sizes import lay_out
from loraserve_kernels.errors import TensorMismatch


@dataclass(frozen=True, slots=True)
class DeviceFit:
    """Refuse adapters that an engine on one process' CPU can never hold.

    A file says little about it: LoKr of 0.75 MB takes 108 MB as the low-rank update that steps
    compute. Other devices find out when they load the adapter for its certificate.

    Args:
        stats: the engine's, of which the budget for adapters counts.
        adapter_dtype: as `EngineConfig.adapter_dtype`.
        has_one_process: whether one process has the whole base.
    """

    stats: Callable[[], EngineStats]
    adapter_dtype: str
    has_one_process: bool

    def check(self, ir: AdapterIR, base: BaseSpec) -> None:
        """Return if the adapter may fit.

        Raises:
            AdapterUnsupported: it needs more bytes than the memory for adapters has.
        """
        budget_bytes = self.stats().device_adapter_budget_bytes
        shape = shape_of(ir, base)
        # of whole weights only the rows count that aren't the base's: a load tells
        if base.device != "cpu" or not self.has_one_process or not budget_bytes or shape.is_upper_bound:
            return
        dtype = ITEMS[STORED[shape.stored] if self.adapter_dtype == "auto" else self.adapter_dtype]
        try:
            layout = lay_out(shape.sizes, num_layers=base.num_layers, module_shapes=base.modules, dtype=dtype)
        except TensorMismatch:
            # the load's error says more
            return
        num_bytes = layout.num_bytes(dtype, shape.num_norm_weights)
        if num_bytes > budget_bytes:
            raise AdapterUnsupported(
                f"This adapter needs {num_bytes:,} bytes on the device; the memory for adapters has {budget_bytes:,}.",
                hint="Train it with a lower rank or on fewer modules; or the server's operator starts it with a "
                "larger --memory-budget, or a smaller --max-model-len.",
            )
