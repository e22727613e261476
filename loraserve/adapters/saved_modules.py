"""Modules that PEFT trains along with LoRA and saves whole: weights of modules_to_save, and biases.

Each must be where the config puts it, and of the base's shape.
"""

from __future__ import annotations

import numpy as np

from loraserve.adapters.config.peft_config import LoraSettings
from loraserve.adapters.format.tensor_names import SAVED_AS, BaseLinear, BaseTensorNames, Contents, LinearTensors, Place
from loraserve.adapters.ir import OUTSIDE_LAYERS, NormIR, TensorView
from loraserve.adapters.problems import Problems
from loraserve.adapters.target_modules import is_saved, ties_saved
from loraserve.errors import AdapterBaseMismatch, AdapterFormatError, AdapterUnsupported
from loraserve.limits import LIMITS


def check_saved(settings: LoraSettings, contents: Contents, names: BaseTensorNames, problems: Problems) -> None:
    """Add a problem for each weight and bias that is missing or wrong.

    One is wrong that isn't the config's, or doesn't fit the base.
    """
    is_tied = ties_saved(settings, names.base)
    for place in names.places():
        linear = names.linears[place[1]]
        stored = contents.linears.get(place, LinearTensors())
        is_meant = is_saved(settings, names.of(place)) or (is_tied and linear.is_outside)
        check = _Check(settings, linear, stored, names.reported_layer(place), problems)
        check.weight(is_meant)
        check.bias(is_meant)
        check.copies()
        check.saved_base()
    _check_tied_weights(settings, contents, names, problems)
    _check_tied_copies(contents, names, problems)
    for place in names.norms():
        _check_norm(settings, place, contents, names, problems)


def norms_of(contents: Contents) -> tuple[NormIR, ...]:
    return tuple(NormIR(layer, norm, weight) for (layer, norm), weight in contents.norms.items())


def vocabulary_problem(what: str, num_rows: int, vocab_size: int) -> str:
    """Explain why a table with another number of rows than the base's can't be served."""
    message = f"{what} has {num_rows:,} rows; this base has {vocab_size:,} tokens. "
    if num_rows > vocab_size:
        return message + (
            f"The base lacks {num_rows - vocab_size:,} of the rows; at most {LIMITS.max_extra_rows:,} such rows are "
            "served, and with LoRA alone. Add fewer tokens, or use the base's unused rows without "
            "resize_token_embeddings, and train them with trainable_token_indices."
        )
    return message + (
        "Shrunk vocabularies aren't served: this base still has the removed tokens. "
        "Train without resize_token_embeddings."
    )


class _Check:
    """Check of a linear's weight and bias."""

    def __init__(
        self,
        settings: LoraSettings,
        linear: BaseLinear,
        stored: LinearTensors,
        reported_layer: int | None,
        problems: Problems,
    ):
        self.settings = settings
        self.linear = linear
        self.stored = stored
        self.reported_layer = reported_layer
        self.problems = problems

    def weight(self, is_meant: bool) -> None:
        name, weight = self.linear.name, self.stored.weight
        if weight is None:
            if is_meant:
                self._malformed(f"modules_to_save names {name} {{layers}}, and the file holds no weight of it.")
            return
        if self.stored.has_lora:
            self._malformed(
                f"The file holds both LoRA and a trained weight for {name} {{layers}}; PEFT trains only one of the two."
            )
        elif self.linear.is_outside:
            # PEFT saves and loads these without a word
            self._check_table(f"The file's {name}.weight", weight)
        elif is_meant:
            self._check_shape("weight", weight, (self.linear.out_features, self.linear.in_features))
        else:
            self._malformed(
                f"The file holds a weight of {name} {{layers}}, which the config's modules_to_save doesn't name."
            )

    def bias(self, is_meant: bool) -> None:
        """`is_meant`: the module is in modules_to_save, its bias with it."""
        name, stored = self.linear.name, self.stored
        for part in ("base_bias", "bias", "bias_copy", "original_bias"):
            tensor = getattr(stored, part)
            if tensor is not None:
                saved_as = SAVED_AS.get(part, part)
                if not self.linear.has_bias:
                    self.problems.add(
                        AdapterBaseMismatch,
                        f"The file holds {name}.{saved_as} {{layers}}; in this base, {name} has no bias.",
                        self.reported_layer,
                    )
                    return
                self._check_shape(saved_as, tensor, (self.linear.out_features,))
        has_lora = stored.has_lora and not is_meant
        expected = "base_bias" if has_lora else "bias"
        setting = self.settings.bias
        is_due = self.linear.has_bias and (is_meant or setting == "all" or (has_lora and setting == "lora_only"))
        found = getattr(stored, expected)
        other = "bias" if has_lora else "base_bias"
        if getattr(stored, other) is not None:
            right, wrong = SAVED_AS.get(expected, expected), SAVED_AS.get(other, other)
            self._malformed(
                f"The file holds {name}.{wrong} {{layers}}; for a module {'with' if has_lora else 'without'} "
                f"LoRA, PEFT reads only {name}.{right}. "
                f"Rename {name}.{wrong} if it is the trained bias: older versions of PEFT used that name."
            )
        elif found is None and is_due:
            if is_meant:
                cause = "the module is in modules_to_save."
            else:
                cause = (
                    f"the config's bias is {setting}. Older versions of PEFT don't save it; "
                    "set bias=none to use the base's."
                )
            self._malformed(f"The file holds no bias of {name} {{layers}}, and {cause}")
        elif found is not None and not is_due and not (has_lora and self.linear.is_outside and self.linear.has_bias):
            # PEFT saves a head that has LoRA whole, and reads its bias again
            self._malformed(f"The file holds a bias of {name} {{layers}}, and the config's bias is {setting}.")

    def copies(self) -> None:
        """Add a problem where two copies that PEFT wrote of a tensor differ."""
        for part in ("weight", "bias"):
            copy = getattr(self.stored, f"{part}_copy")
            if copy is not None and not is_same(copy, getattr(self.stored, part)):
                name = self.linear.name
                self._malformed(
                    f"The file's {name}.modules_to_save.{part} isn't its {name}.{part} {{layers}}; "
                    "PEFT writes two equal copies."
                )

    def saved_base(self) -> None:
        if self.stored.saved_base is not None:
            self._check_table(f"The file's base weight of {self.linear.name}", self.stored.saved_base)

    def _check_table(self, what: str, table: TensorView) -> None:
        """Check that a table has a row per token, of the head and of the embedding alike."""
        vocab, hidden = _table_sizes(self.linear)
        if len(table.shape) != 2 or table.shape[1] != hidden:
            self.problems.add(
                AdapterBaseMismatch,
                f"{what} is {shape_words(table)}; expected {vocab}×{hidden} for this base.",
                self.reported_layer,
            )
        elif table.shape[0] != vocab:
            self.problems.add(AdapterBaseMismatch, vocabulary_problem(what, table.shape[0], vocab), self.reported_layer)

    def _check_shape(self, part: str, tensor: TensorView, shape: tuple[int, ...]) -> None:
        if tensor.shape != shape:
            wanted = "×".join(map(str, shape))
            message = f"{self.linear.name}.{part} is {shape_words(tensor)} {{layers}}; expected {wanted} for this base."
            self.problems.add(AdapterBaseMismatch, message, self.reported_layer)

    def _malformed(self, message: str) -> None:
        self.problems.add(AdapterFormatError, message, self.reported_layer)


def _table_sizes(linear: BaseLinear) -> tuple[int, int]:
    """(tokens, hidden size) of the head or the embedding, whichever way its linear lies."""
    is_embedding = linear.name == "embed_tokens"
    sizes = (linear.in_features, linear.out_features)
    return sizes if is_embedding else (sizes[1], sizes[0])


def shape_words(tensor: TensorView) -> str:
    return "×".join(map(str, tensor.shape)) or "a number"


def is_same(a: TensorView | None, b: TensorView | None) -> bool:
    return a is not None and b is not None and a.dtype == b.dtype and np.array_equal(a.array, b.array)


def _check_tied_weights(settings: LoraSettings, contents: Contents, names: BaseTensorNames, problems: Problems) -> None:
    """Check a tied head.

    PEFT loads a weight into it and the embedding, unless modules_to_save has copied one of them.
    """
    if not names.base.is_head_tied:
        return
    weights = {m: contents.linears[0, m].weight for m in OUTSIDE_LAYERS if (0, m) in contents.linears}
    head, embedding = weights.get("lm_head"), weights.get("embed_tokens")
    if head is None and embedding is None:
        return
    tied = ties_saved(settings, names.base)
    if not tied and any(is_saved(settings, names.of((0, m))) for m in OUTSIDE_LAYERS if m in names.linears):
        return
    why = "ensure_weight_tying is true" if tied else "modules_to_save names neither"
    if tied and (head is None or embedding is None):
        # reported where the config's reach is
        return
    if head is None or embedding is None:
        there = "lm_head" if embedding is None else "embed_tokens"
        problems.add(
            AdapterUnsupported,
            f"This base's head is tied to its embedding, {why}, and the file holds a weight of {there} only, "
            "which PEFT would use for both. "
            "Save it with PEFT's save_pretrained, which writes both.",
        )
    elif not is_same(head, embedding):
        problems.add(
            AdapterUnsupported,
            f"This base's head is tied to its embedding, {why}, and the file's lm_head.weight differs from "
            "its embed_tokens.weight: PEFT would keep "
            "only one. Name both in modules_to_save with ensure_weight_tying=False, "
            "or save the adapter from the tied model.",
        )


def _check_tied_copies(contents: Contents, names: BaseTensorNames, problems: Problems) -> None:
    """Report copies that differ where the base's head is the embedding.

    PEFT loads either's copy into both.
    """
    copies = [contents.linears[0, m].saved_base for m in OUTSIDE_LAYERS if (0, m) in contents.linears]
    there = [copy for copy in copies if copy is not None]
    if names.base.is_head_tied and len(there) == 2 and not is_same(*there):
        problems.add(
            AdapterUnsupported,
            "This base's head is tied to its embedding, and the file's copies of the two differ: "
            "PEFT would keep only one. Save the adapter with "
            "save_embedding_layers=False if it was trained on this base.",
        )


def _check_norm(
    settings: LoraSettings, place: Place, contents: Contents, names: BaseTensorNames, problems: Problems
) -> None:
    path = names.base.norm_paths[place[1]]
    is_meant, weight, reported_layer = (
        is_saved(settings, names.of(place)),
        contents.norms.get(place),
        names.reported_layer(place),
    )
    if weight is None:
        if is_meant:
            problems.add(
                AdapterFormatError,
                f"modules_to_save names {path} {{layers}}, and the file holds no weight of it.",
                reported_layer,
            )
        return
    if not is_meant:
        message = f"The file holds a weight of {path} {{layers}}, which the config's modules_to_save doesn't name."
        problems.add(AdapterFormatError, message, reported_layer)
    if weight.shape != (names.base.hidden_size,):
        problems.add(
            AdapterBaseMismatch,
            f"{path}.weight is {shape_words(weight)} {{layers}}; expected {names.base.hidden_size} numbers "
            "for this base.",
            reported_layer,
        )
