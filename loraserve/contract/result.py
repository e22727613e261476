"""Base of every answer's shape, the envelope of an answer, pages of lists, and errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, PrivateAttr, WithJsonSchema
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

if TYPE_CHECKING:
    import httpx2

_RATE = "x-ratelimit-"
_NULL = {"type": "null"}


@dataclass(frozen=True, slots=True)
class Sent:
    """Mark of a field that the server sends in fewer forms than a client reads.

    It changes the schema of what is sent, and no validation.
    """

    words: tuple[str, ...] = ()
    """Strings that this release sends; a newer one may send others."""
    is_never_null: bool = False
    """None stands for an older server, or for a chunk of a stream."""
    is_optional: bool = False
    """The server leaves the field out where it has nothing to say."""
    is_streamed: bool = False
    """Only chunks of a stream have the field."""


ALWAYS = Sent(is_never_null=True)
OPTIONAL = Sent(is_optional=True)
STREAMED = Sent(is_streamed=True)
ALWAYS_NULL = WithJsonSchema({"type": "null"}, mode="serialization")


@dataclass(frozen=True, slots=True)
class DictOf:
    """Mark of a dict whose keys are those of a shape, and that programs read by key."""

    shape: type[Result]

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        if handler.mode != "serialization":
            return handler(core_schema)
        return self.shape.__get_pydantic_json_schema__(self.shape.__pydantic_core_schema__, handler)


def one_of(*words: str) -> Sent:
    """Mark a field that is sent as one of these words, and never as null."""
    return Sent(words=words, is_never_null=True)


@dataclass(frozen=True, slots=True)
class Answer:
    """The envelope of one answer: the status and the headers that say something about it."""

    status_code: int
    request_id: str | None = None
    adapter: str | None = None
    """`NAME@VERSION`, `OWNER/NAME@VERSION` of one that was granted, or the sum of such, that
    answered an inference request; None for the base.
    """
    fell_back_from: str | None = None
    """The version, written as `adapter`, that was asked for and couldn't answer; `adapter`, or the
    base's id there, answered in its place.
    """
    fell_back_for: str | None = None
    """The code of the error that it would have been."""
    etag: str | None = None
    """The resource's ETag, for `if_match`."""
    ignored: tuple[str, ...] = ()
    """Fields of the request that the server doesn't know and that don't change the answer."""
    did_you_mean: Mapping[str, str] = field(default_factory=dict)
    """Ignored fields that may be misspelt, and the field that is meant by each: `temprature` →
    `temperature`.
    """
    server_timing: str | None = None
    rate_limits: Mapping[str, str] = field(default_factory=dict)
    """The tenant's rate limits: ``x-ratelimit-limit-requests`` under the key ``limit-requests``."""

    @classmethod
    def of(cls, response: httpx2.Response) -> Answer:
        headers = response.headers
        ignored = headers.get("x-loraserve-ignored", "")
        adapter, *said = (part.strip() for part in headers.get("x-loraserve-adapter", "").split(";"))
        fallback = dict(part.partition("=")[::2] for part in said)
        return cls(
            status_code=response.status_code,
            request_id=headers.get("x-request-id"),
            adapter=adapter or None,
            fell_back_from=fallback.get("fallback-from"),
            fell_back_for=fallback.get("reason"),
            etag=headers.get("etag"),
            ignored=tuple(name.strip() for name in ignored.split(",") if name.strip()),
            did_you_mean={
                name.strip(): meant.strip()
                for name, equals, meant in (
                    part.partition("=") for part in headers.get("x-loraserve-did-you-mean", "").split(",")
                )
                if equals
            },
            server_timing=headers.get("server-timing"),
            rate_limits={name.removeprefix(_RATE): value for name, value in headers.items() if name.startswith(_RATE)},
        )


class Result(BaseModel):
    """The result of a call. Fields unknown to this client are kept, and readable as attributes."""

    # a client uses few of the shapes: each is compiled at its first use
    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=(), defer_build=True)

    _answer: Answer | None = PrivateAttr(default=None)

    @property
    def answer(self) -> Answer | None:
        """Request id, ETag and the like.

        None for an object that came inside another (a list's row, a stream's chunk).
        """
        return self._answer

    @property
    def etag(self) -> str | None:
        """The resource's state when it was read, for `if_match`."""
        return self._answer.etag if self._answer is not None else None

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Describe what the server sends: every field, but for optional ones, and no defaults."""
        reference = handler(core_schema)
        if handler.mode == "serialization" and cls.model_fields:
            schema = handler.resolve_ref_schema(reference)
            schema.pop("additionalProperties", None)
            properties, required = schema["properties"], []
            for name, info in cls.model_fields.items():
                mark = sent_as(info)
                if mark.is_streamed:
                    del properties[name]
                    continue
                properties[name] = _narrowed(properties[name], mark)
                if not mark.is_optional:
                    required.append(name)
            schema.pop("required", None)
            schema |= {"required": required} if required else {}
        return reference


R = TypeVar("R", bound=Result)


class Page(Result, Generic[R]):
    """A page of a list, and the cursor of the next."""

    data: list[R]
    next_cursor: str | None = None
    """Pass it as ``cursor`` for the next page; None: this is the last."""


class IdPage(Result, Generic[R]):
    """Page of a list of OpenAI's API: the next one follows the row `last_id`."""

    object: Annotated[str, one_of("list")] = "list"
    data: list[R]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class ErrorDetail(Result):
    message: str
    type: str
    param: str | None
    code: str


class Error(Result):
    """OpenAI's envelope."""

    error: ErrorDetail


class MessageErrorDetail(Result):
    type: str
    message: str
    code: str
    param: str | None
    details: Annotated[dict[str, Any] | None, OPTIONAL, ALWAYS] = None
    """``error_code`` and ``unsupported`` of a field that clients can do without."""


class MessageError(Result):
    """Anthropic's error."""

    type: Annotated[str, one_of("error")]
    error: MessageErrorDetail
    request_id: str | None


class GenerateError(Result):
    """LoRAX's and TGI's error."""

    error: str
    error_type: str
    code: str
    param: str | None


class ProblemDetail(Result):
    detail: str
    field: str | None


class Problem(Result):
    """RFC 9457's problem document."""

    type: Annotated[str, one_of("about:blank")]
    title: str
    status: int
    detail: str
    code: str
    """Stable, for programs."""
    errors: list[ProblemDetail]
    """Errors, an entry per thing that is wrong."""
    request_id: str | None
    received: Annotated[int | None, OPTIONAL, ALWAYS] = None
    """Offset of the next piece; only with ``upload_offset_mismatch``."""


def sent_as(info: FieldInfo) -> Sent:
    """Merge the marks of a field into one."""
    marks = [mark for mark in info.metadata if isinstance(mark, Sent)]
    return Sent(
        words=next((mark.words for mark in marks if mark.words), ()),
        is_never_null=any(mark.is_never_null for mark in marks),
        is_optional=any(mark.is_optional for mark in marks),
        is_streamed=any(mark.is_streamed for mark in marks),
    )


def _narrowed(node: dict[str, Any], mark: Sent) -> dict[str, Any]:
    """Narrow a property's schema to what its mark says, without a default."""
    kept = {key: value for key, value in node.items() if key != "default"}
    if mark.is_never_null and _NULL in kept.get("anyOf", ()):
        forms = [form for form in kept.pop("anyOf") if form != _NULL]
        kept |= forms[0] if len(forms) == 1 else {"anyOf": forms}
    if mark.words:
        kept |= {"const": mark.words[0]} if len(mark.words) == 1 else {"enum": list(mark.words)}
    return kept
