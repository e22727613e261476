"""Inspection of uploads: names, containers and files, before anything is stored."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial

from loraserve.adapters.extra_files import NO_EXTRA_FILES, ExtraFiles
from loraserve.adapters.ir import AdapterIR
from loraserve.adapters.load_memory import LoadMemory
from loraserve.background import Pause, Throttle
from loraserve.limits import LIMITS
from loraserve.registry.health.base_names import BaseNames
from loraserve.registry.health.extra_files import InspectTemplate, inspect_extra_files, with_extra_files
from loraserve.registry.health.inspection import CheckFit, Inspected, inspect_upload
from loraserve.registry.health.own_tokenizer import GetTokenizer, check_rows, inspect_tokenizer
from loraserve.registry.model_name import check_adapter_name
from loraserve.registry.publishing.conversion import Converted, T, Uploaded, convert_upload
from loraserve.registry.uploads.transfers import Uploads
from loraserve.types import BaseSpec, TenantId

MAX_INSPECTIONS = 2
"""Uploads inspected at the same time; each occupies a thread and keeps its bytes in memory."""


class UploadInspector:
    """Checks an upload's name and inspects its files, a few uploads at a time.

    Args:
        base: the resident base model; may raise `EngineUnavailable` while there is none.
        names: names of the base.
        uploads: has the containers that are converted.
        throttle: pauses work while an engine computes on this machine's processors.

    Attributes:
        inspect_template: looks at chat templates; None: none can be published.
        check_fit: refuses what the engine's device can never hold.
        tokenizer: returns the base's tokenizer.
    """

    def __init__(self, base: Callable[[], BaseSpec], names: BaseNames, uploads: Uploads, throttle: Throttle) -> None:
        self._base, self._names, self._uploads, self._throttle = base, names, uploads, throttle
        self._inspections = asyncio.Semaphore(MAX_INSPECTIONS)
        # what adapters unfold to while they are inspected; the largest is inspected alone
        self._unfolding = LoadMemory(LIMITS.max_factors_bytes)
        # set by the server, whose engine and templates start later
        self.inspect_template: InspectTemplate | None = None
        self.check_fit: CheckFit = lambda ir, base: None
        self.tokenizer: GetTokenizer = lambda: None

    def check_name(self, name: str) -> str:
        """Check that `name` is a valid adapter name, and return it, before the upload is read.

        Raises:
            InvalidRequest
        """
        return check_adapter_name(name, self._base().id)

    def names_base(self, name: str) -> bool:
        """Check whether this is a name of the resident base."""
        return self._names.is_name_of(name, self._base())

    def check_device(self, ir: AdapterIR, base: BaseSpec) -> None:
        """Check by `check_fit`, as the server has set it.

        Raises:
            AdapterRejected: the engine's device can never hold the adapter.
        """
        self.check_fit(ir, base)

    async def convert(
        self,
        config: bytes,
        weights: Uploaded,
        base: BaseSpec,
        stage: Callable[[], Awaitable[T]],
        drop: Callable[[T], object],
        *,
        extras: ExtraFiles,
        throttle: Throttle | None = None,
    ) -> Converted[T] | None:
        """Convert an upload in another container to PEFT's files; None: it is these already.

        Args:
            stage, drop: as for `convert_upload`.
            throttle: pauses the work; None: the uploads'.

        Raises:
            AdapterRejected: its container can't be read.
            QuotaExceeded, RateLimited, Overloaded, StorageError: the new weights can't be stored.
        """
        return await convert_upload(
            config,
            weights,
            base,
            stage,
            drop,
            index=extras.index,
            containers=self._uploads.containers,
            slots=self._inspections,
            throttle=throttle or self._throttle,
        )

    async def inspect(
        self,
        config: bytes,
        read: Callable[[], memoryview],
        base: BaseSpec,
        *,
        tenant: TenantId,
        extras: ExtraFiles = NO_EXTRA_FILES,
        throttle: Throttle | None = None,
    ) -> Inspected:
        """Inspect the files for `base`, the two large ones on a thread.

        Args:
            read: returns the weights, on the thread.
            extras: files of the version for chats with it.
            throttle: pauses the work; None: the uploads'.

        Raises:
            AdapterRejected: they can't be served; lists every reason.
            StorageError: the weights can't be read.
        """
        compare = partial(inspect_tokenizer, extras, self.tokenizer(), base, is_strict=self._names.is_strict)
        extras, compared = await asyncio.to_thread(compare)
        checks = [*await inspect_extra_files(tenant, extras, base, self.inspect_template), *compared]
        async with self._inspections:
            work = partial(_inspect, config, read, base, self._names, self.check_fit, self._unfolding)
            inspected = await (throttle or self._throttle).run_in_pieces(work)
        check_rows(extras.tokenizer, inspected.num_extra_rows, base)
        return with_extra_files(inspected, extras, checks)


def _inspect(
    config: bytes,
    read: Callable[[], memoryview],
    base: BaseSpec,
    names: BaseNames,
    check_fit: CheckFit,
    unfolding: LoadMemory,
    pause: Pause,
) -> Inspected:
    data = read()
    pause()
    with ExitStack() as held:

        def reserve(num_bytes: int) -> None:
            held.enter_context(unfolding.reserved(num_bytes))

        return inspect_upload(config, data, base, names=names, check_fit=check_fit, reserve=reserve, pause=pause)
