"""`client.files` and `client.batches`."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from loraserve import errors
from loraserve.contract.batch import Batch, DeletedFile, File
from loraserve.contract.result import IdPage, Result
from loraserve.sdk._async.transport import AsyncTransport
from loraserve.sdk.call import Call, encode, read_into, segment
from loraserve.sdk.concurrency import async_call

R = TypeVar("R", bound=Result)
_PAGE_SIZE = 100
_LOOK_S = 2.0


class AsyncFiles:
    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def create(self, file: str | Path | bytes, *, filename: str = "input.jsonl") -> File:
        """Store the input of a batch, which is in memory meanwhile.

        Args:
            file: path of a JSONL file, or its bytes.
            filename: name to show; a path has its own.
        """
        data = file if isinstance(file, bytes) else await async_call(Path(file).read_bytes)
        name = filename if isinstance(file, bytes) else Path(file).name
        body, boundary = _form({"purpose": b"batch"}, name, data)
        headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
        return await self._transport.send(Call("POST", "/v1/files", read_into(File), body=body, headers=headers))

    async def get(self, file_id: str) -> File:
        """Return what is known of the file."""
        return await self._transport.send(Call("GET", _path("files", file_id), read_into(File)))

    async def content(self, file_id: str) -> bytes:
        """Return the file's bytes: of a batch's output, one JSON object a line."""
        call = Call("GET", f"{_path('files', file_id)}/content", lambda _answer, body: body)
        return await self._transport.send(call)

    async def delete(self, file_id: str) -> None:
        """Delete the file. A batch that was made of it goes on."""
        await self._transport.send(Call("DELETE", _path("files", file_id), read_into(DeletedFile)))

    def list(self, *, purpose: str | None = None) -> AsyncIterator[File]:
        """Yield the files, the newest first; pages are requested as they're needed."""
        return _rows(self._transport, "/v1/files", File, {} if purpose is None else {"purpose": purpose})


class AsyncBatches:
    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def create(
        self,
        *,
        input_file_id: str,
        endpoint: str,
        completion_window: str = "24h",
        metadata: Mapping[str, str] | None = None,
    ) -> Batch:
        """Make a batch of a file's requests, all of them for `endpoint` (``/v1/completions``)."""
        body = {"input_file_id": input_file_id, "endpoint": endpoint, "completion_window": completion_window}
        given: dict[str, Any] = body if metadata is None else {**body, "metadata": dict(metadata)}
        return await self._transport.send(Call("POST", "/v1/batches", read_into(Batch), body=encode(given)))

    async def get(self, batch_id: str) -> Batch:
        """Return how far the batch has come."""
        return await self._transport.send(Call("GET", _path("batches", batch_id), read_into(Batch)))

    async def cancel(self, batch_id: str) -> Batch:
        """Cancel the batch; what is done by then is in its output."""
        return await self._transport.send(Call("POST", f"{_path('batches', batch_id)}/cancel", read_into(Batch)))

    async def wait(self, batch_id: str, *, timeout: float | None = None) -> Batch:
        """Return the batch once it has ended, in whichever way.

        Args:
            timeout: seconds to wait; None: as long as it takes.

        Raises:
            ClientTimeout: it goes on.
        """
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while not (batch := await self.get(batch_id)).has_ended:
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise errors.ClientTimeout(f"The batch {batch_id} is {batch.status} after {timeout:g} s; it goes on.")
            await self._transport.pause(_LOOK_S)
        return batch

    def list(self) -> AsyncIterator[Batch]:
        """Yield the batches, the newest first; pages are requested as they're needed."""
        return _rows(self._transport, "/v1/batches", Batch, {})


async def _rows(transport: AsyncTransport, path: str, kind: type[R], params: Mapping[str, str]) -> AsyncIterator[R]:
    """Yield every row of a list that pages by the last one's id."""
    after: str | None = None
    while True:
        query = {**params, "limit": str(_PAGE_SIZE)} | ({} if after is None else {"after": after})
        call: Call[IdPage[R]] = Call("GET", path, read_into(IdPage[kind]), params=query)  # type: ignore[valid-type]
        page = await transport.send(call)
        for row in page.data:
            yield row
        after = page.last_id
        if not page.has_more or after is None:
            return


def _path(kind: str, object_id: str) -> str:
    return f"/v1/{kind}/{segment(object_id, 'id')}"


def _form(fields: Mapping[str, bytes], filename: str, data: bytes) -> tuple[bytes, str]:
    """Return the body of a form with a file, and its boundary."""
    boundary = uuid.uuid4().hex
    name = filename.replace('"', "_").replace("\r", "_").replace("\n", "_")
    parts: Sequence[tuple[str, bytes]] = [
        *((f'name="{field}"', value) for field, value in fields.items()),
        (f'name="file"; filename="{name}"', data),
    ]
    head = "--{}\r\nContent-Disposition: form-data; {}\r\n\r\n"
    body = b"".join(head.format(boundary, said).encode() + value + b"\r\n" for said, value in parts)
    return body + f"--{boundary}--\r\n".encode(), boundary
