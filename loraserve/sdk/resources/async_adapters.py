"""`AsyncClient.adapters`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from loraserve.sdk.resources import adapter_calls as calls
from loraserve.sdk.resources.adapter_calls import LIVE, ROOT, OnProgress
from loraserve.sdk.resources.operations import Operation
from loraserve.sdk.transport.paging import all_rows_async
from loraserve.sdk.transport.steps import run_async
from loraserve.sdk.transport.transport import AsyncTransport
from loraserve.sdk.types.management import Action, Adapter, Alias, ShadowHour, Version


class AsyncAdapters:
    """As `Adapters`, awaiting; files are read and written on threads."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def push(
        self,
        directory: str | Path,
        *,
        name: str,
        alias: str | None = None,
        promote: bool = True,
        dry_run: bool = False,
        notes: str | None = None,
        tags: Mapping[str, str] | None = None,
        on_progress: OnProgress | None = None,
    ) -> Version:
        """As `Adapters.push`."""
        return await run_async(
            self._transport,
            calls.push(
                name,
                Path(directory),
                self._transport.config.retry,
                alias_=alias,
                promote=promote,
                dry_run=dry_run,
                notes=notes,
                tags=tags,
                on_progress=on_progress,
            ),
        )

    async def pull(
        self,
        name: str,
        directory: str | Path,
        *,
        version: int | None = None,
        overwrite: bool = False,
        on_progress: OnProgress | None = None,
    ) -> Version:
        """As `Adapters.pull`."""
        policy = self._transport.config.retry
        return await run_async(
            self._transport,
            calls.pull(name, version, Path(directory), policy, overwrite=overwrite, on_progress=on_progress),
        )

    async def pull_from(self, name: str, source: str, *, promote: bool = True) -> Operation:
        """As `Adapters.pull_from`."""
        return await self._transport.send(calls.pull_from(name, source, promote))

    def list(self) -> AsyncIterator[Adapter]:
        return all_rows_async(self._transport, ROOT, Adapter)

    async def get(self, name: str) -> Adapter:
        return await self._transport.send(calls.get(name))

    async def update(self, name: str, *, notes: str | None = None, tags: Mapping[str, str] | None = None) -> Adapter:
        return await self._transport.send(calls.update(name, calls.about(notes, tags)))

    async def set_fallback(self, name: str, fallback: int | str | None) -> Adapter:
        """As `Adapters.set_fallback`."""
        wanted = None if fallback is None else str(fallback)
        return await self._transport.send(calls.update(name, {"fallback": wanted}))

    def versions(self, name: str) -> AsyncIterator[Version]:
        return all_rows_async(self._transport, f"{calls.path_of(name)}/versions", Version)

    async def version(self, name: str, version: int) -> Version:
        return await self._transport.send(calls.version(name, version))

    async def update_version(
        self, name: str, version: int, *, notes: str | None = None, tags: Mapping[str, str] | None = None
    ) -> Version:
        return await self._transport.send(calls.update_version(name, version, calls.about(notes, tags)))

    async def delete(self, name: str, version: int | None = None) -> None:
        await self._transport.send(calls.delete(name, version))

    async def restore(self, name: str) -> Adapter:
        return await self._transport.send(calls.restore(name))

    async def restore_version(self, name: str, version: int) -> Version:
        return await self._transport.send(calls.restore_version(name, version))

    def aliases(self, name: str) -> AsyncIterator[Alias]:
        return all_rows_async(self._transport, f"{calls.path_of(name)}/aliases", Alias)

    async def set_alias(
        self,
        name: str,
        alias: str,
        version: int | None = None,
        *,
        split: Mapping[int, float] | None = None,
        shadow: tuple[int, float] | None = None,
        if_match: str | None = None,
    ) -> Alias:
        """As `Adapters.set_alias`."""
        return await self._transport.send(calls.set_alias(name, alias, version, split, shadow, if_match))

    async def alias(self, name: str, alias: str) -> Alias:
        return await self._transport.send(calls.alias(name, alias))

    async def delete_alias(self, name: str, alias: str, *, if_match: str | None = None) -> None:
        await self._transport.send(calls.delete_alias(name, alias, if_match))

    async def rollback(self, name: str, alias: str = LIVE, *, if_match: str | None = None) -> Alias:
        """As `Adapters.rollback`."""
        return await self._transport.send(calls.rollback(name, alias, if_match))

    def shadow(self, name: str, alias: str = LIVE) -> AsyncIterator[ShadowHour]:
        return all_rows_async(self._transport, f"{calls.alias_path(name, alias)}/shadow", ShadowHour)

    async def verify(self, name: str, version: int, *, rebase: bool = False) -> Version:
        """As `Adapters.verify`."""
        return await self._transport.send(calls.verify(name, version, rebase))

    async def warm(self, name: str, version: int) -> Action:
        return await self._transport.send(calls.act(name, version, "warm"))

    async def pin(self, name: str, version: int) -> Action:
        return await self._transport.send(calls.act(name, version, "pin"))

    async def unpin(self, name: str, version: int) -> Action:
        return await self._transport.send(calls.act(name, version, "unpin"))
