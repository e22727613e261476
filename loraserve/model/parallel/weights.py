"""Parts of a base's weights, cut after they are quantized: codes and scales are the whole one's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loraserve.model.parallel.shard import Range, SiteCut
from loraserve_kernels.common.quantized import QuantizedWeight, concatenate

Weight = Tensor | QuantizedWeight


def cut_site(cut: SiteCut, weight: Weight, bias: Tensor | None, first: int, last: int) -> tuple[Weight, Tensor | None]:
    """Return a rank's part of a weight and a bias that are these rows of a site.

    Of linears of several kinds at one site, each weight has some of its rows.
    """
    rows = cut.rows_in(first, last)
    if rows is not None:
        weight = _rows(weight, rows)
        bias = None if bias is None else torch.cat([bias[start:end] for start, end in rows])
    if cut.columns is not None:
        weight = _columns(weight, cut.columns)
    return weight, bias if cut.has_bias else None


def _rows(weight: Weight, rows: Sequence[Range]) -> Weight:
    if isinstance(weight, Tensor):
        return torch.cat([weight[start:end] for start, end in rows])
    return concatenate([weight.rows(start, end) for start, end in rows])


def _columns(weight: Weight, columns: Range) -> Weight:
    start, end = columns
    if isinstance(weight, Tensor):
        return weight[:, start:end].contiguous()
    per_code = 2 if weight.is_packed else 1
    is_by_channel = not weight.has_groups
    group = weight.group_size
    groups = slice(None) if is_by_channel else slice(start // group, end // group)
    return QuantizedWeight(
        weight.format,
        weight.codes[:, start // per_code : end // per_code].contiguous(),
        weight.scales[:, groups],
        None if weight.zeros is None else weight.zeros[:, groups],
        end - start if is_by_channel else group,
        end - start,
        weight.out_features,
    )
