from __future__ import annotations

import ssl
from typing import Any
from unittest import mock

import httpcore2
import pytest

from loraserve import AsyncClient, Client, errors
from loraserve.sdk import concurrency
from loraserve.sdk.config import ClientConfig


def resolve(
    url: str | None = None, api_key: str | None = "sk-lora-secret", tenant: str | None = None, timeout: float = 1.0
) -> ClientConfig:
    return ClientConfig.resolve(url, api_key, tenant, timeout, 2)


def test_variables_name_server_and_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORASERVE_URL", "http://example.com:81/")
    monkeypatch.setenv("LORASERVE_API_KEY", "sk-lora-env")
    monkeypatch.setenv("LORASERVE_TENANT", "acme")
    config = resolve(api_key=None)
    assert config.url == "http://example.com:81"
    assert config.headers["Authorization"] == "Bearer sk-lora-env"
    assert config.headers["X-Tenant"] == "acme"


def test_arguments_win_over_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORASERVE_URL", "http://example.com")
    monkeypatch.setenv("LORASERVE_API_KEY", "sk-lora-env")
    config = resolve("http://other", "sk-lora-argument")
    assert (config.url, config.api_key) == ("http://other", "sk-lora-argument")


def test_url_may_end_as_in_foreign_clients() -> None:
    assert resolve("http://127.0.0.1:8000/v1/").url == "http://127.0.0.1:8000"


def test_missing_key_error_names_places_to_set_key() -> None:
    with pytest.raises(errors.ConfigError, match="LORASERVE_API_KEY"):
        resolve("http://example.com", api_key=None)


@pytest.mark.parametrize("url", [None, "http://localhost:81", "https://[::1]:8000/v1"])
def test_local_server_may_need_no_key(url: str | None) -> None:
    config = resolve(url, api_key=None)
    assert "Authorization" not in config.headers


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("gpu1:8000", "http://gpu1:8000"),
        ("127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("example.com/lora", "http://example.com/lora"),
    ],
)
def test_host_without_scheme_is_url(url: str, expected: str) -> None:
    assert resolve(url).url == expected


@pytest.mark.parametrize(
    "url",
    ["host:port", "a b:8000", "ftp://host", "http://", "http://host:99999", "http://host?x=1"],
)
def test_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(errors.ConfigError, match="isn't a server's URL"):
        resolve(url)


@pytest.mark.parametrize("url", ["http://me:hunter2@host", "me:hunter2@host:80", "http://me:hunter2@host:x"])
def test_url_with_password_is_refused_without_showing_password(url: str) -> None:
    with pytest.raises(errors.ConfigError, match="user name or a password") as caught:
        resolve(url)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("key", ["sk-lora-a\r\nX-Evil: 1", "sk-lora-é", "sk-lora-a "])
def test_invalid_header_key_is_refused_without_showing_key(key: str) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        resolve(api_key=key)
    assert key not in str(caught.value)


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan")])
def test_timeout_must_be_positive(timeout: float) -> None:
    with pytest.raises(errors.ConfigError, match="timeout"):
        resolve(timeout=timeout)


def test_no_repr_shows_the_key() -> None:
    with Client("http://host", api_key="sk-lora-secret") as client:
        assert "secret" not in repr(client)
        assert "secret" not in repr(client._config)


@pytest.mark.parametrize("make", [Client, AsyncClient])
def test_only_https_client_reads_trusted_certificates(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read = mock.Mock(return_value=ssl.create_default_context())
    monkeypatch.setattr(httpcore2, "default_ssl_context", read)
    make("http://example.com", api_key="sk-lora-secret")
    assert read.call_count == 0
    make("https://example.com", api_key="sk-lora-secret")
    assert read.call_count == 1


def test_a_client_of_http_trusts_no_certificate() -> None:
    trusted = concurrency._trusted("http://example.com")
    assert isinstance(trusted, ssl.SSLContext)
    assert (trusted.verify_mode, trusted.check_hostname, trusted.get_ca_certs()) == (ssl.CERT_REQUIRED, True, [])
