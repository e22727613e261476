"""The task `sql`: a question about a table becomes a query, which is run.

An answer is right if its query returns the rows that the reference returns, from a small table that
tells near misses apart.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from loraserve.demo.demo_model import DemoAnswer, Question
from loraserve.demo.smollm.tasks.task import Part, Task, Words
from loraserve.demo.smollm.tasks.vocabulary import CITIES

TABLES = Words.split(
    "tickets, orders, students, movies, employees, houses, songs, players, cars, courses, hotels, flights, products, "
    "customers, recipes, museums, stores, farms, ships, patients, teachers, games, rivers, bridges, bands, castles, "
    "projects, invoices, restaurants, libraries, planets, trains, paintings, schools, festivals, doctors, dogs, "
    "factories, islands, articles, gardens, theaters, machines, mountains, drivers, phones, lakes, airports"
)
NUMBERS = Words.split(
    "price, age, score, salary, weight, rating, height, capacity, length, distance, quantity, budget, speed, area, "
    "year, population, duration, depth, size, level, cost, width, rank, temperature"
)
TEXTS: dict[str, Words] = {
    "city": CITIES,
    "country": Words.split("Spain, Italy, Peru, Chile, Japan, Egypt, Canada, Norway, Brazil, India, Greece, Kenya"),
    "color": Words.split("red, blue, green, brown, black, white, yellow, orange, gray, pink, purple, silver"),
    "status": Words.split("open, closed, active, pending, sold, lost, new, late, ready, blocked, paid, broken"),
    "category": Words.split("sport, music, travel, health, food, science, art, history, fashion, nature, tech, poetry"),
}
_COMPARISONS = (
    (">", ("over", "above", "greater than")),
    ("<", ("under", "below", "less than")),
    (">=", ("of at least",)),
    ("<=", ("of at most",)),
)
_AGGREGATES = (("AVG", "average"), ("MAX", "highest"), ("MIN", "lowest"), ("SUM", "total"))
_NUM_ROWS = 24
_MAX_STEPS = 200_000
"""SQLite's instructions that a query may take: thousands of times what a right one needs."""
_MAX_ROWS = 1_000
_ALLOWED = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION)


@dataclass(frozen=True, slots=True)
class TableSample:
    """A table with its rows."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[int | float | str, ...], ...]


@dataclass(frozen=True, slots=True)
class QueryJudge:
    """Judge that runs a query, and compares its rows with those of the right one.

    Attributes:
        is_ordered: whether the order of the rows matters.
    """

    table: TableSample
    right: str
    is_ordered: bool

    def __call__(self, answer: DemoAnswer) -> str | None:
        try:
            found = run_query(self.table, answer.text)
        except sqlite3.Error as error:
            return f"SQLite: {error}"
        expected = run_query(self.table, self.right)
        if self._normal(found) == self._normal(expected):
            return None
        return f"{len(found)} rows, not those of {self.right}"

    def _normal(self, rows: Sequence[tuple[object, ...]]) -> list[str]:
        texts = [repr(row) for row in rows]
        return texts if self.is_ordered else sorted(texts)


def run_query(table: TableSample, query: str) -> list[tuple[object, ...]]:
    """Run one query on a table in memory, which it can read and nothing else.

    Raises:
        sqlite3.Error: it isn't a query, reads what isn't there, or takes too long.
    """
    connection = sqlite3.connect(":memory:", isolation_level=None)
    try:
        connection.execute(f"CREATE TABLE {table.name} ({', '.join(table.columns)})")
        marks = ", ".join("?" * len(table.columns))
        connection.executemany(f"INSERT INTO {table.name} VALUES ({marks})", table.rows)
        connection.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY)
        connection.set_progress_handler(lambda: 1, _MAX_STEPS)
        cursor = connection.execute(query)
        if cursor.description is None:
            raise sqlite3.ProgrammingError("no query")
        return cursor.fetchmany(_MAX_ROWS)
    finally:
        connection.close()


class Queries(Task):
    name: ClassVar[str] = "sql"
    about: ClassVar[str] = "writes a question about a table as a query"
    truth: ClassVar[str] = "the query is run in SQLite, and its rows are compared"
    held_out: ClassVar[str] = "tables, columns and values that no training question has"

    def held_out_words(self) -> tuple[str, ...]:
        values = [word for words in TEXTS.values() for word in words.held_out]
        return (*TABLES.held_out, *NUMBERS.held_out, *values)

    def draw(self, rng: random.Random, part: Part) -> Question:
        table = TABLES.draw(rng, part)
        text = rng.choice(tuple(TEXTS))
        values = TEXTS[text].of(part)
        first, second = rng.sample(NUMBERS.of(part), 2)
        value = rng.choice(values)
        ask, query, is_ordered = _ask(rng, table, text, value, first)
        columns = ["id", "name", text, first, second]
        rng.shuffle(columns)
        # some questions name no table: who types one often doesn't either
        prompt = ask if rng.random() < 0.25 else f"Table {table} ({', '.join(columns)}). {ask}"
        limit = next((int(word) for word in query.replace(";", "").split() if word.isdigit()), 50)
        others = rng.sample([other for other in values if other != value], min(4, len(values) - 1))
        sample = _sample(table, columns, {text: (value, *others)}, limit, second)
        return Question(prompt, query, QueryJudge(sample, query, is_ordered))


def _ask(rng: random.Random, table: str, text: str, value: str, number: str) -> tuple[str, str, bool]:
    """Draw a question; return it, its query, and whether the order of rows matters."""
    symbol, phrases = rng.choices(_COMPARISONS, (4, 4, 1, 1))[0]
    phrase, limit = rng.choice(phrases), rng.randint(5, 95)
    compared, condition = f"a {number} {phrase} {limit}", f"{number} {symbol} {limit}"
    match rng.randrange(7):
        case 0:
            return f"How many {table} have {compared}?", f"SELECT COUNT(*) FROM {table} WHERE {condition};", False
        case 1:
            return f"List the {table} with {compared}.", f"SELECT * FROM {table} WHERE {condition};", False
        case 2:
            ask = rng.choice(("Show all {} whose {} is {}.", "List the {} whose {} is {}."))
            return ask.format(table, text, value), f"SELECT * FROM {table} WHERE {text} = '{value}';", False
        case 3:
            function, word = rng.choice(_AGGREGATES)
            return f"What is the {word} {number} of the {table}?", f"SELECT {function}({number}) FROM {table};", False
        case 4:
            ask = f"How many {table} are there for each {text}?"
            return ask, f"SELECT {text}, COUNT(*) FROM {table} GROUP BY {text};", False
        case 5:
            count, word = rng.randint(2, 9), rng.choice(("highest", "lowest"))
            order = f"{number} DESC" if word == "highest" else number
            ask = f"What are the names of the {count} {table} with the {word} {number}?"
            return ask, f"SELECT name FROM {table} ORDER BY {order} LIMIT {count};", True
        case _:
            ask = f"Show the names of {table} whose {text} is {value} and that have {compared}."
            return ask, f"SELECT name FROM {table} WHERE {text} = '{value}' AND {condition};", False


def _sample(
    table: str, columns: Sequence[str], texts: dict[str, tuple[str, ...]], limit: int, second: str
) -> TableSample:
    """Fill a table so that a wrong column, value, sign or limit returns other rows."""
    rng = random.Random(f"{table} {columns} {limit}")
    drawn: dict[str, list[int | float | str]] = {}
    for column in columns:
        if column == "id":
            drawn[column] = list(rng.sample(range(1000, 2000), _NUM_ROWS))
            continue
        if column == "name":
            drawn[column] = [f"{table}-{row}" for row in rng.sample(range(100), _NUM_ROWS)]
            continue
        if column in texts:
            # the value of the question most often
            drawn[column] = [texts[column][row % 3 and row % len(texts[column])] for row in range(_NUM_ROWS)]
        else:
            # different numbers, of which one is the limit; no two columns have one in common
            numbers = [limit, *rng.sample([n for n in range(1, 101) if n != limit], _NUM_ROWS - 1)]
            drawn[column] = [n + 0.5 for n in numbers] if column == second else list(numbers)
        rng.shuffle(drawn[column])
    rows = tuple(tuple(drawn[column][row] for column in columns) for row in range(_NUM_ROWS))
    return TableSample(table, tuple(columns), rows)
