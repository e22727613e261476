"""`client.adapters`: push and pull PEFT directories, see what is there, move names, keep or drop weights in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from loraserve.sdk.resources import adapter_calls as calls
from loraserve.sdk.resources.adapter_calls import LIVE, ROOT, OnProgress
from loraserve.sdk.resources.operations import Operation
from loraserve.sdk.transport.paging import all_rows
from loraserve.sdk.transport.steps import run
from loraserve.sdk.transport.transport import Transport
from loraserve.sdk.types.management import Action, Adapter, Alias, ShadowHour, Version


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
        notes: str | None = None,
        tags: Mapping[str, str] | None = None,
        on_progress: OnProgress | None = None,
    ) -> Version:
        """Send a PEFT directory and return the version that the server made of it, checked and durable.

        It is sent in pieces: after a broken connection, and in a push that comes after one that was ended, what the server has
        already isn't sent again. The same bytes again give the version that already has them. With ``dry_run`` everything is
        checked and nothing published. A version whose certificate failed is quarantined (`Version.is_quarantined`): it isn't
        served, and no alias points to it.

        Args:
            alias: point this alias at the new version too.
            promote: let `live`, which the bare name means, point to the new version.
            notes, tags: the version's own.
            on_progress: told how much has been sent; of a push that goes on, from where it goes on.

        Raises:
            AdapterFormatError: the directory isn't a PEFT adapter (before anything is sent), or its files are broken.
            AdapterRejected: it can't be served on this base; `problems` lists every reason.
        """
        return run(
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

    def pull(
        self,
        name: str,
        directory: str | Path,
        *,
        version: int | None = None,
        overwrite: bool = False,
        on_progress: OnProgress | None = None,
    ) -> Version:
        """Bring a version's two files, as they were pushed, into `directory`, and return the version. Each is checked against its digest.

        Args:
            version: None: the one that `live` points to.
            overwrite: replace files that are there.

        Raises:
            AlreadyExists: a file is there, and `overwrite` is False.
        """
        policy = self._transport.config.retry
        return run(
            self._transport,
            calls.pull(name, version, Path(directory), policy, overwrite=overwrite, on_progress=on_progress),
        )

    def pull_from(self, name: str, source: str, *, promote: bool = True) -> Operation:
        """Let the server fetch a version of the adapter by itself. Takes an admin key.

        Args:
            source: ``hf://ORG/NAME[@REVISION]`` or ``s3://BUCKET/PREFIX``, on the operator's list.
            promote: let `live` point to the new version.

        Returns:
            What `client.operations` waits for or cancels; its `result` is the version.
        """
        return self._transport.send(calls.pull_from(name, source, promote))

    def list(self) -> Iterator[Adapter]:
        """Every adapter by name; pages are asked for as they're needed."""
        return all_rows(self._transport, ROOT, Adapter)

    def get(self, name: str) -> Adapter:
        """Raises AdapterNotFound where there is none, or it is another tenant's."""
        return self._transport.send(calls.get(name))

    def update(self, name: str, *, notes: str | None = None, tags: Mapping[str, str] | None = None) -> Adapter:
        """Replace the adapter's notes, its tags, or both; what is None stays."""
        return self._transport.send(calls.update(name, calls.about(notes, tags)))

    def set_fallback(self, name: str, fallback: int | str | None) -> Adapter:
        """Say what answers when the version asked for can't: a version, an alias, ``"base"``, or None: nothing does."""
        wanted = None if fallback is None else str(fallback)
        return self._transport.send(calls.update(name, {"fallback": wanted}))

    def versions(self, name: str) -> Iterator[Version]:
        """Every version of the adapter; pages are asked for as they're needed."""
        return all_rows(self._transport, f"{calls.path_of(name)}/versions", Version)

    def version(self, name: str, version: int) -> Version:
        """Raises VersionNotFound where there is none."""
        return self._transport.send(calls.version(name, version))

    def update_version(
        self, name: str, version: int, *, notes: str | None = None, tags: Mapping[str, str] | None = None
    ) -> Version:
        """Replace the version's notes, its tags, or both; what is None stays."""
        return self._transport.send(calls.update_version(name, version, calls.about(notes, tags)))

    def delete(self, name: str, version: int | None = None) -> None:
        """Delete the adapter, or one version of it. Requests that run finish on what they started with."""
        self._transport.send(calls.delete(name, version))

    def restore(self, name: str) -> Adapter:
        """A deleted adapter is there again, with its versions and aliases as they were, while the server keeps what was deleted."""
        return self._transport.send(calls.restore(name))

    def restore_version(self, name: str, version: int) -> Version:
        """A deleted version is there again, while the server keeps what was deleted."""
        return self._transport.send(calls.restore_version(name, version))

    def aliases(self, name: str) -> Iterator[Alias]:
        """Every alias of the adapter; pages are asked for as they're needed."""
        return all_rows(self._transport, f"{calls.path_of(name)}/aliases", Alias)

    def set_alias(
        self,
        name: str,
        alias: str,
        version: int | None = None,
        *,
        split: Mapping[int, float] | None = None,
        shadow: tuple[int, float] | None = None,
        if_match: str | None = None,
    ) -> Alias:
        """Point `alias` at `version`, or split its traffic.

        Args:
            split: version → weight; a request goes to one of them, and a `user` stays on one.
            shadow: (version, share): a copy of that share of the requests runs on that version and is compared; None: no copy.
            if_match: the ETag that the alias was read with (`Alias.etag`): move it only if nobody else did meanwhile.

        Raises:
            PreconditionFailed: somebody did.
        """
        return self._transport.send(calls.set_alias(name, alias, version, split, shadow, if_match))

    def alias(self, name: str, alias: str) -> Alias:
        """The alias, with its `etag`. Raises AliasNotFound where there is none."""
        return self._transport.send(calls.alias(name, alias))

    def delete_alias(self, name: str, alias: str, *, if_match: str | None = None) -> None:
        """The alias is gone; the version that it named stays. `if_match` as for `set_alias`."""
        self._transport.send(calls.delete_alias(name, alias, if_match))

    def rollback(self, name: str, alias: str = LIVE, *, if_match: str | None = None) -> Alias:
        """Point the alias where it pointed before its last move; again, and it's back.

        Raises:
            Conflict: it never moved.
            PreconditionFailed: it moved since it was read; `if_match` as for `set_alias`.
        """
        return self._transport.send(calls.rollback(name, alias, if_match))

    def shadow(self, name: str, alias: str = LIVE) -> Iterator[ShadowHour]:
        """How the alias's shadow version did, hour by hour; pages are asked for as they're needed."""
        return all_rows(self._transport, f"{calls.alias_path(name, alias)}/shadow", ShadowHour)

    def verify(self, name: str, version: int, *, rebase: bool = False) -> Version:
        """Compare the version's answers with the reference's anew, and return it as it is then: `Version.certificate` has the numbers.

        A certificate that failed puts the version into quarantine, one that passed ends it.

        Args:
            rebase: let a version that was made for another base become one of the server's, if its certificate there passes. Servers
                of the other base refuse it from then on.

        Raises:
            AdapterOfAnotherBase: it was made for another base, and `rebase` isn't given.
            AdapterRejected: it doesn't fit the server's base, or its certificate there failed; it stays the other one's.
            EngineUnavailable: there is no certificate now; nothing was changed.
        """
        return self._transport.send(calls.verify(name, version, rebase))

    def warm(self, name: str, version: int) -> Action:
        """Bring the version's weights into memory, so that its first request needn't wait."""
        return self._transport.send(calls.act(name, version, "warm"))

    def pin(self, name: str, version: int) -> Action:
        """Keep the version's weights in memory until `unpin`. Takes an admin key: it's memory that others lack."""
        return self._transport.send(calls.act(name, version, "pin"))

    def unpin(self, name: str, version: int) -> Action:
        """Let the version's weights go when their room is needed."""
        return self._transport.send(calls.act(name, version, "unpin"))
