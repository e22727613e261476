"""Claim of a registry on its store.

A registry records the store that it works on, and the store its registry. The store has a
marker with the registry's id and the last *stamp* that the registry put there; the registry keeps
the stamps that it made. A marker whose stamp it doesn't have is another registry's, or was put
there by a later state of this one, of which the database is a backup or a copy: such a store's
blobs may be needed though no row here refers to them. A server makes a new stamp at its start and
before each pass of the collector, so a database that went back further than that is found out. The
stamp is committed before the marker has it; any number of servers of one registry may do this at
once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from itertools import islice

from sqlalchemy import delete, select, update
from ulid import ULID

from adapters_store.base import BlobStore, StagedBlob
from loraserve.background import BackgroundTask
from loraserve.db import audit
from loraserve.db.models import RegistryIdentity, StoreStamp
from loraserve.db.session import Clock, Database, utc_now
from loraserve.db.upsert import upsert
from loraserve.errors import LoraserveError, StorageError, StoreMismatch
from loraserve.registry.blob_references import listed, published
from loraserve.registry.storage_gc.marker import Adoption, Marker, StoreContents
from loraserve.types import Digest

logger = logging.getLogger(__name__)

ADOPT = "loraserve db adopt-store"
_LOOK_S = 30.0
_LISTED_AT_ONCE = 1000
_KEPT_STAMPS = 1000
_NUM_TRIES = 20
"""Attempts at a marker that others change meanwhile."""


class StoreClaim:
    """Claim of a registry on its store.

    Args:
        where: name of the store in messages to operators.
    """

    def __init__(
        self, database: Database, store: BlobStore, *, where: str = "the store", clock: Clock = utc_now
    ) -> None:
        self.problem: LoraserveError | None = None
        """Reason for clients why nothing may be stored;
        None while the store is this registry's as far as is known.
        """
        self._database = database
        self._store = store
        self._where = where
        self._clock = clock
        self._is_open = False
        self._task = BackgroundTask(
            "store claim",
            self._watch,
            lambda: _LOOK_S if self.problem is not _UNKNOWN else _LOOK_S / 6,
            failure="the store's owner can't be looked up",
            logger=logger,
            level=logging.DEBUG,
            first_delay_s=None,
        )

    async def open(self) -> None:
        """Claim the store at a server's start. If it doesn't answer, set `problem`.

        `start` claims it as soon as it does.

        Raises:
            StoreMismatch: it isn't known to be this registry's.
            DatabaseUnavailable
        """
        try:
            await self.renew()
        except StorageError as error:
            logger.warning("the store's owner can't be read yet: %s", error)
            self.problem = _UNKNOWN
        self._is_open = True

    def start(self) -> None:
        """Look at the marker twice a minute from now on, until `close`."""
        self._task.start()

    async def close(self) -> None:
        """Stop looking at the marker."""
        await self._task.close()

    async def renew(self) -> None:
        """Wait until the store is known to be this registry's and has a new stamp of it.

        Raises:
            StoreMismatch: it isn't known to be.
            DatabaseUnavailable, StorageError: it can't be found out, or the stamp can't be written.
        """
        await self._settled(self._renew)

    async def look(self) -> None:
        """Check that the store is known to be this registry's.

        A store without a marker is claimed if it can be.

        Raises:
            StoreMismatch: it isn't known to be.
            DatabaseUnavailable, StorageError: it can't be found out.
        """
        await self._settled(self._verified)

    async def why_not(self) -> StoreMismatch | None:
        """Explain why a server wouldn't start on this store; None if it would.

        Nothing is written.

        Raises:
            DatabaseUnavailable, StorageError
        """
        try:
            if await self._read_verified() is None:
                return await self._why_not(await self._survey())
        except StoreMismatch as error:
            return error
        return None

    async def _settled(self, action: Callable[[], Awaitable[object]]) -> None:
        try:
            await action()
        except StoreMismatch as error:
            # a start that is refused reports it itself
            if self._is_open and self.problem is not _NOT_OURS:
                logger.error("%s", error)
            self.problem = _NOT_OURS
            raise
        if self.problem is not None:
            logger.info("%s is this registry's", self._where)
        self.problem = None

    async def _watch(self) -> None:
        # a mismatch was logged when it was found
        with contextlib.suppress(StoreMismatch):
            await self.look()

    async def adopt(self, *, actor: str, is_dry_run: bool = False) -> Adoption:
        """Make the store this registry's, whatever its marker is.

        With `is_dry_run`, report what that would change.

        Raises:
            DatabaseUnavailable, StorageError
        """
        registry = await self._identity()
        for _ in range(_NUM_TRIES):
            data = await asyncio.to_thread(self._store.read_marker)
            marker = None if data is None else Marker.parse(data)
            is_needed = marker is None or not await self._is_known(marker)
            adoption = Adoption(registry, marker, await self._survey(), is_needed)
            if is_dry_run or not is_needed or await self._put(data, registry, adoption, actor=actor):
                return adoption
        raise self._is_contended()

    async def _renew(self) -> None:
        identity = await self._identity()
        for _ in range(_NUM_TRIES):
            data = await self._verified()
            if await self._put(data, identity):
                return
        raise self._is_contended()

    async def _name(self) -> str:
        """Read this registry's id, for messages."""
        async with self._database.read() as session:
            return await session.scalar(select(RegistryIdentity.id)) or "(a new one)"

    async def _verified(self) -> bytes:
        """Read the marker, which this registry wrote.

        It is written now if the store had none and can be claimed.

        Raises:
            StoreMismatch, DatabaseUnavailable, StorageError
        """
        for _ in range(_NUM_TRIES):
            data = await self._read_verified()
            if data is not None:
                return data
            contents = await self._survey()
            problem = await self._why_not(contents)
            if problem is not None:
                # another server of this registry may have claimed it since, and what was seen is
                # its uploads
                if await asyncio.to_thread(self._store.read_marker) is not None:
                    continue
                raise problem
            identity = await self._identity()
            adoption = Adoption(identity, None, contents, is_needed=True)
            if contents.num_blobs:
                logger.info(
                    "%s has no marker; its %d blobs are this registry's: it is claimed", self._where, contents.num_blobs
                )
            await self._put(None, identity, adoption if contents.num_blobs else None, actor=audit.SERVER)
        raise self._is_contended()

    async def _read_verified(self) -> bytes | None:
        """Read the marker, which this registry wrote.

        None: there is none, and this registry never claimed a store.

        Raises:
            StoreMismatch, DatabaseUnavailable, StorageError
        """
        # Before the marker is read: where one was written, it must be there.
        has_claimed = await self._has_claimed()
        data = await asyncio.to_thread(self._store.read_marker)
        if data is not None:
            # After the marker was read: its stamp was committed before it was written.
            await self._check_marker(Marker.parse(data))
        elif has_claimed:
            raise self._mismatch(
                f"{self._where} has no marker, though registry {await self._name()} wrote one to its store:"
                " this is another store, its folder isn't mounted, or its files were deleted.",
                "Give the server its own store",
            )
        return data

    async def _check_marker(self, marker: Marker | None) -> None:
        if marker is None:
            raise self._mismatch(
                f"{self._where} has a marker that can't be parsed, so the owner of its blobs is unknown.",
                "Restore its registry.json from a backup",
            )
        if await self._is_known(marker):
            return
        identity = await self._name()
        if marker.registry != identity:
            raise self._mismatch(
                f"{self._where} belongs to registry {marker.registry} (marked {marker.written_at}); this database is"
                f" registry {identity}.",
                "Give the server the database of this store, or the store of this database",
            )
        raise self._mismatch(
            f"{self._where} was marked at {marker.written_at} by a later state of this registry ({identity}; stamp"
            f" {marker.stamp}): this database is an older backup, or a copy of another server's. The store has"
            " versions, published since, that this database doesn't have.",
            "Restore the newest backup, or give the copy a store of its own",
        )

    async def _why_not(self, contents: StoreContents) -> StoreMismatch | None:
        """Explain why a store without a marker isn't claimed; None if it is.

        The registry has never claimed one.
        """
        if contents.num_blobs == 0:
            if not await self._has_versions():
                return None
            found, hint = "has no blobs and no marker, and this registry has versions", "Give the server its own store"
        elif contents.is_provably_ours:
            return None
        else:
            found = (
                f"has {contents.num_blobs:,} blobs and no marker; "
                f"of them, this registry published {contents.num_published:,},"
                f" has {contents.num_listed:,} as uploads or garbage, and doesn't know {contents.num_unknown:,}"
            )
            hint = "Give the server the database that belongs to this store, or an empty store"
        identity = await self._name()
        return self._mismatch(f"{self._where} {found}: it may not belong to registry {identity}.", hint)

    def _mismatch(self, message: str, hint: str) -> StoreMismatch:
        return StoreMismatch(
            message[0].upper() + message[1:], hint=f"{hint}. To claim it for this registry nevertheless: {ADOPT}"
        )

    def _is_contended(self) -> StorageError:
        return StorageError(f"The marker of {self._where} keeps being changed by other servers.", hint="Try again.")

    # --- the database ---

    async def _identity(self) -> str:
        """Read this registry's id, made if it has none yet."""
        async with self._database.read() as session:
            found = await session.scalar(select(RegistryIdentity.id))
        if found is None:
            async with self._database.write() as session:
                row = {"slot": 1, "id": str(ULID()), "made_at": self._clock()}
                await upsert(session, RegistryIdentity, [row])
                found = await session.scalar(select(RegistryIdentity.id))
        return str(found)

    async def _has_claimed(self) -> bool:
        async with self._database.read() as session:
            query = select(StoreStamp.id).where(StoreStamp.written_at.is_not(None)).limit(1)
            return await session.scalar(query) is not None

    async def _is_known(self, marker: Marker) -> bool:
        async with self._database.read() as session:
            return await session.get(StoreStamp, marker.stamp) is not None

    async def _has_versions(self) -> bool:
        async with self._database.read() as session:
            return bool(await published(session, None))

    async def _put(
        self, expected: bytes | None, registry: str, adoption: Adoption | None = None, *, actor: str = audit.SERVER
    ) -> bool:
        """Put a new stamp in the place of the marker `expected`; return whether it is there."""
        now = self._clock()
        marker = Marker(registry, str(ULID()), now.isoformat(timespec="seconds"))
        async with self._database.write() as session:
            session.add(StoreStamp(id=marker.stamp, made_at=now))
            if adoption is not None:
                detail = {
                    "registry": registry,
                    "marker_of": adoption.marker.registry if adoption.marker else None,
                    "num_blobs": adoption.contents.num_blobs,
                    "num_unknown": adoption.contents.num_unknown,
                }
                audit.record(session, "store.adopt", "store", actor=actor, tenant=None, at=now, detail=detail)
        if not await asyncio.to_thread(self._store.swap_marker, expected, marker.encode()):
            return False
        async with self._database.write() as session:
            this = StoreStamp.id == marker.stamp
            await session.execute(update(StoreStamp).where(this).values(written_at=now))
            # Only after a write: the marker's stamp must never be among those that go.
            kept = select(StoreStamp.id).order_by(StoreStamp.made_at.desc(), StoreStamp.id.desc()).limit(_KEPT_STAMPS)
            await session.execute(delete(StoreStamp).where(~this, StoreStamp.id.not_in(kept.scalar_subquery())))
        return True

    async def _survey(self) -> StoreContents:
        """Count what is in the store.

        It is listed before the database is read: a blob comes before its row.
        """
        digests = self._store.iter_digests()
        num_blobs = num_published = num_listed = 0
        while batch := await asyncio.to_thread(_take, digests):
            async with self._database.read() as session:
                ours = await published(session, batch)
                others = await listed(session, set(batch) - ours)
            num_blobs += len(batch)
            num_published += len(ours)
            num_listed += len(others)
        return StoreContents(num_blobs, num_published, num_listed)


def _take(digests: Iterator[Digest]) -> list[Digest]:
    return list(islice(digests, _LISTED_AT_ONCE))


_UNKNOWN = StorageError("The store's owner isn't verified yet; nothing was stored.", hint="Try again.")
_NOT_OURS = StorageError(
    "The store no longer belongs to this registry; nothing was stored.", hint="The server's log has the reason."
)


class ClaimedStore:
    """A `BlobStore` that takes nothing new while the registry's claim on it has a problem."""

    def __init__(self, store: BlobStore, claim: StoreClaim) -> None:
        self._store = store
        self._claim = claim

    def stage(self, *, is_looked_at: bool = False) -> StagedBlob:
        problem = self._claim.problem
        if problem is not None:
            raise StorageError(problem.message, hint=problem.hint)
        return self._store.stage(is_looked_at=is_looked_at)

    def read(self, digest: str) -> memoryview:
        return self._store.read(digest)

    def read_pieces(self, digest: str) -> Iterator[bytes]:
        return self._store.read_pieces(digest)

    def num_bytes(self, digest: str) -> int:
        return self._store.num_bytes(digest)

    def exists(self, digest: str) -> bool:
        return self._store.exists(digest)

    def delete(self, digest: str) -> bool:
        return self._store.delete(digest)

    def iter_digests(self) -> Iterator[Digest]:
        return self._store.iter_digests()

    def read_marker(self) -> bytes | None:
        return self._store.read_marker()

    def swap_marker(self, expected: bytes | None, data: bytes) -> bool:
        return self._store.swap_marker(expected, data)

    def sweep(self) -> int:
        return self._store.sweep()

    def close(self) -> None:
        self._store.close()
