"""Part of a base that one rank of a tensor-parallel group holds. Imports no torch.

Column-parallel linears (q, k, v, gate, up, the head) are cut by outputs, row-parallel ones (o,
down) by inputs, KV heads with their queries, the vocabulary of embedding and head in equal ranges.
Experts are cut likewise. What is smaller than that (norms, a router) every rank has whole.

All ranks' parts have one shape: the vocabulary's last range is filled up with rows that no one
reads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from loraserve.model.config.model_config import ModelConfig
from loraserve_kernels.common.cuts import Axis, ModuleCut
from loraserve_kernels.common.sites import SITES

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class SiteCut:
    """Part of a site's fused weight.

    Attributes:
        rows: ranges of the outputs, in order; None: all.
        columns: range of the inputs; None: all.
        has_bias: whether this rank adds the bias: of a row-parallel linear one alone does.
    """

    rows: tuple[Range, ...] | None
    columns: Range | None
    has_bias: bool = True

    def rows_in(self, first: int, last: int) -> list[Range] | None:
        """Intersect the ranges with these fused rows, counted from `first`; None: all of them."""
        if self.rows is None:
            return None
        within = ((max(start, first) - first, min(end, last) - first) for start, end in self.rows)
        return [(start, end) for start, end in within if start < end]


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank of a group, and what it holds of a base.

    Attributes:
        whole: the base's config.
    """

    rank: int
    size: int
    whole: ModelConfig

    @property
    def config(self) -> ModelConfig:
        """Config of the part: its heads and its inner widths. The vocabulary is the base's."""
        experts = self.whole.experts
        if experts is not None:
            shared = experts.shared_intermediate_size
            experts = replace(
                experts,
                intermediate_size=experts.intermediate_size // self.size,
                shared_intermediate_size=None if shared is None else shared // self.size,
            )
        return replace(
            self.whole,
            num_heads=self.whole.num_heads // self.size,
            num_kv_heads=max(1, self.whole.num_kv_heads // self.size),
            intermediate_size=self.whole.intermediate_size // self.size,
            experts=experts,
        )

    @property
    def kv_copies(self) -> int:
        """Number of ranks that hold the same KV head: more than one where there are more ranks."""
        return max(1, self.size // self.whole.num_kv_heads)

    @property
    def vocab_width(self) -> int:
        """Tokens of a rank's range, filled up."""
        return -(-self.whole.vocab_size // self.size)

    @property
    def vocab(self) -> Range:
        """The tokens whose rows of the embedding and the head this rank has."""
        start = min(self.rank * self.vocab_width, self.whole.vocab_size)
        return start, min(start + self.vocab_width, self.whole.vocab_size)

    @property
    def modules(self) -> dict[str, tuple[int, int]]:
        """Module → (out_features, in_features) of this rank's part.

        Where others have tokens, the embedding has one more column, of zeros, for those.
        """
        hidden, width = self.whole.hidden_size, self.vocab_width
        return {
            **self.config.module_shapes,
            **_mixture_shapes(self.config),
            "lm_head": (width, hidden),
            "embed_tokens": (hidden, self._table_width),
        }

    @property
    def cuts(self) -> dict[str, ModuleCut]:
        """Module → which part of an adapter's change of it this rank has."""
        width, (first, last) = self.vocab_width, self.vocab
        cuts = {
            "lm_head": ModuleCut(Axis.OUT, first, last, width),
            "embed_tokens": ModuleCut(Axis.IN, first, last, self._table_width),
        }
        for module in self.whole.module_shapes:
            axis = Axis.IN if module in ("o_proj", "down_proj") else Axis.OUT
            start, end = self._range(module)
            cuts[module] = ModuleCut(axis, start, end, end - start, has_bias=axis is Axis.OUT or self.rank == 0)
        for module, (out, width) in _mixture_shapes(self.whole).items():
            if module in ("router", "shared_gate"):
                # each rank chooses the same experts, by the whole of it
                cuts[module] = ModuleCut(Axis.OUT, 0, out, out)
                continue
            axis = Axis.IN if module.endswith("down_proj") else Axis.OUT
            start, end = _part(width if axis is Axis.IN else out, self.rank, self.size)
            cuts[module] = ModuleCut(axis, start, end, end - start, has_bias=axis is Axis.OUT or self.rank == 0)
        return cuts

    def site_cut(self, site: str) -> SiteCut:
        """Choose the part of a layer's site, or of the head."""
        if site == "lm_head":
            return SiteCut(self.head_rows, None)
        if site in ("o", "down"):
            return SiteCut(None, self._range(SITES[site][0]), has_bias=self.rank == 0)
        rows, first = list[Range](), 0
        for module in SITES[site]:
            start, end = self._range(module)
            rows.append((first + start, first + end))
            first += self.whole.module_shapes[module][0]
        return SiteCut(tuple(rows), None)

    def expert_cut(self, inner: int, *, is_down: bool) -> SiteCut:
        """Choose the part of an expert's gate and up, or of its down.

        Args:
            inner: features between them.
        """
        start, end = _part(inner, self.rank, self.size)
        return SiteCut(None, (start, end)) if is_down else SiteCut(((start, end), (inner + start, inner + end)), None)

    @property
    def q_part(self) -> Range:
        """Range of the queries' features."""
        return self._range("q_proj")

    @property
    def k_part(self) -> Range:
        """Range of the keys' features."""
        return self._range("k_proj")

    @property
    def head_rows(self) -> tuple[Range, ...]:
        """Rows of the head, filled up with its first one."""
        first, last = self.vocab
        return ((first, last), *[(0, 1)] * (self.vocab_width - (last - first)))

    @property
    def _table_width(self) -> int:
        """Rows of the embedding's part."""
        return self.vocab_width + (self.size > 1)

    def _range(self, module: str) -> Range:
        """Choose the outputs of a column-parallel linear, or the inputs of a row-parallel one."""
        whole = self.whole
        if module in ("k_proj", "v_proj") and self.kv_copies > 1:
            head = self.rank // self.kv_copies
            return head * whole.head_dim, (head + 1) * whole.head_dim
        side = 1 if module in ("o_proj", "down_proj") else 0
        return _part(whole.module_shapes[module][side], self.rank, self.size)


def _part(count: int, rank: int, size: int) -> Range:
    return count // size * rank, count // size * (rank + 1)


def _mixture_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Map modules of a mixture of experts, its shared one's too, to (out_features, in_features)."""
    experts, hidden = config.experts, config.hidden_size
    if experts is None:
        return {}
    inner, shared = experts.intermediate_size, experts.shared_intermediate_size
    shapes = {
        "experts.gate_proj": (inner, hidden),
        "experts.up_proj": (inner, hidden),
        "experts.down_proj": (hidden, inner),
        "router": (experts.num_experts, hidden),
    }
    if shared is not None:
        shapes |= {"gate_proj": (shared, hidden), "up_proj": (shared, hidden), "down_proj": (hidden, shared)}
        shapes["shared_gate"] = (1, hidden)
    return shapes
