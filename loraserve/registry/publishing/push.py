"""Push: its files, its inspection, its blobs.

It adds or repairs the row of its version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from sqlalchemy.ext.asyncio import AsyncSession

from loraserve.adapters.extra_files import NO_EXTRA_FILES, ExtraFiles
from loraserve.db.models import Adapter, AdapterVersion
from loraserve.registry.changes import record_change
from loraserve.registry.health.checks import state_of
from loraserve.registry.health.corruption import repair
from loraserve.registry.health.inspection import Inspected
from loraserve.registry.health.outcome import CertificateOutcome
from loraserve.registry.repository import AdapterRepository
from loraserve.types import BaseSpec, Digest, TenantId, VersionExtras


class Weights(Protocol):
    """Weights of a version, staged or in the store already."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def digest(self) -> Digest: ...

    @property
    def first_bytes(self) -> bytes: ...

    def read(self) -> memoryview: ...

    def commit(self) -> Digest: ...


@dataclass(frozen=True, slots=True)
class Push:
    """Files of one publish, and the result of their inspection."""

    tenant: TenantId
    name: str
    config: bytes
    weights: Weights
    base: BaseSpec
    inspected: Inspected
    actor: str
    is_promoting: bool
    extras: ExtraFiles = NO_EXTRA_FILES
    is_new_name: bool = False
    """Whether the adapter must not exist yet."""
    upload: Digest | None = None
    """Upload that the weights were converted from; None: they are the upload."""

    @property
    def size_bytes(self) -> int:
        return len(self.config) + self.weights.num_bytes + self.extras.num_bytes


@dataclass(frozen=True, slots=True)
class Stored:
    """Blobs that hold a version."""

    config_blob: Digest
    weights_blob: Digest
    is_uploaded: bool
    """Whether they hold the uploaded files, rather than those of an equal version."""


async def add_version(
    session: AsyncSession,
    repository: AdapterRepository,
    adapter: Adapter,
    push: Push,
    stored: Stored,
    outcome: CertificateOutcome | None,
    now: datetime,
) -> AdapterVersion:
    """Add a version with its audit row."""
    inspected = push.inspected
    checks = checks_of(inspected, outcome)
    extras = inspected.extras or VersionExtras()
    template, defaults = extras.chat_template, extras.generation_config
    version = await repository.add_version(
        adapter,
        now,
        push.actor,
        digest=inspected.digest,
        config_blob=stored.config_blob,
        weights_blob=stored.weights_blob,
        base_digest=push.base.digest,
        size_bytes=push.size_bytes,
        rank=inspected.rank,
        target_modules=list(inspected.target_modules),
        dtype=inspected.dtype,
        state=state_of(checks),
        checks=list(checks),
        chat_template_blob=None if template is None else template.blob,
        chat_template_bytes=None if template is None else template.num_bytes,
        generation_config_blob=None if defaults is None else defaults.blob,
        generation_config_bytes=None if defaults is None else defaults.num_bytes,
        tool_parser=extras.tool_parser,
        reasoning_parser=extras.reasoning_parser,
        chat_template_kwargs=extras.chat_template_kwargs,
        tokenizer_blob=None if extras.tokenizer is None else extras.tokenizer.blob,
        tokenizer_bytes=None if extras.tokenizer is None else extras.tokenizer.num_bytes,
    )
    repository.touch(adapter, now)
    record_change(
        session,
        repository,
        "version.publish",
        f"{push.name}@{version.number}",
        actor=push.actor,
        now=now,
        digest=version.digest,
        size_bytes=push.size_bytes,
        state=version.state,
    )
    return version


async def repair_version(
    session: AsyncSession,
    repository: AdapterRepository,
    adapter: Adapter,
    version: AdapterVersion,
    push: Push,
    stored: Stored,
    outcome: CertificateOutcome | None,
    now: datetime,
) -> None:
    """Point a corrupt version to whole blobs, and write the audit row."""
    await repository.count_made(num_bytes=push.size_bytes - version.size_bytes)
    repair(version, stored.config_blob, stored.weights_blob, push.size_bytes, outcome)
    repository.touch(adapter, now)
    record_change(
        session,
        repository,
        "version.mend",
        f"{push.name}@{version.number}",
        actor=push.actor,
        now=now,
        digest=version.digest,
        state=version.state,
    )


def checks_of(inspected: Inspected, outcome: CertificateOutcome | None) -> tuple[Mapping[str, Any], ...]:
    """Join the checks of a version with this inspection and certificate."""
    return inspected.checks if outcome is None else (*inspected.checks, outcome.as_check())
