"""Read an upload from the socket to a staged file.

It is hashed and bounded on the way, never held whole. A form has one part of any size, which is the
file, and short ones beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from loraserve.adapter_folder import CONFIG_HOLDER, MAX_SHARDS
from loraserve.adapters.extra_files import FILE_NAMES, INDEX, MAX_BYTES, ExtraFiles
from loraserve.errors import InvalidRequest, PayloadTooLarge
from loraserve.limits import LIMITS, MIB

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

    from loraserve.background import Throttle
    from loraserve.registry.uploads.staging import WeightsWriter, Written

CONFIG, WEIGHTS = "config", "weights"
_FLUSH_BYTES = 1 * MIB
_MAX_BOUNDARY_BYTES = 70


@dataclass(frozen=True, slots=True)
class Form:
    """Parts that a form may have.

    Attributes:
        file: name of the part that is written to the staged blob.
        short: names of the other parts, and the bound on their bytes.
        required: names of the parts that must be there.
        hint: description of the whole form, for a refusal.
        alone: first bytes of a file that needs no other part; empty: every file needs them.
        is_repeated: whether there may be several files, of this size together.
    """

    file: str
    max_file_bytes: int
    short: Mapping[str, int]
    required: tuple[str, ...]
    hint: str
    alone: bytes = b""
    is_repeated: bool = False


def _adapter_form() -> Form:
    return Form(
        WEIGHTS,
        LIMITS.max_upload_bytes,
        {CONFIG: LIMITS.max_adapter_config_bytes, **MAX_BYTES},
        (CONFIG, WEIGHTS),
        f"Send multipart/form-data with the two parts {CONFIG} and {WEIGHTS}, "
        f"and at will with {', '.join(FILE_NAMES)}. Shards are several {WEIGHTS}, with their {INDEX}.",
        alone=CONFIG_HOLDER,
        is_repeated=True,
    )


def multipart_boundary(request: Request, form: Form | None = None) -> bytes:
    """Return the boundary in the request's content type.

    Args:
        form: form that is expected; None: an adapter's.

    Raises:
        InvalidRequest: the body isn't multipart/form-data.
    """
    form = form or _adapter_form()
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 1 <= len(boundary) <= _MAX_BOUNDARY_BYTES:
        raise InvalidRequest(
            "The body isn't multipart/form-data with a boundary.", param="Content-Type", hint=form.hint
        )
    return boundary


async def read_upload(
    request: Request, boundary: bytes, weights: WeightsWriter, throttle: Throttle
) -> tuple[bytes, ExtraFiles]:
    """Return the part `CONFIG` and the extra files; write `WEIGHTS` to `weights`, piece by piece.

    The config is empty where the weights' file holds it.

    Raises:
        AdapterFormatError: an extra file isn't text, or is empty.
        InvalidRequest, PayloadTooLarge, StorageError: as `read_form`.
    """
    form = await read_form(request, boundary, _adapter_form(), weights, throttle, begin_file=weights.begin_file)
    parts = dict(form.short)
    if form.num_files > 1 and INDEX not in parts:
        raise InvalidRequest(
            f"{form.num_files} parts {WEIGHTS} came without the {INDEX} of their tensors.",
            param=INDEX,
            hint=_adapter_form().hint,
        )
    return parts.pop(CONFIG, b""), ExtraFiles.read(parts)


async def read_form(
    request: Request,
    boundary: bytes,
    form: Form,
    staged: Written,
    throttle: Throttle,
    *,
    begin_file: Callable[[], object] = lambda: None,
) -> ReadForm:
    """Return the short parts, after writing the file to `staged`, piece by piece.

    Parts may come in any order.

    Args:
        begin_file: called between two files, where the form may have several.

    Raises:
        InvalidRequest: a part is missing, unknown, there twice, encoded, or the body ends early.
        PayloadTooLarge: a part is over its bound; the rest isn't read.
        StorageError: `staged` can't be written.
    """
    parts = _Parts(form)
    parser = MultipartParser(boundary, callbacks=parts.callbacks())

    def write(files: list[bytearray]) -> None:
        for number, data in enumerate(files):
            if number:
                begin_file()
            staged.write(data)

    try:
        async for chunk in request.stream():
            parser.write(chunk)
            if sum(map(len, parts.files)) >= _FLUSH_BYTES:
                await throttle.run(partial(write, parts.take_files()))
    except FormParserError as error:
        raise InvalidRequest("The body isn't well-formed multipart/form-data.", hint=form.hint) from error
    except ClientDisconnect:
        # No client reads the answer, and it isn't a failure of the server's.
        raise InvalidRequest("The client disconnected before the end of the body.") from None
    if not parts.is_complete:
        raise InvalidRequest("The body ends before its closing boundary.", hint="Upload it again.")
    stands_alone = bool(form.alone) and parts.first == form.alone
    for name in (form.file,) if stands_alone else form.required:
        if name not in parts.seen:
            raise InvalidRequest(f'The part "{name}" is missing.', param=name, hint=form.hint)
    await throttle.run(partial(write, parts.take_files()))
    return ReadForm({name: bytes(data) for name, data in parts.short.items()}, bytes(parts.filename), parts.num_files)


@dataclass(frozen=True, slots=True)
class ReadForm:
    """Short parts of a form by their names, and the name that the client gave to its last file."""

    short: Mapping[str, bytes]
    filename: bytes
    num_files: int


class _Parts:
    """Parts found so far by the parser, which calls back with pieces of any size."""

    def __init__(self, form: Form) -> None:
        self.short: dict[str, bytearray] = {}
        # not taken yet: the rest of a file, and those that follow it
        self.files = [bytearray()]
        self.num_files = 0
        self.first = b""
        """The first bytes of the first file, as many as `Form.alone` has."""
        self.filename = b""
        self.seen: set[str] = set()
        self.is_complete = False
        self._form = form
        self._part = ""
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._num_file_bytes = 0

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin_part,
            "on_header_field": self._add_header_name,
            "on_header_value": self._add_header_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._name_part,
            "on_part_data": self._add_data,
            "on_end": self._end,
        }

    def take_files(self) -> list[bytearray]:
        taken, self.files = self.files, [bytearray()]
        return taken

    def _begin_part(self) -> None:
        self._part = ""
        self._headers = {}

    def _add_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        self._headers[bytes(self._header_name).lower()] = bytes(self._header_value)
        self._header_name.clear()
        self._header_value.clear()

    def _name_part(self) -> None:
        kind, options = parse_options_header(self._headers.get(b"content-disposition"))
        name = options.get(b"name", b"")
        form = self._form
        if kind != b"form-data" or name not in (form.file.encode(), *(short.encode() for short in form.short)):
            raise InvalidRequest("The body has an unknown part.", hint=form.hint)
        self._part = name.decode()
        is_file = self._part == form.file
        if self._part in self.seen and not (is_file and form.is_repeated):
            raise InvalidRequest(f'The part "{self._part}" appears twice.', param=self._part, hint=form.hint)
        self.seen.add(self._part)
        if is_file:
            self.filename = options.get(b"filename", b"")
            self.num_files += 1
            if self.num_files > MAX_SHARDS:
                raise InvalidRequest(f"The body has more than {MAX_SHARDS} files.", param=self._part)
            if self.num_files > 1:
                self.files.append(bytearray())
        else:
            self.short[self._part] = bytearray()
        encoding = self._headers.get(b"content-transfer-encoding", b"binary").strip().lower()
        if encoding not in (b"binary", b"8bit", b"7bit"):
            raise InvalidRequest(
                f'The part "{self._part}" has a Content-Transfer-Encoding; send it unencoded.', param=self._part
            )

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        form, name = self._form, self._part
        if name != form.file:
            if len(self.short[name]) + end - start > form.short[name]:
                raise PayloadTooLarge(f'The part "{name}" exceeds the limit of {form.short[name]} bytes.', param=name)
            self.short[name] += data[start:end]
            return
        self._num_file_bytes += end - start
        if self._num_file_bytes > form.max_file_bytes:
            raise PayloadTooLarge(f'The part "{name}" exceeds the limit of {form.max_file_bytes} bytes.', param=name)
        if len(self.first) < len(form.alone):
            self.first += data[start : min(end, start + len(form.alone) - len(self.first))]
        # no copy on the way
        self.files[-1] += memoryview(data)[start:end]

    def _end(self) -> None:
        self.is_complete = True
