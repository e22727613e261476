"""One language, the field's: words of an earlier, private one don't come back, docstrings read as
sentences, and headings are nouns or tasks.

A ratchet: each count may fall and never rise. Where a test fails because a count fell, lower the
bound in the same commit.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("loraserve", "adapters_store", "kernels/loraserve_kernels", "migrations/loraserve_migrations")
OUTSIDE = ("tests", "benchmarks", "kernels/benchmarks", "examples", "tools")
"""Folders whose identifiers are held to the terms as well, but not their docstrings."""

TERMS = {
    "Turns": "SchedulingPass, or TenantRoundRobin",
    "Accounts": "FairQueue",
    "Account": "TenantFlow",
    "Line": "WaitingQueue",
    "Away": "ParkedFlowIndex",
    "OwnTimes": "RequestDeadlines",
    "Holdings": "ResourceQuota",
    "is_nobody": "is_internal",
    "is_ahead": "is_over_share",
    "owed": "max_deficit",
    "is_line_closed": "is_admission_paused",
    "closed_for": "reserved_for",
    "PlaceLine": "LoadQueue",
    "Favourites": "HotSet",
    "ReadAhead": "Prefetcher",
    "Arrivals": "states of ResidentAdapter",
    "Renter": "ArenaClient",
    "Tenure": "Owner",
    "Division": "MemoryPlan",
    "AdapterFacts": "AdapterMetadata",
    "Rests": "Throttle",
    "stand_back": "lower_thread_priority",
    "Strikes": "NumericFailures",
    "mend": "repair",
    "LateCertificates": "CertificateBackfill",
    "DeletionMarks": "DeletionLocks",
    "strangers": "unknown_tenants",
    "Answering": "InferenceContext",
    "Answerer": "TargetSelector",
    "WholeAnswer": "JSONAnswer",
    "References": "ReferenceEvaluator",
    "company": "cobatched",
    "sort_out": "group_tensors",
}
"""Identifiers that aren't used any more, and the standard term for each."""

_OPENERS = (
    "a's all as at before behind beside beyond both by each either every for from further here how if in inside it "
    "least less many more most much never no nobody none nothing of often on one only others over several since so "
    "some somebody than that the's their there these they this those though through to too twice under until up very "
    "what whatever when where wherever whether which whichever who whoever whom whose why with within without"
)
OPENERS = frozenset(_OPENERS.split())
"""First words that begin a fragment.

`Whether` is for properties, whose docstring is a noun phrase; it counts where a function has it.
"""

PERSONS = re.compile(r"\b(who|whom|whoever|nobody|somebody|someone|anybody|anyone)\b", re.IGNORECASE)
"""Words for people. A request, a thread or a tensor is *it*."""

FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)

_PRONOUNS = (
    "it its itself they them their themselves he his she her who whom whose whoever nobody somebody anybody everybody "
    "nothing something anything everything none what whatever one ones another others that which this these those we "
    "you i me my your our"
)
PRONOUNS = frozenset(_PRONOUNS.split())
"""Words of a test's name that stand for a noun, which is said instead."""
MAX_NAME_WORDS = 8

MAX_FRAGMENTS = 0.012
MAX_WITH_PERSONS = 0.001
"""Shares of all docstrings. *Whose* isn't counted: English says it of things too."""
MAX_WITH_RETURN = 0.082
"""Share of functions' docstrings that begin with *Return*.

Most functions do something of which the returned value is the result; their docstrings open with
the verb for that. Others, such as properties, open with a noun phrase or need no docstring.
"""

RETURNS = re.compile(r"\s*Returns?\b")
CLAUSE = re.compile(r"(^|[:,] (and )?)(what|when|where|how|why|who|whose|which|whether|if)\b", re.IGNORECASE)
"""Beginning of a clause in a heading: ``What is where``, ``Storage: where bytes are``."""


@cache
def sources(folders: tuple[str, ...] = FOLDERS) -> dict[Path, str]:
    """Return the folders' texts by path."""
    return {path: path.read_text() for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))}


@cache
def docstrings(text: str) -> tuple[tuple[int, str, ast.AST | None], ...]:
    """Return the docstrings of a module: of modules, classes and functions,
    and of attributes (whose node is None).
    """
    return tuple(_docstrings(text))


def _docstrings(text: str) -> Iterator[tuple[int, str, ast.AST | None]]:
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        is_documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for place, statement in enumerate(body):
            if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                continue
            if not isinstance(statement.value.value, str):
                continue
            if place == 0 and is_documented:
                yield statement.lineno, statement.value.value, node
            elif place and isinstance(body[place - 1], ast.Assign | ast.AnnAssign):
                yield statement.lineno, statement.value.value, None


def is_fragment(text: str, node: ast.AST | None) -> bool:
    first = (text.split() or [""])[0].strip("*`'\".,:;").lower()
    if first == "whether" and not is_function(node):
        return False
    return first in OPENERS


def is_function(node: ast.AST | None) -> bool:
    """Return whether the node is a function that isn't a property:
    a property's docstring may be a noun phrase.
    """
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    return not any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


def test_identifiers_are_the_fields_terms() -> None:
    found: dict[str, Counter[str]] = {}
    for path, text in sources((*FOLDERS, *OUTSIDE)).items():
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME and token.string in TERMS:
                found.setdefault(token.string, Counter())[str(path.relative_to(ROOT))] += 1
    assert not found, "\n".join(f"{name}: say {TERMS[name]} ({dict(where)})" for name, where in sorted(found.items()))


def test_docstrings_open_as_sentences() -> None:
    every, bad = 0, []
    for path, text in sources().items():
        for line, docstring, node in docstrings(text):
            every += 1
            if is_fragment(docstring, node):
                bad.append(f"{path.relative_to(ROOT)}:{line}: {docstring.strip().splitlines()[0][:80]}")
    share = len(bad) / every
    words = "open with an imperative (functions) or a noun phrase (attributes, modules)"
    assert share <= MAX_FRAGMENTS, (
        f"{len(bad)} of {every} docstrings ({share:.1%}) are fragments: {words}\n" + "\n".join(bad)
    )


def test_docstrings_of_functions_open_with_verb() -> None:
    every, bad = 0, []
    for path, text in sources().items():
        for line, docstring, node in docstrings(text):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                every += 1
                if RETURNS.match(docstring):
                    bad.append(f"{path.relative_to(ROOT)}:{line}: {docstring.strip().splitlines()[0][:80]}")
    share = len(bad) / every
    words = "say what the function does: Compute, Read, Find, List, Check whether, …"
    assert share <= MAX_WITH_RETURN, (
        f"{len(bad)} of {every} docstrings of functions ({share:.1%}) open with Return: {words}\n" + "\n".join(bad)
    )


def test_headings_are_nouns_or_tasks() -> None:
    bad = []
    for path in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))):
        for heading in re.findall(r"^#+ (.*)$", FENCE.sub("", path.read_text()), re.MULTILINE):
            if CLAUSE.search(heading):
                bad.append(f"{path.relative_to(ROOT)}: {heading}")
    assert not bad, "name the thing or the task, without a clause:\n" + "\n".join(bad)


def test_docstrings_use_no_words_for_people() -> None:
    every, bad = 0, []
    for path, text in sources().items():
        for line, docstring, _ in docstrings(text):
            every += 1
            if PERSONS.search(docstring):
                bad.append(f"{path.relative_to(ROOT)}:{line}: {docstring.strip().splitlines()[0][:80]}")
    share = len(bad) / every
    assert share <= MAX_WITH_PERSONS, (
        f"{len(bad)} of {every} docstrings ({share:.1%}) call something *who*\n" + "\n".join(bad)
    )


def test_names_of_tests_are_short_and_without_pronouns() -> None:
    bad = []
    for path, text in sources(("tests",)).items():
        for name in re.findall(r"^\s*(?:async )?def test_(\w+)", text, re.MULTILINE):
            words = name.split("_")
            if len(words) > MAX_NAME_WORDS or PRONOUNS.intersection(words):
                bad.append(f"{path.relative_to(ROOT)}: test_{name}")
    assert not bad, f"{len(bad)} names: test_<noun>_<verb>_<condition>, in {MAX_NAME_WORDS} words\n" + "\n".join(bad)
