"""`Client` and `AsyncClient`: a server, a key, and everything that can be asked with them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import httpx2

from loraserve import errors
from loraserve.sdk.call import Call, read_into
from loraserve.sdk.config import DEFAULT_TIMEOUT_S, ClientConfig
from loraserve.sdk.resources.adapters import Adapters
from loraserve.sdk.resources.async_adapters import AsyncAdapters
from loraserve.sdk.resources.chat import AsyncChat, Chat
from loraserve.sdk.resources.completions import AsyncCompletions, Completions
from loraserve.sdk.resources.grants import AsyncGrants, Grants
from loraserve.sdk.resources.keys import AsyncKeys, Keys
from loraserve.sdk.resources.models import AsyncModels, Models
from loraserve.sdk.resources.operations import AsyncOperations, Operations
from loraserve.sdk.resources.residency import AdapterResidency, Memory, ResidencyPage
from loraserve.sdk.resources.server import AuditEntry, Base, Limits
from loraserve.sdk.resources.tenants import AsyncTenants, Tenants
from loraserve.sdk.resources.usage import AsyncUsage, Usage
from loraserve.sdk.transport.paging import all_rows, all_rows_async
from loraserve.sdk.transport.transport import AsyncTransport, Transport

if TYPE_CHECKING:
    import openai

_RESIDENCY, _AUDIT = "/api/v1/residency", "/api/v1/audit"
_BASE: Call[Base] = Call("GET", "/api/v1/base", read_into(Base))
_LIMITS: Call[Limits] = Call("GET", "/api/v1/limits", read_into(Limits))
# of one row, though none is wanted: the memory comes with every page
_MEMORY: Call[ResidencyPage] = Call("GET", _RESIDENCY, read_into(ResidencyPage), params={"limit": "1"})
_METRICS: Call[str] = Call("GET", "/metrics", lambda _answer, body: body.decode("utf-8", "replace"))


class Client:
    """Blocking, safe to share between threads; close it, or use it in a `with` block.

    Args:
        base_url: the server's root; None: LORASERVE_URL, else this machine's port 8000.
        api_key: None: LORASERVE_API_KEY.
        tenant: whom an admin key acts for (`X-Tenant`); None: LORASERVE_TENANT, else the key's own tenant.
        timeout: seconds to wait for an answer, and between two pieces of one.
        max_retries: further tries when the server is overloaded or can't be reached.
        http_client: an httpx2 client of your own (proxies, certificates); it stays yours to close.

    Raises:
        ConfigError: there is no key, or a value can't be what it should be.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        tenant: str | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        max_retries: int = 2,
        http_client: httpx2.Client | None = None,
    ) -> None:
        self._config = ClientConfig.resolve(base_url, api_key, tenant, timeout, max_retries)
        self._transport = Transport(self._config, http_client)
        self.adapters = Adapters(self._transport)
        self.completions = Completions(self._transport)
        self.chat = Chat(self._transport)
        self.models = Models(self._transport)
        self.tenants = Tenants(self._transport)
        self.keys = Keys(self._transport)
        self.grants = Grants(self._transport)
        self.operations = Operations(self._transport)
        self.usage = Usage(self._transport)

    @property
    def url(self) -> str:
        """The server's root."""
        return self._config.url

    def residency(self, *, resident: bool = False) -> Iterator[AdapterResidency]:
        """Where each version's weights are now: device, host or disk; with `resident`, those alone that are in some memory."""
        return all_rows(self._transport, _RESIDENCY, AdapterResidency, _resident(resident))

    def memory(self) -> Memory | None:
        """What the device's and the host's memory hold now, by the engine's last heartbeat; None for a tenant's key."""
        return self._transport.send(_MEMORY).memory

    def audit(self) -> Iterator[AuditEntry]:
        """Who did what, newest first."""
        return all_rows(self._transport, _AUDIT, AuditEntry)

    def base(self) -> Base:
        """The resident base model."""
        return self._transport.send(_BASE)

    def limits(self) -> Limits:
        """Every bound of the server."""
        return self._transport.send(_LIMITS)

    def metrics(self) -> str:
        """The server's counters and gauges, in Prometheus' text format."""
        return self._transport.send(_METRICS)

    def openai(self) -> openai.OpenAI:
        """The official client, configured for this server, key and tenant.

        Raises:
            ConfigError: `openai` isn't installed.
        """
        return _import_openai().OpenAI(**_openai_arguments(self._config))  # type: ignore[no-any-return]

    def close(self) -> None:
        self._transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self.url!r}, tenant={self._config.tenant!r})"


class AsyncClient:
    """As `Client`, awaiting, under asyncio or trio; close it, or use it in an `async with` block."""

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        tenant: str | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        max_retries: int = 2,
        http_client: httpx2.AsyncClient | None = None,
    ) -> None:
        self._config = ClientConfig.resolve(base_url, api_key, tenant, timeout, max_retries)
        self._transport = AsyncTransport(self._config, http_client)
        self.adapters = AsyncAdapters(self._transport)
        self.completions = AsyncCompletions(self._transport)
        self.chat = AsyncChat(self._transport)
        self.models = AsyncModels(self._transport)
        self.tenants = AsyncTenants(self._transport)
        self.keys = AsyncKeys(self._transport)
        self.grants = AsyncGrants(self._transport)
        self.operations = AsyncOperations(self._transport)
        self.usage = AsyncUsage(self._transport)

    @property
    def url(self) -> str:
        """The server's root."""
        return self._config.url

    def residency(self, *, resident: bool = False) -> AsyncIterator[AdapterResidency]:
        """As `Client.residency`."""
        return all_rows_async(self._transport, _RESIDENCY, AdapterResidency, _resident(resident))

    async def memory(self) -> Memory | None:
        """As `Client.memory`."""
        return (await self._transport.send(_MEMORY)).memory

    def audit(self) -> AsyncIterator[AuditEntry]:
        """As `Client.audit`."""
        return all_rows_async(self._transport, _AUDIT, AuditEntry)

    async def base(self) -> Base:
        """As `Client.base`."""
        return await self._transport.send(_BASE)

    async def limits(self) -> Limits:
        """As `Client.limits`."""
        return await self._transport.send(_LIMITS)

    async def metrics(self) -> str:
        """As `Client.metrics`."""
        return await self._transport.send(_METRICS)

    def openai(self) -> openai.AsyncOpenAI:
        """As `Client.openai`, the awaiting one."""
        return _import_openai().AsyncOpenAI(**_openai_arguments(self._config))  # type: ignore[no-any-return]

    async def close(self) -> None:
        await self._transport.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncClient({self.url!r}, tenant={self._config.tenant!r})"


def _resident(is_wanted: bool) -> dict[str, str]:
    return {"resident": "true"} if is_wanted else {}


def _import_openai() -> Any:
    try:
        import openai
    except ImportError as error:
        raise errors.ConfigError(
            "The official client isn't installed.", hint='Install it: pip install "loraserve[openai]"'
        ) from error
    return openai


def _openai_arguments(config: ClientConfig) -> dict[str, Any]:
    return {
        "base_url": f"{config.url}/v1",
        "api_key": config.api_key,
        "default_headers": {"X-Tenant": config.tenant} if config.tenant else {},
        "timeout": config.timeout_s,
        "max_retries": config.retry.max_retries,
    }
