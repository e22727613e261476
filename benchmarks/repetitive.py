"""A base whose answers repeat what they have seen, as those of trained models do: JSON rows, a file
with a few edits, an answer that quotes a passage; and random ones.

It has the shape and the costs of a size of `make_model`, and random weights but for its ends: the
token that follows depends on the last one alone, by a table of probabilities. So answers are drawn
at temperature 1.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.make_model import SIZES
from loraserve.text.tokenizer import Tokenizer

FIRST_TOKEN = 300
IMPOSSIBLE = -25.0
"""Logit of a token that doesn't follow."""
JSON, CODE, RETRIEVAL, RANDOM = "JSON rows", "code edit", "retrieval answer", "random"
WORKS = (JSON, CODE, RETRIEVAL, RANDOM)

Table = Mapping[int, Mapping[int, float]]
"""Token → probability of each that may follow."""


@dataclass(frozen=True, slots=True)
class Work:
    """A prompt, and which tokens follow which."""

    prompt: list[int]
    table: Table


class _Tokens:
    def __init__(self) -> None:
        self._next = FIRST_TOKEN

    def take(self, count: int) -> list[int]:
        """Tokens that nothing else uses."""
        self._next += count
        return list(range(self._next - count, self._next))


def walk(table: Table, start: int, count: int, rng: random.Random) -> list[int]:
    """Tokens drawn from a table, the first one included."""
    tokens = [start]
    while len(tokens) < count:
        following = table[tokens[-1]]
        tokens += rng.choices(list(following), list(following.values()))
    return tokens


def _uniform(tokens: Sequence[int]) -> dict[int, float]:
    return dict.fromkeys(tokens, 1 / len(tokens))


def _json_rows(tokens: _Tokens, rng: random.Random) -> Work:
    """Rows of five fields: their names and signs are always the same, their values are drawn."""
    table: dict[int, Mapping[int, float]] = {}
    ends: list[int] = []
    first: list[int] = []
    for num_values in (40, 30, 3, 10, 20):
        signs, values = tokens.take(4), tokens.take(num_values)
        first = first or signs
        for end in ends:
            table[end] = {signs[0]: 1.0}
        for a, b in itertools.pairwise(signs):
            table[a] = {b: 1.0}
        table[signs[-1]] = _uniform(values)
        ends = values
    for end in ends:
        table[end] = {first[0]: 1.0}
    return Work(walk(table, first[0], 101, rng), table)


def _code_edit(tokens: _Tokens, rng: random.Random) -> Work:
    """A file, and the same again, where one token in thirty is another."""
    file, edits, begin = tokens.take(240), tokens.take(20), tokens.take(1)
    table: dict[int, Mapping[int, float]] = {begin[0]: {file[0]: 1.0}}
    for i, token in enumerate(file):
        follower = file[(i + 1) % len(file)]
        table[token] = {follower: 1.0} if i % 3 else {follower: 0.9, edits[i // 3 % len(edits)]: 0.1}
    for number, edit in enumerate(edits):
        places = [i for i in range(0, len(file), 3) if i // 3 % len(edits) == number]
        table[edit] = _uniform([file[(i + 2) % len(file)] for i in places])
    return Work([*file, *begin], table)


def _retrieval(tokens: _Tokens, rng: random.Random) -> Work:
    """A passage of sentences, and an answer that quotes some, with the same words between them."""
    sentences, link = [tokens.take(16) for _ in range(14)], tokens.take(8)
    table: dict[int, Mapping[int, float]] = {a: {b: 1.0} for a, b in itertools.pairwise(link)}
    table[link[-1]] = _uniform([sentence[0] for sentence in sentences])
    for sentence in sentences:
        for a, b in itertools.pairwise(sentence):
            table[a] = {b: 1.0}
        table[sentence[-1]] = {link[0]: 1.0}
    return Work([*(token for sentence in sentences for token in sentence), link[0]], table)


def _random(tokens: _Tokens, rng: random.Random) -> Work:
    """Any of some tokens after any other: pairs occur again, and what followed them doesn't."""
    some = tokens.take(60)
    return Work(rng.choices(some, k=64), {token: _uniform(some) for token in some})


def works() -> dict[str, Work]:
    """Each kind of work."""
    tokens, rng = _Tokens(), random.Random(0)
    makers = {JSON: _json_rows, CODE: _code_edit, RETRIEVAL: _retrieval, RANDOM: _random}
    return {name: maker(tokens, rng) for name, maker in makers.items()}


def json_list(tokenizer: Tokenizer) -> Work:
    """A list of strings, in tokens of the tokenizer: the likeliest of them are always JSON."""

    def token(text: str) -> int:
        (token_id,) = tokenizer.encode(text, add_special_tokens=False)
        return token_id

    begin, first, between, value = FIRST_TOKEN, token('["'), token('","'), token("compose")
    table = {begin: {first: 1.0}, first: {value: 1.0}, value: {between: 1.0}, between: {value: 1.0}}
    return Work([begin], table)


def write_draft(size: str, source: Path, out: Path, share_right: float) -> None:
    """Write a draft base for a size's: its first layer and its ends.

    Args:
        share_right: share of the tokens after which it has the same probabilities. After the others
            it is sure of a token that never follows.
    """
    write_repetitive(size, source, out, num_layers=1, share_right=share_right)


def write_repetitive(
    size: str,
    source: Path,
    out: Path,
    table: Table | None = None,
    *,
    num_layers: int | None = None,
    share_right: float = 1.0,
) -> None:
    """Write the base of a size whose answers follow a table; by default those of all `works`.

    Args:
        source: a base that `make_model` wrote.
        num_layers: how many of its layers are kept; None: all.
        share_right: share of the tokens whose followers are the tables'.
    """
    shape = SIZES[size]
    if table is None:
        table = {token: following for work in works().values() for token, following in work.table.items()}
    if len(table) > shape.hidden:
        raise SystemExit(f"{len(table)} tokens don't fit {shape.hidden} directions: take a larger size")
    tensors = {
        name: tensor
        for name, tensor in load_file(source / "model.safetensors").items()
        if num_layers is None or not name.startswith("model.layers.") or int(name.split(".")[2]) < num_layers
    }
    rng = random.Random(1)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            # layers cost what they cost, and add nearly nothing
            tensors[name] = tensor * 1e-6
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    # a token's own direction, with the length that the last norm gives it
    columns = torch.full((shape.vocab, len(table)), IMPOSSIBLE)
    for column, (token, following) in enumerate(table.items()):
        embedding[token] = 0
        embedding[token, column] = 1
        if rng.random() >= share_right:
            columns[FIRST_TOKEN - 1, column] = 0.0
            continue
        for follower, probability in following.items():
            columns[follower, column] = math.log(probability)
    head[:] = 0
    head[:, : len(table)] = (columns / shape.hidden**0.5).to(head.dtype)
    out.mkdir(parents=True, exist_ok=True)
    for file in source.glob("*.json"):
        shutil.copy(file, out)
    if num_layers is not None:
        config = json.loads((out / "config.json").read_text())
        (out / "config.json").write_text(json.dumps({**config, "num_hidden_layers": num_layers}))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
