"""Container of the parts behind the routes, filled once and carried by the application."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.requests import HTTPConnection

from loraserve.adapters.config.generation_config import NO_DEFAULTS, GenerationDefaults
from loraserve.adapters.format.containers import CONTAINERS
from loraserve.api.grammar.checker import GrammarChecker
from loraserve.api.http.client_address import TrustedProxies
from loraserve.api.http.text_threads import TextThreads
from loraserve.api.metrics.counters import ServerMetrics
from loraserve.api.metrics.history import ActivityHistory
from loraserve.api.metrics.routing import AdapterRouting
from loraserve.api.residency_snapshot import ResidencySnapshots
from loraserve.api.result_cache import ResultCache
from loraserve.api.shadow import ShadowRunner
from loraserve.api.version_chat.formats import VersionChats
from loraserve.api.version_chat.renderer import TemplateRenderer
from loraserve.batches.batches import Batches
from loraserve.batches.runner import BatchRunner
from loraserve.batches.stored_files import StoredFiles
from loraserve.errors import Overloaded
from loraserve.limits import LIMITS, Limits
from loraserve.model.gguf.gguf_adapter import GgufAdapter
from loraserve.planning.adapters import DeviceFit
from loraserve.tenancy.limits.admission import Admissions
from loraserve.tenancy.limits.pauses import Pauses
from loraserve.tenancy.limits.shares import Rooms
from loraserve.text.chat_template import special_tokens
from loraserve.text.grammar_worker import Setup

if TYPE_CHECKING:
    from adapters_store.base import BlobStore
    from loraserve.api.http.guard import RequestTracer
    from loraserve.conversations.stored_responses import StoredResponses
    from loraserve.engine_client.interface import ServingEngine
    from loraserve.registry.registry import Registry
    from loraserve.settings import Settings
    from loraserve.tenancy.billing.meter import UsageMeter
    from loraserve.tenancy.identity.auth import Authenticator
    from loraserve.text.chat_format import ChatFormat
    from loraserve.text.tokenizer import Tokenizer
    from loraserve.types import TenantId


@dataclass(slots=True)
class Services:
    """The parts behind the routes. Everything here lives as long as the application does."""

    settings: Settings
    engine: ServingEngine
    registry: Registry
    authenticator: Authenticator
    store: BlobStore
    tokenizer: Tokenizer
    chat_format: ChatFormat
    """Format of chats with the base."""
    base_defaults: GenerationDefaults = NO_DEFAULTS
    """Defaults of requests in the base's ``generation_config.json``, where they are used."""
    usage: UsageMeter | None = None
    """Meter of billed usage; None: nothing is billed."""
    responses: StoredResponses | None = None
    """Stored responses; None: none are stored."""
    tracer: RequestTracer | None = None
    """Makes spans of requests; None: nothing is traced."""
    admissions: Admissions = field(default_factory=Admissions)
    metrics: ServerMetrics = field(default_factory=ServerMetrics)
    text_threads: TextThreads = field(default_factory=TextThreads)
    limits: Limits = LIMITS
    clock: Callable[[], float] = time.time
    is_draining: bool = False
    """Not ready any more; requests are still taken for a moment, until load balancers have noticed.
    """
    is_closed: bool = False
    """New work is refused; what runs may finish."""
    grammars: GrammarChecker = field(init=False)
    templates: TemplateRenderer = field(init=False)
    """Renders versions' chat templates; the base's is rendered here."""
    version_chats: VersionChats = field(init=False)
    shadows: ShadowRunner = field(init=False)
    rooms: Rooms = field(init=False)
    proxies: TrustedProxies = field(init=False)
    pauses: Pauses = field(init=False)
    routing: AdapterRouting = field(init=False)
    files: StoredFiles = field(init=False)
    batches: Batches = field(init=False)
    batch_runner: BatchRunner = field(init=False)
    result_cache: ResultCache = field(init=False)
    residency: ResidencySnapshots = field(init=False)
    history: ActivityHistory = field(init=False)

    def __post_init__(self) -> None:
        self.rooms = Rooms(self.limits)
        self.proxies = TrustedProxies(self.settings.trusted_proxies, self.settings.client_address_source)
        self.residency = ResidencySnapshots(lambda: self.engine.residency())
        self.history = ActivityHistory(
            self.metrics.activity, lambda: self.engine.stats, limits=self.limits, clock=self.clock
        )
        self.pauses = Pauses(self.limits.max_pause_s)
        self.grammars = GrammarChecker(self._grammar_setup, limits=self.limits)
        self.templates = TemplateRenderer(lambda: special_tokens(self.tokenizer.config), limits=self.limits)
        self.registry.inspector.inspect_template = self.templates.inspect
        fit = DeviceFit(
            lambda: self.engine.stats,
            self.settings.adapter_dtype,
            has_one_process=self.settings.tensor_parallel * self.settings.pipeline_parallel == 1,
        )
        self.registry.inspector.check_fit = fit.check
        self.registry.uploads.containers = (*CONTAINERS, GgufAdapter())
        self.registry.stored_fit.doubts = fit.may_exceed
        self.registry.inspector.tokenizer = lambda: self.tokenizer
        self.version_chats = VersionChats(
            lambda: self.chat_format,
            self.tokenizer,
            self.store,
            self.templates,
            tool_call_parser=self.settings.tool_call_parser,
            reasoning_parser=self.settings.reasoning_parser,
            vocab_size=lambda: self.engine.base.vocab_size,
            base_defaults=self.base_defaults,
            on_damage=self.registry.corruption.report,
            limits=self.limits,
        )
        self.routing = AdapterRouting(self.engine, self.metrics.adapter_load, self.settings.max_num_seqs)
        self.shadows = ShadowRunner(self.engine, self.registry, self.metrics, limits=self.limits)
        registry = self.registry
        self.files = StoredFiles(registry.database, registry.store, registry.uploads)
        self.batches = Batches(registry.database)
        self.batch_runner = BatchRunner(
            registry.database,
            registry.store,
            self.batches,
            throttle=registry.uploads.throttle,
            meter=self.usage,
            max_requests=max(1, min(LIMITS.max_batch_requests, self.settings.max_num_seqs // 4)),
        )
        self.result_cache = ResultCache(self.settings.result_cache_bytes, limits=self.limits)
        registry.on_forget = self.result_cache.drop_adapter
        registry.on_delete = self.engine.forget_texts
        registry.ephemeral.on_freed = self.result_cache.drop_version
        self.authenticator.tenants.on_delete = self._forget_tenant

    def _forget_tenant(self, tenant: TenantId) -> None:
        # those to which it granted adapters use them no more
        self.registry.forget_owner(tenant)
        self.result_cache.drop_tenant(tenant)
        self.engine.forget_texts(tenant)

    def _grammar_setup(self) -> Setup:
        base = self.engine.base
        return Setup(str(self.tokenizer.model_dir), base.vocab_size, tuple(base.eos_token_ids))

    async def close_tracer(self) -> None:
        """Send the spans that aren't sent yet; a reload may have made this tracer."""
        if self.tracer is not None:
            await self.tracer.close()

    def check_open(self) -> None:
        """Check that the server takes new work.

        Raises:
            Overloaded: it is shutting down.
        """
        if self.is_closed:
            raise Overloaded("The server is shutting down.", retry_after_s=5.0)


def services_of(connection: HTTPConnection) -> Services:
    """Look up the services of the application that answers this request."""
    services: Services = connection.app.state.services
    return services
