from __future__ import annotations

import json
import os
from pathlib import Path
from typing import get_args

import pytest

from loraserve.errors import ConfigError
from loraserve.limits import GIB
from loraserve.settings import Settings, parse_size
from loraserve.text.reasoning import REASONING_FORMATS
from loraserve.text.tool_parsers.table import TOOL_FORMATS


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("LORASERVE_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_flag_precedes_variable_file_and_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "loraserve.toml").write_text('model = "m"\nport = 1\nhost = "file"\nmax-num-seqs = 3\n')
    monkeypatch.setenv("LORASERVE_PORT", "2")
    monkeypatch.setenv("LORASERVE_HOST", "variable")
    settings = Settings.load(port=4, host=None)
    assert (settings.port, settings.host, settings.max_num_seqs, settings.loader_threads) == (4, "variable", 3, 2)


@pytest.mark.parametrize(
    ("text", "expected"), [("8GiB", 8 * GIB), ("1.5 gib", 3 * GIB // 2), ("500MB", 500_000_000), ("4096", 4096), (7, 7)]
)
def test_sizes_are_read(text: object, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"memory_budget": "lots"}, "--memory-budget: should be a size"),
        ({"port": 70000}, "--port: "),
        ({"device": "tpu"}, "--device: "),
        ({"quantize": "int3"}, "--quantize: "),
        ({"speculation": "on"}, "--speculation: "),
        ({"draft_quantize": "int3"}, "--draft-quantize: "),
        ({"draft_model": 7}, "--draft-model: "),
        ({"admin_key": "short"}, "--admin-key: should have 32"),
        ({"model_id": "a b"}, "--model-id: "),
        ({"colour": "red"}, "--colour is unknown"),
        ({"retention_s": -1}, "--retention-s: "),
        ({"pull_allow": "https://example.org/*"}, "--pull-allow: should be patterns"),
        ({"pull_allow": "s3://models/../*"}, "--pull-allow: should be patterns"),
        ({"cors_allow_origins": "https://a.example/"}, "--cors-allow-origins: should be origins"),
        ({"cors_allow_origins": "a.example"}, "--cors-allow-origins: should be origins"),
        ({"cors_allow_origins": "https://a.example,*"}, "--cors-allow-origins: should be origins"),
    ],
)
def test_a_bad_flag_is_named(flags: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.load(**({"model": "m"} | flags))
    assert named in str(caught.value)


def test_server_without_keys_needs_local_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings.load(model="m").auth
    assert not Settings.load(model="m", auth=False, cors_allow_origins="http://localhost:3000").auth
    monkeypatch.setenv("LORASERVE_AUTH", "false")
    for flags, named in (
        ({"host": "0.0.0.0"}, "--host is 0.0.0.0"),
        ({"host": "::1"}, "--host is ::1"),
        ({"trusted_proxies": "10.0.0.0/8"}, "--trusted-proxies"),
        ({"cors_allow_origins": "*"}, "--cors-allow-origins"),
    ):
        with pytest.raises(ConfigError, match="--no-auth") as caught:
            Settings.load(model="m", **flags)
        assert named in str(caught.value)


def test_path_of_template_is_absolute(tmp_path: Path) -> None:
    settings = Settings.load(model="m", chat_template="own.jinja")
    assert settings.chat_template == tmp_path / "own.jinja"
    assert settings.engine_config("m").chat_template_file == str(tmp_path / "own.jinja")


def test_tls_key_without_certificate_is_refused() -> None:
    with pytest.raises(ConfigError, match="--ssl-keyfile needs --ssl-certfile"):
        Settings.load(model="m", ssl_keyfile="tls.key")


def test_missing_model_error_names_option() -> None:
    with pytest.raises(ConfigError, match="--model is required"):
        Settings.load()


def test_a_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORASERVE_MAX_NUM_SEQS", "many")
    with pytest.raises(ConfigError, match="LORASERVE_MAX_NUM_SEQS: "):
        Settings.load(model="m")


def test_an_unknown_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORASERVE_MEMORY_BUDJET", "1GiB")
    with pytest.raises(ConfigError, match="LORASERVE_MEMORY_BUDJET"):
        Settings.load(model="m")


def test_client_variables_do_not_affect_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORASERVE_URL", "http://x")
    monkeypatch.setenv("LORASERVE_API_KEY", "x")
    assert Settings.load(model="m").model == "m"


def test_an_unknown_key_of_the_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "loraserve.toml").write_text("portt = 1\n")
    with pytest.raises(ConfigError, match="portt"):
        Settings.load(model="m")


def test_named_config_file_must_exist() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml doesn't exist"):
        Settings.load(model="m", config="nowhere.toml")


def test_admin_key_appears_in_no_repr_or_error(monkeypatch: pytest.MonkeyPatch) -> None:
    key = "k" * 40
    assert key not in repr(Settings.load(model="m", admin_key=key))
    monkeypatch.setenv("LORASERVE_ADMIN_KEY", "tooshortasecret")
    with pytest.raises(ConfigError) as caught:
        Settings.load(model="m")
    assert "tooshortasecret" not in str(caught.value)


def test_engine_gets_absolute_paths_and_unresolved_device(tmp_path: Path) -> None:
    (tmp_path / "my-base").mkdir()
    config = Settings.load(model=str(tmp_path / "my-base"), data_dir=tmp_path / "data").engine_config(
        tmp_path / "my-base"
    )
    assert (config.device, config.dtype, config.model_id) == ("auto", "auto", "my-base")
    assert config.store_url == (tmp_path / "data" / "blobs").as_uri()


@pytest.mark.parametrize(("given", "expected"), [({}, "auto"), ({"speculation": "off"}, "off")])
def test_whether_to_speculate_reaches_the_engine(given: dict[str, object], expected: str) -> None:
    assert Settings.load(model="base", **given).engine_config("base").speculation == expected


def test_draft_base_takes_base_quantization_unless_overridden(tmp_path: Path) -> None:
    given = {"model": "base", "draft_model": str(tmp_path), "quantize": "int8"}
    config = Settings.load(**given).engine_config("base")
    assert (config.draft_model_dir, config.draft_quantize) == (str(tmp_path), "int8")
    assert Settings.load(**given, draft_quantize="none").engine_config("base").draft_quantize == "none"
    assert Settings.load(model="base").engine_config("base").draft_model_dir is None


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"draft_model": ".", "speculation": "off"}, "--speculation off refuses"),
        ({"draft_model": ".", "device": "cuda"}, "--draft-model is for CPUs"),
        ({"draft_model": "absent"}, "--draft-model absent isn't a directory"),
        ({"draft_model": "x" * 5000}, "isn't a directory"),
        ({"draft_model": "a\0b"}, "isn't a directory"),
        ({"draft_quantize": "int8"}, "--draft-quantize is for a draft base"),
    ],
)
def test_flags_conflicting_with_draft_base_are_named(flags: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Settings.load(model="m", **flags).engine_config("m")


def test_adapter_loss_limits_reach_engine() -> None:
    config = Settings.load(
        model="m", device="cpu", adapter_dtype="int8", adapter_rank_error="0.01", max_adapter_loss="0.05"
    ).engine_config("m")
    assert (config.adapter_dtype, config.adapter_rank_error, config.max_adapter_loss) == ("int8", 0.01, 0.05)


def test_a_gpu_holds_no_adapter_in_fp32() -> None:
    with pytest.raises(ConfigError, match="--adapter-dtype fp32 is for CPUs"):
        Settings.load(model="m", device="cuda", adapter_dtype="fp32").engine_config("m")


@pytest.mark.parametrize("value", ["0", "1", "-0.1", "much"])
def test_rank_error_must_be_a_valid_fraction(value: str) -> None:
    with pytest.raises(ConfigError, match="--adapter-rank-error: "):
        Settings.load(model="m", adapter_rank_error=value)


def test_origins_are_read_from_a_list_with_commas() -> None:
    origins = ("https://a.example", "http://localhost:3000", "tauri://localhost")
    assert Settings.load(model="m").cors_allow_origins == ()
    assert Settings.load(model="m", cors_allow_origins=", ".join(origins)).cors_allow_origins == origins
    assert Settings.load(model="m", cors_allow_origins="*").cors_allow_origins == ("*",)


def test_pull_patterns_are_read_from_each_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected = ("hf://acme/*", "s3://models/sql/*")
    assert Settings.load(model="m").pull_allow == ()
    assert Settings.load(model="m", pull_allow="hf://acme/*, s3://models/sql/*").pull_allow == expected
    (tmp_path / "loraserve.toml").write_text('pull-allow = ["hf://acme/*", "s3://models/sql/*"]\n')
    assert Settings.load(model="m").pull_allow == expected
    monkeypatch.setenv("LORASERVE_PULL_ALLOW", "s3://b/*")
    assert Settings.load(model="m").pull_allow == ("s3://b/*",)


def test_alternative_base_names_are_comma_separated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (Settings.load(model="m").base_names, Settings.load(model="m").strict_base) == ((), False)
    assert Settings.load(model="m", base_names="org/Base, base-2 ,").base_names == ("org/Base", "base-2")
    monkeypatch.setenv("LORASERVE_BASE_NAMES", "org/base")
    monkeypatch.setenv("LORASERVE_STRICT_BASE", "true")
    assert (Settings.load(model="m").base_names, Settings.load(model="m").strict_base) == (("org/base",), True)
    monkeypatch.delenv("LORASERVE_BASE_NAMES")
    (tmp_path / "loraserve.toml").write_text('base-names = ["org/base", "b"]\n')
    assert Settings.load(model="m").base_names == ("org/base", "b")


def test_parser_choices_match_parser_tables() -> None:
    fields = Settings.model_fields
    assert set(get_args(fields["tool_call_parser"].annotation)) == {"auto", "none", *TOOL_FORMATS}
    assert set(get_args(fields["reasoning_parser"].annotation)) == {"auto", "none", *REASONING_FORMATS}


def test_template_variables_are_read_from_each_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {"enable_thinking": False}
    assert Settings.load(model="m", default_chat_template_kwargs='{"enable_thinking": false}') == Settings.load(
        model="m", default_chat_template_kwargs=expected
    )
    monkeypatch.setenv("LORASERVE_DEFAULT_CHAT_TEMPLATE_KWARGS", '{"enable_thinking": false}')
    assert Settings.load(model="m").default_chat_template_kwargs == expected
    monkeypatch.delenv("LORASERVE_DEFAULT_CHAT_TEMPLATE_KWARGS")
    (tmp_path / "own.toml").write_text("[default_chat_template_kwargs]\nenable_thinking = false\n")
    assert Settings.load(model="m", config=tmp_path / "own.toml").default_chat_template_kwargs == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("x", "isn't JSON"),
        ("[1]", "should be a JSON object"),
        ('{"tools": []}', "can't set tools"),
        ('{"a": Infinity}', "has Infinity"),
        (f'{{"a": "{"x" * 5000}"}}', "exceeds the limit of 4096 bytes"),
        ("[" * 3000, "is"),
        (json.dumps({str(index): index for index in range(33)}), "has 33 variables"),
    ],
)
def test_odd_template_variables_are_refused(value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"--default-chat-template-kwargs: .*{message}"):
        Settings.load(model="m", default_chat_template_kwargs=value)


@pytest.mark.parametrize("name", ["base", "org/My.Base", "org/base:v2", "qwen3:0.6b-q4_K_M"])
def test_base_id_follows_hub_and_tags(name: str) -> None:
    assert Settings.load(model="m", model_id=name).base_id == name


@pytest.mark.parametrize("name", [":base", "a@b", "a+b", "a*b", "a b", "x" * 129])
def test_base_id_has_no_syntax_of_adapters(name: str) -> None:
    with pytest.raises(ConfigError, match="--model-id"):
        Settings.load(model="m", model_id=name)
