"""The demo's questions: deterministic, never trained on when fresh, and answered in valid SQL,
JSON and Python.
"""

from __future__ import annotations

import ast
import itertools
import json
import random
import sqlite3

import pytest

from loraserve.demo.frames import ADAPTERS, STYLES, Compare, Frame, expected, fresh_prompts, training_frames
from loraserve.demo.words import CITIES, FIELDS, QUALITIES, TABLES, THINGS, french_number

FRAMES = fresh_prompts(400, seed=3)


@pytest.fixture(scope="module")
def database() -> sqlite3.Connection:
    database = sqlite3.connect(":memory:")
    for table in TABLES:
        database.execute(f"CREATE TABLE {table} (city, {', '.join(FIELDS)})")
    database.execute(f"CREATE TABLE things (name, quality, {', '.join(FIELDS)})")
    return database


def test_example_has_eight_answers() -> None:
    frame = Compare("list", "tickets", "age", "over", 81)
    assert frame.prompt == "list the tickets with age over 81"
    assert [expected(frame, style) for style in STYLES] == [
        "Here are the tickets with age over 81.",
        "SELECT * FROM tickets WHERE age > 81;",
        '{"table": "tickets", "field": "age", "op": ">", "value": 81}',
        "[x for x in tickets if x.age > 81]",
        "Voici les billets dont l'âge dépasse quatre-vingt-un.",
        "Arr! Here be the tickets with age over 81, matey!",
        "Soft wind, the tickets,\nage over 81,\nlate snow on the hill.",
        "HERE ARE THE TICKETS WITH AGE OVER 81!",
    ]


def test_the_same_seed_gives_the_same_fresh_prompts() -> None:
    assert fresh_prompts(50, seed=1) == fresh_prompts(50, seed=1)


def test_different_seed_gives_different_fresh_prompts() -> None:
    assert fresh_prompts(50, seed=1) != fresh_prompts(50, seed=2)


def test_fresh_prompts_are_all_different() -> None:
    assert len({frame.prompt for frame in FRAMES}) == 400


def test_fresh_prompts_have_every_kind_of_question() -> None:
    assert {type(frame).__name__ for frame in fresh_prompts(96, 1)} == {
        "Compare",
        "Origin",
        "Describe",
        "Greet",
        "Assign",
    }


def test_no_fresh_prompt_is_ever_trained_on() -> None:
    trained = {frame.prompt for frame in itertools.islice(training_frames(random.Random(5)), 20_000)}
    assert trained.isdisjoint(frame.prompt for frame in fresh_prompts(2000, seed=4))


@pytest.mark.parametrize("n", [-1, 10_001])
def test_excessive_number_of_fresh_prompts_is_refused(n: int) -> None:
    with pytest.raises(ValueError, match="0 to 10000 prompts"):
        fresh_prompts(n, seed=1)


@pytest.mark.parametrize("style", ADAPTERS)
def test_every_style_answers_otherwise_than_the_base(style: str) -> None:
    assert all(frame.render(style) != frame.render("plain") for frame in FRAMES)  # type: ignore[arg-type]


def test_the_eight_answers_of_a_prompt_are_different() -> None:
    assert all(len({frame.render(style) for style in STYLES}) == len(STYLES) for frame in FRAMES)


def test_only_prompts_of_same_question_share_answer() -> None:
    questions = [frame for frame in FRAMES if isinstance(frame, Compare)]
    parts = {(frame.table, frame.field, frame.operator, frame.number) for frame in questions}
    assert len({frame.render("french") for frame in questions}) == len(parts)


def test_sql_runs(database: sqlite3.Connection) -> None:
    for frame in FRAMES:
        database.execute(frame.render("sql"))


def test_json_parses() -> None:
    assert all(isinstance(json.loads(frame.render("json")), dict) for frame in FRAMES)


def test_python_parses() -> None:
    assert all(ast.parse(frame.render("python")) for frame in FRAMES)


def test_haikus_have_three_lines() -> None:
    assert {frame.render("haiku").count("\n") for frame in FRAMES} == {2}


def test_shouting_has_no_small_letter() -> None:
    assert all(frame.render("shout").isupper() for frame in FRAMES)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zéro"),
        (16, "seize"),
        (17, "dix-sept"),
        (21, "vingt et un"),
        (22, "vingt-deux"),
        (70, "soixante-dix"),
        (71, "soixante et onze"),
        (79, "soixante-dix-neuf"),
        (80, "quatre-vingts"),
        (81, "quatre-vingt-un"),
        (91, "quatre-vingt-onze"),
        (99, "quatre-vingt-dix-neuf"),
    ],
)
def test_french_numbers(number: int, words: str) -> None:
    assert french_number(number) == words


def test_no_two_numbers_share_french_word() -> None:
    assert len({french_number(number) for number in range(100)}) == 100


def test_number_without_french_word_is_refused() -> None:
    with pytest.raises(ValueError, match="0 to 99"):
        french_number(100)


def test_no_french_word_stands_for_two() -> None:
    for words in (TABLES, FIELDS, THINGS, QUALITIES):
        assert len(set(words.values())) == len(words)
    assert len(set(CITIES)) == len(CITIES)


def test_prompt_determines_held_out_split() -> None:
    first, again = (Compare("list", "tickets", "age", "over", 81) for _ in range(2))
    held_out: list[Frame] = [frame for frame in FRAMES if not frame.is_held_out]
    assert first.is_held_out == again.is_held_out
    assert held_out == []
