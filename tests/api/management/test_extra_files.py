"""A version's files for chats: uploaded, refused with reasons, downloaded, kept and collected."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from adapters_store import LocalStore
from loraserve.adapters.digest import adapter_digest
from loraserve.adapters.format.peft_format import read_adapter
from loraserve.api.services import Services
from loraserve.demo.pack import base_dir
from loraserve.limits import LIMITS
from loraserve.text.tokenizer import Tokenizer
from loraserve.tokenizer_identity import TokenizerSummary

TEMPLATE = b"{% for message in messages %}[{{ message.role }}]\r\n{{ message.content }}{% endfor %}\n"
DEFAULTS = b'{\n  "temperature": 0.3,\n  "transformers_version": "4.50.0"\n}\n'
EXTRAS = {
    "chat_template": TEMPLATE,
    "generation_config": DEFAULTS,
    "tool_parser": b"hermes\n",
    "reasoning_parser": b"qwen3",
    "chat_template_kwargs": b'{ "mood": "glad", "enable_thinking": false }',
}
ROOT = "/adapters/sql/versions"


async def test_extra_files_are_returned_as_uploaded(acme: httpx2.AsyncClient, push: Any) -> None:
    made = await push(acme, extras=EXTRAS)
    assert made.status_code == 201
    shown = made.json()
    assert shown["tool_parser"], shown["reasoning_parser"] == ("hermes", "qwen3")
    assert shown["chat_template_kwargs"] == {"mood": "glad", "enable_thinking": False}
    assert [(file["name"], file["size_bytes"]) for file in shown["extra_files"]] == [
        ("chat_template.jinja", len(TEMPLATE)),
        ("generation_config.json", len(DEFAULTS)),
    ]
    assert (await acme.get(f"{ROOT}/1")).json()["extra_files"] == shown["extra_files"]
    (check,) = (check for check in shown["checks"] if check["name"] == "extra_files")
    assert "ignored in generation_config.json: transformers_version" in check["detail"]
    for file, data in (("chat_template.jinja", TEMPLATE), ("generation_config.json", DEFAULTS)):
        answer = await acme.get(f"{ROOT}/1/files/{file}")
        assert (answer.status_code, answer.content) == (200, data)
        assert answer.headers["etag"] == f'"{hashlib.sha256(data).hexdigest()}"'


async def test_version_without_extra_files_keeps_original_digest(
    acme: httpx2.AsyncClient, push: Any, make_upload: Callable[..., tuple[bytes, bytes]]
) -> None:
    plain = (await push(acme)).json()
    assert (plain["extra_files"], plain["tool_parser"], plain["reasoning_parser"]) == ([], None, None)
    adapter = read_adapter(*make_upload())
    assert plain["digest"] == adapter_digest(adapter.config, adapter.tensors)
    digests = {plain["digest"]}
    for extras in (
        {"chat_template": TEMPLATE},
        {"chat_template": TEMPLATE + b" "},
        {"generation_config": b"{}"},
        {"tool_parser": b"hermes"},
        {"tool_parser": b"mistral"},
        {"reasoning_parser": b"mistral"},
        {"chat_template_kwargs": b'{"a": 1, "b": 2}'},
        {"chat_template_kwargs": b'{"b":2,"a":1}'},
        {"chat_template_kwargs": b"{}"},
        EXTRAS,
    ):
        made = await push(acme, extras=extras)
        again = await push(acme, extras=extras)
        is_known = extras.get("chat_template_kwargs") in (b'{"b":2,"a":1}', b"{}")
        assert (made.status_code, again.status_code) == (200 if is_known else 201, 200)
        assert again.json()["version"] == made.json()["version"]
        digests.add(made.json()["digest"])
    assert len(digests) == 9
    assert (await acme.get(f"{ROOT}/1/files/chat_template.jinja")).status_code == 404


async def test_resumable_upload_accepts_extra_files(
    acme: httpx2.AsyncClient, push: Any, make_upload: Callable[..., tuple[bytes, bytes]]
) -> None:
    config, weights = make_upload()
    sha256 = hashlib.sha256(weights).hexdigest()
    upload = (await acme.post("/uploads", json={"sha256": sha256, "size": len(weights)})).json()
    size = len(weights)
    await acme.patch(
        f"/uploads/{upload['id']}", content=weights, headers={"Content-Range": f"bytes 0-{size - 1}/{size}"}
    )
    body = {"config": json.loads(config), "blob": sha256, **{name: data.decode() for name, data in EXTRAS.items()}}
    checked = await acme.post(ROOT, json=body, params={"dry_run": "true"})
    assert (checked.status_code, len(checked.json()["extra_files"])) == (200, 2)
    made = await acme.post(ROOT, json=body)
    assert made.status_code == 201
    assert (await push(acme, extras=EXTRAS)).json()["digest"] == made.json()["digest"]
    assert (await acme.get(f"{ROOT}/1/files/chat_template.jinja")).content == TEMPLATE
    refused = await acme.post(ROOT, json=body | {"tool_parser": 1})
    assert (refused.status_code, "tool_parser" in refused.text) == (400, True)


SPENT = ("memory", "limits", "time, memory or stack")
"""Reasons of what is over several bounds: a machine's pace decides which it meets first."""

BAD: list[tuple[dict[str, bytes], str]] = [
    ({"chat_template": b""}, "chat_template.jinja is empty"),
    ({"chat_template": b"\xff"}, "isn't UTF-8: byte 0"),
    ({"chat_template": b"a\nb\n{% for %}"}, "line 3:"),
    ({"chat_template": b"{{ unknown | nofilter }}"}, "line 1: No filter named 'nofilter'"),
    ({"chat_template": b"{{ messages[0].content.x.y }}"}, "UndefinedError"),
    ({"chat_template": b"{{ raise_exception('never') }}"}, "never"),
    ({"chat_template": b"{% if false %}x{% endif %}"}, "empty prompt"),
    ({"chat_template": b"{% include '/etc/passwd' %}"}, "chat_template.jinja"),
    ({"chat_template": b"{{ ''.__class__.__mro__[1].__subclasses__() }}"}, "SecurityError"),
    ({"chat_template": b"{{ messages.append(1) }}"}, "SecurityError"),
    ({"chat_template": b"{{ 'a' * 1000000000 }}"}, "limits"),
    ({"chat_template": b"{{ 'a' | center(4000000000) }}"}, "memory"),
    ({"chat_template": b"{{ '%4000000000d' % 1 }}"}, "memory"),
    ({"chat_template": b"{% for i in range(10**9) %}x{% endfor %}"}, "SecurityError"),
    ({"chat_template": b"{% for i in range(1000000000) %}x{% endfor %}"}, "chat_template.jinja"),
    ({"chat_template": b"{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"}, SPENT),
    ({"chat_template": b"{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"}, "RecursionError"),
    ({"chat_template": b"{{ " + b"(" * 30_000 + b"1" + b")" * 30_000 + b" }}"}, "chat_template.jinja"),
    ({"chat_template": b"{{ " + b"[" * 30_000 + b"]" * 30_000 + b" }}"}, "chat_template.jinja"),
    ({"chat_template": b"{% if 1 %}" * 3_000 + b"{% endif %}" * 3_000}, "chat_template.jinja"),
    ({"chat_template": b"{{ ([[0] * 100] * 10000) | sum(start=[]) }}"}, "time, memory or stack"),
    ({"chat_template": b"{% set n = namespace(s='a') %}" + b"{% set n.s = n.s ~ n.s %}" * 60}, SPENT),
    ({"tool_parser": b"nobody"}, "tool_parser isn't known. Expected one of: functiongemma, generic"),
    ({"reasoning_parser": b"nobody"}, "reasoning_parser isn't known. Expected one of: deepseek_r1"),
    ({"chat_template_kwargs": b"[]"}, "chat_template_kwargs.json should be a JSON object"),
    ({"chat_template_kwargs": b"{"}, "chat_template_kwargs.json isn't JSON"),
    ({"chat_template_kwargs": b'{"a": NaN}'}, "has NaN"),
    ({"chat_template_kwargs": b'{"messages": [], "tools": []}'}, "can't set messages, tools"),
    ({"chat_template_kwargs": b'{"a": "\\ud800"}'}, "a value that JSON can't hold"),
    ({"chat_template_kwargs": b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}"}, "nested deeper than 16"),
    ({"generation_config": b"[]"}, "expected an object"),
    ({"generation_config": b'{"temperature": 1, "temperature": 2}'}, "appears twice"),
    ({"generation_config": b'{"temperature": NaN}'}, "isn't a JSON number"),
    ({"generation_config": b'{"temperature": "1"}'}, "temperature is '1'; expected a number"),
    ({"generation_config": b'{"temperature": true}'}, "temperature is True"),
    ({"generation_config": b'{"top_p": 2}'}, "top_p is 2"),
    ({"generation_config": b'{"top_k": 1.5}'}, "top_k is 1.5"),
    ({"generation_config": b'{"max_new_tokens": 0}'}, "max_new_tokens is 0"),
    ({"generation_config": b'{"eos_token_id": 99999999}'}, "is not a token of this base"),
    ({"generation_config": b'{"eos_token_id": [1, "2"]}'}, "eos_token_id is"),
    ({"generation_config": b'{"stop_strings": [""]}'}, "stop_strings is"),
    ({"generation_config": b'{"do_sample": 1}'}, "do_sample is 1"),
    ({"generation_config": b'{"num_beams": 4}'}, "num_beams is 4, which would change answers"),
    ({"generation_config": b'{"suppress_tokens": [1]}'}, "suppress_tokens"),
    ({"generation_config": b'{"my_field": 1}'}, "the field 'my_field' isn't known"),
]


async def test_bad_extra_files_are_refused_with_reason(
    acme: httpx2.AsyncClient, push: Any, subtests: Any, services: Services
) -> None:
    for extras, reason in BAD:
        with subtests.test(reason=reason):
            refused = await push(acme, extras=extras, params={"dry_run": "true"})
            assert refused.status_code == 422
            found = " ".join(error["detail"] for error in refused.json()["errors"])
            assert any(one in found for one in (reason if isinstance(reason, tuple) else (reason,))), found
    assert (await acme.get(ROOT)).status_code == 404


async def test_every_problem_is_listed_at_once(acme: httpx2.AsyncClient, push: Any) -> None:
    refused = await push(
        acme,
        extras={
            "chat_template": b"{% x %}",
            "tool_parser": b"a",
            "reasoning_parser": b"b",
            "generation_config": b'{"top_p": 2, "num_beams": 2}',
        },
    )
    assert len(refused.json()["errors"]) == 5


async def test_extra_file_over_size_limit_is_refused(acme: httpx2.AsyncClient, push: Any) -> None:
    for name, most in (
        ("chat_template", LIMITS.max_chat_template_bytes),
        ("generation_config", LIMITS.max_generation_config_bytes),
        ("tool_parser", LIMITS.max_parser_name_bytes),
    ):
        refused = await push(acme, extras={name: b"x" * (most + 1)})
        assert (refused.status_code, f'The part "{name}" exceeds' in refused.json()["detail"]) == (413, True)


async def test_foreign_extra_files_are_absent(acme: httpx2.AsyncClient, globex: httpx2.AsyncClient, push: Any) -> None:
    await push(acme, extras=EXTRAS)
    answers = [await globex.get(f"/adapters/{name}/versions/1/files/chat_template.jinja") for name in ("sql", "none")]
    assert [answer.status_code for answer in answers] == [404, 404]
    assert answers[0].json()["detail"].replace("sql", "none") == answers[1].json()["detail"]


async def test_damaged_template_quarantines_version_until_pushed_again(
    acme: httpx2.AsyncClient, push: Any, store: LocalStore, services: Services
) -> None:
    made = (await push(acme, extras=EXTRAS)).json()
    blob = made["extra_files"][0]["sha256"]
    (store.root / blob[:2] / blob[2:4] / blob).unlink()
    assert (await acme.get(f"{ROOT}/1/files/chat_template.jinja")).status_code == 503
    await services.registry.corruption.close()
    assert (await acme.get(f"{ROOT}/1")).json()["state"] == "quarantined"
    assert (await push(acme, extras=EXTRAS)).json()["state"] == "ready"
    assert (await acme.get(f"{ROOT}/1/files/chat_template.jinja")).content == TEMPLATE


def tokenizer_definition() -> dict[str, Any]:
    definition: dict[str, Any] = json.loads((base_dir() / "tokenizer.json").read_bytes())
    return definition


def summary(definition: dict[str, Any]) -> bytes:
    found = TokenizerSummary.of_files({"tokenizer.json": json.dumps(definition).encode()})
    assert found is not None
    return found.text().encode()


def with_token(definition: dict[str, Any], id_: int, content: str) -> dict[str, Any]:
    token = {**definition["added_tokens"][-1], "id": id_, "content": content}
    kept = [known for known in definition["added_tokens"] if known["id"] != id_]
    return {**definition, "added_tokens": [*kept, token]}


async def test_tokenizer_of_base_is_not_stored(acme: httpx2.AsyncClient, push: Any, services: Services) -> None:
    services.registry.inspector.tokenizer = lambda: Tokenizer(base_dir())
    same = (await push(acme, extras={"tokenizer": summary(tokenizer_definition())})).json()
    (check,) = [check for check in same["checks"] if check["name"] == "tokenizer"]
    assert (check["status"], check["detail"]) == ("passed", "the base's")
    assert (same["warnings"], same["extra_files"]) == ([], [])
    plain = (await push(acme, seed=1)).json()
    assert "tokenizer" not in {check["name"] for check in plain["checks"]}
    # it is no part of the version
    assert (await push(acme)).json()["digest"] == same["digest"]


SPLIT = {"type": "Split", "pattern": {"Regex": "a+"}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"decoder": {"type": "Fuse"}}, "(the decoder) aren't the base's, which are used"),
        (
            {"pre_tokenizer": SPLIT},
            "it has a pre-tokenizer of its own with the step 'Split', which isn't used: the base's is",
        ),
    ],
)
async def test_unused_tokenizer_rules_are_named(
    acme: httpx2.AsyncClient, push: Any, services: Services, rules: dict[str, Any], words: str
) -> None:
    services.registry.inspector.tokenizer = lambda: Tokenizer(base_dir())
    extras = {"tokenizer": summary({**tokenizer_definition(), **rules})}
    made = (await push(acme, extras=extras)).json()
    (check,) = [check for check in made["checks"] if check["name"] == "tokenizer"]
    assert (check["status"], words in check["detail"]) == ("warned", True)
    assert made["extra_files"] == []
    services.registry.base_names.change((), is_strict=True)
    refused = await push(acme, seed=1, extras=extras)
    assert (refused.status_code, words in refused.text) == (422, True)


async def test_bad_tokenizers_are_refused_by_name(acme: httpx2.AsyncClient, push: Any, services: Services) -> None:
    services.registry.inspector.tokenizer = lambda: Tokenizer(base_dir())
    definition = tokenizer_definition()
    merges = definition["model"]["merges"]
    first = definition["added_tokens"][0]
    changed_merges = {**definition, "model": {**definition["model"], "merges": merges[1:]}}
    for bad, code, words in (
        (changed_merges, "adapter_base_mismatch", "it merges tokens by other rules"),
        (
            with_token(definition, first["id"], "<|renamed|>"),
            "adapter_base_mismatch",
            f"the base has '{first['content']}'",
        ),
        (with_token(definition, 20, "<|middle|>"), "adapter_format", "has the id 20, and tokenizers gives it"),
        (with_token(definition, 1 << 20, "<|far|>"), "adapter_unsupported", "an adapter may have 1,024 more"),
    ):
        made = await push(acme, extras={"tokenizer": summary(bad)})
        assert (made.status_code, made.json()["code"], words in made.json()["detail"]) == (422, code, True), made.text


async def test_strict_server_refuses_unknown_tokenizer(acme: httpx2.AsyncClient, push: Any, services: Services) -> None:
    extras = {"tokenizer": summary(tokenizer_definition())}
    services.registry.inspector.tokenizer = lambda: None
    (warning,) = (await push(acme, extras=extras)).json()["warnings"]
    assert "can't be compared: the base's can't be read" in warning
    services.registry.base_names.change((), is_strict=True)
    made = await push(acme, seed=1, extras=extras)
    assert (made.status_code, made.json()["code"]) == (422, "adapter_base_mismatch")


async def test_malformed_tokenizer_summary_is_refused(acme: httpx2.AsyncClient, push: Any) -> None:
    for data in (b"{", b"[]", b'{"num_tokens": "8"}', b"x", b"[" * 900, json.dumps(tokenizer_definition()).encode()):
        made = await push(acme, extras={"tokenizer": data})
        assert made.status_code in (413, 422), made.text
