"""The client: a server, a key, and all calls that can be made with them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import httpx2

from loraserve import errors
from loraserve.contract.completion import Tokens
from loraserve.contract.residency import AdapterResidency, Memory, ResidencyPage
from loraserve.contract.server import AuditEntry, Base, Limits
from loraserve.sdk._async.adapters import AsyncAdapters
from loraserve.sdk._async.batches import AsyncBatches, AsyncFiles
from loraserve.sdk._async.evaluations import AsyncEvaluations
from loraserve.sdk._async.inference import AsyncChat, AsyncCompletions, AsyncModels
from loraserve.sdk._async.operations import AsyncOperations
from loraserve.sdk._async.paging import all_rows
from loraserve.sdk._async.pooling import AsyncEmbeddings, AsyncRerankings, AsyncScores
from loraserve.sdk._async.responses import AsyncResponses
from loraserve.sdk._async.tenancy import AsyncAdminKeys, AsyncGrants, AsyncKeys, AsyncTenants
from loraserve.sdk._async.transport import AsyncTransport
from loraserve.sdk._async.usage import AsyncUsage
from loraserve.sdk.call import Call, encode, read_into
from loraserve.sdk.config import DEFAULT_TIMEOUT_S, ClientConfig
from loraserve.sdk.retry import OnWait

if TYPE_CHECKING:
    import openai


class AsyncClient:
    """Call one server with one key; each call is awaited, under asyncio or trio.

    Close it, or use it in an `async with` block.

    Args:
        base_url: the server's root; None: LORASERVE_URL, else this machine's port 8000.
        api_key: None: LORASERVE_API_KEY; a server on this machine may need none.
        tenant: the tenant that an admin key acts for (`X-Tenant`); None: LORASERVE_TENANT, else the
            key's own tenant.
        timeout: seconds to wait for an answer, and between two pieces of one.
        max_retries: most further tries when the server is overloaded or can't be reached.
        on_wait: called before each of these tries with the seconds until then and the reason.
        http_client: an httpx2 client of your own (proxies, certificates); it stays yours to close.

    Raises:
        ConfigError: there is no key, or a value isn't valid.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        tenant: str | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        max_retries: int = 2,
        on_wait: OnWait | None = None,
        http_client: httpx2.AsyncClient | None = None,
    ) -> None:
        self._config = ClientConfig.resolve(base_url, api_key, tenant, timeout, max_retries, on_wait)
        self._transport = AsyncTransport(self._config, http_client)
        self.adapters = AsyncAdapters(self._transport)
        self.evaluations = AsyncEvaluations(self._transport)
        self.completions = AsyncCompletions(self._transport)
        self.chat = AsyncChat(self._transport)
        self.responses = AsyncResponses(self._transport)
        self.embeddings = AsyncEmbeddings(self._transport)
        self.scores = AsyncScores(self._transport)
        self.rerankings = AsyncRerankings(self._transport)
        self.models = AsyncModels(self._transport)
        self.files = AsyncFiles(self._transport)
        self.batches = AsyncBatches(self._transport)
        self.tenants = AsyncTenants(self._transport)
        self.keys = AsyncKeys(self._transport)
        self.admin_keys = AsyncAdminKeys(self._transport)
        self.grants = AsyncGrants(self._transport)
        self.operations = AsyncOperations(self._transport)
        self.usage = AsyncUsage(self._transport)

    @property
    def url(self) -> str:
        """The server's root."""
        return self._config.url

    def residency(self, *, resident: bool = False) -> AsyncIterator[AdapterResidency]:
        """Yield where each version's weights are: device, host or disk.

        With `resident`, only versions in memory.
        """
        params = {"resident": "true"} if resident else {}
        return all_rows(self._transport, "/api/v1/residency", AdapterResidency, params)

    async def memory(self) -> Memory | None:
        """Return the use of the device's and the host's memory at the last heartbeat.

        None for a tenant's key.
        """
        # every page carries the memory: request the smallest
        call = Call("GET", "/api/v1/residency", read_into(ResidencyPage), params={"limit": "1"})
        page = await self._transport.send(call)
        return page.memory

    def audit(self) -> AsyncIterator[AuditEntry]:
        """Yield the audit log, newest entry first."""
        return all_rows(self._transport, "/api/v1/audit", AuditEntry)

    async def base(self) -> Base:
        """Return the resident base model."""
        return await self._transport.send(Call("GET", "/api/v1/base", read_into(Base)))

    async def limits(self) -> Limits:
        """Return every bound of the server."""
        return await self._transport.send(Call("GET", "/api/v1/limits", read_into(Limits)))

    async def tokenize(self, prompt: str, *, model: str | None = None, add_special_tokens: bool = True) -> Tokens:
        """Return the tokens of a text, as the model's tokenizer reads it.

        Args:
            model: an adapter, whose version may have tokens of its own; None: the base.
            add_special_tokens: add those that begin a prompt.
        """
        body = encode({"model": model, "prompt": prompt, "add_special_tokens": add_special_tokens})
        return await self._transport.send(Call("POST", "/tokenize", read_into(Tokens), body=body))

    async def metrics(self) -> str:
        """Return the server's counters and gauges, in Prometheus' text format."""
        return await self._transport.send(
            Call("GET", "/metrics", lambda _answer, body: body.decode("utf-8", "replace"))
        )

    def openai(self) -> openai.AsyncOpenAI:
        """Return the official client, configured for this server, key and tenant.

        Raises:
            ConfigError: `openai` isn't installed.
        """
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
        # the official client needs one
        "api_key": config.api_key or "none",
        "default_headers": {"X-Tenant": config.tenant} if config.tenant else {},
        "timeout": config.timeout_s,
        "max_retries": config.retry.max_retries,
    }
