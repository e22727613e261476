# Generated from loraserve/sdk/_async/batches.py by `make sdk`: don't edit.
"""`client.files` and `client.batches`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from loraserve import errors
from loraserve.contract.batch import Batch, DeletedFile, File
from loraserve.contract.result import IdPage, Result
from loraserve.sdk._sync.transport import Transport
from loraserve.sdk.call import Call, encode, read_into, segment
from loraserve.sdk.concurrency import sync_call

R = TypeVar("R", bound=Result)
_PAGE_SIZE = 100
_LOOK_S = 2.0


class Files:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(self, file: str | Path | bytes, *, filename: str = "input.jsonl") -> File:
        """Store the input of a batch, which is in memory meanwhile.

        Args:
            file: path of a JSONL file, or its bytes.
            filename: name to show; a path has its own.
        """
        data = file if isinstance(file, bytes) else sync_call(Path(file).read_bytes)
        name = filename if isinstance(file, bytes) else Path(file).name
        body, boundary = _form({"purpose": b"batch"}, name, data)
        headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
        return self._transport.send(Call("POST", "/v1/files", read_into(File), body=body, headers=headers))

    def get(self, file_id: str) -> File:
        """Return what is known of the file."""
        return self._transport.send(Call("GET", _path("files", file_id), read_into(File)))

    def content(self, file_id: str) -> bytes:
        """Return the file's bytes: of a batch's output, one JSON object a line."""
        call = Call("GET", f"{_path('files', file_id)}/content", lambda _answer, body: body)
        return self._transport.send(call)

    def delete(self, file_id: str) -> None:
        """Delete the file. A batch that was made of it goes on."""
        self._transport.send(Call("DELETE", _path("files", file_id), read_into(DeletedFile)))

    def list(self, *, purpose: str | None = None) -> Iterator[File]:
        """Yield the files, the newest first; pages are requested as they're needed."""
        return _rows(self._transport, "/v1/files", File, {} if purpose is None else {"purpose": purpose})


class Batches:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(
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
        return self._transport.send(Call("POST", "/v1/batches", read_into(Batch), body=encode(given)))

    def get(self, batch_id: str) -> Batch:
        """Return how far the batch has come."""
        return self._transport.send(Call("GET", _path("batches", batch_id), read_into(Batch)))

    def cancel(self, batch_id: str) -> Batch:
        """Cancel the batch; what is done by then is in its output."""
        return self._transport.send(Call("POST", f"{_path('batches', batch_id)}/cancel", read_into(Batch)))

    def wait(self, batch_id: str, *, timeout: float | None = None) -> Batch:
        """Return the batch once it has ended, in whichever way.

        Args:
            timeout: seconds to wait; None: as long as it takes.

        Raises:
            ClientTimeout: it goes on.
        """
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while not (batch := self.get(batch_id)).has_ended:
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise errors.ClientTimeout(f"The batch {batch_id} is {batch.status} after {timeout:g} s; it goes on.")
            self._transport.pause(_LOOK_S)
        return batch

    def list(self) -> Iterator[Batch]:
        """Yield the batches, the newest first; pages are requested as they're needed."""
        return _rows(self._transport, "/v1/batches", Batch, {})


def _rows(transport: Transport, path: str, kind: type[R], params: Mapping[str, str]) -> Iterator[R]:
    """Yield every row of a list that pages by the last one's id."""
    after: str | None = None
    while True:
        query = {**params, "limit": str(_PAGE_SIZE)} | ({} if after is None else {"after": after})
        call: Call[IdPage[R]] = Call("GET", path, read_into(IdPage[kind]), params=query)  # type: ignore[valid-type]
        page = transport.send(call)
        yield from page.data
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
