"""The inference routes over a real HTTP server, a real registry and a real tokenizer;
only the engine is a stand-in.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from fastapi import FastAPI
from shared_texts import template_of, tokenizer_of
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers

from adapters_store import LocalStore
from loraserve.adapters.config.generation_config import NO_DEFAULTS, GenerationDefaults
from loraserve.adapters.extra_files import ExtraFiles
from loraserve.api.app import create_app
from loraserve.api.http.listener import listener_url, open_listener
from loraserve.api.http.tls import TlsFiles
from loraserve.api.server import make_http_server
from loraserve.api.services import Services
from loraserve.conversations.stored_responses import StoredResponses
from loraserve.db.session import Database
from loraserve.engine_client.messages import GenerateRequest
from loraserve.engine_client.output import Chunk, OutputProcessor
from loraserve.errors import Overloaded
from loraserve.limits import LIMITS, Limits
from loraserve.registry.registry import Registry
from loraserve.settings import Settings
from loraserve.tenancy.billing.meter import UsageMeter
from loraserve.tenancy.identity.auth import Authenticator, Caller
from loraserve.text.chat_format import ChatFormat
from loraserve.text.tokenizer import Tokenizer
from loraserve.types import (
    AdapterRef,
    AdapterResidency,
    BaseSpec,
    Digest,
    EngineStats,
    FinishReason,
    PoolingKind,
    TenantId,
    TokenLogprobs,
    TokenOutput,
)

ADMIN_KEY = "admin-key-of-the-tests-" + "x" * 20
EOS = "<|eos|>"

CHAT_TEMPLATE = """{%- for message in messages -%}
{%- if message.role == "assistant" and loop.first -%}{{ raise_exception("the assistant can't begin") }}{%- endif -%}
<|{{ message.role }}|>{{ message.content }}
{% endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the text half of a model: bytes as tokens, and a chat template."""
    path = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = HFTokenizer(models.BPE(vocab={char: id_ for id_, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS, "<|user|>", "<|assistant|>", "<|system|>"])
    # known to the tokenizer, unknown to the model
    tokenizer.add_tokens(["<|late|>"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return path


def pooled_by_fake(request: GenerateRequest, hidden_size: int) -> np.ndarray:
    """The fake engine's vector of a prompt, or the numbers of two labels."""
    pooling = request.pooling
    assert pooling is not None
    # a token's hidden state is drawn from its id and its adapter
    shift = len(request.adapter.name) if request.adapter else 0
    states = np.stack(
        [np.random.default_rng(id_ + 1000 * shift).normal(size=hidden_size) for id_ in request.prompt_token_ids]
    )
    kinds = {PoolingKind.MEAN: states.mean(0), PoolingKind.LAST: states[-1], PoolingKind.CLS: states[0]}
    pooled: npt.NDArray[np.float64] = kinds[pooling.kind]
    if pooling.classify:
        return pooled[:2].astype("<f4")
    pooled = pooled[: pooling.dimensions]
    return (pooled / np.linalg.norm(pooled) if pooling.normalize else pooled).astype("<f4")


@dataclass
class FakeEngine:
    """Answers with ``{model} says {seed}: …`` in the real tokenizer's tokens, one per step; and
    remembers who was there.
    """

    base: BaseSpec
    tokenizer: Tokenizer
    script: str = ""
    step_s: float = 0.0
    steps: asyncio.Semaphore | None = None
    """Permits, one for each token that may come; None: all may."""
    fail_after: int | None = None
    failure: Exception = field(default_factory=lambda: Overloaded("The queue is full.", retry_after_s=0.05))
    seen: list[GenerateRequest] = field(default_factory=list)
    live: set[str] = field(default_factory=set)
    num_aborted: int = 0
    num_taken: int = 0
    """Chunks that a request's reader took past the iterator."""
    most_live: int = 0
    """Requests that were there at once, of those that pool."""
    is_ready: bool = True
    is_live: bool = True
    status: str | None = None
    num_restarts: int = 0
    num_hangs: int = 0
    num_waiting_clients: int = 0
    stats: EngineStats = field(default_factory=EngineStats)
    resident: dict[Digest, AdapterResidency] = field(default_factory=dict)
    forgotten: list[tuple[TenantId, str | None, int | None]] = field(default_factory=list)
    """Deleted tenants, adapters and versions whose texts are gone."""
    num_residency_queries: int = 0
    warmed: list[AdapterRef] = field(default_factory=list)

    async def warm(self, ref: AdapterRef) -> None:
        self.warmed.append(ref)

    def forget_texts(self, owner: TenantId, name: str | None = None, version: int | None = None) -> None:
        self.forgotten.append((owner, name, version))

    async def residency(self, only: Collection[Digest] | None = None) -> tuple[AdapterResidency, ...]:
        self.num_residency_queries += 1
        return tuple(row for digest, row in self.resident.items() if only is None or digest in only)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        self.seen.append(request)
        self.live.add(request.request_id)
        is_over = False
        try:
            processor = OutputProcessor(request, self.tokenizer)
            has_begun = False
            async for output in self._steps(request):
                chunk = processor.push(output)
                is_over = chunk.finish_reason is not None
                # as the real one: between the first chunk and the last, while nothing waits
                if has_begun and not is_over and request.reader is not None and request.reader.is_ready():
                    request.reader.take(chunk)
                    self.num_taken += 1
                    continue
                has_begun = True
                yield chunk
                if is_over:
                    return
        finally:
            self.live.discard(request.request_id)
            self.num_aborted += not is_over

    async def _steps(self, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
        if request.pooling is not None:
            await asyncio.sleep(self.step_s)
            if self.fail_after is not None:
                raise self.failure
            self.most_live = max(self.most_live, len(self.live))
            pooled = pooled_by_fake(request, self.base.hidden_size)
            yield TokenOutput(
                request_id=request.request_id,
                finish_reason=FinishReason.STOP,
                pooled=pooled.tobytes(),
                queue_s=0.001,
                adapter_s=0.002 if request.adapter else 0.0,
                prefill_s=0.003,
            )
            return
        model = request.adapter.name if request.adapter else "base"
        text = self.script or f"{model} says {request.params.seed % 1000}: the quick brown fox jumps over the lazy dog"
        eos = self.base.eos_token_ids[0]
        tokenizer = request.tokenizer or self.tokenizer
        token_ids = [*tokenizer.encode(text, add_special_tokens=False), eos]
        for step, token_id in enumerate(token_ids):
            await asyncio.sleep(self.step_s)
            if self.steps is not None:
                await self.steps.acquire()
            if step == self.fail_after:
                raise self.failure
            is_first, is_last = step == 0, step + 1 == request.params.max_tokens
            ends = {eos, *request.params.stop_token_ids}
            reason = FinishReason.STOP if token_id in ends else FinishReason.LENGTH if is_last else None
            yield TokenOutput(
                request_id=request.request_id,
                token_ids=(token_id,),
                logprobs=None
                if request.params.logprobs is None
                else (self._own(self._logprobs(token_id, request.params.logprobs), request),),
                prompt_logprobs=self._prompt_logprobs(request) if is_first else None,
                finish_reason=reason,
                num_cached_tokens=16 if is_first else 0,
                queue_s=0.001 if is_first else 0.0,
                adapter_s=0.002 if is_first else 0.0,
                prefill_s=0.003 if is_first else 0.0,
                adapter_tier="disk" if is_first and request.adapter else "",
                adapter_read_s=0.001 if is_first and request.adapter else 0.0,
            )
            if reason is not None:
                return

    def _prompt_logprobs(self, request: GenerateRequest) -> tuple[TokenLogprobs | None, ...] | None:
        num = request.params.prompt_logprobs
        if num is None:
            return None
        return (None, *(self._logprobs(token_id, num) for token_id in request.prompt_token_ids[1:]))

    def _own(self, entry: TokenLogprobs, request: GenerateRequest) -> TokenLogprobs:
        """With the tokens that the request names, if it names any."""
        own = request.params.logprob_token_ids
        return msgspec.structs.replace(entry, top=tuple((id_, -id_ / 64) for id_ in own)) if own else entry

    def _logprobs(self, token_id: int, num: int) -> TokenLogprobs:
        top = tuple(((token_id + 1 + i) % 200, -0.25 - i) for i in range(num))
        return TokenLogprobs(token_id=token_id, logprob=-0.5 if token_id % 2 else float("-inf"), top=top)


@pytest.fixture
def base(small_base: BaseSpec, model_dir: Path) -> BaseSpec:
    tokenizer = tokenizer_of(model_dir)
    eos = tokenizer.token_to_id(EOS)
    assert eos is not None
    return msgspec.structs.replace(
        small_base, vocab_size=tokenizer.vocab_size - 1, max_model_len=256, eos_token_ids=(eos,)
    )


@pytest.fixture
def engine(base: BaseSpec, model_dir: Path) -> FakeEngine:
    return FakeEngine(base, tokenizer_of(model_dir))


@pytest.fixture
def limits() -> Limits:
    return LIMITS


@pytest.fixture
def base_defaults() -> GenerationDefaults:
    """Return the defaults of the base's generation_config.json."""
    return NO_DEFAULTS


@dataclass(frozen=True)
class Published:
    """A registry in which acme has the adapter ``sql`` at version 1, to copy."""

    folder: Path
    key: str


Upload = tuple[bytes, bytes]


@pytest.fixture(scope="session")
def publish_once(tmp_path_factory: pytest.TempPathFactory, migrated_sqlite: Path) -> PublishOnce:
    """A function that makes a base's `Published`, the first time."""
    made: dict[tuple[bytes, ...], Published] = {}

    async def run(base: BaseSpec, upload: Upload) -> Published:
        name = (msgspec.json.encode(base), *upload)
        if name not in made:
            folder = tmp_path_factory.mktemp("published")
            shutil.copyfile(migrated_sqlite, folder / "registry.db")
            database = Database(f"sqlite:///{folder / 'registry.db'}")
            authenticator = Authenticator(database, admin_key=ADMIN_KEY)
            await authenticator.open()
            acme = await create_tenant(authenticator, "acme")
            registry = Registry(database, LocalStore(folder / "blobs"), lambda: base)
            await publish_upload(registry, acme.caller.tenant, "sql", upload)
            await database.dispose()
            made[name] = Published(folder, acme.key)
        return made[name]

    return run


PublishOnce = Callable[[BaseSpec, Upload], Awaitable[Published]]


@pytest.fixture
async def published(
    request: pytest.FixtureRequest,
    base: BaseSpec,
    make_upload: Callable[..., Upload],
    publish_once: PublishOnce,
) -> Published | None:
    """Return what the registry begins as, for tests with the fixture `sql`; None: empty."""
    return await publish_once(base, make_upload()) if "sql" in request.fixturenames else None


@pytest.fixture
async def services(
    engine: FakeEngine,
    base: BaseSpec,
    model_dir: Path,
    migrated_sqlite: Path,
    published: Published | None,
    tmp_path: Path,
    limits: Limits,
    base_defaults: GenerationDefaults,
) -> AsyncIterator[Services]:
    if published is None:
        shutil.copyfile(migrated_sqlite, tmp_path / "registry.db")
    else:
        shutil.copytree(published.folder, tmp_path, dirs_exist_ok=True)
    database = Database(f"sqlite:///{tmp_path / 'registry.db'}")
    store = LocalStore(tmp_path / "blobs")
    authenticator = Authenticator(database, admin_key=ADMIN_KEY)
    await authenticator.open()
    usage = UsageMeter(database, tmp_path / "usage")
    services = Services(
        settings=Settings(model=str(model_dir), data_dir=tmp_path),
        engine=engine,  # type: ignore[arg-type]
        registry=Registry(database, store, lambda: base),
        authenticator=authenticator,
        store=store,
        tokenizer=engine.tokenizer,
        chat_format=ChatFormat(template_of(model_dir), engine.tokenizer),
        base_defaults=base_defaults,
        limits=limits,
        usage=usage,
        responses=StoredResponses(database),
    )
    yield services
    await services.grammars.close()
    await services.templates.close()
    await usage.close()
    await database.dispose()


@pytest.fixture
def tls() -> TlsFiles | None:
    """The server's certificate; None: it speaks HTTP."""
    return None


@pytest.fixture
def app(services: Services) -> FastAPI:
    return create_app(services)


@pytest.fixture
async def url(app: FastAPI, services: Services, tls: TlsFiles | None) -> AsyncIterator[str]:
    """A real server in this event loop."""
    async with served(app, services, tls) as address:
        yield address


@asynccontextmanager
async def served(app: FastAPI, services: Services, tls: TlsFiles | None = None) -> AsyncIterator[str]:
    """Serve an app with the steps of `HTTPServer.serve`, without its waits, 0.2 s at each end."""
    server = make_http_server(app, services, tls)
    listener = open_listener("127.0.0.1", 0)
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup(sockets=[listener])
    # sets the headers of each answer
    await server.on_tick(0)
    try:
        yield listener_url(listener, "http" if tls is None else "https")
    finally:
        for acceptor in server.servers:
            acceptor.close()
        state = server.server_state
        for connection in list(state.connections):
            connection.shutdown()
        with suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                while state.connections or state.tasks:
                    await asyncio.sleep(0.001)
        for acceptor in server.servers:
            await acceptor.wait_closed()


@dataclass
class Tenant:
    caller: Caller
    key: str

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}


async def create_tenant(authenticator: Authenticator, name: str) -> Tenant:
    record = await authenticator.tenants.create(name, actor="test")
    made = await authenticator.keys.create(record.id, name="test", actor="test")
    return Tenant(await authenticator.authenticate(made.secret), made.secret)


async def publish_upload(
    registry: Registry, owner: TenantId, name: str, upload: Upload, extras: Mapping[str, bytes] | None = None
) -> int:
    """Publish an adapter as the management routes do; return its version."""
    config, weights = upload
    staged = await registry.uploads.stage(owner)
    try:
        staged.write(weights)
        published = await registry.publisher.publish(
            owner, name, config, staged, actor="test", extras=ExtraFiles.read(extras or {})
        )
    finally:
        await registry.uploads.release(owner, staged)
    assert published.version.version is not None
    return published.version.version


@pytest.fixture
def make_tenant(services: Services) -> Callable[[str], Awaitable[Tenant]]:
    async def make(name: str) -> Tenant:
        return await create_tenant(services.authenticator, name)

    return make


@pytest.fixture
async def acme(
    services: Services, make_tenant: Callable[[str], Awaitable[Tenant]], published: Published | None
) -> Tenant:
    if published is None:
        return await make_tenant("acme")
    return Tenant(await services.authenticator.authenticate(published.key), published.key)


@pytest.fixture
def publish(services: Services, acme: Tenant, make_upload: Callable[..., Upload]) -> Callable[..., Any]:
    """Publishes an adapter for acme (or another), as an upload would."""

    async def run(name: str = "sql", seed: int = 0, tenant: Tenant | None = None, **extras: bytes) -> int:
        owner = (tenant or acme).caller.tenant
        return await publish_upload(services.registry, owner, name, make_upload(seed), extras)

    return run


@pytest.fixture
def sql() -> None:
    """Have `services` begin with acme's adapter ``sql`` at version 1."""


@pytest.fixture
async def client(url: str, acme: Tenant, sql: None) -> AsyncIterator[httpx2.AsyncClient]:
    """acme's client; acme has the adapter ``sql`` at version 1."""
    async with httpx2.AsyncClient(base_url=url, headers=acme.headers, timeout=60) as client:
        yield client


@pytest.fixture
def no_leaks(engine: FakeEngine) -> Iterator[None]:
    yield
    assert not engine.live
