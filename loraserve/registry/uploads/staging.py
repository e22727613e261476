"""Bounds on the bytes of running uploads: by tenant and in all, and by what they turn out to be."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Protocol, Self

from adapters_store.base import StagedBlob
from loraserve.adapters.format.containers import CONTAINERS, Container, find_container
from loraserve.adapters.format.peft_format import WEIGHTS_FILE, read_beginning
from loraserve.errors import AdapterFormatError, QuotaExceeded
from loraserve.limits import LIMITS
from loraserve.tenancy.limits.shares import Shares, tenant_holder
from loraserve.types import Digest, TenantId

_FORM_BYTES = 1 << 20
"""Bytes that a body may have besides the file: a config, other small files, a form's framing."""
_RETRY_S = 5.0
_MAX_BEGINNING_BYTES = 8 << 20
"""Bytes that are kept until a file is judged: more than any header that is read."""


class StagingBudget:
    """Bytes that running uploads have on the disk, of which a tenant may have what is free.

    They are no rows yet, which quotas count. Safe to use from several threads.

    Args:
        capacity: bytes of all tenants' uploads on this server.
    """

    def __init__(self, capacity: int = LIMITS.max_staged_bytes) -> None:
        self.shares = Shares("staged_bytes", "bytes of running uploads", capacity, retry_s=_RETRY_S)
        self._lock = threading.Lock()
        self._of_tenants: Counter[TenantId] = Counter()

    def check(self, tenant: TenantId, num_bytes: int, room_bytes: int | None) -> None:
        """Check that an upload whose body has that many bytes may begin.

        Raises:
            QuotaExceeded, RateLimited, Overloaded: as `take`, now instead of after the bytes.
        """
        with self._lock:
            self._check(tenant, max(0, num_bytes - _FORM_BYTES), room_bytes)

    def take(self, tenant: TenantId, num_bytes: int, room_bytes: int | None) -> None:
        """Count further bytes of an upload, until `give_back`.

        Args:
            room_bytes: bytes that the tenant may store in addition to what it stores; None: any.

        Raises:
            QuotaExceeded: all of the tenant's uploads together are more than that.
            RateLimited: the tenant has its share of all uploads' bytes.
            Overloaded: there is no room.
        """
        with self._lock:
            self._check(tenant, num_bytes, room_bytes)
            self.shares.take(tenant_holder(tenant), num_bytes)
            self._of_tenants[tenant] += num_bytes

    def give_back(self, tenant: TenantId, num_bytes: int) -> None:
        """Count bytes no more: they are gone, or a version's."""
        if not num_bytes:
            return
        with self._lock:
            self.shares.give_back(tenant_holder(tenant), num_bytes)
            self._of_tenants[tenant] -= num_bytes
            if not self._of_tenants[tenant]:
                del self._of_tenants[tenant]

    def _check(self, tenant: TenantId, num_bytes: int, room_bytes: int | None) -> None:
        running = self._of_tenants.get(tenant, 0)
        if room_bytes is not None and running + num_bytes > room_bytes:
            raise QuotaExceeded(
                f"The tenant may store {max(0, room_bytes)} more bytes, and its running uploads have {running}; "
                f"{num_bytes} more would exceed its limit.",
                hint="Delete versions, files or uploads, or have an admin raise the limit: loraserve tenant set TENANT "
                "--max-stored-bytes N",
            )
        if not self.shares.has_room(tenant_holder(tenant), num_bytes):
            # raises the refusal with the reason
            self.shares.take(tenant_holder(tenant), num_bytes)


class Written(Protocol):
    """Something that takes a file's bytes in order."""

    def write(self, data: bytes | bytearray | memoryview, /) -> None: ...


class WeightsBeginning:
    """Judge the weights of an adapter as soon as their header is there.

    Zeros, a pickle or a header that promises another size than comes are refused then, instead of
    after gigabytes.

    Args:
        containers: formats that are read in addition to safetensors.
    """

    def __init__(self, containers: Sequence[Container] = CONTAINERS) -> None:
        self._containers = containers
        self._beginning = bytearray()
        self._num_bytes = 0
        self._total: int | None = None
        self._container: Container | None = None
        self._next_look = 0

    def see(self, data: bytes | bytearray | memoryview) -> None:
        """Look at the next bytes.

        Raises:
            AdapterFormatError: this is no file that `read_header` accepts, however it continues.
        """
        self._num_bytes += len(data)
        if self._total is None:
            self._look(data)
        if self._total is None or self._num_bytes <= self._total:
            return
        if self._container is not None:
            raise AdapterFormatError(
                f"The weights have more than {self._total:,} bytes, the most that their beginning allows."
            )
        raise AdapterFormatError(
            f"{WEIGHTS_FILE} has {self._total:,} bytes by its header, and more came: bytes after the last tensor "
            "belong to no tensor."
        )

    def _look(self, data: bytes | bytearray | memoryview) -> None:
        """Find how many bytes the file may have, once enough of it is there."""
        self._beginning += data[: _MAX_BEGINNING_BYTES - len(self._beginning)]
        self._container = find_container(self._beginning, self._containers)
        if self._container is None:
            header = read_beginning(self._beginning)
            self._total = None if header is None else header.body_offset + header.body_bytes
        elif len(self._beginning) >= self._next_look:
            self._total = self._container.read_beginning(self._beginning, LIMITS)
            # as often as the beginning doubles: small pieces would be read again and again
            self._next_look = 2 * len(self._beginning)
        if self._total is not None:
            self._beginning.clear()

    def begin_file(self) -> None:
        """Judge what comes as another file of the same weights.

        Raises:
            AdapterFormatError: the file before it isn't complete, or isn't safetensors.
        """
        if self._container is not None or self._num_bytes != self._total:
            raise AdapterFormatError(
                "One of the weights' files is shorter than its header says, or isn't a safetensors file.",
                hint="Several files of weights are the shards that adapter_model.safetensors.index.json names.",
            )
        self._num_bytes, self._total, self._next_look = 0, None, 0


class WeightsWriter(Written, Protocol):
    """Something that takes the files of an adapter's weights in order."""

    def begin_file(self) -> None:
        """Take what is written from now on as another file."""
        ...


class JudgedWeights:
    """Writer of an adapter's weights that are judged by their beginning.

    Args:
        containers: formats that are read in addition to safetensors.
    """

    def __init__(self, target: Written, containers: Sequence[Container] = CONTAINERS) -> None:
        self._target, self._beginning = target, WeightsBeginning(containers)

    def write(self, data: bytes | bytearray | memoryview, /) -> None:
        """Write all of `data`.

        Raises:
            AdapterFormatError: it is no adapter's weights.
        """
        self._beginning.see(data)
        self._target.write(data)

    def begin_file(self) -> None:
        """Take what is written from now on as another file of the same weights.

        Raises:
            AdapterFormatError: as `WeightsBeginning.begin_file`.
        """
        self._beginning.begin_file()


class BoundedBlob:
    """A staged blob whose bytes count in a `StagingBudget` until it is discarded.

    Args:
        room_bytes: as for `StagingBudget.take`.
        beginning: judges the bytes; None: any file is welcome.
    """

    def __init__(
        self,
        staged: StagedBlob,
        budget: StagingBudget,
        tenant: TenantId,
        room_bytes: int | None,
        beginning: WeightsBeginning | None,
    ) -> None:
        self._staged, self._budget, self._tenant = staged, budget, tenant
        self._room_bytes, self._beginning = room_bytes, beginning
        self._num_taken = 0

    @property
    def num_bytes(self) -> int:
        return self._staged.num_bytes

    @property
    def digest(self) -> Digest:
        return self._staged.digest

    @property
    def first_bytes(self) -> bytes:
        return self._staged.first_bytes

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write and hash all of `data`.

        Raises:
            AdapterFormatError: it is no adapter's weights.
            QuotaExceeded, RateLimited, Overloaded: as `StagingBudget.take`.
            StorageFull, StorageError: as `StagedBlob.write`.
        """
        if self._beginning is not None:
            self._beginning.see(data)
        self._budget.take(self._tenant, len(data), self._room_bytes)
        self._num_taken += len(data)
        self._staged.write(data)

    def begin_file(self) -> None:
        """Take what is written from now on as another file of the same weights.

        Raises:
            AdapterFormatError: as `WeightsBeginning.begin_file`.
        """
        if self._beginning is not None:
            self._beginning.begin_file()

    def read(self) -> memoryview:
        return self._staged.read()

    def commit(self) -> Digest:
        return self._staged.commit()

    def discard(self) -> None:
        """Discard the blob if it isn't committed, and give its bytes back."""
        self._staged.discard()
        num_taken, self._num_taken = self._num_taken, 0
        self._budget.give_back(self._tenant, num_taken)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()
