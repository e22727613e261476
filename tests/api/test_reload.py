"""SIGHUP's settings: those that can change do, the others wait, and a wrong one changes nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import SecretStr
from whole_app import ADMIN_KEY, model_dir, services  # noqa: F401

from loraserve.api.reload import LIVE_SETTINGS, SettingsReload
from loraserve.api.services import Services
from loraserve.errors import AuthenticationError, ConfigError
from loraserve.settings import Settings


@pytest.fixture(autouse=True)
def same_log_level() -> Iterator[None]:
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


async def test_what_can_change_does_and_the_rest_is_named(
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
            "ephemeral_memory": 1 << 21,
            "max_num_seqs": 3,
            "retention_s": 1.0,
        }
    )
    reload = SettingsReload(services, lambda: new, None)
    counted = services.metrics.settings_reloads
    with caplog.at_level(logging.INFO, "loraserve.server"):
        reload.run()
    assert (counted.labels("done")._value.get(), counted.labels("failed")._value.get()) == (1, 0)
    assert "need a restart: max_num_seqs, retention_s" in caplog.text
    assert logging.getLogger().level == logging.DEBUG
    assert (services.settings.grace_s, services.settings.ephemeral_loads) == (3.0, True)
    assert services.settings.max_num_seqs == old.max_num_seqs
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


def test_a_wrong_file_changes_nothing_and_is_logged(
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


def test_every_live_setting_exists() -> None:
    assert set(Settings.model_fields) >= LIVE_SETTINGS
