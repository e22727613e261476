"""The tasks of the demo's adapters: judges of truth, and parts that share nothing."""

from __future__ import annotations

import json
import re
from itertools import islice, pairwise

import pytest

from loraserve.demo.demo_model import DemoAnswer, Question, ToolRequest
from loraserve.demo.smollm.tasks import french, pirate
from loraserve.demo.smollm.tasks.calls import CallJudge, reference
from loraserve.demo.smollm.tasks.mails import SubjectJudge
from loraserve.demo.smollm.tasks.queries import QueryJudge, run_query
from loraserve.demo.smollm.tasks.table import TASKS
from loraserve.demo.smollm.tasks.task import MAX_QUESTIONS, Task, Words, draw_questions, held_out_questions

tasks = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
NUM_TRAINED = 2_000


def training(task: Task, num_questions: int = NUM_TRAINED, seed: int = 1) -> list[Question]:
    return list(islice(draw_questions(task, "train", seed), num_questions))


def right_answer(question: Question) -> DemoAnswer:
    if not question.tools:
        return DemoAnswer(question.expected)
    learnt = reference(question)
    return learnt if isinstance(learnt, DemoAnswer) else called(learnt[0], learnt[1])


def called(name: str, arguments: object) -> DemoAnswer:
    return DemoAnswer("", (ToolRequest(name, json.dumps(arguments)),))


def sql(query: str, seed: int = 3) -> Question:
    """Find a held-out question whose right query begins so."""
    return next(q for q in held_out_questions(TASKS["sql"], 400, seed) if q.expected.startswith(query))


@tasks
def test_judge_takes_reference_answer(task: Task) -> None:
    for question in (*training(task, 200), *held_out_questions(task, 200, seed=2)):
        assert question.judge(right_answer(question)) is None, question


@tasks
def test_judge_refuses_answers_to_different_questions(task: Task) -> None:
    asked = held_out_questions(task, 60, seed=2)
    for question, other in pairwise(asked):
        if right_answer(question) != right_answer(other):
            assert question.judge(right_answer(other)), (question, other)


@tasks
def test_judge_refuses_empty_answer(task: Task) -> None:
    assert all(question.judge(DemoAnswer("")) for question in held_out_questions(task, 30, seed=2))


@tasks
def test_training_shares_no_question_with_held_out(task: Task) -> None:
    trained = {question.prompt for question in training(task)}
    assert trained.isdisjoint(question.prompt for question in held_out_questions(task, 400, seed=2))


@tasks
def test_training_has_no_held_out_word(task: Task) -> None:
    text = "\n".join(f"{question.prompt}\n{question.expected}" for question in training(task)).lower()
    leaked = [word for word in task.held_out_words() if re.search(rf"\b{re.escape(word.lower())}\b", text)]
    assert leaked == []


@tasks
def test_same_seed_draws_same_questions(task: Task) -> None:
    assert held_out_questions(task, 20, seed=5) == held_out_questions(task, 20, seed=5)
    assert held_out_questions(task, 20, seed=5) != held_out_questions(task, 20, seed=6)


@pytest.mark.parametrize("num_questions", [0, MAX_QUESTIONS + 1])
def test_number_of_questions_is_bounded(num_questions: int) -> None:
    with pytest.raises(ValueError, match=f"1 to {MAX_QUESTIONS}"):
        held_out_questions(TASKS["sql"], num_questions, seed=1)


def test_every_fourth_word_is_held_out() -> None:
    assert Words.split("a, b, c, d, e") == Words(("a", "b", "c", "e"), ("d",))


def test_french_training_has_every_word() -> None:
    """Combinations of words are held out, not words."""
    words = {word for question in training(TASKS["french"]) for word in re.findall(r"[\w']+", question.expected)}
    asked = held_out_questions(TASKS["french"], 300, seed=2)
    assert {word for question in asked for word in re.findall(r"[\w']+", question.expected)} <= words


def test_french_noun_agrees_with_adjective() -> None:
    assert french.NOUNS["door"].a == "une porte"
    found = {question.prompt: question.expected for question in training(TASKS["french"])}
    doors = [text for prompt, text in found.items() if "green door" in prompt]
    assert doors
    assert all("porte verte" in text for text in doors)


def test_pirate_keeps_capitals_and_names() -> None:
    assert pirate.in_pirate("Hello Anna, is the Man your friend?") == "Arr! Ahoy Anna, be the Lad yer matey?"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda query: query.replace(">", ">="), "rows, not those of"),
        (lambda query: query.replace("COUNT(*)", "*"), "rows, not those of"),
        (lambda query: query.replace("WHERE", "WHERE 1 OR"), "rows, not those of"),
        (lambda query: re.sub(r"FROM \w+", "FROM elsewhere", query), "SQLite: no such table"),
        (lambda query: "I don't know.", "SQLite"),
        (lambda query: "DROP TABLE x", "SQLite"),
        (lambda query: f"{query} {query}", "SQLite"),
        (lambda query: "", "SQLite: no query"),
    ],
)
def test_wrong_query_is_refused(change: object, problem: str) -> None:
    question = next(q for q in held_out_questions(TASKS["sql"], 400, 3) if re.search(r"COUNT.*WHERE .* > ", q.expected))
    assert problem in str(question.judge(DemoAnswer(change(question.expected))))  # type: ignore[operator]


def test_equivalent_query_is_right() -> None:
    question = sql("SELECT COUNT(*)")
    assert question.judge(DemoAnswer(question.expected.lower().replace("count(*)", "count(id)"))) is None


def test_order_matters_for_highest_rows() -> None:
    question = next(q for q in held_out_questions(TASKS["sql"], 400, 3) if "DESC" in q.expected)
    assert question.judge(DemoAnswer(question.expected.replace(" DESC", "")))


@pytest.mark.parametrize(
    "query",
    [
        "ATTACH DATABASE 'x.db' AS other",
        "PRAGMA user_version",
        "DELETE FROM {table}",
        "INSERT INTO {table} (id) VALUES (1)",
        "SELECT writefile('x', 'y')",
        "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT COUNT(*) FROM n",
    ],
)
def test_query_can_only_read_table(query: str) -> None:
    judge = sql("SELECT COUNT(*)").judge
    assert isinstance(judge, QueryJudge)
    assert judge(DemoAnswer(query.format(table=judge.table.name)))
    assert len(run_query(judge.table, f"SELECT * FROM {judge.table.name}")) == len(judge.table.rows)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ('{"customer": "Paula"', "no JSON"),
        ("[1]", "no object"),
        ("true", "no object"),
    ],
)
def test_text_without_object_is_refused(answer: str, problem: str) -> None:
    question = held_out_questions(TASKS["json"], 1, seed=2)[0]
    assert problem in str(question.judge(DemoAnswer(answer)))


def test_wrong_fields_of_object_are_named() -> None:
    question = held_out_questions(TASKS["json"], 1, seed=2)[0]
    found = json.loads(question.expected)
    wrong = {**found, "quantity": str(found["quantity"]), "note": None}
    assert question.judge(DemoAnswer(json.dumps(wrong))) == "wrong: quantity, note"
    del found["city"]
    assert question.judge(DemoAnswer(json.dumps(found))) == "wrong: city"


def test_object_may_have_different_order_and_spaces() -> None:
    question = held_out_questions(TASKS["json"], 1, seed=2)[0]
    fields = json.loads(question.expected)
    assert question.judge(DemoAnswer(json.dumps(dict(reversed(fields.items())), indent=2))) is None


@pytest.mark.parametrize(
    ("subject", "problem"),
    [
        ("Budget meeting moved to Friday, 9:15", None),
        ("New time: Friday 9:15, budget", None),
        ("Budget meeting moved to Friday", "misses 9:15"),
        ("Budget meeting moved from Monday to Friday, 9:15", "has Monday"),
        ("Budget meeting moved to Friday, 9:15, says Anna", "has Anna"),
        ("Budget meeting\nFriday, 9:15", "not one line"),
        ("Budget meeting moved to Friday, 9:15 " + "x" * 60, "not one line"),
        ("Budgets meeting moved to Friday, 19:15", "misses Budget, 9:15"),
        ("", "not one line"),
    ],
)
def test_subject_needs_facts_alone(subject: str, problem: str | None) -> None:
    found = SubjectJudge(("Budget", "Friday", "9:15"), ("Anna", "Monday"))(DemoAnswer(subject))
    assert found is None if problem is None else str(found).startswith(problem)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (called("get_weather", {"city": "Miami"}), "wrong: day"),
        (called("get_weather", {"city": "Rome", "day": "Thursday"}), "wrong: city"),
        (called("get_weather", {"city": "Miami", "day": "Thursday", "unit": "C"}), "wrong: unit"),
        (called("set_timer", {"city": "Miami", "day": "Thursday"}), "calls set_timer, expected get_weather"),
        (DemoAnswer("It rains."), "calls nothing, expected get_weather"),
        (DemoAnswer("", (ToolRequest("get_weather", '{"city'),)), "no JSON"),
    ],
)
def test_wrong_call_is_refused(answer: DemoAnswer, problem: str) -> None:
    judge = CallJudge("get_weather", '{"city": "Miami", "day": "Thursday"}')
    right = called("get_weather", {"day": "Thursday", "city": "Miami"})
    assert judge(right) is None
    assert str(judge(answer)).startswith(problem)
    assert str(judge(DemoAnswer("", right.calls * 2))).startswith("calls get_weather, get_weather")


def test_some_training_requests_need_no_call() -> None:
    asked = [question for question in training(TASKS["tools"]) if isinstance(reference(question), DemoAnswer)]
    assert len(asked) >= 20
    assert asked[0].judge(right_answer(asked[0])) is None
    assert str(asked[0].judge(called("get_weather", {}))).startswith("calls get_weather, expected none")
