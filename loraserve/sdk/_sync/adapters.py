# Generated from loraserve/sdk/_async/adapters.py by `make sdk`: don't edit.
"""`client.adapters`: push and pull PEFT directories, list and move versions.

Weights can be kept in memory or let go.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from loraserve import errors
from loraserve.contract.adapter import Action, Adapter, Version
from loraserve.contract.alias import Alias, ShadowHour
from loraserve.contract.operation import Operation
from loraserve.contract.traffic import Traffic
from loraserve.sdk._sync.paging import NO_PARAMS, all_rows
from loraserve.sdk._sync.transfer import download, send_file
from loraserve.sdk._sync.transport import Transport
from loraserve.sdk.call import Call, encode, idempotency_key, if_match_header, read_into, read_nothing, segment
from loraserve.sdk.concurrency import sync_call
from loraserve.sdk.file_piece import OnProgress
from loraserve.sdk.files.adapter_source import AdapterSource
from loraserve.sdk.files.peft_directory import INDEX, find_files, read_config, read_extra_files, read_index_file

ROOT = "/api/v1/adapters"
_NOTES = {"include": "notes"}
LIVE = "live"
UNCHANGED = 200
"""Answer to a push whose bytes a version has already; a new version's is 201."""


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
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        on_progress: OnProgress | None = None,
    ) -> Version:
        """Send a PEFT directory and return the version that the server made of it.

        The version is checked and durable. The weights are sent in pieces: a push that was
        interrupted goes on from the bytes that the server already has. Pushing the same bytes again
        returns the version that has them. With ``dry_run`` everything is checked and nothing
        published. A version whose certificate failed is quarantined (`Version.is_quarantined`): it
        isn't served, and no alias points to it.

        ``chat_template.jinja`` and ``generation_config.json`` in the directory become part of the
        version.

        Args:
            directory: a PEFT directory, one of mlx-lm's, a GGUF file of LoRA, or what MLflow keeps,
                which MLflow's library (if it is installed) downloads first: ``runs:/RUN_ID/PATH``,
                ``models:/NAME/VERSION``, ``models:/NAME@ALIAS``, or these as ``mlflow://runs/…``
                and ``mlflow://models/…``.
            alias: point this alias at the new version too.
            promote: point `live`, which the bare name means, at the new version.
            notes, tags: set on the version.
            tool_parser, reasoning_parser: formats of its tool calls and its reasoning, part of the
                version; None: what the directory's file of that name says, if there is one.
            chat_template_kwargs: variables that the version sets for its chat template, such as
                ``{"enable_thinking": False}``, part of the version too; None: those of the
                directory's ``chat_template_kwargs.json``, if there is one.
            on_progress: called with the bytes sent so far; a resumed push starts from those that
                the server has.

        Raises:
            AdapterFormatError: the directory isn't a PEFT adapter (before anything is sent), or its
                files are broken.
            AdapterRejected: it can't be served on this base; `problems` lists every reason.
        """
        source = sync_call(AdapterSource.open, directory)
        try:
            files = sync_call(find_files, source.directory)
            config = None if files.config is None else sync_call(read_config, files.config)
            extras = sync_call(read_extra_files, source.directory)
            if files.index is not None:
                extras[INDEX] = (sync_call(read_index_file, files.index)).decode()
            weights_path = sync_call(source.join, files.weights)
            parsers = {"tool_parser": tool_parser, "reasoning_parser": reasoning_parser}
            extras |= {name: value for name, value in parsers.items() if value is not None}
            if chat_template_kwargs is not None:
                extras["chat_template_kwargs"] = json.dumps(dict(chat_template_kwargs))
            params = {} if promote else {"promote": "false"}
            if dry_run:
                params["dry_run"] = "true"
            made = self._publish(name, config, extras, weights_path, params, on_progress)
        finally:
            sync_call(source.close)
        if made.version is None or dry_run:
            return made
        is_unchanged = made.answer is not None and made.answer.status_code == UNCHANGED
        if notes is not None or tags is not None:
            made = self.update_version(name, made.version, notes=notes, tags=tags)
        if alias is not None and not made.is_quarantined and made.version is not None:
            self.set_alias(name, alias, made.version)
            made = self.version(name, made.version)
        made._is_unchanged = is_unchanged
        return made

    def _publish(
        self,
        name: str,
        config: str | None,
        extras: Mapping[str, str],
        weights: Path,
        params: Mapping[str, str],
        on_progress: OnProgress | None,
    ) -> Version:
        """Upload the weights and publish them.

        Upload them again if the server has lost or damaged them meanwhile.
        """
        policy = self._transport.config.retry
        attempt = 0
        while True:
            digest = send_file(self._transport, weights, on_progress)
            # the config's own text: the server reads every number to its last digit
            body = encode({"blob": digest, **extras})
            if config is not None:
                body = f'{{"config":{config},{body.decode().removeprefix("{")}'.encode()
            path, headers = f"{_path(name)}/versions", idempotency_key()
            call = Call("POST", path, read_into(Version), params=params, headers=headers, body=body)
            try:
                return self._transport.send(call)
            except (errors.UploadNotFound, errors.Conflict) as error:
                delay = policy.delay_after_failure(attempt)
                # subclasses of Conflict are refusals
                if type(error) not in (errors.UploadNotFound, errors.Conflict) or delay is None:
                    raise
            self._transport.pause(delay)
            attempt += 1

    def pull(
        self,
        name: str,
        directory: str | Path,
        *,
        version: int | None = None,
        overwrite: bool = False,
        on_progress: OnProgress | None = None,
    ) -> Version:
        """Download a version's files into `directory`, and return the version.

        The files are as they were pushed. Each file is checked against its digest.

        Args:
            version: None: the one that `live` points to.
            overwrite: replace files that exist.

        Raises:
            AlreadyExists: a file exists, and `overwrite` is False.
        """
        if version is None:
            live = self.alias(name, LIVE)
            version = live.version
        found = self.version(name, version)
        download(
            self._transport,
            _path(name, version),
            found,
            Path(directory),
            overwrite=overwrite,
            on_progress=on_progress,
        )
        return found

    def pull_from(self, name: str, source: str, *, promote: bool = True) -> Operation:
        """Make the server fetch a version of the adapter itself. Takes an admin key.

        Args:
            source: ``hf://ORG/NAME[@REVISION]`` or ``s3://BUCKET/PREFIX``, on the operator's list.
            promote: point `live` at the new version.

        Returns:
            The operation, for `client.operations` to wait for or cancel; its `result` is the
            version.
        """
        body = encode({"source": source} if promote else {"source": source, "promote": False})
        headers = idempotency_key()
        return self._transport.send(
            Call("POST", f"{_path(name)}/pulls", read_into(Operation), headers=headers, body=body)
        )

    def list(self, *, with_notes: bool = False) -> Iterator[Adapter]:
        """Yield every adapter by name; pages are requested as they're needed."""
        return all_rows(self._transport, ROOT, Adapter, _NOTES if with_notes else NO_PARAMS)

    def get(self, name: str) -> Adapter:
        """Return the adapter.

        Raises:
            AdapterNotFound: there is none, or it is another tenant's.
        """
        return self._transport.send(Call("GET", _path(name), read_into(Adapter)))

    def update(self, name: str, *, notes: str | None = None, tags: Mapping[str, str] | None = None) -> Adapter:
        """Replace the adapter's notes, its tags, or both; None leaves a field as it is."""
        return self._transport.send(Call("PATCH", _path(name), read_into(Adapter), body=encode(_changes(notes, tags))))

    def set_fallback(self, name: str, fallback: int | str | None) -> Adapter:
        """Set what answers when the requested version can't.

        It is a version, an alias, ``"base"``, or None for nothing.
        """
        body = encode({"fallback": None if fallback is None else str(fallback)})
        return self._transport.send(Call("PATCH", _path(name), read_into(Adapter), body=body))

    def versions(self, name: str, *, with_notes: bool = False) -> Iterator[Version]:
        """Yield every version of the adapter; pages are requested as they're needed."""
        return all_rows(self._transport, f"{_path(name)}/versions", Version, _NOTES if with_notes else NO_PARAMS)

    def version(self, name: str, version: int) -> Version:
        """Return the version.

        Raises:
            VersionNotFound: there is none.
        """
        return self._transport.send(Call("GET", _path(name, version), read_into(Version)))

    def update_version(
        self, name: str, version: int, *, notes: str | None = None, tags: Mapping[str, str] | None = None
    ) -> Version:
        """Replace the version's notes, its tags, or both; None leaves a field as it is."""
        return self._transport.send(
            Call("PATCH", _path(name, version), read_into(Version), body=encode(_changes(notes, tags)))
        )

    def delete(self, name: str, version: int | None = None) -> None:
        """Delete the adapter, or one version of it.

        Running requests finish on the version they started with.
        """
        self._transport.send(Call("DELETE", _path(name, version), read_nothing))

    def restore(self, name: str) -> Adapter:
        """Bring back a deleted adapter with its versions and aliases.

        The server keeps them for a while.
        """
        return self._transport.send(
            Call("POST", f"{_path(name)}/restore", read_into(Adapter), headers=idempotency_key())
        )

    def restore_version(self, name: str, version: int) -> Version:
        """Bring back a deleted version, while the server still keeps it."""
        return self._transport.send(
            Call("POST", f"{_path(name, version)}/restore", read_into(Version), headers=idempotency_key())
        )

    def aliases(self, name: str) -> Iterator[Alias]:
        """Yield every alias of the adapter; pages are requested as they're needed."""
        return all_rows(self._transport, f"{_path(name)}/aliases", Alias)

    def set_alias(
        self,
        name: str,
        alias: str,
        version: int | None = None,
        *,
        split: Mapping[int, float] | None = None,
        shadow: tuple[int, float] | None = None,
        if_match: str | None = None,
        if_better: str | None = None,
    ) -> Alias:
        """Point `alias` at `version`, or split its traffic.

        Args:
            split: version → weight; each request goes to one of them, and all of one `user` to the
                same.
            shadow: (version, share): run a copy of this share of the requests on that version and
                compare the answers; None: no copies.
            if_match: the ETag that the alias was read with (`Alias.etag`): move it only if it
                hasn't changed since.
            if_better: a metric: move it only if the version's `client.evaluations` are better by it
                than those of the version that it points to, on the same data.

        Raises:
            InvalidRequest: neither a version nor a split is given, or both are.
            PreconditionFailed: it has changed since.
            NotEvaluated, NotBetter: there is nothing to compare, or the version isn't better.
        """
        if (version is None) == (split is None):
            raise errors.InvalidRequest(
                "Give either version or split: an alias points to one version, or splits its traffic."
            )
        body: dict[str, object] = {} if version is None else {"version": version}
        if split is not None:
            body["split"] = [{"version": number, "weight": weight} for number, weight in split.items()]
        if shadow is not None:
            body["shadow"] = {"version": shadow[0], "share": shadow[1]}
        if if_better is not None:
            body["if_better"] = if_better
        headers = if_match_header(if_match)
        return self._transport.send(
            Call("PUT", _alias_path(name, alias), read_into(Alias), headers=headers, body=encode(body))
        )

    def alias(self, name: str, alias: str) -> Alias:
        """Return the alias, with its `etag`.

        Raises:
            AliasNotFound: there is none.
        """
        return self._transport.send(Call("GET", _alias_path(name, alias), read_into(Alias)))

    def delete_alias(self, name: str, alias: str, *, if_match: str | None = None) -> None:
        """Delete the alias; the version that it points to stays. `if_match` as for `set_alias`."""
        headers = if_match_header(if_match)
        self._transport.send(Call("DELETE", _alias_path(name, alias), read_nothing, headers=headers))

    def rollback(self, name: str, alias: str = LIVE, *, if_match: str | None = None) -> Alias:
        """Point the alias where it pointed before its last move.

        A second rollback undoes the first.

        Raises:
            Conflict: it never moved.
            PreconditionFailed: it has moved since it was read; `if_match` as for `set_alias`.
        """
        path, headers = f"{_alias_path(name, alias)}/rollback", idempotency_key() | if_match_header(if_match)
        return self._transport.send(Call("POST", path, read_into(Alias), headers=headers))

    def shadow(self, name: str, alias: str = LIVE) -> Iterator[ShadowHour]:
        """Yield how the alias's shadow version compared, hour by hour.

        Pages are requested as they're needed.
        """
        return all_rows(self._transport, f"{_alias_path(name, alias)}/shadow", ShadowHour)

    def traffic(self, name: str, *, minutes: int = 60) -> Traffic:
        """Return the requests of the last minutes (10 to 60) by the version that answered them.

        They are the tenant's own, on the server that answers, since it started.
        """
        params = {"minutes": str(minutes)}
        return self._transport.send(Call("GET", f"{_path(name)}/traffic", read_into(Traffic), params=params))

    def verify(self, name: str, version: int, *, rebase: bool = False) -> Version:
        """Compare the version's answers with the reference's again.

        Return it with the new `Version.certificate`. A certificate that failed puts the version
        into quarantine, one that passed ends it.

        Args:
            rebase: move a version that was made for another base to the server's, if its
                certificate there passes. Servers of the other base refuse it from then on.

        Raises:
            AdapterOfAnotherBase: it was made for another base, and `rebase` isn't given.
            AdapterRejected: it doesn't fit the server's base, or its certificate there failed; it
                stays on the other one.
            EngineUnavailable: no certificate could be made; nothing was changed.
        """
        params = {"rebase": "true"} if rebase else {}
        path = f"{_path(name, version)}/verify"
        return self._transport.send(Call("POST", path, read_into(Version), params=params, headers=idempotency_key()))

    def warm(self, name: str, version: int) -> Action:
        """Load the version's weights into memory, so that its first request needn't wait."""
        return self._act(name, version, "warm")

    def pin(self, name: str, version: int) -> Action:
        """Keep the version's weights in memory until `unpin`.

        Takes an admin key: others lack that memory.
        """
        return self._act(name, version, "pin")

    def unpin(self, name: str, version: int) -> Action:
        """Allow the version's weights to be evicted when their memory is needed."""
        return self._act(name, version, "unpin")

    def _act(self, name: str, version: int, action: str) -> Action:
        path = f"{_path(name, version)}/{action}"
        return self._transport.send(Call("POST", path, read_into(Action), headers=idempotency_key()))


def _path(name: str, version: int | None = None) -> str:
    path = f"{ROOT}/{segment(name, 'name')}"
    return path if version is None else f"{path}/versions/{version}"


def _alias_path(name: str, alias: str) -> str:
    return f"{_path(name)}/aliases/{segment(alias, 'alias')}"


def _changes(notes: str | None, tags: Mapping[str, str] | None) -> dict[str, object]:
    """Return the fields that are given."""
    changes: dict[str, object] = {} if notes is None else {"notes": notes}
    return changes if tags is None else {**changes, "tags": dict(tags)}
