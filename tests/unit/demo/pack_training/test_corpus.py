"""The demo's lessons: the same for the same seed, never a held-out question,
each style asked for by its tag.
"""

from __future__ import annotations

import itertools
import random

import pytest

from loraserve.demo.frames import ADAPTERS, STYLES, fresh_prompts
from loraserve.demo.pack_training.corpus import Example, adapter_examples, base_examples


def base_lessons(seed: int, num: int) -> list[Example]:
    return list(itertools.islice(base_examples(random.Random(seed)), num))


def test_the_same_seed_gives_the_same_lessons() -> None:
    assert base_lessons(1, 300) == base_lessons(1, 300)


def test_different_seed_gives_different_lessons() -> None:
    assert base_lessons(1, 300) != base_lessons(2, 300)


def test_base_never_sees_fresh_prompt() -> None:
    fresh = {frame.prompt for frame in fresh_prompts(2000, seed=1)}
    asked = {example.prompt for example in base_lessons(3, 20_000)}
    tagged = {f"{prompt} in {style}" for prompt in fresh for style in STYLES}
    assert asked.isdisjoint(fresh | tagged)


def test_an_adapter_never_sees_a_fresh_prompt() -> None:
    fresh = {frame.prompt for frame in fresh_prompts(2000, seed=1)}
    asked = {example.prompt for example in itertools.islice(adapter_examples(random.Random(3), "sql"), 5000)}
    assert asked.isdisjoint(fresh)


def test_the_base_is_asked_for_every_style() -> None:
    prompts = [example.prompt for example in base_lessons(4, 500)]
    assert all(any(prompt.endswith(f" in {style}") for prompt in prompts) for style in ADAPTERS)


def test_an_adapters_prompts_name_no_style() -> None:
    examples = itertools.islice(adapter_examples(random.Random(5), "french"), 500)
    assert not any(example.prompt.endswith("in french") for example in examples)


def test_the_base_has_no_adapter_lessons() -> None:
    with pytest.raises(ValueError, match="not an adapter's style"):
        next(adapter_examples(random.Random(1), "plain"))
