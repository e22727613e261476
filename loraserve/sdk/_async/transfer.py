"""An adapter's files, sent and fetched.

Interrupted transfers go on where they stopped, or leave nothing behind.
"""

from __future__ import annotations

from pathlib import Path

import httpx2

from loraserve import errors
from loraserve.adapter_folder import CONFIG_FILE, WEIGHTS_FILE
from loraserve.contract.adapter import Version
from loraserve.contract.operation import Progress
from loraserve.contract.result import Answer
from loraserve.sdk._async.transport import AsyncTransport
from loraserve.sdk.attempt import error_from_failure
from loraserve.sdk.call import Call, read_nothing
from loraserve.sdk.concurrency import async_call
from loraserve.sdk.file_piece import OnProgress
from loraserve.sdk.files import uploads
from loraserve.sdk.files.download import RETRIED, PartialFile, prepare_directory, write_extras
from loraserve.sdk.files.peft_directory import EXTRA_FILES


async def send_file(transport: AsyncTransport, path: Path, on_progress: OnProgress | None) -> str:
    """Return the file's SHA-256 once the server has stored all of its bytes.

    Bytes that it has aren't sent again.

    Raises:
        AdapterFormatError: the file changed meanwhile.
        LoraserveError: the server refused it, or none of the tries that the retry policy allows
            brought a byte.
    """
    policy = transport.config.retry
    state = await async_call(uploads.FileState.of, path)
    upload = await transport.send(uploads.create(state))
    most_bytes, num_failures = upload.received, 0
    call = uploads.patch(upload, path, on_progress)
    while not upload.is_complete:
        try:
            upload = await transport.send(call)
        except uploads.RETRIED as failure:
            await async_call(uploads.check_unchanged, path, state)
            delay = policy.delay_after_failure(num_failures)
            if delay is None:
                raise
            num_failures += 1
            await transport.pause(delay)
            # an upload that expired begins again
            call = uploads.create(state) if isinstance(failure, errors.UploadNotFound) else uploads.get(upload)
            continue
        if upload.received > most_bytes:
            # more bytes than ever before: the connection works again
            most_bytes, num_failures = upload.received, 0
        call = uploads.patch(upload, path, on_progress)
    if on_progress is not None:
        on_progress(Progress(state.num_bytes, state.num_bytes))
    return state.sha256


async def download(
    transport: AsyncTransport,
    version_path: str,
    version: Version,
    directory: Path,
    *,
    overwrite: bool,
    on_progress: OnProgress | None,
) -> None:
    """Write the files of the version at `version_path` into `directory`.

    They are checked against the server's digests. Extra files that the version doesn't have are
    removed from there.

    Raises:
        AlreadyExists: one of them exists, and `overwrite` is False.
        AdapterCorrupt: the bytes differed from the server's digest at every try.
    """
    await async_call(prepare_directory, directory, overwrite)
    done_bytes = 0

    def report(num_bytes: int) -> None:
        if on_progress is not None:
            on_progress(Progress(done_bytes + num_bytes, max(version.size_bytes, done_bytes + num_bytes)))

    # the config comes last: a directory that has one has the weights too
    extras = [name for name in EXTRA_FILES.values() if any(file.name == name for file in version.extra_files)]
    parts = [PartialFile(directory / name, report) for name in (*extras, WEIGHTS_FILE, CONFIG_FILE)]
    try:
        for part in parts:
            call = Call("GET", f"{version_path}/files/{part.path.name}", read_nothing)
            await _fetch(transport, call, part)
            done_bytes += part.num_bytes
        await async_call(write_extras, directory, extras, version)
        for part in parts:
            await async_call(part.commit)
    finally:
        for part in parts:
            part.discard()


async def _fetch(transport: AsyncTransport, call: Call[None], part: PartialFile) -> None:
    policy = transport.config.retry
    attempt = 0
    while True:
        failure: errors.LoraserveError
        try:
            answer = await _receive(transport, call, part)
            if await async_call(part.finish, answer):
                return
            failure = errors.AdapterCorrupt(
                f"{part.path.name} was damaged during the download: its digest differs from the server's."
            )
        except RETRIED as error:
            failure = error
        delay = policy.delay_after_failure(attempt)
        if delay is None:
            raise failure
        await transport.pause(delay)
        attempt += 1


async def _receive(transport: AsyncTransport, call: Call[None], part: PartialFile) -> Answer:
    """Write an answer's bytes to `part`, from its beginning.

    Raises:
        ConnectionFailed, ClientTimeout: the answer is incomplete.
    """
    response = await transport.open(call)
    try:
        await async_call(part.begin)
        async for chunk in response.aiter_bytes():
            await async_call(part.write, chunk)
        return Answer.of(response)
    except httpx2.TransportError as failure:
        raise error_from_failure(failure, transport.config.url) from failure
    finally:
        await response.aclose()
