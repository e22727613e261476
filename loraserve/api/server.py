"""`serve`: from settings to a server that answers, and back down without losing a stream."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import structlog
import uvicorn
import uvloop
from starlette.types import ASGIApp

from adapters_store import open_store
from adapters_store.base import BlobStore
from loraserve.adapters.config.generation_config import FILE, NO_DEFAULTS, GenerationDefaults, read_base_defaults
from loraserve.api.app import create_app
from loraserve.api.batch_lines import BatchLines
from loraserve.api.console.pages import PATH
from loraserve.api.http.acceptor import Acceptor, HTTPServer
from loraserve.api.http.connection import BoundedProtocol
from loraserve.api.http.httptools_connection import HttptoolsConnection
from loraserve.api.http.listener import listener_url, open_listener, raise_file_limit
from loraserve.api.http.tls import TlsFiles
from loraserve.api.logs import configure_logging
from loraserve.api.metrics.counters import ServerMetrics
from loraserve.api.reload import SettingsReload
from loraserve.api.services import Services
from loraserve.api.tracing.collector import open_tracer
from loraserve.background import SERVER_NICENESS, Throttle, lower_thread_priority
from loraserve.conversations.stored_responses import StoredResponses
from loraserve.db import migrate
from loraserve.db.session import Database
from loraserve.engine_client.client import EngineClient
from loraserve.engine_client.interface import EngineMaker
from loraserve.errors import ConfigError
from loraserve.model.checkpoint.source import local_draft_dir, resolve_model_dir
from loraserve.registry.health.base_names import BaseNames
from loraserve.registry.publishing.inspector import MAX_INSPECTIONS
from loraserve.registry.registry import Registry
from loraserve.registry.storage_gc.store_claim import StoreClaim
from loraserve.settings import Settings
from loraserve.tenancy.billing.meter import FOLDER, UsageMeter
from loraserve.tenancy.identity.auth import Authenticator
from loraserve.tenancy.identity.tenants import DEFAULT_TENANT
from loraserve.tenancy.limits.admission import Admissions
from loraserve.tenancy.limits.servers import Servers
from loraserve.tenancy.limits.shares import ConnectionSlot
from loraserve.text.chat_format import ChatFormat
from loraserve.text.chat_template import ChatTemplate
from loraserve.text.tokenizer import Tokenizer

logger = structlog.stdlib.get_logger("loraserve.server")

EXIT_OK, EXIT_INTERRUPTED = 0, 130

_NOTICE_S = 0.5
"""Between "not ready" and refusing work: load balancers look away first."""
_KEEP_ALIVE_S = 75
"""Seconds that an idle connection is kept.

Longer than clients and load balancers keep one (5 s, 60 s), so that they close it: a request that
meets our closing fails.
"""
_LINE_GRACE_S = 5.0
"""Seconds that batches' lines have to end in: another server computes them as well."""
_CLOSE_S = 5
"""Seconds for connections to end once their requests have."""


def serve(settings: Settings, *, read: Callable[[], Settings] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code: 0 after a drain, 130 after an interrupt.

    The socket listens at once; /readyz answers 503 until the base is loaded. An empty registry is
    migrated; one that is behind is refused.

    Args:
        read: returns the settings as a start would have them now, for SIGHUP; None: they stay.

    Raises:
        ConfigError: the settings can't work: the model isn't there, the port is taken, the registry
            needs an upgrade.
        ModelError, EngineError: the base can't be loaded.
    """
    configure_logging(settings.log_level)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings, read or (lambda: settings)))


async def _serve(settings: Settings, read: Callable[[], Settings]) -> int:
    # what is too long for the event loop is mostly uploads': where the engine computes on the same
    # cores, tokens come first
    asyncio.get_running_loop().set_default_executor(background_threads("server"))
    # Its default ends the process at once, streams and all.
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _ignore_hangup)
    tls = None if settings.ssl_certfile is None else TlsFiles(settings.ssl_certfile, settings.ssl_keyfile)
    listener = open_listener(settings.host, settings.port)
    with listener:
        async with open_services(settings, EngineClient) as services:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, SettingsReload(services, read, tls).run)
            return await _Lifetime(services, listener, tls).run()


@contextlib.asynccontextmanager
async def open_services(settings: Settings, make_engine: EngineMaker) -> AsyncIterator[Services]:
    """Make a server's services and run its background work; end both with the block.

    Its engine is made and not started.

    Raises:
        ConfigError: the settings can't work.
    """
    services, database = await _make_services(settings, make_engine)
    registry, usage, responses = services.registry, services.usage, services.responses
    servers = Servers(database)
    admissions = Admissions(
        num_servers=lambda: servers.num_live,
        uses_elsewhere=servers.uses_elsewhere,
        told_at=lambda: servers.told_at,
    )
    services.admissions, servers.uses = admissions, admissions.uses
    # ended from the last to the first, each also when another's end fails
    async with contextlib.AsyncExitStack() as ending:
        for end in (
            database.dispose,
            registry.shadow_hours.close,
            registry.numeric_failures.close,
            registry.corruption.close,
            registry.collector.close,
            registry.claim.close,
            registry.ephemeral.close,
            registry.operations.close,
            servers.close,
            *([usage.close] if usage is not None else []),
            *([responses.close] if responses is not None else []),
            services.files.close,
            services.grammars.close,
            services.templates.close,
            services.close_tracer,
            services.history.close,
            services.engine.stop,
            registry.pins.close,
            registry.base_precisions.close,
            registry.certificate_backfill.close,
            services.batch_runner.close,
        ):
            ending.push_async_callback(end)
        servers.start()
        registry.claim.start()
        registry.collector.start()
        registry.pins.start()
        registry.ephemeral.start()
        registry.certificate_backfill.start()
        registry.base_precisions.start()
        services.files.start()
        services.history.start()
        if usage is not None:
            usage.start()
        if responses is not None:
            responses.start()
        yield services


def _ignore_hangup() -> None:
    logger.warning("SIGHUP is ignored while the server starts")


def background_threads(name: str, count: int | None = None) -> ThreadPoolExecutor:
    """Threads that stand back for the engine's."""
    return ThreadPoolExecutor(
        count, thread_name_prefix=name, initializer=lower_thread_priority, initargs=(SERVER_NICENESS,)
    )


async def _make_services(settings: Settings, make_engine: EngineMaker) -> tuple[Services, Database]:
    metrics = ServerMetrics()
    tracer = open_tracer(settings, metrics)
    model_dir = await asyncio.to_thread(resolve_model_dir, settings.model)
    draft_dir = await asyncio.to_thread(local_draft_dir, settings.draft_model)
    config = settings.engine_config(model_dir, draft_dir)
    tokenizer = Tokenizer(model_dir)
    base_defaults = await asyncio.to_thread(_base_defaults, settings, Path(model_dir))
    if settings.chat_template is not None:
        logger.info(f"chats have the template {settings.chat_template}, in the place of the base's own")
    chat_format = ChatFormat(
        ChatTemplate(model_dir, tokenizer, file=settings.chat_template),
        tokenizer,
        tool_call_parser=settings.tool_call_parser,
        reasoning_parser=settings.reasoning_parser,
        variables=settings.default_chat_template_kwargs,
    )
    database, store, claim, authenticator = await _open_registry(settings)
    # the two know of each other: the registry asks the engine for certificates, and is notified by
    # it of damaged bytes
    engine = make_engine(
        config,
        tokenizer,
        hang_timeout_s=settings.engine_hang_timeout,
        on_damage=lambda digest, blob: registry.corruption.report(digest, blob),
    )
    registry = Registry(
        database,
        store,
        lambda: engine.base,
        certify=engine.verify,
        measure_base=engine.measure_base,
        pinning=engine,
        base_names=BaseNames(settings.base_names, source=settings.model_source, is_strict=settings.strict_base),
        throttle=Throttle(
            is_serving=lambda: engine.is_computing_here, threads=background_threads("upload", MAX_INSPECTIONS)
        ),
        is_certified_at_upload=settings.certify == "at-upload",
        is_certified_strictly=settings.strict_certificates,
        retention_s=settings.retention_s,
        pull_allow=settings.pull_allow,
        claim=claim,
        warm=engine.warm,
        lora_dir=settings.lora_dir,
        ephemeral_memory_bytes=settings.ephemeral_memory,
        ephemeral_ttl_s=settings.ephemeral_ttl_s,
        on_ephemeral_unused=engine.discard,
    )
    services = Services(
        settings=settings,
        engine=engine,
        registry=registry,
        authenticator=authenticator,
        store=store,
        tokenizer=tokenizer,
        chat_format=chat_format,
        base_defaults=base_defaults,
        usage=UsageMeter(database, settings.data_dir / FOLDER),
        responses=StoredResponses(database, is_storing=settings.store_responses),
        tracer=tracer,
        metrics=metrics,
    )
    if not settings.auth:
        logger.warning(f"--no-auth: requests without a key are an admin's, for the tenant {DEFAULT_TENANT}")
    return services, database


def _base_defaults(settings: Settings, model_dir: Path) -> GenerationDefaults:
    """Read the base's defaults of requests, and log them; the API's own where none are used."""
    path = model_dir / FILE
    if settings.generation_config == "none" or not path.is_file():
        return NO_DEFAULTS
    defaults, warnings = read_base_defaults(path.read_bytes())
    for warning in warnings:
        logger.warning(f"the base's {warning} This is ignored.")
    if taken := defaults.as_fields():
        shown = ", ".join(f"{name} {value:g}" for name, value in taken.items())
        logger.info(
            f"defaults of requests, from the base's {FILE}: {shown} (--generation-config none: the API's own)",
        )
    return defaults


async def _open_registry(settings: Settings) -> tuple[Database, BlobStore, StoreClaim, Authenticator]:
    """Open database and store; make the tables and the first admin key where there are none."""
    try:
        settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--data-dir {settings.data_dir} can't be created: {error.strerror or error}.") from error
    store = open_store(settings.resolved_store_url, spool=settings.data_dir / "spool")
    if await migrate.upgrade_if_empty(settings.resolved_database_url):
        logger.info("registry created")
    await migrate.check(settings.resolved_database_url)
    database = Database(settings.resolved_database_url)
    database.reserve_space()
    claim = StoreClaim(database, store, where=f"the store {settings.resolved_store_url}")
    try:
        await claim.open()
    except BaseException:
        # a SQLite database that isn't closed leaves a -wal file, which a restored backup would be
        # mixed with
        await database.dispose()
        raise
    admin_key = settings.admin_key.get_secret_value() if settings.admin_key else None
    authenticator = Authenticator(database, admin_key=admin_key)
    made = await authenticator.open()
    if made is not None:
        _show_admin_key(made)
    return database, store, claim, authenticator


async def prepare_registry(settings: Settings) -> None:
    """Make the tables of an empty registry and its first admin key, and show the key.

    For a cluster, whose servers' logs are elsewhere.

    Raises:
        LoraserveError: the database or the store can't be used.
    """
    database, _, claim, _ = await _open_registry(settings)
    await claim.close()
    await database.dispose()


def _show_admin_key(secret: str) -> None:
    """Show a generated key, the only time: on stderr, past the logs, which are kept."""
    sys.stderr.write(f"\nAdmin key (shown this once; set LORASERVE_ADMIN_KEY to use your own):\n  {secret}\n\n")
    sys.stderr.flush()


def make_http_server(app: ASGIApp, services: Services, tls: TlsFiles | None = None) -> HTTPServer:
    """Build an HTTP server whose connections take slots in the services' rooms.

    It has as many as there can be open files for.
    """
    budget = raise_file_limit(services.limits)
    services.rooms.connections.capacity = budget.max_connections

    def make_acceptor(listener: socket.socket, make_protocol: Callable[[ConnectionSlot], BoundedProtocol]) -> Acceptor:
        return Acceptor(
            listener,
            make_protocol,
            services.rooms.connections,
            proxies=services.proxies,
            tls=None if tls is None else tls.context,
            first_reserved=budget.first_reserved,
            limits=services.limits,
        )

    return HTTPServer(
        uvicorn.Config(
            app,
            http=HttptoolsConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_CLOSE_S,
        ),
        make_acceptor,
    )


@dataclass(slots=True)
class _Lifetime:
    """Lifetime of the server, from the first accepted connection to the last closed."""

    services: Services
    listener: socket.socket
    tls: TlsFiles | None
    _signals: asyncio.Queue[signal.Signals] = field(default_factory=asyncio.Queue)

    async def run(self) -> int:
        """Serve until a stop is requested; return the exit code.

        Raises:
            LoraserveError: the engine can't be started.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signals.put_nowait, number)
        app = create_app(self.services)
        self.services.batch_runner.start(BatchLines(self.services, app))
        server = make_http_server(app, self.services, self.tls)
        serving = asyncio.create_task(server.serve(sockets=[self.listener]), name="http")
        starting = asyncio.create_task(self._start_engine(), name="engine-start")
        signalled = asyncio.create_task(self._signals.get(), name="signal")
        try:
            done, _ = await asyncio.wait({serving, starting, signalled}, return_when=asyncio.FIRST_COMPLETED)
            if starting in done:
                await starting
                done, _ = await asyncio.wait({serving, signalled}, return_when=asyncio.FIRST_COMPLETED)
            if signalled not in done:
                return EXIT_OK  # uvicorn ended by itself; it logged why
            number = signalled.result()
            starting.cancel()
            await self._drain(number)
            return EXIT_INTERRUPTED if number is signal.SIGINT else EXIT_OK
        finally:
            self.services.is_draining = self.services.is_closed = True
            starting.cancel()
            signalled.cancel()
            server.should_exit = True
            await asyncio.gather(serving, starting, signalled, return_exceptions=True)
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def _start_engine(self) -> None:
        url = listener_url(self.listener, "https" if self.tls else "http")
        pages = {"console": f"{url}{PATH}"} if self.services.settings.console else {}
        logger.info("listening", url=url, **pages)
        began = asyncio.get_running_loop().time()
        await self.services.engine.start()
        base = self.services.engine.base
        took_s = round(asyncio.get_running_loop().time() - began, 1)
        logger.info("ready", url=url, base=base.id, max_model_len=base.max_model_len, engine_start_s=took_s, **pages)

    async def _drain(self, number: signal.Signals) -> None:
        """Not ready; then no new work; then what runs has the grace period.

        A second signal ends the waiting.
        """
        logger.info("draining", signal=number.name, grace_s=self.services.settings.grace_s)
        draining = asyncio.create_task(self._drain_slowly(number is not signal.SIGINT))
        hurry = asyncio.create_task(self._signals.get())
        await asyncio.wait({draining, hurry}, return_when=asyncio.FIRST_COMPLETED)
        for task in (draining, hurry):
            task.cancel()
        await asyncio.gather(draining, hurry, return_exceptions=True)
        await self.services.engine.stop()
        logger.info("drained")

    async def _drain_slowly(self, has_notice: bool) -> None:
        grace_s = self.services.settings.grace_s
        self.services.is_draining = True
        if has_notice:
            await asyncio.sleep(min(_NOTICE_S, grace_s))
        self.services.is_closed = True
        await self.services.shadows.close()
        # what clients and batches have under way ends together
        await asyncio.gather(
            self.services.batch_runner.close(min(_LINE_GRACE_S, grace_s)), self.services.engine.stop(grace_s)
        )
