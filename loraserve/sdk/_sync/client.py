# Generated from loraserve/sdk/_async/client.py by `make sdk`: don't edit.
"""The client: a server, a key, and all calls that can be made with them."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import httpx2

from loraserve import errors
from loraserve.contract.completion import Tokens
from loraserve.contract.residency import AdapterResidency, Memory, ResidencyPage
from loraserve.contract.server import AuditEntry, Base, Limits
from loraserve.sdk._sync.adapters import Adapters
from loraserve.sdk._sync.batches import Batches, Files
from loraserve.sdk._sync.evaluations import Evaluations
from loraserve.sdk._sync.inference import Chat, Completions, Models
from loraserve.sdk._sync.operations import Operations
from loraserve.sdk._sync.paging import all_rows
from loraserve.sdk._sync.pooling import Embeddings, Rerankings, Scores
from loraserve.sdk._sync.responses import Responses
from loraserve.sdk._sync.tenancy import AdminKeys, Grants, Keys, Tenants
from loraserve.sdk._sync.transport import Transport
from loraserve.sdk._sync.usage import Usage
from loraserve.sdk.call import Call, encode, read_into
from loraserve.sdk.config import DEFAULT_TIMEOUT_S, ClientConfig
from loraserve.sdk.retry import OnWait

if TYPE_CHECKING:
    import openai


class Client:
    """Call one server with one key; each call blocks, and threads may share it.

    Close it, or use it in an `with` block.

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
        http_client: httpx2.Client | None = None,
    ) -> None:
        self._config = ClientConfig.resolve(base_url, api_key, tenant, timeout, max_retries, on_wait)
        self._transport = Transport(self._config, http_client)
        self.adapters = Adapters(self._transport)
        self.evaluations = Evaluations(self._transport)
        self.completions = Completions(self._transport)
        self.chat = Chat(self._transport)
        self.responses = Responses(self._transport)
        self.embeddings = Embeddings(self._transport)
        self.scores = Scores(self._transport)
        self.rerankings = Rerankings(self._transport)
        self.models = Models(self._transport)
        self.files = Files(self._transport)
        self.batches = Batches(self._transport)
        self.tenants = Tenants(self._transport)
        self.keys = Keys(self._transport)
        self.admin_keys = AdminKeys(self._transport)
        self.grants = Grants(self._transport)
        self.operations = Operations(self._transport)
        self.usage = Usage(self._transport)

    @property
    def url(self) -> str:
        """The server's root."""
        return self._config.url

    def residency(self, *, resident: bool = False) -> Iterator[AdapterResidency]:
        """Yield where each version's weights are: device, host or disk.

        With `resident`, only versions in memory.
        """
        params = {"resident": "true"} if resident else {}
        return all_rows(self._transport, "/api/v1/residency", AdapterResidency, params)

    def memory(self) -> Memory | None:
        """Return the use of the device's and the host's memory at the last heartbeat.

        None for a tenant's key.
        """
        # every page carries the memory: request the smallest
        call = Call("GET", "/api/v1/residency", read_into(ResidencyPage), params={"limit": "1"})
        page = self._transport.send(call)
        return page.memory

    def audit(self) -> Iterator[AuditEntry]:
        """Yield the audit log, newest entry first."""
        return all_rows(self._transport, "/api/v1/audit", AuditEntry)

    def base(self) -> Base:
        """Return the resident base model."""
        return self._transport.send(Call("GET", "/api/v1/base", read_into(Base)))

    def limits(self) -> Limits:
        """Return every bound of the server."""
        return self._transport.send(Call("GET", "/api/v1/limits", read_into(Limits)))

    def tokenize(self, prompt: str, *, model: str | None = None, add_special_tokens: bool = True) -> Tokens:
        """Return the tokens of a text, as the model's tokenizer reads it.

        Args:
            model: an adapter, whose version may have tokens of its own; None: the base.
            add_special_tokens: add those that begin a prompt.
        """
        body = encode({"model": model, "prompt": prompt, "add_special_tokens": add_special_tokens})
        return self._transport.send(Call("POST", "/tokenize", read_into(Tokens), body=body))

    def metrics(self) -> str:
        """Return the server's counters and gauges, in Prometheus' text format."""
        return self._transport.send(Call("GET", "/metrics", lambda _answer, body: body.decode("utf-8", "replace")))

    def openai(self) -> openai.OpenAI:
        """Return the official client, configured for this server, key and tenant.

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
