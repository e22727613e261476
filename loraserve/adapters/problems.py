"""Problems of an upload, collected while it is compiled and raised together.

So one corrected upload fixes all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from loraserve.errors import AdapterBaseMismatch, AdapterFormatError, AdapterRejected, AdapterUnsupported

_MAX_PROBLEMS = 64

# What is wrong with the files comes before what is wrong with their fit.
_ORDER: tuple[type[AdapterRejected], ...] = (AdapterFormatError, AdapterUnsupported, AdapterBaseMismatch)


@dataclass(slots=True)
class Problems:
    """Groups of one message with the layers it concerns.

    A mistake in 28 layers is reported once.
    """

    by_message: dict[tuple[type[AdapterRejected], str], list[int]] = field(default_factory=dict)

    def add(self, kind: type[AdapterRejected], message: str, layer: int | None = None) -> None:
        """Keep it.

        `` {layers}`` in a message becomes the layers of all that it is about, or nothing.
        """
        layers = self.by_message.setdefault((kind, message), [])
        if layer is not None:
            layers.append(layer)

    @property
    def texts(self) -> list[str]:
        """Messages of the problems, for people."""
        return [
            message.replace(" {layers}", f" in {_ranges(layers)}" if layers else "")
            for (_, message), layers in self.by_message.items()
        ]

    def raise_if_any(self) -> None:
        """Raise all problems as one error; do nothing if there are none.

        Raises:
            AdapterFormatError: if one is of this kind; else
            AdapterUnsupported: if one is of this kind; else
            AdapterBaseMismatch. Its `problems` are all of them.
        """
        if not self.by_message:
            return
        texts = self.texts
        kinds = {kind for kind, _ in self.by_message}
        kind = next(k for k in _ORDER if k in kinds)
        more = len(texts) - _MAX_PROBLEMS
        if more > 0:
            texts = [*texts[:_MAX_PROBLEMS], f"… and {more} more."]
        summary = (
            texts[0]
            if len(texts) == 1
            else f"{len(texts)} problems: {' '.join(texts[:3])}{' …' if len(texts) > 3 else ''}"
        )
        raise kind(f"The adapter can't be served: {summary}", problems=texts)


def _ranges(layers: Iterable[int]) -> str:
    """ "layer 3", "layers 0–27", "layers 0, 2, 5–7 and 11 more": at most six ranges."""
    numbers = sorted(set(layers))
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    texts = [f"{first}" if first == last else f"{first}–{last}" for first, last in ranges]
    if len(texts) > 6:
        rest = sum(last - first + 1 for first, last in ranges[6:])
        texts = [*texts[:6], f"and {rest} more"]
    return f"layer{'' if len(numbers) == 1 else 's'} {', '.join(texts)}"
