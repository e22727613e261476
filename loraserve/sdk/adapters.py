"""`client.adapters`: push a PEFT directory, see what is there, move names, keep or drop weights in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path

import anyio.to_thread

from loraserve.sdk.call import Call, encode, idempotency_key, read_into, read_nothing, segment
from loraserve.sdk.paging import all_rows, all_rows_async
from loraserve.sdk.resources import Action, Adapter, Alias, Version
from loraserve.sdk.transport import AsyncTransport, Transport
from loraserve.sdk.upload import Progress, Upload

OnProgress = Callable[[Progress], object]
ROOT = "/api/v1/adapters"


def _path(name: str, version: int | None = None) -> str:
    path = f"{ROOT}/{segment(name, 'name')}"
    return path if version is None else f"{path}/versions/{version}"


def _alias_path(name: str, alias: str) -> str:
    return f"{_path(name)}/aliases/{segment(alias, 'alias')}"


def _condition(if_match: str | None) -> dict[str, str]:
    return {} if if_match is None else {"If-Match": if_match}


def _push(name: str, upload: Upload, promote: bool, dry_run: bool) -> Call[Version]:
    params = {} if promote else {"promote": "false"}
    if dry_run:
        params["dry_run"] = "true"
    path = f"{_path(name)}/versions"
    return Call("POST", path, read_into(Version), params=params, headers=idempotency_key(), upload=upload)


def _set_alias(name: str, alias: str, version: int, if_match: str | None) -> Call[Alias]:
    body = encode({"version": version})
    return Call("PUT", _alias_path(name, alias), read_into(Alias), headers=_condition(if_match), body=body)


def _alias(name: str, alias: str) -> Call[Alias]:
    return Call("GET", _alias_path(name, alias), read_into(Alias))


def _delete_alias(name: str, alias: str, if_match: str | None) -> Call[None]:
    return Call("DELETE", _alias_path(name, alias), read_nothing, headers=_condition(if_match))


def _get(name: str) -> Call[Adapter]:
    return Call("GET", _path(name), read_into(Adapter))


def _version(name: str, version: int) -> Call[Version]:
    return Call("GET", _path(name, version), read_into(Version))


def _delete(name: str, version: int | None) -> Call[None]:
    return Call("DELETE", _path(name, version), read_nothing)


def _verify(name: str, version: int) -> Call[Version]:
    return Call("POST", f"{_path(name, version)}/verify", read_into(Version), headers=idempotency_key())


def _act(name: str, version: int, action: str) -> Call[Action]:
    return Call("POST", f"{_path(name, version)}/{action}", read_into(Action), headers=idempotency_key())


class Adapters:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def push(
        self,
        directory: str | Path,
        *,
        name: str,
        alias: str | None = None,
        promote: bool = True,
        dry_run: bool = False,
        on_progress: OnProgress | None = None,
    ) -> Version:
        """Send a PEFT directory and return the version that the server made of it, checked and durable.

        The same bytes again give the version that already has them. With ``dry_run`` everything is checked and nothing kept. A version
        whose certificate failed is quarantined (`Version.is_quarantined`): it isn't served, and no alias points to it.

        Args:
            alias: point this alias at the new version too.
            promote: let `live`, which the bare name means, point to the new version.
            on_progress: told how much has been sent, from nothing to all; again from nothing if the upload is tried again.

        Raises:
            AdapterFormatError: the directory isn't a PEFT adapter (before anything is sent), or its files are broken.
            AdapterRejected: it can't be served on this base; `problems` lists every reason.
        """
        version = self._transport.send(_push(name, Upload(directory, on_progress), promote, dry_run))
        if alias is None or version.version is None or version.is_quarantined or dry_run:
            return version
        self.set_alias(name, alias, version.version)
        return self.version(name, version.version)

    def list(self) -> Iterator[Adapter]:
        """Every adapter by name; pages are asked for as they're needed."""
        return all_rows(self._transport, ROOT, Adapter)

    def get(self, name: str) -> Adapter:
        """Raises AdapterNotFound where there is none, or it is another tenant's."""
        return self._transport.send(_get(name))

    def versions(self, name: str) -> Iterator[Version]:
        """Every version of the adapter; pages are asked for as they're needed."""
        return all_rows(self._transport, f"{_path(name)}/versions", Version)

    def version(self, name: str, version: int) -> Version:
        """Raises VersionNotFound where there is none."""
        return self._transport.send(_version(name, version))

    def delete(self, name: str, version: int | None = None) -> None:
        """Delete the adapter, or one version of it. Requests that run finish on what they started with."""
        self._transport.send(_delete(name, version))

    def set_alias(self, name: str, alias: str, version: int, *, if_match: str | None = None) -> Alias:
        """Point `alias` at `version`.

        Args:
            if_match: the ETag that the alias was read with (`Alias.etag`): move it only if nobody else did meanwhile.

        Raises:
            PreconditionFailed: somebody did.
        """
        return self._transport.send(_set_alias(name, alias, version, if_match))

    def alias(self, name: str, alias: str) -> Alias:
        """The alias, with its `etag`. Raises AliasNotFound where there is none."""
        return self._transport.send(_alias(name, alias))

    def delete_alias(self, name: str, alias: str, *, if_match: str | None = None) -> None:
        """The alias is gone; the version that it named stays. `if_match` as for `set_alias`."""
        self._transport.send(_delete_alias(name, alias, if_match))

    def verify(self, name: str, version: int) -> Version:
        """Compare the version's answers with the reference's anew, and return it as it is then: `Version.certificate` has the numbers.

        A certificate that failed puts the version into quarantine, one that passed ends it.

        Raises:
            EngineUnavailable: there is no certificate now; nothing was changed.
        """
        return self._transport.send(_verify(name, version))

    def warm(self, name: str, version: int) -> Action:
        """Bring the version's weights into memory, so that its first request needn't wait."""
        return self._transport.send(_act(name, version, "warm"))

    def pin(self, name: str, version: int) -> Action:
        """Keep the version's weights in memory until `unpin`. Takes an admin key: it's memory that others lack."""
        return self._transport.send(_act(name, version, "pin"))

    def unpin(self, name: str, version: int) -> Action:
        """Let the version's weights go when their room is needed."""
        return self._transport.send(_act(name, version, "unpin"))


class AsyncAdapters:
    """As `Adapters`, awaiting."""

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
        on_progress: OnProgress | None = None,
    ) -> Version:
        """As `Adapters.push`; the directory is read on a thread."""
        upload = await anyio.to_thread.run_sync(partial(Upload, directory, on_progress))
        version = await self._transport.send(_push(name, upload, promote, dry_run))
        if alias is None or version.version is None or version.is_quarantined or dry_run:
            return version
        await self.set_alias(name, alias, version.version)
        return await self.version(name, version.version)

    def list(self) -> AsyncIterator[Adapter]:
        return all_rows_async(self._transport, ROOT, Adapter)

    async def get(self, name: str) -> Adapter:
        return await self._transport.send(_get(name))

    def versions(self, name: str) -> AsyncIterator[Version]:
        return all_rows_async(self._transport, f"{_path(name)}/versions", Version)

    async def version(self, name: str, version: int) -> Version:
        return await self._transport.send(_version(name, version))

    async def delete(self, name: str, version: int | None = None) -> None:
        await self._transport.send(_delete(name, version))

    async def set_alias(self, name: str, alias: str, version: int, *, if_match: str | None = None) -> Alias:
        return await self._transport.send(_set_alias(name, alias, version, if_match))

    async def alias(self, name: str, alias: str) -> Alias:
        return await self._transport.send(_alias(name, alias))

    async def delete_alias(self, name: str, alias: str, *, if_match: str | None = None) -> None:
        await self._transport.send(_delete_alias(name, alias, if_match))

    async def verify(self, name: str, version: int) -> Version:
        """As `Adapters.verify`."""
        return await self._transport.send(_verify(name, version))

    async def warm(self, name: str, version: int) -> Action:
        return await self._transport.send(_act(name, version, "warm"))

    async def pin(self, name: str, version: int) -> Action:
        return await self._transport.send(_act(name, version, "pin"))

    async def unpin(self, name: str, version: int) -> Action:
        return await self._transport.send(_act(name, version, "unpin"))
