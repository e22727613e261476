"""Declare what routes' signatures lack: bodies, headers, and answers beside the usual one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from loraserve.adapters.extra_files import FILE_NAMES, INDEX, INDEX_FILE, TOKENIZER
from loraserve.api.anthropic.body import MessageBody, MessageTokensBody
from loraserve.api.comparison import Comparison
from loraserve.api.inference.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    RerankBody,
    ScoreBody,
    TokenizeBody,
)
from loraserve.api.live_adapters.sglang import (
    LoadLoraAdapterFromTensors,
    LoadLoraAdapterOfSglang,
    UnloadLoraAdapterOfSglang,
)
from loraserve.api.live_adapters.vllm import LoadLoraAdapter, UnloadLoraAdapter
from loraserve.api.lorax.schemas import GenerateBody
from loraserve.api.management.admin_keys import AdminKeyCreate
from loraserve.api.management.aliases import AliasChange
from loraserve.api.management.comparison.evaluations import EvaluationBody
from loraserve.api.management.keys import KeyCreate
from loraserve.api.management.lifecycle import AdapterEdit, VersionEdit
from loraserve.api.management.operations import PullCreate
from loraserve.api.management.payloads.new_keys import KeyRotation
from loraserve.api.management.tenants import TenantCreate, TenantPatch
from loraserve.api.management.uploads import UploadCreate
from loraserve.api.ollama.answer import NDJSON
from loraserve.api.ollama.body import OllamaChatBody, OllamaGenerateBody
from loraserve.api.ollama.embeddings import OllamaEmbedBody, OllamaEmbeddingsBody
from loraserve.api.ollama.models import OllamaShowBody
from loraserve.api.openai.batches import BatchCreate
from loraserve.api.openai.responses.body import ResponseBody
from loraserve.contract.chat import ChatCompletion, Message
from loraserve.contract.completion import Completion, Generated, Text, Tokens
from loraserve.contract.ollama.answers import OllamaChat, OllamaGeneration, OllamaVector, OllamaVectors
from loraserve.contract.pooling import EmbeddingList, Reranking, ScoreList
from loraserve.contract.response import ModelResponse
from loraserve.contract.server import Health

Schema = Mapping[str, Any]
Content = Mapping[str, type[BaseModel] | Schema]
"""Media type → what is in it."""

JSON, BYTES, EVENTS, CSV = "application/json", "application/octet-stream", "text/event-stream", "text/csv"
METRICS, JSONL = "text/plain", "application/jsonl"
_BINARY: Schema = {"type": "string", "format": "binary"}
_EVENTS: Schema = {"type": "string", "description": "`data: {…}` lines, and `data: [DONE]` at the end."}
_NAMED_EVENTS: Schema = {
    "type": "string",
    "description": "`event: NAME` and `data: {…}` lines.",
}
_COMPARED: Schema = {"description": "`event: NAME` and `data: {…}` lines; `index` says of which request."}
_TOKENIZER_INFO: Schema = {
    "type": "object",
    "properties": {"tokenizer_class": {"type": "string"}, "chat_template": {"type": "string"}},
    "required": ["tokenizer_class"],
    "additionalProperties": True,
}
_GENERATED: Schema = {"$ref": "#/components/schemas/Generated"}
_TOKENS: Schema = {"description": "`data: {…}` lines, one per token; the last has the generated text and its details."}
_LINES: Schema = {"description": "Lines of JSON, each with a piece; the last is done, and has counts and times."}
_SHA256: Schema = {"type": "string", "pattern": "^[0-9a-f]{64}$"}

_UPLOADED_FILES: Schema = {
    "type": "object",
    "properties": {
        "config": {**_BINARY, "description": "adapter_config.json; of a GGUF file, nothing."},
        "weights": {**_BINARY, "description": "Several of these parts are the shards that index names."},
        **dict.fromkeys((*FILE_NAMES, INDEX), _BINARY),
    },
    "required": ["weights"],
}
_STORED_UPLOAD: Schema = {
    "type": "object",
    "properties": {
        "config": {"type": "object", "description": "adapter_config.json; of a GGUF file, nothing."},
        "blob": _SHA256,
        INDEX: {
            "type": "string",
            "minLength": 1,
            "description": f"{INDEX_FILE}, whose files the blob is, one after the other.",
        },
        **{name: {"type": "string", "minLength": 1, "description": file} for name, file in FILE_NAMES.items()},
        TOKENIZER: {
            "type": "string",
            "description": "Summary of the adapter's own tokenizer, which loraserve's client makes of its files: "
            "added tokens are served, another vocabulary than the base's is refused.",
        },
    },
    "required": ["blob"],
    "additionalProperties": False,
}

_FILE: Schema = {
    "type": "object",
    "properties": {
        "file": _BINARY,
        "purpose": {"type": "string", "enum": ["batch"]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer"},
    },
    "required": ["file", "purpose"],
}

_SCORE = ("/v1/score", "/score")
_RERANK = ("/v1/rerank", "/rerank", "/v2/rerank")

BODIES: Mapping[str, Content] = {
    "POST /v1/completions": {JSON: CompletionBody},
    "POST /v1/chat/completions": {JSON: ChatBody},
    "POST /v1/responses": {JSON: ResponseBody},
    "POST /v1/responses/input_tokens": {JSON: ResponseBody},
    "POST /v1/messages": {JSON: MessageBody},
    "POST /v1/messages/count_tokens": {JSON: MessageTokensBody},
    "POST /": {JSON: GenerateBody},
    "POST /generate": {JSON: GenerateBody},
    "POST /generate_stream": {JSON: GenerateBody},
    "POST /api/chat": {JSON: OllamaChatBody},
    "POST /api/generate": {JSON: OllamaGenerateBody},
    "POST /api/embed": {JSON: OllamaEmbedBody},
    "POST /api/embeddings": {JSON: OllamaEmbeddingsBody},
    "POST /api/show": {JSON: OllamaShowBody},
    "POST /v1/embeddings": {JSON: EmbeddingBody},
    **{f"POST {path}": {JSON: ScoreBody} for path in _SCORE},
    **{f"POST {path}": {JSON: RerankBody} for path in _RERANK},
    "POST /v1/files": {"multipart/form-data": _FILE},
    "POST /v1/batches": {JSON: BatchCreate},
    "POST /tokenize": {JSON: TokenizeBody},
    "POST /detokenize": {JSON: DetokenizeBody},
    "POST /v1/load_lora_adapter": {JSON: LoadLoraAdapter},
    "POST /v1/unload_lora_adapter": {JSON: UnloadLoraAdapter},
    "POST /load_lora_adapter": {JSON: LoadLoraAdapterOfSglang},
    "POST /load_lora_adapter_from_tensors": {
        JSON: LoadLoraAdapterFromTensors,
        "multipart/form-data": _UPLOADED_FILES,
    },
    "POST /unload_lora_adapter": {JSON: UnloadLoraAdapterOfSglang},
    "POST /api/v1/adapters/{name}/versions": {"multipart/form-data": _UPLOADED_FILES, JSON: _STORED_UPLOAD},
    "POST /api/v1/adapters/{name}/pulls": {JSON: PullCreate},
    "PATCH /api/v1/adapters/{name}": {JSON: AdapterEdit},
    "PATCH /api/v1/adapters/{name}/versions/{number}": {JSON: VersionEdit},
    "PUT /api/v1/adapters/{name}/aliases/{alias}": {JSON: AliasChange},
    "PUT /api/v1/adapters/{name}/versions/{number}/evaluations/{sha256}": {JSON: EvaluationBody},
    "POST /api/v1/uploads": {JSON: UploadCreate},
    "PATCH /api/v1/uploads/{upload_id}": {BYTES: _BINARY},
    "POST /api/v1/tenants": {JSON: TenantCreate},
    "PATCH /api/v1/tenants/{tenant}": {JSON: TenantPatch},
    "POST /api/v1/tenants/{tenant}/keys": {JSON: KeyCreate},
    "POST /api/v1/tenants/{tenant}/keys/{key_id}/rotate": {JSON: KeyRotation},
    "POST /api/v1/keys": {JSON: KeyCreate},
    "POST /api/v1/keys/{key_id}/rotate": {JSON: KeyRotation},
    "POST /api/v1/admin-keys": {JSON: AdminKeyCreate},
    "POST /api/v1/admin-keys/{admin_key_id}/rotate": {JSON: KeyRotation},
    "POST /api/v1/compare": {JSON: Comparison},
}
"""Bodies by method and path; routes under /t/{tenant} have the same."""

NO_BODY = frozenset(
    {
        "PUT /api/v1/adapters/{name}/grants/{tenant}",
        "POST /api/v1/adapters/{name}/restore",
        "POST /api/v1/adapters/{name}/versions/{number}/restore",
        "POST /api/v1/adapters/{name}/versions/{number}/verify",
        "POST /api/v1/adapters/{name}/versions/{number}/warm",
        "POST /api/v1/adapters/{name}/versions/{number}/pin",
        "POST /api/v1/adapters/{name}/versions/{number}/unpin",
        "POST /api/v1/adapters/{name}/aliases/{alias}/rollback",
        "POST /v1/batches/{batch_id}/cancel",
        "POST /ping",
        "POST /pause",
        "POST /resume",
    }
)
"""Routes that could have a body, and take none."""

ANSWERS: Mapping[str, Content] = {
    "GET /livez": {JSON: Health},
    "GET /readyz": {JSON: Health},
    "GET /health": {JSON: Health},
    "GET /ping": {JSON: Health},
    "POST /ping": {JSON: Health},
    "GET /metrics": {METRICS: {"type": "string"}},
    "POST /v1/completions": {JSON: Completion, EVENTS: _EVENTS},
    "POST /v1/chat/completions": {JSON: ChatCompletion, EVENTS: _EVENTS},
    "POST /v1/responses": {JSON: ModelResponse, EVENTS: _NAMED_EVENTS},
    "POST /v1/messages": {JSON: Message, EVENTS: _NAMED_EVENTS},
    "GET /v1/responses/{response_id}": {JSON: ModelResponse},
    "POST /": {JSON: {"type": "array", "items": _GENERATED}, EVENTS: _TOKENS},
    "POST /generate": {JSON: Generated, EVENTS: _TOKENS},
    "POST /generate_stream": {EVENTS: _TOKENS},
    "POST /api/chat": {JSON: OllamaChat, NDJSON: _LINES},
    "POST /api/generate": {JSON: OllamaGeneration, NDJSON: _LINES},
    "POST /api/embed": {JSON: OllamaVectors},
    "POST /api/embeddings": {JSON: OllamaVector},
    "POST /v1/embeddings": {JSON: EmbeddingList},
    **{f"POST {path}": {JSON: ScoreList} for path in _SCORE},
    **{f"POST {path}": {JSON: Reranking} for path in _RERANK},
    "POST /tokenize": {JSON: Tokens},
    "POST /detokenize": {JSON: Text},
    "GET /v1/files/{file_id}/content": {JSONL: _BINARY},
    "GET /tokenizer_info": {JSON: _TOKENIZER_INFO},
    "GET /api/v1/adapters/{name}/versions/{number}/files/{file}": {JSON: {"type": "object"}, BYTES: _BINARY},
    "POST /api/v1/compare": {EVENTS: _COMPARED},
}
"""Answers that the routes' signatures don't declare."""

MORE_FORMS: Mapping[str, Content] = {
    "GET /api/v1/usage": {CSV: {"type": "string"}},
    "GET /api/v1/live": {EVENTS: _NAMED_EVENTS},
}
"""Media types beside the JSON in the signature."""

MORE_STATUSES: Mapping[str, tuple[int, ...]] = {
    "POST /api/v1/adapters/{name}/versions": (200,),
    "POST /api/v1/uploads": (200,),
    "PUT /api/v1/adapters/{name}/aliases/{alias}": (201,),
    "PUT /api/v1/adapters/{name}/versions/{number}/evaluations/{sha256}": (201,),
    "PUT /api/v1/adapters/{name}/grants/{tenant}": (201,),
    "POST /api/v1/adapters/{name}/versions/{number}/warm": (202,),
    "POST /api/v1/adapters/{name}/versions/{number}/pin": (202,),
    "POST /api/v1/adapters/{name}/versions/{number}/unpin": (202,),
}
"""Other statuses with the same answer."""

CONDITIONAL = frozenset(
    {
        "PUT /api/v1/adapters/{name}/aliases/{alias}",
        "DELETE /api/v1/adapters/{name}/aliases/{alias}",
        "POST /api/v1/adapters/{name}/aliases/{alias}/rollback",
        "PATCH /api/v1/tenants/{tenant}",
    }
)
"""Routes that heed ``If-Match``."""

GENERATING = frozenset({"POST /", "POST /generate", "POST /generate_stream"})
"""Routes with LoRAX's and TGI's errors."""

CHATS = frozenset(
    {
        "POST /v1/completions",
        "POST /v1/chat/completions",
        "POST /v1/responses",
        "POST /v1/messages",
        "POST /api/chat",
        "POST /api/generate",
    }
)
"""Routes that generate, beside LoRAX's."""

MESSAGES = frozenset({"POST /v1/messages", "POST /v1/messages/count_tokens"})
"""Routes with Anthropic's errors."""

OLLAMA = frozenset(
    {
        "GET /api/ps",
        "GET /api/tags",
        "GET /api/version",
        "POST /api/chat",
        "POST /api/embed",
        "POST /api/embeddings",
        "POST /api/generate",
        "POST /api/show",
    }
)
"""Routes with Ollama's errors."""

STORING = frozenset(
    {
        "POST /v1/load_lora_adapter",
        "POST /load_lora_adapter",
        "POST /load_lora_adapter_from_tensors",
        "POST /v1/files",
        "POST /api/v1/adapters/{name}/versions",
        "POST /api/v1/adapters/{name}/pulls",
        "POST /api/v1/uploads",
        "PATCH /api/v1/uploads/{upload_id}",
    }
)
"""Routes that can find the store full."""
