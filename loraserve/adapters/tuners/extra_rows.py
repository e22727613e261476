"""Rows that an adapter's embedding and head have beyond the base's, after a resize in training.

They are split off before all else is read: what remains has the base's shapes. Whatever PEFT adds
to these rows (LoRA, trained tokens) is a part of them here, so that each is a row of plain numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from loraserve.adapters.config.peft_config import LoraSettings
from loraserve.adapters.format.tensor_names import BaseTensorNames, Contents, LinearTensors
from loraserve.adapters.ir import OUTSIDE_LAYERS, ExtraRowsIR, ModuleIR, TensorView
from loraserve.adapters.problems import Problems
from loraserve.adapters.trained_tokens import TokenRows
from loraserve.adapters.tuners.factors import Matrix, as_float32, as_view
from loraserve.errors import AdapterBaseMismatch, AdapterFormatError, AdapterUnsupported
from loraserve.limits import Limits
from loraserve.types import BaseSpec

_CURE = (
    'Save the adapter with modules_to_save=["embed_tokens", "lm_head"], or with save_pretrained('
    "save_embedding_layers=True)."
)
_TABLES = {"weight": "{}", "weight_copy": "{}.modules_to_save", "saved_base": "the base weight of {}"}
"""Tensors with a row for each token, and words for each."""
_UNSERVED = ("magnitude", "lora_bias", "bias", "bias_copy", "base_bias", "original_bias")


@dataclass(slots=True)
class SplitRows:
    """Rows and columns that were split off an adapter's tables.

    Attributes:
        num_rows: rows beyond the base's.
        tables: module → its last rows, of the first of `weight` and `saved_base` that there is.
        is_own: modules whose rows of `tables` are the adapter's own weight.
        columns: module → what its LoRA has for these rows: of the embedding columns of A, of the
            head rows of B.
    """

    num_rows: int
    tables: dict[str, TensorView] = field(default_factory=dict)
    is_own: set[str] = field(default_factory=set)
    columns: dict[str, TensorView] = field(default_factory=dict)


def split_extra_rows(
    settings: LoraSettings, contents: Contents, names: BaseTensorNames, limits: Limits, problems: Problems
) -> SplitRows | None:
    """Cut the tables of `contents` to the base's rows; return the others.

    None where there are none, or more than are served, which the checks of shapes then refuse. Add
    a problem for tables of different sizes, and for what isn't served with such rows.
    """
    vocab = names.base.vocab_size
    sizes = dict(_sizes(contents, names))
    ids = [token_id for group in settings.trained_tokens.values() for token_id in group]
    num_rows = max((*sizes.values(), *(token_id + 1 for token_id in ids)), default=0) - vocab
    if not 0 < num_rows <= limits.max_extra_rows:
        return None
    if sizes and len({*sizes.values(), vocab + num_rows}) > 1:
        listed = ", ".join(f"{name} has {count:,}" for name, count in sizes.items())
        named = f"; trainable_token_indices names token {max(ids):,}" if ids and max(ids) >= max(sizes.values()) else ""
        problems.add(
            AdapterBaseMismatch,
            f"The embedding and the head have different numbers of rows: {listed}{named}. This base has {vocab:,}: "
            f"resize both with resize_token_embeddings. {_CURE}",
        )
    if settings.invocation_token_ids:
        problems.add(AdapterUnsupported, "alora_invocation_tokens is refused with a resized embedding.")
    found = SplitRows(num_rows)
    for module in OUTSIDE_LAYERS:
        stored = contents.linears.get((0, module))
        if stored is not None:
            contents.linears[0, module] = _split(module, stored, vocab, found, problems)
    return found


def _sizes(contents: Contents, names: BaseTensorNames) -> Iterable[tuple[str, int]]:
    """Yield the rows of each table that the file has, with words for it."""
    hidden = names.base.hidden_size
    for module in OUTSIDE_LAYERS:
        stored = contents.linears.get((0, module), LinearTensors())
        for part in _TABLES:
            table = getattr(stored, part)
            if table is not None and len(table.shape) == 2 and table.shape[1] == hidden:
                yield _TABLES[part].format(module), table.shape[0]
        columns = _columns(module, stored)
        if columns is not None and len(columns.shape) == 2:
            yield f"{module}'s LoRA", columns.shape[1 if module == "embed_tokens" else 0]


def _columns(module: str, stored: LinearTensors) -> TensorView | None:
    return stored.lora_a if module == "embed_tokens" else stored.lora_b


def _split(module: str, stored: LinearTensors, vocab: int, found: SplitRows, problems: Problems) -> LinearTensors:
    for part in _UNSERVED:
        if getattr(stored, part) is not None:
            problems.add(
                AdapterUnsupported,
                f"{module} has rows beyond the base's, and DoRA or a bias; this combination isn't served.",
            )
            break
    cut: dict[str, TensorView] = {}
    for part in _TABLES:
        table = getattr(stored, part)
        if table is None or len(table.shape) != 2 or table.shape[0] <= vocab:
            continue
        cut[part] = _view(table, table.array[:vocab])
        if module not in found.tables:
            found.tables[module] = _view(table, table.array[vocab:])
            if part == "weight":
                found.is_own.add(module)
    columns = _columns(module, stored)
    if columns is not None and len(columns.shape) == 2:
        if module == "embed_tokens" and columns.shape[1] > vocab:
            cut["lora_a"] = _view(columns, columns.array[:, :vocab])
            found.columns[module] = _view(columns, columns.array[:, vocab:])
        elif module == "lm_head" and columns.shape[0] > vocab:
            cut["lora_b"] = _view(columns, columns.array[:vocab])
            found.columns[module] = _view(columns, columns.array[vocab:])
    return replace(stored, **cut)


def _view(tensor: TensorView, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> TensorView:
    return TensorView(tensor.dtype, array.shape, array)


def split_tokens(rows: Mapping[str, TokenRows], vocab: int) -> tuple[dict[str, TokenRows], dict[str, TokenRows]]:
    """Split the trained tokens into those that the base has rows for and those beyond them."""
    within, beyond = dict[str, TokenRows](), dict[str, TokenRows]()
    for module, trained in rows.items():
        count = sum(token_id < vocab for token_id in trained.ids)
        for part, ids, array in (
            (within, trained.ids[:count], trained.rows.array[:count]),
            (beyond, trained.ids[count:], trained.rows.array[count:]),
        ):
            if ids:
                part[module] = TokenRows(ids, _view(trained.rows, array))
    return within, beyond


def joined_rows(
    split: SplitRows,
    tokens: Mapping[str, TokenRows],
    modules: Iterable[ModuleIR],
    base: BaseSpec,
    problems: Problems,
) -> ExtraRowsIR | None:
    """Join the rows to plain numbers; None and a problem if some aren't in the file.

    Args:
        tokens: trained ones beyond the base's rows.
        modules: those of the tables, with their LoRA on the base's rows.
    """
    tables = dict(split.tables)
    if base.is_head_tied and tables and not split.is_own:
        # PEFT loads a base's table into both
        [first, *_] = tables.values()
        tables = {module: tables.get(module, first) for module in OUTSIDE_LAYERS}
    by_module = {m.module: m for m in modules if m.module in OUTSIDE_LAYERS}
    found: dict[str, TensorView] = {}
    for module in OUTSIDE_LAYERS:
        rows = np.zeros((split.num_rows, base.hidden_size), np.float32)
        is_known = np.zeros(split.num_rows, bool)
        if module in tables and len(tables[module].array) == split.num_rows:
            rows[:], is_known[:] = as_float32(tables[module]), True
        if module in tokens:
            places = np.array(tokens[module].ids) - base.vocab_size
            rows[places], is_known[places] = as_float32(tokens[module].rows), True
        if not is_known.all():
            missing = base.vocab_size + int(np.flatnonzero(~is_known)[0])
            problems.add(
                AdapterFormatError,
                f"The adapter has tokens up to {base.vocab_size + split.num_rows - 1:,}; this base has rows for "
                f"{base.vocab_size:,}, and the file holds no row of {module} for token {missing:,}: those of the "
                f"embedding and of the head must both be there. {_CURE}",
            )
            continue
        if module in split.columns:
            rows = rows + _of_lora(module, by_module[module], split.columns[module])
        found[module] = as_view(rows)
    return ExtraRowsIR(found["embed_tokens"], found["lm_head"]) if len(found) == len(OUTSIDE_LAYERS) else None


def _of_lora(module: str, m: ModuleIR, columns: TensorView) -> Matrix:
    """Compute the update that LoRA makes to the extra rows."""
    if m.lora_a is None or m.lora_b is None:
        return np.zeros((), np.float32)
    if module == "embed_tokens":
        return m.scaling * (as_float32(m.lora_b) @ as_float32(columns)).T
    return m.scaling * (as_float32(columns) @ as_float32(m.lora_a))
