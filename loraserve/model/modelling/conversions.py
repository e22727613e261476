"""Names and shapes of a checkpoint's tensors as transformers' modelling code has them.

Checkpoints keep names of earlier code, and experts one by one that the code has in one tensor:
transformers' own table says so.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from loraserve.errors import ModelError


class Conversions:
    """Conversion of a checkpoint's tensors.

    Attributes:
        targets: name in the checkpoint → name in the model, of those that stand for one tensor.
        gathered: name in the checkpoint → first name in the model of what it becomes a part of.
        apart: name in the checkpoint → name that it would have in the model by itself, of those.
        ignored: names in the checkpoint that the model leaves out.
    """

    def __init__(self, model: Any, names: list[str]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, rename_source_key

        mapping = get_model_conversion_mapping(model)
        renamings = [one for one in mapping if not isinstance(one, WeightConverter)]
        converters = [one for one in mapping if isinstance(one, WeightConverter)]
        by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        parameters = dict(model.state_dict())
        ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
        self._model = model
        self._patterns: dict[str, str] = {}
        self._groups: dict[str, Any] = {}
        self._held: dict[str, dict[str, Tensor]] = {}
        self.targets: dict[str, str] = {}
        self.gathered: dict[str, str] = {}
        self.apart: dict[str, str] = {}
        self.ignored: set[str] = set()
        for name in names:
            target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, parameters)
            if pattern is not None:
                self.gathered[name], self._patterns[name] = target, pattern
                self.apart[name] = rename_source_key(name, renamings, [], model.base_model_prefix, parameters)[0]
                self._groups.setdefault(target, copy.deepcopy(by_pattern[pattern]))
            elif target not in parameters and any(one.search(target) for one in ignored):
                self.ignored.add(name)
            else:
                self.targets[name] = target
        self._num_missing = Counter(self.gathered.values())

    def leave(self, prefix: str) -> None:
        """Merge no tensors whose names apart begin so: each stands for itself."""
        for name in [name for name, apart in self.apart.items() if apart.startswith(prefix)]:
            self.targets[name] = self.apart.pop(name)
            self._num_missing[self.gathered.pop(name)] -= 1

    def merged(self, name: str, tensor: Tensor) -> Mapping[str, Tensor]:
        """Keep a tensor until the others that it is merged with are there.

        Return what they become then, by name in the model; they aren't kept any more. Nothing
        before.

        Raises:
            ModelError: they can't be merged.
        """
        from transformers.core_model_loading import dot_natural_key

        target = self.gathered[name]
        held = self._held.setdefault(target, {})
        held[name] = tensor
        self._num_missing[target] -= 1
        if self._num_missing[target]:
            return {}
        group = self._groups.pop(target)
        for one in sorted(held, key=dot_natural_key):
            group.add_tensor(target, one, self._patterns[one], held[one])
        del self._held[target]
        try:
            converted = group.convert(target, model=self._model, config=self._model.config)
        except Exception as error:
            raise ModelError(
                f"The tensors of {target} can't be merged by transformers: {str(error).splitlines()[0][:200]}.",
                hint="Fetch the checkpoint again, or check config.json.",
            ) from error
        return {key: value[0] if isinstance(value, list) else value for key, value in converted.items()}
