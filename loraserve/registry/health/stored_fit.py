"""Whether a stored version fits the device, before an alias points to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

from adapters_store.base import BlobStore
from loraserve.adapters.compiler import open_adapter
from loraserve.adapters.format.tensor_names import known_modules
from loraserve.adapters.load_memory import LoadMemory
from loraserve.errors import AdapterRejected, EngineUnavailable, StorageError
from loraserve.limits import LIMITS
from loraserve.registry.health.inspection import CheckFit
from loraserve.registry.records import VersionRecord
from loraserve.types import BaseSpec


class DoubtsFit(Protocol):
    """Whether an adapter may exceed the device's memory, by what is known without its files."""

    def __call__(
        self, base: BaseSpec, *, rank: int, modules: tuple[str, ...], stored: str, size_bytes: int
    ) -> bool: ...


class StoredFit:
    """Refuses versions that this server's device can never hold.

    A version may have been published for a server with more memory. Its files are read only if its
    rank and modules leave a doubt; one at a time.

    Args:
        store: the versions' blobs.
        base: the resident base model; may raise `EngineUnavailable` while there is none.
        check: as at a push; refuses what the device can never hold.

    Attributes:
        doubts: set by the server; at first none has doubts.
    """

    def __init__(self, store: BlobStore, base: Callable[[], BaseSpec], check: CheckFit) -> None:
        self.doubts: DoubtsFit = lambda base, **shape: False
        self._store = store
        self._base = base
        self._check = check
        self._turn = asyncio.Semaphore(1)
        self._memory = LoadMemory(LIMITS.max_factors_bytes)

    async def check(self, version: VersionRecord) -> None:
        """Check that the version may fit, or that this can't be found out now.

        Raises:
            AdapterRejected: it never fits, as at a push.
        """
        try:
            base = self._base()
        except EngineUnavailable:
            return
        if version.base_digest != base.digest or not self.doubts(
            base,
            rank=version.rank,
            modules=known_modules(base, version.target_modules),
            stored=version.dtype,
            size_bytes=version.size_bytes,
        ):
            return
        async with self._turn:
            try:
                await asyncio.to_thread(self._check_files, version, base)
            except AdapterRejected as error:
                raise type(error)(
                    f"{version.name}@{version.version}: {error.message}", problems=error.problems, hint=error.hint
                ) from error
            except StorageError:
                # a load reports what is wrong with the bytes
                return

    def _check_files(self, version: VersionRecord, base: BaseSpec) -> None:
        config, weights = self._store.read(version.config_blob), self._store.read(version.weights_blob)
        with ExitStack() as held:

            def reserve(num_bytes: int) -> None:
                held.enter_context(self._memory.reserved(num_bytes))

            self._check(open_adapter(config, weights, base, reserve=reserve), base)
