"""The client's configuration, complete and checked."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import ClassVar
from urllib.parse import urlsplit

from loraserve import errors
from loraserve.sdk.retry import OnWait, RetryPolicy

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_TIMEOUT_S = 600.0
CONNECT_TIMEOUT_S = 5.0
_LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
_HOST = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9.-]*|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?(?:/[\w./-]*)?", re.ASCII)
"""Host and port without a scheme, and a path."""


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """The configuration, made by `resolve`; its repr leaves out the key."""

    URL_VARIABLE: ClassVar[str] = "LORASERVE_URL"
    KEY_VARIABLE: ClassVar[str] = "LORASERVE_API_KEY"

    url: str
    api_key: str | None = field(repr=False)
    """None: the server is on this machine, and may need none (``serve --no-auth``)."""
    tenant: str | None
    timeout_s: float
    retry: RetryPolicy
    on_wait: OnWait | None = field(default=None, repr=False)
    """Function that is told of each wait for another try."""

    @classmethod
    def resolve(
        cls,
        base_url: str | None,
        api_key: str | None,
        tenant: str | None,
        timeout_s: float,
        max_retries: int,
        on_wait: OnWait | None = None,
    ) -> ClientConfig:
        """Read arguments first, then the environment, then use port 8000 of this machine.

        The variables are LORASERVE_URL, LORASERVE_API_KEY and LORASERVE_TENANT.

        Raises:
            ConfigError: no key for a server that isn't on this machine, or a URL, key, tenant or
                number that can't be one.
        """
        url = _checked_url(base_url or os.environ.get(cls.URL_VARIABLE) or DEFAULT_URL)
        key = api_key or os.environ.get(cls.KEY_VARIABLE) or None
        if key is None and urlsplit(url).hostname not in _LOCAL_HOSTS:
            raise cls.missing_key()
        tenant = tenant or os.environ.get("LORASERVE_TENANT") or None
        for value, what in ((key or "", "The API key"), (tenant or "", "The tenant")):
            # What isn't plain ASCII can't be a header; the value itself isn't shown, it may be a
            # secret.
            if not value.isascii() or not value.isprintable() or value != value.strip():
                raise errors.ConfigError(
                    f"{what} has characters that can't be sent in a header; "
                    "expected printable ASCII without spaces around it."
                )
        if not timeout_s > 0:
            raise errors.ConfigError(f"timeout is {timeout_s}; it should be more than 0 seconds.")
        if max_retries < 0:
            raise errors.ConfigError(f"max_retries is {max_retries}; it should be 0 or more.")
        return cls(url, key, tenant, timeout_s, RetryPolicy(max_retries), on_wait)

    @classmethod
    def missing_key(cls) -> errors.ConfigError:
        """Build the error for a server that needs a key where none was given."""
        return errors.ConfigError(
            "No API key was given.",
            hint=f"Pass api_key=… or set {cls.KEY_VARIABLE} (the server prints its first one).",
        )

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        from loraserve import __version__

        headers = {"Accept": "application/json", "User-Agent": f"loraserve-python/{__version__}"}
        if self.api_key is not None:
            headers = {"Authorization": f"Bearer {self.api_key}", **headers}
        return headers | {"X-Tenant": self.tenant} if self.tenant else headers


def _checked_url(url: str) -> str:
    """Return the server's root, without a trailing slash.

    The `/v1` that other clients want at the end is left out too; what has no scheme, such as
    ``gpu1:8000``, is a server of HTTP.

    Raises:
        ConfigError: it isn't a URL, or holds a password.
    """
    if "@" in url.rpartition("://")[2].partition("/")[0]:
        # before any other words, which repeat the URL
        raise errors.ConfigError(
            "The URL holds a user name or a password.", hint="Put the key into api_key or LORASERVE_API_KEY instead."
        )
    if _HOST.fullmatch(url):
        url = f"http://{url}"
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_url = False
    if not is_url or parts.query or parts.fragment:
        raise errors.ConfigError(f"{url!r} isn't a server's URL.", hint=f"Expected a form such as {DEFAULT_URL}.")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
