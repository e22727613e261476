"""Evaluation of versions: lines of data, metrics, requests, and what is kept and shown."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from loraserve import Client, errors
from loraserve.cli.arguments import split_versions
from loraserve.cli.evaluation import data_file
from loraserve.cli.evaluation.data_file import read_data
from loraserve.cli.evaluation.evaluator import check_answered_by
from loraserve.cli.evaluation.metrics import compile_pattern, has_fields, is_accurate, is_exact, matches
from loraserve.contract.result import Answer

Run = Callable[..., Any]
SQL = "SELECT * FROM tickets WHERE age > {};"
QUESTION = "list the tickets with age over {}"


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Four questions that the bundled adapter answers in SQL."""
    lines = [
        {
            "prompt": QUESTION.format(age),
            "answer": SQL.format(age),
            "regex": r"^SELECT .* FROM \w+",
            "id": age,
        }
        for age in (81, 40, 7, 65)
    ]
    return write(tmp_path / "held-out.jsonl", *lines)


# --- lines ---


def test_line_forms_are_read_with_number(tmp_path: Path) -> None:
    user, assistant = {"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}
    path = write(
        tmp_path / "d.jsonl",
        {"prompt": "2 + 2 =", "completion": " 4", "source": "x", "regex": None},
        "",
        {"messages": [user], "answer": "4", "choices": ["3", "4"]},
        {"messages": [user, assistant]},
        {"prompt": "p", "answer": '{"a": {"b": [1]}}', "json_field": "a.b.0", "json_fields": ["a"]},
    )
    data = read_data(path)
    assert [line.number for line in data.lines] == [1, 3, 4, 5]
    assert [line.answer for line in data.lines] == [" 4", "4", "4", '{"a": {"b": [1]}}']
    assert [line.question for line in data.lines] == ["2 + 2 =", "2 + 2", "2 + 2", "p"]
    assert data.lines[2].messages == (user,)
    assert data.lines[3].json_fields == ("a.b.0", "a")
    assert data.ignored == ("source",)
    assert data.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert data.metrics == ("exact_match", "accuracy", "json_match", "log_likelihood")


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{bad", "isn't JSON: Expecting property name"),
        ("[]", "isn't a JSON object"),
        ("[" * 100_000, "nested too deeply"),
        (r'{"prompt": "\ud800", "answer": "x"}', "half of a surrogate pair"),
        ({"answer": "x"}, "either prompt or messages"),
        ({"prompt": "x", "messages": [{"role": "user"}], "answer": "y"}, "either prompt or messages"),
        ({"prompt": "x"}, "either answer or completion"),
        ({"prompt": "x", "answer": "y", "completion": "y"}, "either answer or completion"),
        ({"prompt": "", "answer": "y"}, "prompt should be text"),
        ({"prompt": ["x"], "answer": "y"}, "prompt should be text"),
        ({"prompt": "x", "answer": 4}, "answer should be text"),
        ({"prompt": "x", "answer": "  "}, "answer should be text"),
        ({"messages": [], "answer": "y"}, "messages should be a list"),
        ({"messages": [{"content": "x"}], "answer": "y"}, "messages should be a list"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "nothing but the answer"),
        ({"prompt": "x", "answer": "y", "regex": "(a"}, "RE2 can't compile the regex: missing"),
        ({"prompt": "x", "answer": "y", "regex": "(?=a)"}, "RE2 can't compile the regex"),
        ({"prompt": "x", "answer": "y", "choices": ["y"]}, "choices should be a list of 2"),
        ({"prompt": "x", "answer": "y", "choices": ["a", "b"]}, "answer should be one of the choices"),
        ({"prompt": "x", "answer": "y", "choices": ["y", " Y"]}, "same text twice"),
        ({"prompt": "x", "answer": "y", "json_fields": ["a"]}, "answer should be a JSON object"),
        ({"prompt": "x", "answer": '{"b": 1}', "json_fields": ["a"]}, "answer has no field 'a'"),
        ({"prompt": "x", "answer": '{"b": 1}', "json_fields": []}, "json_fields should be a list"),
    ],
)
def test_wrong_line_is_refused_by_number(tmp_path: Path, line: object, fault: str) -> None:
    path = write(tmp_path / "d.jsonl", {"prompt": "x", "answer": "y"}, line, {}, {})
    with pytest.raises(errors.InvalidRequest) as caught:
        read_data(path)
    assert "d.jsonl:2: " in caught.value.message
    assert fault in caught.value.message
    assert caught.value.hint == "Other lines are wrong too: 3, 4."


def test_data_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "d.jsonl", *[{"prompt": "x", "answer": "y"}] * 4)
    monkeypatch.setattr(data_file, "MAX_LINES", 3)
    with pytest.raises(errors.PayloadTooLarge, match="more than 3 lines"):
        read_data(path)
    monkeypatch.setattr(data_file, "MAX_LINE_BYTES", 10)
    with pytest.raises(errors.InvalidRequest, match=r"d\.jsonl:1: the line has 31 bytes"):
        read_data(write(path, {"prompt": "x", "answer": "yy"}))
    monkeypatch.setattr(data_file, "MAX_FILE_BYTES", 20)
    with pytest.raises(errors.PayloadTooLarge):
        read_data(path)


def test_missing_or_empty_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidRequest, match="can't be read: No such file"):
        read_data(tmp_path / "none.jsonl")
    with pytest.raises(errors.InvalidRequest, match="can't be read"):
        read_data(tmp_path)
    with pytest.raises(errors.InvalidRequest, match="has no lines"):
        read_data(write(tmp_path / "d.jsonl", "", "  "))


def test_versions_are_read_after_name() -> None:
    assert split_versions("a/b") == ("a/b", ())
    assert split_versions("sql@3,4") == ("sql", (3, 4))
    for wrong in ("sql@", "sql@live", "sql@3,", "sql@3,3"):
        with pytest.raises(typer.BadParameter):
            split_versions(wrong)


# --- metrics ---


def test_exact_match_ignores_outer_white_space() -> None:
    assert is_exact(" yes\n", "yes")
    assert not is_exact("Yes", "yes")


@pytest.mark.parametrize(
    ("answer", "reference", "choices", "is_right"),
    [
        ("The answer is  PARIS.", "Paris", (), True),
        ("15", "5", (), False),
        ("It's 5.", "5", (), True),
        ("a (b) c", "(b)", (), True),
        ("B, and not A", "A", ("A", "B"), False),
        ("B, and not A", "B", ("A", "B"), True),
        ("New York", "York", ("New York", "York"), False),
        ("new york city", "New York", ("New", "New York"), True),
        ("neither", "A", ("A", "B"), False),
    ],
)
def test_accuracy_finds_reference_as_whole_words(
    answer: str, reference: str, choices: tuple[str, ...], is_right: bool
) -> None:
    assert is_accurate(answer, reference, choices) == is_right


def test_regex_matches_part_of_answer_in_linear_time() -> None:
    assert matches("order 17 is late", r"\d+ is")
    assert not matches("order", r"\d")
    assert not matches("a" * 50_000, r"(a+)+b")
    assert isinstance(compile_pattern("("), str)


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [
        ('{"name": "Ann", "items": [{"price": 2.0}], "more": 1}', True),
        ('```json\n{"name": "Ann", "items": [{"price": 2}]}\n```', True),
        ('{"name": "Bob", "items": [{"price": 2}]}', False),
        ('{"name": "Ann", "items": []}', False),
        ('{"name": "Ann", "items": [{"price": true}]}', False),
        ('["Ann"]', False),
        ("Ann", False),
        ("[" * 100_000, False),
    ],
)
def test_json_match_compares_named_fields(answer: str, is_right: bool) -> None:
    reference = '{"name": "Ann", "items": [{"price": 2}], "more": null}'
    assert has_fields(answer, reference, ("name", "items.0.price")) == is_right


def test_json_match_keeps_true_and_number_apart() -> None:
    assert not has_fields('{"a": true}', '{"a": 1}', ("a",))
    assert has_fields('{"a.b": {"c": [1, {"d": null}]}}', '{"a.b": {"c": [1, {"d": null}]}}', ("a.b",))


# --- the command ---


def push_two(client: Client, name: str, *directories: Path) -> None:
    for directory in directories:
        client.adapters.push(directory, name=name)


def test_versions_and_base_are_compared_and_kept(
    here: Run, client: Client, sql_dir: Path, pirate_dir: Path, data: Path
) -> None:
    push_two(client, "judged", pirate_dir, sql_dir)
    done = here("adapter", "eval", "judged@1,2", data, "--max-tokens", "32", "--format", "json")
    assert done.code == 0, done.stderr
    assert "Fields of the lines that no metric reads: id." in done.stderr
    base, pirate, sql = (one["metrics"] for one in done.json["models"])
    assert [one["model"] for one in done.json["models"]] == [client.base().id, "judged@1", "judged@2"]
    assert (sql["exact_match"], sql["accuracy"], sql["regex_match"]) == (1, 1, 1)
    assert (pirate["exact_match"], base["exact_match"]) == (0, 0)
    assert 0 > sql["log_likelihood"] > max(pirate["log_likelihood"], base["log_likelihood"])
    assert done.json["num_differing"] == 4
    assert [one["line"] for one in done.json["differences"]] == [1, 2, 3]
    assert done.json["differences"][0]["answers"]["judged@2"] == SQL.format(81)
    assert done.json["data"]["sha256"] == hashlib.sha256(data.read_bytes()).hexdigest()
    for number, metrics in ((1, pirate), (2, sql)):
        (kept,) = client.evaluations.list("judged", number)
        assert (kept.metrics, kept.base_metrics, kept.num_lines) == (metrics, base, 4)
        assert (kept.data_name, kept.settings) == ("held-out.jsonl", {"max_tokens": "32"})


def test_evaluation_is_shown_with_version(here: Run, client: Client, sql_dir: Path, data: Path) -> None:
    client.adapters.push(sql_dir, name="shown")
    assert "exact match" not in here("adapter", "show", "shown").stdout
    done = here("adapter", "eval", "shown", data, "--max-tokens", "32", "--show", "1")
    assert done.code == 0, done.stderr
    title, base, version = done.stdout.splitlines()[:3]
    assert title.split("  ")[0] == "MODEL"
    assert "EXACT MATCH" in title
    assert base.startswith(client.base().id)
    assert version.split()[:3] == ["shown@1", "4", "100.0"]
    assert done.stdout.count("line ") == 1
    assert SQL.format(81) in done.stdout
    assert "3 more lines are answered differently" in done.stderr
    shown = here("adapter", "show", "shown@1").stdout
    assert "on 4 lines of held-out.jsonl" in shown
    assert "100.0 %; the base 0.0 %" in shown
    assert "exact match 100.0 %" in here("adapter", "versions", "shown").stdout


def test_alias_moves_only_if_version_is_better(
    here: Run, client: Client, sql_dir: Path, pirate_dir: Path, data: Path
) -> None:
    push_two(client, "moved", sql_dir, pirate_dir)
    client.adapters.set_alias("moved", "live", 1)
    missing = here("adapter", "alias", "moved", "live", "2", "--if-better", "exact_match")
    assert missing.code == 1
    assert "Try: loraserve adapter eval moved@1,2 DATA.jsonl" in missing.stderr
    done = here("adapter", "eval", "moved@1,2", data, "--max-tokens", "32")
    (advised,) = (line for line in done.stderr.splitlines() if "--if-better" in line)
    worse = here(*shlex.split(advised.partition("loraserve ")[2]))
    assert worse.code == 1
    assert "moved@2 isn't better than moved@1" in worse.stderr
    client.adapters.set_alias("moved", "live", 2)
    better = here("adapter", "alias", "moved", "live", "1", "--if-better", "exact_match", "--format", "json")
    assert (better.code, better.json["version"]) == (0, 1)
    for wrong in (("--split", "1=1,2=1"), ()):
        assert here("adapter", "alias", "moved", "live", *wrong, "--if-better", "accuracy").code == 2


def test_wrong_line_stops_before_first_request(here: Run, data: Path) -> None:
    data.write_text(data.read_text() + "{}\n")
    # not even the adapter is looked for
    done = here("adapter", "eval", "absent@1", data)
    assert (done.code, done.stdout) == (1, "")
    assert "held-out.jsonl:5: the line should have either prompt or messages." in done.stderr


def test_failed_request_names_line_and_keeps_no_result(here: Run, client: Client, sql_dir: Path, data: Path) -> None:
    client.adapters.push(sql_dir, name="failing")
    long = {"prompt": "list the tickets " * 4000, "answer": "x"}
    data.write_text(data.read_text() + json.dumps(long) + "\n")
    done = here("adapter", "eval", "failing", data, "--max-tokens", "8")
    assert (done.code, done.stdout) == (1, "")
    assert "held-out.jsonl:5, " in done.stderr
    assert "maximum context length" in done.stderr
    assert list(client.evaluations.list("failing", 1)) == []


def test_named_metrics_alone_are_computed_and_unkept(here: Run, client: Client, sql_dir: Path, data: Path) -> None:
    client.adapters.push(sql_dir, name="partly")
    words = ("--metric", "accuracy", "--no-keep", "--max-tokens", "4", "--stop", "zzz", "--format", "json")
    done = here("adapter", "eval", "partly@1", data, *words)
    assert done.code == 0
    assert [list(one["metrics"]) for one in done.json["models"]] == [["accuracy"]] * 2
    assert done.json["settings"] == {"max_tokens": "4", "stop": '["zzz"]'}
    assert "partly@1: 4 of 4 answers were cut at 4 tokens." in done.stderr
    assert list(client.evaluations.list("partly", 1)) == []
    for words in (("--metric", "bleu"), ("--metric", "json_match"), ("--stop", "")):
        assert here("adapter", "eval", "partly@1", data, *words).code == 2
    assert here("adapter", "eval", "partly@9", data).code == 1


def test_refused_requests_are_tried_again(here: Run, client: Client, sql_dir: Path, data: Path) -> None:
    client.tenants.create("narrow", limits={"max_concurrent_requests": 1, "max_queued_requests": 1})
    key = client.keys.create("narrow", name="ci").key
    with Client(client.url, api_key=key) as tenant:
        tenant.adapters.push(sql_dir, name="narrow")
    words = ("-c", "4", "--max-tokens", "32", "--metric", "exact_match", "--format", "json")
    done = here("adapter", "eval", "narrow@1", data, *words, LORASERVE_API_KEY=key)
    assert done.code == 0, done.stderr
    assert "trying again in" in done.stderr
    assert [one["metrics"] for one in done.json["models"]] == [{"exact_match": 0}, {"exact_match": 1}]


def test_answer_of_fallback_ends_evaluation() -> None:
    check_answered_by(Answer(200, adapter="sql@3"), "sql@3")
    check_answered_by(None, "sql@3")
    fallen = Answer(200, adapter="sql@2", fell_back_from="sql@3", fell_back_for="adapter_quarantined")
    with pytest.raises(errors.AdapterUnavailable, match=r"sql@2 answered in the place of sql@3 \(adapter_quarantined"):
        check_answered_by(fallen, "sql@3")


def test_likelihood_equals_mean_of_echoed_reference(here: Run, client: Client, sql_dir: Path, tmp_path: Path) -> None:
    client.adapters.push(sql_dir, name="likely")
    prompt, answer = QUESTION.format(81), SQL.format(81)
    data = write(tmp_path / "one.jsonl", {"prompt": prompt, "answer": answer})
    done = here("adapter", "eval", "likely@1", data, "--metric", "log_likelihood", "--no-keep", "--format", "json")
    assert done.code == 0, done.stderr
    before = client.tokenize(prompt, model="likely@1").tokens
    tokens = client.tokenize(answer, model="likely@1", add_special_tokens=False).tokens
    echoed = client.completions.create(model="likely@1", prompt=[*before, *tokens], max_tokens=0, echo=True, logprobs=0)
    assert echoed.choices[0].logprobs is not None
    expected = [number or 0.0 for number in echoed.choices[0].logprobs.token_logprobs[len(before) :]]
    assert len(expected) == len(tokens)
    found = done.json["models"][1]["metrics"]
    assert found == {"log_likelihood": pytest.approx(sum(expected) / len(tokens), abs=1e-5)}
