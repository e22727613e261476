"""Find the token of a prompt from which on an adapter acts."""

from __future__ import annotations

from collections.abc import Sequence

from loraserve.memory.kv.prefix_cache import Activation
from loraserve.types import Digest


def find_activation(
    adapter: Digest, invocation_token_ids: Sequence[int], prompt_token_ids: Sequence[int]
) -> Activation | None:
    """Find where an adapter begins to act; it acts on all later tokens, output included.

    An activated LoRA acts from the first token of the last occurrence of its invocation tokens in
    the prompt on, and nowhere (None) if they don't occur; an adapter without invocation tokens acts
    on every token.

    Source: `calculate_alora_offsets` of PEFT.
    """
    if not invocation_token_ids:
        return Activation(adapter, 0)
    start = find_last(invocation_token_ids, prompt_token_ids)
    return None if start is None else Activation(adapter, start)


def find_last(part: Sequence[int], whole: Sequence[int]) -> int | None:
    """Find where the last occurrence of ``part`` starts in ``whole``; None if there is none.

    ``part`` isn't empty. Takes time linear in both, whatever clients send.

    Source: Knuth, Morris and Pratt, from the end.
    """
    pattern = part[::-1]
    # borders[i]: length of the longest proper prefix of pattern[:i + 1] that is also its suffix
    borders = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = borders[length - 1]
        length += pattern[i] == pattern[length]
        borders[i] = length
    length = 0
    for start in range(len(whole) - 1, -1, -1):
        while length and whole[start] != pattern[length]:
            length = borders[length - 1]
        length += whole[start] == pattern[length]
        if length == len(pattern):
            return start
    return None
