"""Regexes that RE2 doesn't take are matched as Python's ``re`` matches them, which is PEFT's, and
in a bounded number of steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from peft.utils.other import match_target_against_key

from loraserve.adapters.compiler import compile_adapter
from loraserve.adapters.config.expressions import Budget, Expression, parse_as_python, parse_expression
from loraserve.adapters.config.regexes import Regex, compile_regex
from loraserve.adapters.ir import TensorView
from loraserve.errors import AdapterUnsupported
from loraserve.limits import LIMITS
from loraserve.types import BaseSpec

MODULES = [
    *(f"self_attn.{m}_proj" for m in "qkvo"),
    *(f"mlp.{m}_proj" for m in ("gate", "up", "down")),
    "self_attn",
    "input_layernorm",
]
NAMES = [f"{root}.layers.{i}.{m}" for root in ("model", "language_model") for i in (0, 1, 10, 31) for m in MODULES]
NAMES += ["lm_head", "model.embed_tokens", "model.norm", "visual.blocks.0.attn.qkv"]

IN_THE_WILD = [
    r"^(language_model|model)(?!.*(lm_head|output|emb|wte|shared)).*(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)$",
    r"^(language_model)(?!.*(lm_head|output|emb|wte|shared)).*",
    r"^(?!.*(visual|lm_head)).*\.(q_proj|v_proj)$",
    r"(?!.*visual)(?=.*(self_attn|mlp)).*_proj",
    r".*\.(?:[0-9]|1[0-5])\.(?!mlp).*_proj",
    r"(?:.*?(?:language|text|model).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?(?:q_proj|k_proj|up_proj)(?!_).*?)|(?:\bmodel\.layers\.[\d]{1,}\.mlp\.down_proj)",
    r".*(?<!\.mlp)\.\w+_proj\Z",
    r"(?i)(?!VISUAL).*LAYERS\.\d+\..*Q_PROJ",
]


@pytest.mark.parametrize("text", IN_THE_WILD)
def test_expressions_of_trainers_match_as_in_peft(text: str) -> None:
    regex = compile_regex(text)
    assert isinstance(regex, Regex)
    assert isinstance(regex.compiled, Expression)
    matched = [name for name in NAMES if regex.is_fullmatch(name)]
    assert matched == [name for name in NAMES if match_target_against_key(text, name)]
    assert 0 < len(matched) < len(NAMES) or "language_model)" in text


SHORT = ["m.l.0.q_proj", "m.l.11.q_proj", "lm.q", "q", "aab", "abab", "Kis_9", "aaaa", "m", "I.S-k"]
LEAVES = [
    *("a", "b", "q", ".", "_", "K", "m.l", "q_proj", "", "(?:)", "a|b", "(l|m|)", "^", "$"),
    *(r"\.", r"\d", r"\w", r"\s", r"\D", r"\W", r"\A", r"\Z", r"\b", r"\B", r"\u017f", r"\x6b"),
    *("[01]", "[^.]", "[a-c]", "[^a-m]", r"[\w.]", "[A-Z]", "[k-s]", r"[\u0130-\u2130]", r"[^\d_]"),
]
REPEATS = ["", "", "", "*", "+", "?", "{1,2}", "{2}", "{,2}", "{0,3}", "*?", "+?", "??", "{1,}?"]


def draw(rng: random.Random, depth: int) -> str:
    """Return an expression with everything that is taken; names are short,
    for the oracle must come to an end.
    """
    if depth == 0 or rng.random() < 0.3:
        leaf = rng.choice(LEAVES)
        is_single = leaf not in ("", "^", "$", "a|b") and leaf not in (r"\A", r"\Z", r"\b", r"\B")
        return (f"(?:{leaf})" if len(leaf) > 1 else leaf) + rng.choice(REPEATS) if is_single else leaf
    inner = draw(rng, depth - 1)
    match rng.randrange(9):
        case 0 | 1 | 2:
            return inner + draw(rng, depth - 1)
        case 3:
            return f"(?:{inner}|{draw(rng, depth - 1)})"
        case 4:
            return f"({inner}){rng.choice(('', '?', '*', '+', '{1,2}', '*?'))}"
        case 5:
            return f"(?={inner})"
        case 6:
            return f"(?!{inner})"
        case 7:
            return f"(?{rng.choice(('<=', '<!'))}{draw(rng, min(depth - 1, 1))})"
        case _:
            return f"(?{rng.choice(('i', 's', 'm', 'a', 'ia', 'x', '-i', 'i-s'))}:{inner})"


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("seed", range(4))
def test_random_expression_matches_as_in_python_re(seed: int) -> None:
    rng = random.Random(seed)
    compared = 0
    while compared < 400:
        text = ("(?i)" if rng.random() < 0.15 else "") + draw(rng, rng.randrange(1, 5))
        try:
            oracle = re.compile(text)
        except re.error:
            continue
        expression = parse_expression(parse_as_python(text), Budget())
        assert isinstance(expression, Expression), text
        for name in SHORT:
            assert expression.is_fullmatch(name) == bool(oracle.fullmatch(name)), (text, name)
            assert expression.is_match(name) == bool(oracle.match(name)), (text, name)
        compared += 1


def test_set_of_all_characters_is_read_without_enumeration() -> None:
    """Python's compiler takes 10 ms for each of these sets,
    with a lock that holds up every other thread.
    """
    started = time.process_time()
    regex = compile_regex("(?i)" + r"[\x00-\U0010ffff]" * 200)
    assert isinstance(regex, Regex)
    assert regex.is_fullmatch("a" * 200)
    assert not regex.is_fullmatch("a" * 199)
    assert time.process_time() - started < 1


ATTACKS = [
    "(?!x)(a+)+$b",
    "(?=(a+)+b)a*",
    "(?!(((a*)*)*)*b).*c",
    "(?!x)(a?){3000}a",
    "(?!x)" + "(" * 25 + "a{9}" + "){9}" * 25,
    "(?=a)" + "(?:a|a)*" * 200 + "b",
    "(?=a)" + "(?=.*" * 60 + "b" + ")" * 60,
    "(?!x)" + "(.*)" * 900 + "b",
]


@pytest.mark.parametrize("text", ATTACKS, ids=lambda text: text[:24])
def test_attack_takes_at_most_allowed_steps(text: str) -> None:
    regex = compile_regex(text)
    assert isinstance(regex, Regex)
    started = time.process_time()
    # with Python's engine, most of these would take longer than the universe has
    with contextlib.suppress(AdapterUnsupported):
        matched = [name for i in range(600) if regex.is_fullmatch(name := "a" * (450 + i % 40))]
        assert matched in ([], ["a" * (450 + i % 40) for i in range(600)])
    # what it takes on a machine that does much else beside it: steps alone are bounded exactly
    assert time.process_time() - started < 20


def test_budget_is_shared_by_all_regexes_of_config(
    make_config: Callable[..., dict[str, Any]],
    make_tensors: Callable[..., dict[str, np.ndarray[Any, Any]]],
    base: BaseSpec,
) -> None:
    places = {(layer, module): 4 for layer in range(3) for module in ("q_proj", "v_proj")}
    tensors = {name: TensorView("F32", a.shape, a) for name, a in make_tensors(places).items()}
    targets = r"^(language_model|model)(?!.*(lm_head|output|emb)).*\.(q|v)_proj$"
    assert len(compile_adapter(make_config(target_modules=targets), tensors, base).modules) == 6
    several = {f"(?!x{i}).*b": 2 for i in range(64)}
    limits = dataclasses.replace(LIMITS, max_adapter_regex_steps=20_000)
    assert compile_adapter(make_config(target_modules=targets), tensors, base, limits)
    with pytest.raises(AdapterUnsupported, match="the names of this base's modules takes more than 20,000 steps"):
        compile_adapter(make_config(target_modules=targets, alpha_pattern=several), tensors, base, limits)
    few = Budget(dataclasses.replace(LIMITS, max_adapter_regex_steps=6))
    first, second = (compile_regex(text, budget=few) for text in ("(?!x)a", "(?!y)a"))
    assert isinstance(first, Regex)
    assert isinstance(second, Regex)
    with pytest.raises(AdapterUnsupported):
        _ = first.is_fullmatch("a"), second.is_fullmatch("a")
