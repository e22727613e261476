"""Chat formats and defaults of versions, made of their extra files once and kept while in use."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from adapters_store import read_extra_bytes
from loraserve.adapters.config.generation_config import NO_DEFAULTS, GenerationDefaults, read_generation_config
from loraserve.api.version_chat.renderer import TemplateRenderer
from loraserve.errors import (
    AdapterCorrupt,
    AdapterRejected,
    AdapterUnservable,
    BlobCorrupt,
    BlobNotFound,
    ChatTemplateFailed,
    ConfigError,
    InvalidRequest,
)
from loraserve.limits import LIMITS, Limits
from loraserve.registry.composition import versions_of
from loraserve.tenant_cache import TenantCache
from loraserve.text.chat_format import AUTO, ChatFormat
from loraserve.text.chat_template import special_tokens
from loraserve.text.version_template import VersionTemplate
from loraserve.tokenizer_identity import TokenizerSummary
from loraserve.types import AdapterRef, Digest, ExtraFile

if TYPE_CHECKING:
    from adapters_store.base import BlobStore
    from loraserve.text.tokenizer import Tokenizer

T = TypeVar("T")
_ENTRY_BYTES = 4096
"""Bytes that an entry takes in addition to its template's text, with room to spare."""
_TOKENIZER_BYTES, _BYTES_PER_ADDED_BYTE = 16 << 10, 32
"""Bytes that a version's tokenizer takes besides the base's: at least, and by its file's bytes."""
LOADED, CACHED = "loaded", "cached"
OUTCOMES = (LOADED, CACHED)


class VersionChats:
    """Give the chat format and the defaults of whatever a request is bound to.

    Args:
        base: returns the format of chats with the base.
        tool_call_parser, reasoning_parser: what the operator chose for the base.
        vocab_size: returns the width of the base's logits.
        base_defaults: the base's, which those of a version go before, field by field.
        on_damage: called with the digest of a version and the blob of its that is damaged.

    Attributes:
        num_by_outcome: uses of versions' own formats and defaults since the start.
    """

    def __init__(
        self,
        base: Callable[[], ChatFormat],
        tokenizer: Tokenizer,
        store: BlobStore,
        renderer: TemplateRenderer,
        *,
        tool_call_parser: str = AUTO,
        reasoning_parser: str = AUTO,
        vocab_size: Callable[[], int],
        base_defaults: GenerationDefaults = NO_DEFAULTS,
        on_damage: Callable[[Digest, Digest], None] = lambda digest, blob: None,
        limits: Limits = LIMITS,
    ) -> None:
        self.num_by_outcome: Counter[str] = Counter()
        self._base, self._tokenizer, self._store, self._renderer = base, tokenizer, store, renderer
        self._tool_call_parser, self._reasoning_parser = tool_call_parser, reasoning_parser
        self._vocab_size, self._on_damage, self._base_defaults = vocab_size, on_damage, base_defaults
        self._cache: TenantCache[object] = TenantCache(limits.max_version_chat_bytes)
        self._loading: dict[Hashable, asyncio.Task[Any]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the formats and defaults that are kept."""
        return self._cache.num_bytes

    async def chat_format(self, tenant: str, adapter: AdapterRef | None) -> ChatFormat:
        """Find the format of chats with what a request is bound to; the base's where it has none.

        Args:
            tenant: the one whose request it is.

        Raises:
            AdapterCorrupt: the stored template is damaged or missing.
            ChatTemplateFailed: it can't be compiled.
            EngineUnavailable: its process can't be started.
        """
        version = _version_of(adapter)
        extras = None if version is None else version.extras
        if (
            version is None
            or extras is None
            or not (
                extras.chat_template
                or extras.tool_parser
                or extras.reasoning_parser
                or extras.chat_template_kwargs
                or extras.tokenizer
            )
        ):
            return self._base()
        key = ("format", version.tenant, version.name, version.version, version.digest)
        return await self._kept(key, version.tenant, lambda: self._make_format(tenant, version))

    async def tokenizer(self, adapter: AdapterRef | None) -> Tokenizer:
        """Find the tokenizer of what a request is bound to; the base's where it has no other.

        Raises:
            AdapterCorrupt: the stored differences are damaged or missing.
            AdapterUnservable: they don't fit this base's tokenizer.
            InvalidRequest: the versions of a sum have different ones, or one has tokens that the
                base has no rows for.
        """
        versions = versions_of(adapter)
        owning = {file.blob: version for version in versions if (file := own_tokenizer(version)) is not None}
        if not owning:
            return self._tokenizer
        if len(owning) > 1:
            names = " and ".join(sorted(f"{one.name}@{one.version}" for one in owning.values()))
            raise InvalidRequest(
                f"{names} have tokenizers of their own, which differ; a sum needs one for its texts.",
                param="model",
                hint="Add up versions that were trained with the same added tokens.",
            )
        (version,) = owning.values()
        key = ("tokenizer", version.tenant, version.name, version.version, version.digest)
        made = await self._kept(key, version.tenant, lambda: self._make_tokenizer(version))
        if adapter is not None and adapter.parts and made.num_ids(self._vocab_size()) > self._vocab_size():
            raise InvalidRequest(
                f"{version.name}@{version.version} has added tokens beyond the base's rows; it can't be part of a sum.",
                param="model",
                hint="Request the version alone.",
            )
        return made

    async def defaults(self, adapter: AdapterRef | None) -> GenerationDefaults:
        """Find the defaults of requests for what one is bound to.

        Raises:
            AdapterCorrupt: the stored file is damaged or missing.
        """
        version = _version_of(adapter)
        if version is None or version.extras is None or version.extras.generation_config is None:
            return self._base_defaults
        file = version.extras.generation_config
        key = ("defaults", version.tenant, version.name, version.version, version.digest)
        own = await self._kept(key, version.tenant, lambda: self._read_defaults(version, file))
        return own.over(self._base_defaults)

    async def _kept(self, key: Hashable, owner: str, make: Callable[[], Awaitable[tuple[T, int]]]) -> T:
        """Look up what is kept under the key; make it once for all requests that need it meanwhile.

        A request that leaves doesn't end what others wait for.
        """
        known = self._cache.get(owner, key)
        if known is not None:
            self.num_by_outcome[CACHED] += 1
            return cast(T, known)
        task = self._loading.get(key)
        if task is None:
            task = asyncio.create_task(self._load(key, owner, make), name="version-chat")
            self._loading[key] = task
            task.add_done_callback(lambda _: self._loading.pop(key, None))
            # read, so that asyncio reports no error that every request has stopped waiting for
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return cast(T, await asyncio.shield(task))

    async def _load(self, key: Hashable, owner: str, make: Callable[[], Awaitable[tuple[T, int]]]) -> T:
        made, num_bytes = await make()
        self.num_by_outcome[LOADED] += 1
        self._cache.put(owner, key, made, num_bytes + _ENTRY_BYTES)
        return made

    async def _make_format(self, tenant: str, version: AdapterRef) -> tuple[ChatFormat, int]:
        extras = version.extras
        if extras is None:
            raise ValueError("the version has no extra files")
        template: Any = self._base().template
        num_bytes = 0
        if extras.chat_template is not None:
            name = f"{version.name}@{version.version}"
            source = (await self._read(version, extras.chat_template)).decode()
            found = await self._renderer.inspect(tenant, source)
            if found.problems:
                raise ChatTemplateFailed(
                    f"The chat template of {name} can't be used: {found.problems[0]}.", param="messages"
                )
            template, num_bytes = VersionTemplate(name, source, found.read), 2 * len(source)
        tokenizer = await self.tokenizer(version)
        # templates write the special tokens by these names
        special = {} if tokenizer is self._tokenizer else special_tokens(tokenizer.config)
        variables = {**special, **self._base().variables, **json.loads(extras.chat_template_kwargs or "{}")}
        made = ChatFormat(
            template,
            tokenizer,
            variables=variables,
            tool_call_parser=extras.tool_parser or self._tool_call_parser,
            reasoning_parser=extras.reasoning_parser or self._reasoning_parser,
        )
        known = self._base().tools
        if made.tools is None and extras.tool_parser is None and known is not None:
            # the template shows tools in no way that is recognized: the model is the base's kind
            made = ChatFormat(
                template,
                tokenizer,
                variables=variables,
                tool_call_parser=known.name,
                reasoning_parser=extras.reasoning_parser or self._reasoning_parser,
            )
        return made, num_bytes

    async def _make_tokenizer(self, version: AdapterRef) -> tuple[Tokenizer, int]:
        name = f"{version.name}@{version.version}"
        file = None if version.extras is None else version.extras.tokenizer
        if file is None:
            raise ValueError("the version has no tokenizer")
        data = await self._read(version, file)
        summary = TokenizerSummary.parse(data.decode())
        base = await asyncio.to_thread(lambda: self._tokenizer.summary)
        conflict = "can't be read" if summary is None else None if base is None else summary.conflict(base)
        try:
            if summary is None or conflict is not None:
                raise ConfigError(f"it {conflict}")
            made = await asyncio.to_thread(self._tokenizer.with_differences, summary)
        except ConfigError as error:
            # it was good when it was uploaded, to another release or for another base
            raise AdapterUnservable(
                f"The tokenizer of {name} doesn't fit this base's: {error.message}.",
                hint="Push the version again with a tokenizer that has the base's vocabulary.",
            ) from error
        return made, _TOKENIZER_BYTES + _BYTES_PER_ADDED_BYTE * len(data)

    async def _read_defaults(self, version: AdapterRef, file: ExtraFile) -> tuple[GenerationDefaults, int]:
        data = await self._read(version, file)
        num_ids = (await self.tokenizer(version)).num_ids(self._vocab_size())
        try:
            defaults, _ = read_generation_config(data, num_ids)
        except AdapterRejected as error:
            # it was good when it was uploaded, to another release or for another base
            raise AdapterUnservable(
                f"The defaults of {version.name}@{version.version} don't fit this server: {error.problems[0]}",
                hint="Push the version again with another generation_config.json.",
            ) from error
        return defaults, len(data)

    async def _read(self, version: AdapterRef, file: ExtraFile) -> bytes:
        """Read the file's bytes, verified.

        Raises:
            AdapterCorrupt: they are damaged or missing.
        """
        try:
            if version.memory is not None:
                files = () if version.extras is None else version.extras.files
                offset = sum(one.num_bytes for one in files[: files.index(file)])
                return await asyncio.to_thread(read_extra_bytes, version.memory, offset, file)
            return bytes(await asyncio.to_thread(self._store.read, file.blob))
        except (BlobCorrupt, BlobNotFound) as error:
            self._on_damage(version.digest, file.blob)
            raise AdapterCorrupt(
                "The stored bytes of this adapter version are damaged or missing.",
                digest=version.digest,
                blob=file.blob,
                hint="Push the adapter again.",
            ) from error


def own_tokenizer(version: AdapterRef) -> ExtraFile | None:
    """Look up the file of a version's differences from the base's tokenizer; None: none."""
    return None if version.extras is None else version.extras.tokenizer


def _version_of(adapter: AdapterRef | None) -> AdapterRef | None:
    """Find the version whose extra files chats with the adapter use; None: the base's are used.

    Those of a sum are used where all of its versions have the same.
    """
    versions = versions_of(adapter)
    if not versions or any(version.extras != versions[0].extras for version in versions):
        return None
    return versions[0]
