"""Which of a peer's formats is measured beside which of ours."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import peers_quality as quality
from benchmarks.formats import CALIBRATED, FORMATS, SAME_FILE, file_format, file_type
from benchmarks.peers_rows import Pair

OURS_REAL = ("bfloat16", "int8", "int4-rounded", "int4-calibrated")
"""Our formats that are paired by what they lose."""
LLAMA_CPP_REAL = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_1", "Q4_0")
LLAMA_CPP_COMMON = ("Q8_0", "Q4_K_M", "Q4_0")
"""Formats of llama.cpp that most people take."""


def is_bfloat16_fast(instructions: Sequence[str]) -> bool:
    return bool({"avx512_bf16", "amx_bf16"} & set(instructions))


def default_pairs(peers: Sequence[str], instructions: Sequence[str]) -> list[Pair]:
    """Return each peer's best formats on this processor, with ours that is nearest or fastest.

    llama.cpp rounds activations to eight bits in its formats of four bits too, as we do in
    int4-rounded. bfloat16 is fast only where the processor multiplies it. Both programs can hold
    adapters in eight bits, too: what follows a plus is the adapters' format.
    """
    is_fast = is_bfloat16_fast(instructions)
    wide = "bfloat16" if is_fast else "float32"
    pairs = {
        "llama.cpp": [
            ("Q4_0", "int4-rounded"),
            ("Q4_0+Q8_0", "int4-rounded+int8"),
            ("Q8_0", "int8"),
            ("Q8_0+Q8_0", "int8+int8"),
        ],
        "vllm": [(wide, "int8")],
        "peft": [("float32", "float32")] + ([("bfloat16", "bfloat16")] if is_fast else []),
    }
    return [Pair(peer, theirs, our) for peer in peers for theirs, our in pairs[peer]]


def pairs_by_quality(peers: Sequence[str], qualities: quality.Qualities, is_wide_fast: bool) -> list[Pair]:
    """Return pairs that lose about as much of the base."""
    ours = {
        name: one.divergence
        for (who, name), one in qualities.items()
        if who == quality.OURS and file_type(name) is None
    }
    theirs = {name: one.divergence for (who, name), one in qualities.items() if who == "llama.cpp"}
    pairs = []
    if "llama.cpp" in peers and not theirs:
        # their rows say why there is nothing to compare with
        pairs += [Pair("llama.cpp", "Q8_0", "int8")]
    elif "llama.cpp" in peers:
        pairs += [Pair("llama.cpp", name, quality.nearest(theirs[name], ours)) for name in LLAMA_CPP_COMMON]
        # the same weights to the bit
        pairs += [Pair("llama.cpp", name, file_format(name)) for name in LLAMA_CPP_COMMON]
        for our, divergence in ours.items():
            format = quality.nearest_not_better(divergence, theirs)
            if format is not None:
                pairs.append(Pair("llama.cpp", format, our))
    wide = "bfloat16" if is_wide_fast else "float32"
    if "vllm" in peers:
        pairs += [Pair("vllm", wide, wide), Pair("vllm", wide, "int8")]
    if "peft" in peers:
        pairs.append(Pair("peft", wide, wide))
    return list(dict.fromkeys(pairs))


def parse_pairs(text: str, peers: Sequence[str]) -> list[Pair]:
    """Return the pairs of `PEER:FORMAT=OURS,…`.

    Raises:
        ValueError: which one isn't a pair, and of what there is a choice.
    """
    pairs = []
    for item in text.split(","):
        peer, _, formats = item.strip().partition(":")
        theirs, _, our = formats.partition("=")
        if peer == "llama.cpp" and our == SAME_FILE:
            our = file_format(theirs)
        elif peer not in peers or not theirs or our not in {**FORMATS, **CALIBRATED}:
            raise ValueError(
                f"--formats has {item!r}; expected PEER:FORMAT=OURS with a PEER of {', '.join(peers)} "
                f"and OURS of {', '.join((*FORMATS, *CALIBRATED))}, or gguf, llama.cpp's own file; such as "
                "llama.cpp:Q8_0=int8."
            )
        pairs.append(Pair(peer, theirs, our))
    return pairs
