"""Pass of the reference evaluation: rows, products of resident weights, and adapters' formulas.

A subclass defines what a layer computes with them: `reference_model` by architectures' formulas,
`modelling.modelled_pass` by transformers' code.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from loraserve.adapters.ir import AdapterIR, ExtraRowsIR, ModuleIR, NormIR, TensorView
from loraserve.model.layers.linears import Linear, rounding_of_row
from loraserve_kernels.common.arithmetic import ActivationRounding

_BLOCK_WEIGHTS = 1 << 22


class ReferenceWeights(Protocol):
    """Weights of a resident base, as they are computed with."""

    @property
    def device(self) -> torch.device: ...

    def weight_rows(self, layer: int, *modules: str) -> Iterator[Tensor]:
        """Yield a module's weight in blocks of rows, float32, in order.

        Of modules that read the same input, they come one after the other; of ``embed_tokens``,
        they are the rows of the table.
        """
        ...

    def bias(self, layer: int, module: str) -> Tensor | None:
        """Read a linear's bias, float32; None where it has none."""
        ...

    def activation_rounding(self, layer: int, module: str) -> ActivationRounding | None:
        """Look up how the module's products round a row of their input.

        None: they take it in the dtype of the activations.
        """
        ...


class Stopped(Exception):
    """The evaluation isn't needed any more."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Logits in the host's memory, a [num_tokens, vocab_size] float32 tensor for each sequence.

    Attributes:
        base: of the base alone.
        adapted: of the base with the adapter.
        nudged: of the base alone, with inputs that are moved by 1/4096 before they are rounded to
            integers; empty where no product rounds its input so, or the base's logits were known.
        own: of the base with the adapter, of the subject's own sequences: [num_tokens, vocab_size +
            the adapter's extra rows].
    """

    base: tuple[Tensor, ...]
    adapted: tuple[Tensor, ...]
    nudged: tuple[Tensor, ...] = ()
    own: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class Subject:
    """Input of an evaluation.

    Attributes:
        sequences: token ids.
        terms: an adapter, with a weight of 1; or the terms of a composition: the weighted changes
            add up, module by module.
        known_base: the sequences' logits by the base, from an earlier evaluation: they aren't
            computed again.
        starts: each sequence's first token whose logits are needed; None: all tokens' are.
        own: sequences with tokens that only the adapter has rows for; the base alone computes none.
    """

    sequences: Sequence[Sequence[int]]
    terms: Sequence[tuple[AdapterIR, float]]
    known_base: tuple[Tensor, ...] | None = None
    starts: Sequence[int] | None = None
    own: Sequence[Sequence[int]] = ()

    @property
    def placed(self) -> list[tuple[tuple[int, ...], int]]:
        """Sequences, each with its first token whose logits are needed."""
        starts = self.starts or [0] * len(self.sequences)
        return [(tuple(sequence), start) for sequence, start in zip(self.sequences, starts, strict=True)]

    @property
    def num_extra_rows(self) -> int:
        """Rows beyond the base's that its own sequences are computed with."""
        rows = [ir.extra_rows.num_rows for ir, _ in self.terms if ir.extra_rows is not None] if self.own else []
        return max(rows, default=0)


class Products(Protocol):
    """Computes products of linears in the place of the base's own."""

    def multiply(self, x: Tensor, layer: int, modules: Sequence[str]) -> Tensor | None:
        """Compute the products of modules that read x, side by side; None: not of these."""
        ...

    def multiply_by(self, x: Tensor, linear: Linear) -> Tensor | None:
        """Compute the product of an expert's linear or of a router; None: not of this one."""
        ...


def invocation_start(token_ids: Sequence[int], invocation: Sequence[int]) -> int | None:
    """Find where an aLoRA begins to act.

    That is at the last occurrence of its invocation tokens, from the first of them on. None:
    nowhere. Without such tokens: at 0.
    """
    size = len(invocation)
    for start in range(len(token_ids) - size, -1, -1) if size else (0,):
        if list(token_ids[start : start + size]) == list(invocation):
            return start
    return None


class _Term:
    """Adapter with the rows that it acts on."""

    def __init__(self, ir: AdapterIR, weight: float, rows: Tensor | slice) -> None:
        self.weight, self.rows, self._ir = weight, rows, ir
        self._modules: Mapping[tuple[int, str, int], ModuleIR] = {m.place: m for m in ir.modules}
        self._norms: Mapping[tuple[int, str], NormIR] = {(n.layer, n.norm): n for n in ir.norms}

    def module(self, layer: int, module: str, expert: int = 0) -> ModuleIR | None:
        return self._modules.get((layer, module, expert))

    def norm(self, layer: int, norm: str) -> NormIR | None:
        return self._norms.get((layer, norm))

    @property
    def extra_rows(self) -> ExtraRowsIR | None:
        return self._ir.extra_rows

    def among(self, rows: Tensor, num_rows: int) -> _Term:
        """Restrict the term to those of its rows that are kept, counted among these.

        Args:
            rows: kept rows, [num_kept], ascending.
            num_rows: number of all rows.
        """
        is_own = torch.zeros(num_rows, dtype=torch.bool, device=rows.device)
        is_own[self.rows] = True
        return _Term(self._ir, self.weight, is_own[rows].nonzero()[:, 0])


class _Rows:
    """Rows of a pass: tokens with what comes before them.

    Attributes:
        tokens, positions: of each row.
        sequences: rows of each sequence that was added.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.sequences: list[list[int]] = []

    def add(self, sequence: Sequence[int], starts: Sequence[int | None], known: dict[_Prefix, int]) -> list[int]:
        """Add a sequence, and return its rows.

        Args:
            starts: token from which each of the adapters acts on it; None: none.
            known: rows of the sequences that it may share its beginning with.
        """
        rows: list[int] = []
        for position, token in enumerate(sequence):
            is_active = tuple(start is not None and position >= start for start in starts)
            prefix = (rows[-1] if rows else None, token, is_active)
            if prefix not in known:
                known[prefix] = len(self.tokens)
                self.tokens.append(token)
                self.positions.append(position)
            rows.append(known[prefix])
        self.sequences.append(rows)
        return rows


_Prefix = tuple[int | None, int, tuple[bool, ...]]
"""Row before, token, and whether each adapter acts on it."""


class ReferencePass(ABC):
    """Pass through the layers, which a subclass computes.

    Its rows are the sequences' by the base, each once and those alone that aren't known, then the
    same from a nudged input where products round theirs, then every subject's sequences' with its
    adapter.
    """

    def __init__(
        self,
        base: ReferenceWeights,
        subjects: Sequence[Subject],
        is_wanted: Callable[[], bool],
        *,
        rounding_modules: Sequence[str],
        is_rounding: bool = True,
        products: Products | None = None,
    ) -> None:
        """Place the rows.

        Args:
            rounding_modules: modules that round their input if any does.
        """
        self._is_rounding, self._products = is_rounding, products
        self._weights, self._is_wanted = base, is_wanted
        self._device = base.device
        self._subjects = subjects
        self._num_extra = max((one.num_extra_rows for one in subjects), default=0)
        self._by_base: dict[tuple[int, ...], int] = {}
        for sequence, start in (pair for one in subjects if one.known_base is None for pair in one.placed):
            self._by_base[sequence] = min(start, self._by_base.get(sequence, start))
        rows, self._wanted = _Rows(), list[list[int]]()
        self._is_nudging = any(self._rounding(0, module) is not None for module in rounding_modules)
        nudged = 0
        for _ in range(2 if self._is_nudging else 1):
            nudged, known = len(rows.tokens), dict[_Prefix, int]()
            for sequence, start in self._by_base.items():
                self._wanted.append(rows.add(sequence, (), known)[start:])
        self._nudged = self._indices(range(nudged, len(rows.tokens) if self._is_nudging else nudged))
        terms = []
        for one in subjects:
            first, known = len(rows.tokens), {}
            acting: list[set[int]] = [set() for _ in one.terms]
            for sequence, start in [*one.placed, *((tuple(sequence), 0) for sequence in one.own)]:
                starts = [invocation_start(sequence, ir.invocation_token_ids) for ir, _ in one.terms]
                added = rows.add(sequence, starts, known)
                self._wanted.append(added[start:])
                for own, begin in zip(acting, starts, strict=True):
                    own.update(added[len(added) if begin is None else begin :])
            for (ir, weight), own in zip(one.terms, acting, strict=True):
                is_all = not ir.invocation_token_ids
                place = slice(first, len(rows.tokens)) if is_all else self._indices(sorted(own))
                terms.append(_Term(ir, weight, place))
        self._terms = terms
        self._tokens, self._positions = self._indices(rows.tokens), self._indices(rows.positions)
        self._sequences = [self._indices(one) for one in rows.sequences]

    def _indices(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)

    def run(self) -> list[Evaluation]:
        """Evaluate the subjects."""
        return self._evaluations(self._logits().cpu())

    @abstractmethod
    def _logits(self) -> Tensor:
        """Compute the logits of the rows that `_keep_wanted` keeps, as `_with_extra` makes them."""

    def _keep_wanted(self, x: Tensor) -> Tensor:
        """Select the rows whose logits are needed, and place sequences and terms among them."""
        kept = self._indices(sorted({row for rows in self._wanted for row in rows}))
        if len(kept) == x.shape[0]:
            return x
        self._terms = [term.among(kept, x.shape[0]) for term in self._terms]
        places = {row: place for place, row in enumerate(kept.tolist())}
        self._nudged = self._indices([places[row] for row in self._nudged.tolist() if row in places])
        self._wanted = [[places[row] for row in rows] for rows in self._wanted]
        return x[kept]

    def _evaluations(self, logits: Tensor) -> list[Evaluation]:
        # copies: keeping them for the next evaluation must not keep all the others
        vocab_size = logits.shape[1] - self._num_extra
        wide = iter([logits[torch.tensor(rows, dtype=torch.int64)] for rows in self._wanted])
        parts = (part[:, :vocab_size] for part in wide)
        plain, nudged = (
            dict(zip(self._by_base, itertools.islice(parts, len(self._by_base)), strict=True))
            if is_there
            else dict[tuple[int, ...], Tensor]()
            for is_there in (True, self._is_nudging)
        )
        found = []
        for one in self._subjects:
            adapted = tuple(itertools.islice(parts, len(one.sequences)))
            num_columns = vocab_size + one.num_extra_rows
            own = tuple(part[:, :num_columns] for part in itertools.islice(wide, len(one.own)))
            if one.known_base is not None:
                found.append(Evaluation(one.known_base, adapted, own=own))
                continue
            base, again = (
                tuple(by_base[sequence][start - self._by_base[sequence] :] for sequence, start in one.placed)
                if by_base
                else ()
                for by_base in (plain, nudged)
            )
            found.append(Evaluation(base, adapted, again, own))
        return found

    # linears

    def _linear(self, x: Tensor, layer: int, module: str) -> Tensor:
        return self._adapt(x, self._multiply(x, layer, module), layer, module)

    def _with_extra(self, logits: Tensor, x: Tensor) -> Tensor:
        """Append the logits of the rows that subjects' own sequences have beyond the base's.

        Args:
            logits: [num_rows, vocab_size].
            x: what the head has read, [num_rows, hidden_size].
        """
        if not self._num_extra:
            return logits
        first, wide = logits.shape[1], F.pad(logits, (0, self._num_extra))
        for term in self._terms:
            if term.extra_rows is not None:
                head = self._of(term.extra_rows.head)[: self._num_extra]
                wide[term.rows, first : first + len(head)] = x[term.rows] @ head.T
        return wide

    def _linears(self, x: Tensor, layer: int, sizes: Mapping[str, int]) -> list[Tensor]:
        """Compute the outputs of modules that read the same input.

        Their weights are read one after the other.
        """
        parts = torch.split(self._multiply(x, layer, *sizes), list(sizes.values()), 1)
        return [self._adapt(x, y, layer, module) for module, y in zip(sizes, parts, strict=True)]

    def _multiply(self, x: Tensor, layer: int, *modules: str) -> Tensor:
        if not self._is_wanted():
            raise Stopped
        own = None if self._products is None else self._products.multiply(x, layer, modules)
        if own is not None:
            return own
        roundings = {module: self._rounding(layer, module) for module in modules}
        if len(set(roundings.values())) > 1:
            return torch.cat([self._multiply(x, layer, module) for module in modules], dim=1)
        x = self._rounded(x, roundings[modules[0]])
        return torch.cat([x @ block.T for block in self._weights.weight_rows(layer, *modules)], dim=1)

    def _multiply_by(self, x: Tensor, linear: Linear) -> Tensor:
        own = None if self._products is None else self._products.multiply_by(x, linear)
        if own is not None:
            return own
        parts, start = [], 0
        for block in linear.rows(0, linear.out_features):
            rounding = rounding_of_row(linear, start) if self._is_rounding else None
            parts.append(_rounded(x, rounding) @ block.T)
            start += block.shape[0]
        return torch.cat(parts, dim=1)

    def _rounding(self, layer: int, module: str) -> ActivationRounding | None:
        return self._weights.activation_rounding(layer, module) if self._is_rounding else None

    def _rounded(self, x: Tensor, rounding: ActivationRounding | None) -> Tensor:
        """Round x as products take it; nudged rows are moved a little before they are rounded."""
        return _rounded(x, rounding, self._nudged)

    def _adapt(self, x: Tensor, y: Tensor, layer: int, module: str) -> Tensor:
        """Compute a module's output.

        Args:
            y: the base's weight times x.
        """
        bias = self._weights.bias(layer, module)
        out = y if bias is None else y + bias
        changes = []
        for term in self._terms:
            m = term.module(layer, module)
            if m is not None:
                own = self._adapted(m, x[term.rows], y[term.rows], bias)
                changes.append((term, own - out[term.rows]))
        for term, change in changes:
            out[term.rows] += term.weight * change
        return out

    def _adapt_expert(
        self, x: Tensor, y: Tensor, layer: int, module: str, expert: int = 0, rows: Tensor | None = None
    ) -> Tensor:
        """Compute the output of a module of a mixture, without its bias, for some rows.

        Args:
            y: the base's weight times x.
            expert: its number; 0 for a module that isn't an expert's.
            rows: which rows x is, [n]; None: all.
        """
        out, is_own = y.clone(), torch.zeros(len(self._tokens), dtype=torch.bool, device=y.device)
        rows = torch.arange(y.shape[0], device=y.device) if rows is None else rows
        for term in self._terms:
            m = term.module(layer, module, expert)
            if m is not None:
                is_own[:] = False
                is_own[term.rows] = True
                mine = is_own[rows]
                out[mine] += term.weight * (self._adapted(m, x[mine], y[mine], None) - y[mine])
        return out

    def _adapted(self, m: ModuleIR, x: Tensor, wx: Tensor, bias: Tensor | None) -> Tensor:
        """Apply the formula of `ModuleIR`.

        Args:
            wx: the base's weight times x.
        """
        scale = self._dora_scale(m)
        if m.weight is not None:
            wx = self._product(x, m.weight)
        if m.token_rows is not None:
            wx = wx.clone()
            wx[:, list(m.token_ids)] = x @ self._of(m.token_rows).T
        if m.lora_a is not None and m.lora_b is not None:
            wx = wx + m.scaling * ((x @ self._of(m.lora_a).T) @ self._of(m.lora_b).T)
        return self._finish(m, wx if scale is None else scale * wx, bias)

    def _finish(self, m: ModuleIR, y: Tensor, bias: Tensor | None) -> Tensor:
        """Biases and IA3's scale."""
        if m.bias is not None:
            bias = self._of(m.bias)
        if bias is not None:
            y = y + bias
        if m.lora_bias is not None:
            y = y + m.scaling * self._of(m.lora_bias)
        return y if m.output_scale is None else y * self._of(m.output_scale)

    def _dora_scale(self, m: ModuleIR) -> Tensor | None:
        if m.magnitude is None or m.lora_a is None or m.lora_b is None:
            return None
        a, b = self._of(m.lora_a), self._of(m.lora_b)
        if m.module == "embed_tokens":
            squares, start = torch.zeros(b.shape[0], device=self._device, dtype=torch.float64), 0
            for block in self._weight_rows(m):
                columns = a[:, start : start + block.shape[0]]
                squares += ((block + m.scaling * (columns.T @ b.T)).double() ** 2).sum(0)
                start += block.shape[0]
            return self._of(m.magnitude) / squares.sqrt().float()
        norms, start = [], 0
        for block in self._weight_rows(m):
            norms.append((block + m.scaling * (b[start : start + block.shape[0]] @ a)).norm(dim=1))
            start += block.shape[0]
        return self._of(m.magnitude) / torch.cat(norms)

    def _weight_rows(self, m: ModuleIR) -> Iterator[Tensor]:
        """Yield the weight that the adapter's update is added to, in blocks of rows.

        It is the base's, or the adapter's own.
        """
        start = 0
        for block in self._weights.weight_rows(m.layer, m.module):
            end = start + block.shape[0]
            yield block if m.weight is None else _tensor(m.weight, self._device, np.arange(start, end))
            start = end

    # the embedding

    def _embed(self) -> Tensor:
        out, num_rows = self._table_rows(self._weights.weight_rows(0, "embed_tokens"))
        beyond = self._tokens - num_rows
        # rows of tokens that the base lacks are written below
        self._tokens = torch.where(beyond < 0, self._tokens, 0)
        plain = out.clone()
        for term in self._terms:
            m = term.module(0, "embed_tokens")
            if m is not None:
                out[term.rows] += term.weight * (self._embedded(m, term.rows, plain[term.rows]) - plain[term.rows])
        for term in self._terms:
            if term.extra_rows is not None:
                own, embedded = beyond[term.rows], out[term.rows]
                embedded[own >= 0] = self._of(term.extra_rows.embedding)[own[own >= 0]]
                out[term.rows] = embedded
        return out

    def _table_rows(self, blocks: Iterator[Tensor]) -> tuple[Tensor, int]:
        """Look up the tokens' rows of a table that comes in blocks, and count its rows.

        A token beyond them has zeros.
        """
        out, start = torch.empty(len(self._tokens), 0, device=self._device), 0
        for block in blocks:
            if start == 0:
                out = torch.zeros(len(self._tokens), block.shape[1], device=self._device)
            here = (self._tokens >= start) & (self._tokens < start + block.shape[0])
            out[here] = block[self._tokens[here] - start]
            start += block.shape[0]
        return out, start

    def _embedded(self, m: ModuleIR, rows: Tensor | slice, embedded: Tensor) -> Tensor:
        tokens = self._tokens[rows]
        if m.weight is not None:
            embedded = _tensor(m.weight, self._device, tokens.cpu().numpy())
        if m.token_rows is not None:
            places = {token: place for place, token in enumerate(m.token_ids)}
            own = self._of(m.token_rows)
            embedded = torch.stack(
                [
                    row if token not in places else own[places[token]]
                    for token, row in zip(tokens.tolist(), embedded, strict=True)
                ]
            )
        if m.lora_a is not None and m.lora_b is not None:
            embedded = embedded + m.scaling * (self._of(m.lora_a)[:, tokens].T @ self._of(m.lora_b).T)
        scale = self._dora_scale(m)
        return self._finish(m, embedded if scale is None else scale * embedded, None)

    def _product(self, x: Tensor, weight: TensorView) -> Tensor:
        """``x W^T``; of the weight a block of rows is float32 at a time."""
        step = max(1, _BLOCK_WEIGHTS // weight.shape[1])
        rows = np.arange(weight.shape[0])
        blocks = (rows[start : start + step] for start in range(0, len(rows), step))
        return torch.cat([x @ _tensor(weight, self._device, block).T for block in blocks], dim=1)

    def _of(self, view: TensorView) -> Tensor:
        return _tensor(view, self._device)


def _rounded(x: Tensor, rounding: ActivationRounding | None, nudged: Tensor | None = None) -> Tensor:
    """Round each row of x, or group of its inputs, to integers by its largest value.

    A row that is rotated before it is rounded is rotated back.

    Args:
        nudged: rows that are moved by 1/4096 before they are rounded.
    """
    if rounding is None:
        return x
    turned = _rotated(x, rounding.rotation)
    if nudged is not None and len(nudged):
        turned = turned.clone()
        turned[nudged] *= 1 + (torch.arange(x.shape[1], device=x.device) % 2 * 2 - 1) / 4096
    outliers = _outliers(turned, rounding.num_outliers)
    rest = turned if outliers is None else turned.scatter(1, outliers, 0.0)
    groups = rest.reshape(x.shape[0], -1, rounding.group or x.shape[1])
    step = groups.abs().amax(2, keepdim=True) / rounding.levels
    rounded = torch.where(step > 0, torch.round(groups / step) * step, 0.0).view(x.shape)
    if outliers is not None:
        rounded = rounded.scatter(1, outliers, turned.gather(1, outliers))
    return _rotated(rounded, rounding.rotation)


def _outliers(x: Tensor, count: int) -> Tensor | None:
    """Find the inputs of each row with the largest magnitudes, [rows, count]; None: of no count.

    The first of equal ones is taken, as kernels do.
    """
    rest, found = x.abs() if count else x, list[Tensor]()
    for _ in range(count):
        found.append(rest.argmax(1, keepdim=True))
        rest = rest.scatter(1, found[-1], -1.0)
    return torch.cat(found, 1) if found else None


def _rotated(x: Tensor, block: int) -> Tensor:
    """Multiply each block of a row of x with an orthogonal Hadamard matrix.

    Twice is x again.

    Args:
        block: its size, a power of two; 0: x is returned as it is.
    """
    if block == 0:
        return x
    matrix = torch.ones(1, 1, device=x.device)
    while len(matrix) < block:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    turned: Tensor = x.reshape(-1, block) @ matrix / block**0.5
    return turned.view(x.shape)


def _tensor(view: TensorView, device: torch.device, rows: npt.NDArray[np.int64] | None = None) -> Tensor:
    """Copy a stored tensor, or these rows of it, in float32, into memory of its own."""
    array = np.array(view.array if rows is None else view.array[rows])
    if view.dtype == "BF16":
        # torch has no bfloat16 in numpy; int16 has the same bits
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device, torch.float32)
    return torch.from_numpy(array).to(device, torch.float32)
