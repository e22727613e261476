"""SIGHUP's settings: those that can change do, the others wait, and a wrong one changes nothing."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from whole_app import ADMIN_KEY, model_dir, services, started  # noqa: F401

from loraserve.api import reload
from loraserve.api.reload import LIVE_SETTINGS, SettingsReload
from loraserve.api.services import Services
from loraserve.errors import AdapterBaseMismatch, AuthenticationError, ConfigError
from loraserve.settings import Settings


@pytest.fixture(autouse=True)
def same_log_level() -> Iterator[None]:
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


async def test_live_settings_change_and_restart_settings_are_named(
    services: Services,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    old = services.settings
    new = old.model_copy(
        update={
            "log_level": "debug",
            "grace_s": 3.0,
            "admin_key": SecretStr("another-admin-key-" + "y" * 20),
            "pull_allow": ("hf://acme/*",),
            "store_responses": False,
            "result_cache_bytes": 0,
            "ephemeral_loads": True,
            "ephemeral_ttl_s": 61.0,
            "whole_answer_keep_alive_s": 30.0,
            "ephemeral_memory": 1 << 21,
            "max_num_seqs": 3,
            "port": 1,
            "retention_s": 61.0,
            "base_names": ("acme/base",),
            "strict_base": True,
            "certify": "on-request",
            "lora_dir": "/srv/adapters",
            "access_log": False,
        }
    )
    counted = services.metrics.settings_reloads
    with caplog.at_level(logging.INFO, "loraserve.server"):
        SettingsReload(services, lambda: new, None).run()
    assert (counted.labels("done")._value.get(), counted.labels("failed")._value.get()) == (1, 0)
    assert "need a restart: max_num_seqs, port\n" in caplog.text
    assert "grace_s (30.0 -> 3.0)" in caplog.text
    assert "pull_allow (none -> hf://acme/*)" in caplog.text
    assert "changed: access_log (True -> False), admin_key, base_names" in caplog.text
    assert logging.getLogger().level == logging.DEBUG
    assert (services.settings.grace_s, services.settings.ephemeral_loads) == (3.0, True)
    assert services.settings.max_num_seqs == old.max_num_seqs
    registry = services.registry
    for part in (registry.collector, registry.publisher, registry.restorer):
        assert part.retention == timedelta(seconds=61)
    with pytest.raises(AdapterBaseMismatch, match=r"serves .*acme/base"):
        registry.base_names.inspect({"base_model_name_or_path": "another"}, services.engine.base)
    assert (registry.certificates._is_at_upload, registry.local_folders.root) == (False, "/srv/adapters")
    assert services.registry.pulls.allowed == ("hf://acme/*",)
    assert services.registry.ephemeral.ttl_s == 61.0
    assert services.registry.ephemeral.bytes.capacity == 1 << 21
    assert services.responses is not None
    assert not services.responses.is_storing
    assert (await services.authenticator.authenticate("another-admin-key-" + "y" * 20)).is_admin
    with pytest.raises(AuthenticationError):
        await services.authenticator.authenticate(ADMIN_KEY)
    # the key is in no line of the log
    assert "another-admin-key" not in caplog.text


def test_invalid_reload_changes_no_setting_and_is_logged(
    services: Services,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
    subtests: Any,
) -> None:
    old = services.settings

    def fail(error: Exception) -> Settings:
        raise error

    tls = old.model_copy(update={"ssl_certfile": "/x.pem", "log_level": "debug"})
    for name, read in {
        "a wrong file": lambda: fail(ConfigError("loraserve.toml is not valid TOML")),
        "a bug": lambda: fail(RuntimeError("boom")),
        "TLS turned on": lambda: tls,
    }.items():
        with subtests.test(name):
            failed = services.metrics.settings_reloads.labels("failed")._value
            before = failed.get()
            SettingsReload(services, read, None).run()
            assert failed.get() == before + 1
            assert services.settings is old
            assert "the settings stay as they are" in caplog.text


async def test_new_log_level_applies_after_reload_is_logged(
    services: Services,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    new = services.settings.model_copy(update={"log_level": "error", "port": 1})
    with caplog.at_level(logging.INFO):
        SettingsReload(services, lambda: new, None).run()
        assert logging.getLogger().level == logging.ERROR
    assert "changed: log_level (info -> error)" in caplog.text
    assert "need a restart: port" in caplog.text


class Tracer:
    """Tracer that only says whether it was closed."""

    is_closed = False

    def trace(self, record: Any, headers: Any) -> str:
        return ""

    async def close(self) -> None:
        self.is_closed = True


async def test_replaced_tracer_sends_queued_spans(
    services: Services,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = Tracer(), Tracer()
    services.tracer = first
    monkeypatch.setattr(reload, "open_tracer", lambda settings, metrics: second)
    settings = services.settings
    for sample, tracer in ((None, first), (0.5, second), (0.5, second)):
        settings = settings.model_copy(update={"trace_sample": sample})
        SettingsReload(services, lambda new=settings: new, None).run()  # type: ignore[misc]
        assert services.tracer is tracer
    await asyncio.sleep(0)
    assert (first.is_closed, second.is_closed) == (True, False)


def test_live_settings_exist_and_match_documentation() -> None:
    assert set(Settings.model_fields) >= LIVE_SETTINGS
    page = (Path(__file__).resolve().parents[2] / "docs/deployment.md").read_text()
    (section,) = re.findall(r"## Settings that change while the server runs\n(.*?)\n## ", page, re.DOTALL)
    told = {name for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert told == LIVE_SETTINGS
