"""Every error that loraserve raises on purpose.

An error knows what went wrong, never how HTTP says it: `loraserve.api.errors` maps a class to a
status.

    LoraserveError
    ├── ConfigError                 a flag, variable or file says something impossible
    │   ├── SchemaOutdated          the registry's tables aren't the ones this program works with
    │   └── StoreMismatch           the store isn't known to be this registry's
    ├── InvalidRequest              a request's field is wrong; `param` names it
    │   ├── UnsupportedParameter    a field that would change the answer and isn't implemented
    │   ├── ContextLengthExceeded   prompt + max_tokens don't fit the model
    │   ├── NoChatTemplate          messages for a model that takes prompts alone
    │   ├── ChatTemplateFailed      a version's own template makes no prompt of these messages
    │   ├── GrammarTooComplex       a grammar that takes too much to compile or to follow
    │   ├── GrammarDeadEnd          an answer begun, which nothing continues as its grammar asks
    │   ├── GrammarCrashed          a grammar over which its compiler crashed: a bug
    │   ├── PayloadTooLarge         a body, a header or a list is over its bound
    │   │   └── HeadersTooLarge
    │   ├── ContentEncodingUnsupported
    │   ├── MethodNotAllowed        the route exists, for other methods
    │   └── RequestTimeout          the request's body stopped coming
    ├── AuthenticationError         no key, a bad key, a revoked key
    ├── PermissionDenied            a good key without the scope
    ├── NotFound                    absent, or another tenant's: the two read the same
    │   ├── ModelNotFound
    │   ├── AdapterNotFound
    │   ├── VersionNotFound
    │   ├── AliasNotFound
    │   ├── TenantNotFound
    │   ├── KeyNotFound
    │   ├── GrantNotFound
    │   ├── UploadNotFound
    │   ├── ResponseNotFound        a stored response; `param` names the field that asked for it
    │   ├── OperationNotFound
    │   ├── FileNotFound
    │   └── BatchNotFound
    ├── Conflict                    the thing exists, or changed meanwhile
    │   ├── AlreadyExists
    │   ├── UploadOffsetMismatch    a piece of an upload doesn't begin where the last one ended
    │   ├── UploadDigestMismatch    an upload's bytes aren't those it was announced with
    │   ├── PreconditionFailed      If-Match named another version
    │   │   ├── NotEvaluated        a version has no evaluation that can be compared
    │   │   └── NotBetter           a version isn't better than the one that an alias points to
    │   └── IdempotencyKeyReused    the same Idempotency-Key came with another request
    ├── AdapterRejected             an upload that can't be served; `problems` lists every reason
    │   ├── AdapterFormatError      the files aren't what they claim to be
    │   ├── AdapterUnsupported      a config field that isn't implemented
    │   ├── AdapterBaseMismatch     shapes or layers that the base doesn't have
    │   ├── AdapterNotFinite        NaN or infinity in the weights
    │   └── AdapterUncertified      its certificate isn't passed, and the server asks for that
    ├── AdapterUnavailable          a published adapter can't be served now
    │   ├── AdapterCorrupt          its bytes no longer hash to its digest
    │   ├── AdapterNotReady         not on the device by the deadline: still loading, or no room
    │   ├── AdapterNumerics         its logits were not finite
    │   ├── AdapterQuarantined      its certificate failed, or its stored bytes were found damaged
    │   ├── AdapterOfAnotherBase    made for another base; has `AdapterBaseMismatch`'s code
    │   └── AdapterUnservable       it never can, on this base and device as this server was started
    │       └── AdapterTooLarge     it can never fit the memory budget
    ├── ModelError                  the base model can't be loaded
    │   ├── UnknownArchitecture
    │   ├── MissingTensor
    │   ├── UnexpectedTensor
    │   └── ShapeMismatch
    ├── Overloaded                  us, not you: the queue is full, or the server drains
    │   └── DatabaseUnavailable     the registry can't be read or written now
    │       └── DatabaseDamaged     its bytes are damaged, or cut off
    ├── RateLimited                 you, not us
    │   └── QuotaExceeded           the tenant's share of adapters, bytes or keys is used up
    ├── EngineError
    │   ├── EngineUnavailable       the engine isn't up (yet, or again)
    │   │   └── EngineDied          it was, and died before it answered this call
    │   ├── DeadlineExceeded        no token was made within the timeout that the request named
    │   └── EngineCrashed           the engine died twice under this request
    ├── StorageError
    │   ├── StorageFull
    │   ├── SourceTooSlow           where an adapter is pulled from sends its bytes too slowly
    │   ├── BlobNotFound
    │   ├── BlobCorrupt
    │   └── BackupDamaged           a backup isn't what was written, or lacks blobs
    ├── InvariantViolation          our own bug: counted in production, fatal in tests
    └── ClientError                 the SDK's own: no answer, or one that makes no sense
        ├── ConnectionFailed        nothing listens at the URL, or the connection broke
        ├── ClientTimeout           no answer within the client's timeout
        └── UnexpectedAnswer        an answer that no loraserve server gives
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class LoraserveError(Exception):
    """The root. `code` is stable and machine-readable; `hint` says what to do next.

    `status_code` and `request_id` are None but on errors that came back from a server: the SDK sets
    them, nothing else does.
    """

    code: str = "internal_error"
    status_code: int | None = None
    request_id: str | None = None

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}" if self.hint else self.message


class ConfigError(LoraserveError):
    code = "invalid_config"


class SchemaOutdated(ConfigError):
    code = "schema_outdated"


class StoreMismatch(ConfigError):
    code = "store_mismatch"


class InvalidRequest(LoraserveError):
    """`param` is the dotted path of the offending field, e.g. ``messages.0.content``."""

    code = "invalid_value"

    def __init__(self, message: str, *, param: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.param = param


class UnsupportedParameter(InvalidRequest):
    code = "unsupported_parameter"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class NoChatTemplate(InvalidRequest):
    code = "no_chat_template"


class ChatTemplateFailed(InvalidRequest):
    code = "chat_template_failed"


class GrammarTooComplex(InvalidRequest):
    code = "grammar_too_complex"


class GrammarDeadEnd(InvalidRequest):
    code = "grammar_dead_end"


class GrammarCrashed(InvalidRequest):
    code = "grammar_crashed"


class PayloadTooLarge(InvalidRequest):
    code = "payload_too_large"


class ContentEncodingUnsupported(InvalidRequest):
    code = "unsupported_content_encoding"


class HeadersTooLarge(PayloadTooLarge):
    code = "headers_too_large"


class MethodNotAllowed(InvalidRequest):
    code = "method_not_allowed"


class RequestTimeout(InvalidRequest):
    code = "request_timeout"


class AuthenticationError(LoraserveError):
    code = "invalid_api_key"


class PermissionDenied(LoraserveError):
    code = "permission_denied"


class NotFound(LoraserveError):
    code = "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"
    param: str | None = None
    """Field that names it, where that isn't `model`."""


class AdapterNotFound(NotFound):
    code = "adapter_not_found"


class VersionNotFound(NotFound):
    code = "version_not_found"


class AliasNotFound(NotFound):
    code = "alias_not_found"


class TenantNotFound(NotFound):
    code = "tenant_not_found"


class KeyNotFound(NotFound):
    code = "key_not_found"


class GrantNotFound(NotFound):
    code = "grant_not_found"


class UploadNotFound(NotFound):
    code = "upload_not_found"


class ResponseNotFound(NotFound):
    code = "response_not_found"

    def __init__(self, message: str, *, param: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.param = param


class OperationNotFound(NotFound):
    code = "operation_not_found"


class FileNotFound(NotFound):
    code = "file_not_found"


class BatchNotFound(NotFound):
    code = "batch_not_found"


class Conflict(LoraserveError):
    code = "conflict"


class AlreadyExists(Conflict):
    code = "already_exists"


class UploadOffsetMismatch(Conflict):
    """`received` is how many bytes are durable: where the next piece should begin.

    None where the error came from afar.
    """

    code = "upload_offset_mismatch"

    def __init__(self, message: str, *, received: int | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.received = received


class UploadDigestMismatch(Conflict):
    code = "upload_digest_mismatch"


class PreconditionFailed(Conflict):
    code = "precondition_failed"


class NotEvaluated(PreconditionFailed):
    code = "not_evaluated"


class NotBetter(PreconditionFailed):
    code = "not_better"


class IdempotencyKeyReused(Conflict):
    code = "idempotency_key_reused"


class AdapterRejected(LoraserveError):
    """An upload that can't be served. `problems` lists every reason found, not only the first."""

    code = "adapter_rejected"

    def __init__(self, message: str, *, problems: Sequence[str] = (), hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.problems = tuple(problems) or (message,)


class AdapterFormatError(AdapterRejected):
    code = "adapter_format"


class AdapterUnsupported(AdapterRejected):
    code = "adapter_unsupported"


class AdapterBaseMismatch(AdapterRejected):
    code = "adapter_base_mismatch"


class AdapterNotFinite(AdapterRejected):
    code = "adapter_not_finite"


class AdapterUncertified(AdapterRejected):
    """An upload without a passed certificate, to a server that asks for one."""

    code = "adapter_uncertified"


class AdapterUnavailable(LoraserveError):
    code = "adapter_unavailable"


class AdapterCorrupt(AdapterUnavailable):
    """`digest` is the version's, and `blob` the damaged one; of a composition its part's.

    Both are None where the error came from afar.
    """

    code = "adapter_corrupt"

    def __init__(
        self, message: str, *, digest: str | None = None, blob: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.digest = digest
        self.blob = blob


class AdapterNotReady(AdapterUnavailable):
    code = "adapter_not_ready"
    retry_after_s = 5.0
    """Its load goes on meanwhile."""


class AdapterNumerics(AdapterUnavailable):
    code = "adapter_numerics"


class AdapterQuarantined(AdapterUnavailable):
    code = "adapter_quarantined"


class AdapterOfAnotherBase(AdapterUnavailable):
    """A published version isn't of the base that this server serves.

    For clients it is the same finding as `AdapterBaseMismatch`, and has its `code`: of an upload
    the status is 422, of a version 409. `param` names the version: ``sql@3``.
    """

    code = "adapter_base_mismatch"

    def __init__(self, message: str, *, param: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.param = param


class AdapterUnservable(AdapterUnavailable):
    code = "adapter_unservable"


class AdapterTooLarge(AdapterUnservable):
    code = "adapter_too_large"


class ModelError(LoraserveError):
    code = "model_error"


class UnknownArchitecture(ModelError):
    code = "unknown_architecture"


class MissingTensor(ModelError):
    code = "missing_tensor"


class UnexpectedTensor(ModelError):
    code = "unexpected_tensor"


class ShapeMismatch(ModelError):
    code = "shape_mismatch"


class TokenizerMismatch(ModelError):
    code = "tokenizer_mismatch"


class Overloaded(LoraserveError):
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class DatabaseUnavailable(Overloaded):
    code = "database_unavailable"


class DatabaseDamaged(DatabaseUnavailable):
    code = "database_damaged"


class RateLimited(LoraserveError):
    """`kind` is what there was too much of: ``requests`` or ``tokens``."""

    code = "rate_limit_exceeded"

    def __init__(
        self, message: str, *, retry_after_s: float = 1.0, kind: str = "requests", hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s
        self.kind = kind


class QuotaExceeded(RateLimited):
    code = "insufficient_quota"


class EngineError(LoraserveError):
    code = "engine_error"


class EngineUnavailable(EngineError):
    code = "engine_unavailable"


class EngineDied(EngineUnavailable):
    """The same as its parent to clients, and of the same `code`.

    What was asked for may be what killed it.
    """


class DeadlineExceeded(EngineError):
    code = "deadline_exceeded"


class EngineCrashed(EngineError):
    code = "engine_crashed"


class StorageError(LoraserveError):
    code = "storage_error"


class StorageFull(StorageError):
    code = "storage_full"


class SourceTooSlow(StorageError):
    code = "source_too_slow"


class BlobNotFound(StorageError):
    code = "blob_not_found"


class BlobCorrupt(StorageError):
    code = "blob_corrupt"


class BackupDamaged(StorageError):
    code = "backup_damaged"


class InvariantViolation(LoraserveError):
    """Something that must always hold doesn't. Never caused by input; its catcher counts it."""

    code = "internal_error"


class ClientError(LoraserveError):
    code = "client_error"


class ConnectionFailed(ClientError):
    code = "connection_failed"


class ClientTimeout(ClientError):
    code = "client_timeout"


class UnexpectedAnswer(ClientError):
    code = "unexpected_answer"


def timeout_error(timeout_s: float) -> DeadlineExceeded:
    """Return the error of a request that timed out before its first token."""
    return DeadlineExceeded(
        f"The request got no token within its timeout of {timeout_s:g} s.",
        hint="Try again later, or set a longer timeout.",
    )


def closest(word: str, known: Iterable[str]) -> str | None:
    """Find the known word that a mistyped one may mean, in any case; None: none is near."""
    by_key = {one.lower(): one for one in known}
    found = difflib.get_close_matches(word.lower(), by_key, n=1)
    return by_key[found[0]] if found else None


def error_from_code(code: str, message: str) -> LoraserveError:
    """Return an error of the class that has this code; unknown codes give the root.

    So an error comes back from another process. Of two classes with one code it is the one that the
    tree names first.
    """
    todo: list[type[LoraserveError]] = [LoraserveError]
    while todo:
        cls = todo.pop()
        if cls.code == code:
            return cls(message)
        todo.extend(reversed(cls.__subclasses__()))
    return LoraserveError(message)
