"""The calls about adapters, and what takes several of them: shared by `Adapters` and `AsyncAdapters`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from loraserve import errors
from loraserve.sdk.call import Call, encode, idempotency_key, read_into, read_nothing, segment
from loraserve.sdk.file_piece import Progress
from loraserve.sdk.files.download import download
from loraserve.sdk.files.peft_directory import find_files, read_config
from loraserve.sdk.files.uploads import send_file
from loraserve.sdk.resources.operations import Operation
from loraserve.sdk.retry import RetryPolicy
from loraserve.sdk.transport.steps import Pause, Steps, Work
from loraserve.sdk.types.management import Action, Adapter, Alias, Version

OnProgress = Callable[[Progress], object]
ROOT = "/api/v1/adapters"
LIVE = "live"


def path_of(name: str, version: int | None = None) -> str:
    path = f"{ROOT}/{segment(name, 'name')}"
    return path if version is None else f"{path}/versions/{version}"


def alias_path(name: str, alias: str) -> str:
    return f"{path_of(name)}/aliases/{segment(alias, 'alias')}"


def _condition(if_match: str | None) -> dict[str, str]:
    return {} if if_match is None else {"If-Match": if_match}


def get(name: str) -> Call[Adapter]:
    return Call("GET", path_of(name), read_into(Adapter))


def version(name: str, number: int) -> Call[Version]:
    return Call("GET", path_of(name, number), read_into(Version))


def update(name: str, changes: Mapping[str, object]) -> Call[Adapter]:
    return Call("PATCH", path_of(name), read_into(Adapter), body=encode(changes))


def update_version(name: str, number: int, changes: Mapping[str, object]) -> Call[Version]:
    return Call("PATCH", path_of(name, number), read_into(Version), body=encode(changes))


def about(notes: str | None, tags: Mapping[str, str] | None) -> dict[str, object]:
    """The fields that are given."""
    given: dict[str, object] = {} if notes is None else {"notes": notes}
    return given if tags is None else {**given, "tags": dict(tags)}


def delete(name: str, number: int | None) -> Call[None]:
    return Call("DELETE", path_of(name, number), read_nothing)


def restore(name: str) -> Call[Adapter]:
    return Call("POST", f"{path_of(name)}/restore", read_into(Adapter), headers=idempotency_key())


def restore_version(name: str, number: int) -> Call[Version]:
    return Call("POST", f"{path_of(name, number)}/restore", read_into(Version), headers=idempotency_key())


def set_alias(
    name: str,
    alias: str,
    number: int | None,
    split: Mapping[int, float] | None,
    shadow: tuple[int, float] | None,
    if_match: str | None,
) -> Call[Alias]:
    """
    Raises:
        InvalidRequest: neither a version nor a split is given, or both are.
    """
    if (number is None) == (split is None):
        raise errors.InvalidRequest("An alias points to a version, or splits its traffic: give one of the two.")
    body: dict[str, object] = {} if number is None else {"version": number}
    if split is not None:
        body["split"] = [{"version": one, "weight": weight} for one, weight in split.items()]
    if shadow is not None:
        body["shadow"] = {"version": shadow[0], "share": shadow[1]}
    headers = _condition(if_match)
    return Call("PUT", alias_path(name, alias), read_into(Alias), headers=headers, body=encode(body))


def alias(name: str, alias: str) -> Call[Alias]:
    return Call("GET", alias_path(name, alias), read_into(Alias))


def delete_alias(name: str, alias: str, if_match: str | None) -> Call[None]:
    return Call("DELETE", alias_path(name, alias), read_nothing, headers=_condition(if_match))


def rollback(name: str, alias: str, if_match: str | None) -> Call[Alias]:
    headers = idempotency_key() | _condition(if_match)
    return Call("POST", f"{alias_path(name, alias)}/rollback", read_into(Alias), headers=headers)


def verify(name: str, number: int, rebase: bool) -> Call[Version]:
    params = {"rebase": "true"} if rebase else {}
    path = f"{path_of(name, number)}/verify"
    return Call("POST", path, read_into(Version), params=params, headers=idempotency_key())


def act(name: str, number: int, action: str) -> Call[Action]:
    return Call("POST", f"{path_of(name, number)}/{action}", read_into(Action), headers=idempotency_key())


def pull_from(name: str, source: str, promote: bool) -> Call[Operation]:
    body = encode({"source": source} if promote else {"source": source, "promote": False})
    return Call("POST", f"{path_of(name)}/pulls", read_into(Operation), headers=idempotency_key(), body=body)


def push(
    name: str,
    directory: Path,
    policy: RetryPolicy,
    *,
    alias_: str | None,
    promote: bool,
    dry_run: bool,
    notes: str | None,
    tags: Mapping[str, str] | None,
    on_progress: OnProgress | None,
) -> Steps[Version]:
    """Send the directory, publish it, and say of the version what is to be said of it."""
    config_path, weights_path = find_files(directory)
    config: str = yield Work(lambda: read_config(config_path))
    made = yield from _publish(name, config, weights_path, policy, promote, dry_run, on_progress)
    number = made.version
    if number is None or dry_run:
        return made
    said = about(notes, tags)
    if said:
        made = yield update_version(name, number, said)
    if alias_ is None or made.is_quarantined:
        return made
    yield set_alias(name, alias_, number, None, None, None)
    return (yield version(name, number))  # type: ignore[no-any-return]


def _publish(
    name: str,
    config: str,
    weights: Path,
    policy: RetryPolicy,
    promote: bool,
    dry_run: bool,
    on_progress: OnProgress | None,
) -> Steps[Version]:
    params = {} if promote else {"promote": "false"}
    if dry_run:
        params["dry_run"] = "true"
    attempt = 0
    while True:
        digest = yield from send_file(weights, policy, on_progress)
        # The config as it stands in its file: the server reads it as it would any other, numbers to the last digit.
        body = f'{{"config":{config},"blob":"{digest}"}}'.encode()
        where, headers = f"{path_of(name)}/versions", idempotency_key()
        lost: errors.LoraserveError
        try:
            return (yield Call("POST", where, read_into(Version), params=params, headers=headers, body=body))  # type: ignore[no-any-return]
        except (errors.UploadNotFound, errors.Conflict) as error:
            # The bytes are gone from the server, or damaged there: it asks for them again.
            if type(error) not in (errors.UploadNotFound, errors.Conflict):
                raise
            lost = error
        delay = policy.delay_after_failure(attempt)
        if delay is None:
            raise lost
        yield Pause(delay)
        attempt += 1


def pull(
    name: str,
    number: int | None,
    directory: Path,
    policy: RetryPolicy,
    *,
    overwrite: bool,
    on_progress: OnProgress | None,
) -> Steps[Version]:
    """The version's files, or the live one's where none is named, are in `directory`."""
    if number is None:
        live: Alias = yield alias(name, LIVE)
    which = live.version if number is None else number
    found: Version = yield version(name, which)
    where = path_of(name, which)
    yield from download(where, found.size_bytes, directory, policy, overwrite=overwrite, on_progress=on_progress)
    return found
