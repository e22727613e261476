"""GET /api/tags, /api/ps and /api/version, and POST /api/show."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from loraserve import __version__
from loraserve.api import scopes
from loraserve.api.inference.fields import ignored_header, json_fields, parse_body
from loraserve.api.inference.schemas import MAX_MODEL_LENGTH
from loraserve.api.ollama.latest_tag import find_model, tagged
from loraserve.api.residency_snapshot import IN_MEMORY
from loraserve.api.services import Services, services_of
from loraserve.contract.ollama.models import (
    OllamaDetails,
    OllamaLoadedModel,
    OllamaLoadedModelList,
    OllamaModel,
    OllamaModelDescription,
    OllamaModelList,
    OllamaVersion,
)
from loraserve.errors import InvalidRequest
from loraserve.registry.model_name import parse_model
from loraserve.tenancy.identity.auth import Caller
from loraserve.text.chat_format import ChatFormat
from loraserve.types import BaseSpec

if TYPE_CHECKING:
    from loraserve.adapters.config.generation_config import GenerationDefaults
    from loraserve.types import AdapterRef

router = APIRouter()

OLLAMA_VERSION = "0.33.0"
"""Version of Ollama whose API the routes answer."""
_SNAPSHOT_S = 2.0
"""Age of what all who ask for the loaded models share."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
"""Time of a base: files don't tell when a model was made."""
_NEVER = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
_UNITS = ((1_000_000_000, "B", 1), (1_000_000, "M", 2), (1_000, "K", 2))
_PARAMETERS = {"repetition_penalty": "repeat_penalty", "max_tokens": "num_predict"}
"""Defaults that Ollama's parameters call otherwise."""
_THINKING = ("enable_thinking", "thinking", "reasoning_effort")
"""Variables of templates that turn reasoning on."""

_require_inference = scopes.require(scopes.INFERENCE)


class OllamaShowBody(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, hide_input_in_errors=True)

    model: str = Field(default="", max_length=MAX_MODEL_LENGTH)
    name: str = Field(default="", max_length=MAX_MODEL_LENGTH)
    """Older name of the field `model`."""


@router.get("/tags")
async def list_tags(request: Request, caller: Caller = Depends(_require_inference)) -> OllamaModelList:
    """List the models of /v1/models, each with a tag in its name: ``NAME:latest``."""
    services = services_of(request)
    base = services.engine.base
    models = [
        OllamaModel(
            name=tagged(base.id),
            model=tagged(base.id),
            modified_at=_EPOCH,
            size=base.size_bytes,
            digest=base.digest,
            details=_details(services, is_base=True),
        )
    ]
    for one in await services.registry.list_servable(caller.tenant):
        if one.model != base.id:
            name = tagged(one.model)
            models.append(
                OllamaModel(
                    name=name,
                    model=name,
                    modified_at=one.created_at,
                    size=one.size_bytes,
                    digest=one.digest,
                    details=_details(services, is_base=False),
                )
            )
    return OllamaModelList(models=models)


@router.get("/ps")
async def list_loaded(request: Request, caller: Caller = Depends(_require_inference)) -> OllamaLoadedModelList:
    """List the base, and those of the listed adapters that are in memory by the tenant's own use.

    It is as it was at most two seconds ago.
    """
    services = services_of(request)
    base, used = services.engine.base, services.registry.last_used
    is_on_gpu = base.device == "cuda"
    models = [_loaded(services, base.id, base.digest, base.size_bytes, base.size_bytes if is_on_gpu else 0)]
    by_digest = (await services.residency.take(max_age_s=_SNAPSHOT_S)).by_digest
    for one in await services.registry.list_servable(caller.tenant):
        found = by_digest.get(one.digest)
        # weights that another tenant's use loaded would tell of that use
        is_own = found is not None and (caller.is_operator or used.has_used(caller.tenant, one.digest))
        if found is not None and is_own and found.tier in IN_MEMORY and one.model != base.id:
            size = found.device_bytes or found.host_bytes
            models.append(_loaded(services, one.model, one.digest, size, found.device_bytes if is_on_gpu else 0))
    return OllamaLoadedModelList(models=models)


@router.get("/version", dependencies=[Depends(_require_inference)])
async def get_version() -> OllamaVersion:
    """Return the version of Ollama whose API is answered, and this server's own."""
    return OllamaVersion(version=OLLAMA_VERSION, loraserve=__version__)


@router.post("/show")
async def show(
    request: Request,
    response: Response,
    caller: Caller = Depends(_require_inference),
    raw: dict[str, Any] = Depends(json_fields),
) -> OllamaModelDescription:
    """Describe one model, by any of its names.

    Raises:
        InvalidRequest: a field is wrong; `param` names it.
        ModelNotFound: the tenant has no such model.
        AdapterQuarantined: it isn't served.
    """
    services = services_of(request)
    body, ignored = parse_body(OllamaShowBody, raw)
    asked = body.model or body.name
    if not asked:
        raise InvalidRequest("model is missing.", param="model")
    response.headers.update(ignored_header(ignored))
    base = services.engine.base
    parsed = parse_model(await find_model(services, caller, asked), base.id)
    target = None if parsed.is_base else await services.registry.describe(caller.tenant, parsed)
    ref = None if target is None else target.ref
    chat_format = await services.version_chats.chat_format(caller.tenant, ref)
    parameters = _parameters(await services.version_chats.defaults(ref))
    # a granted version's own template is its owner's
    is_shown = ref is None or ref.tenant == caller.tenant or chat_format is services.chat_format
    return OllamaModelDescription(
        modelfile=_modelfile(base, ref, parameters),
        parameters="\n".join(f"{name:<30} {value}" for name, value in parameters),
        template=chat_format.template.source if is_shown else "",
        details=_details(services, is_base=ref is None),
        model_info=_model_info(base, ref),
        capabilities=_capabilities(chat_format),
        modified_at=_EPOCH if target is None else target.created_at,
    )


def _loaded(services: Services, model: str, digest: str, size: int, size_vram: int) -> OllamaLoadedModel:
    base = services.engine.base
    return OllamaLoadedModel(
        name=tagged(model),
        model=tagged(model),
        size=size,
        digest=digest,
        details=_details(services, is_base=model == base.id),
        expires_at=_NEVER,
        size_vram=size_vram,
        context_length=base.max_model_len,
    )


def _details(services: Services, *, is_base: bool) -> OllamaDetails:
    base = services.engine.base
    is_gguf = is_base and services.settings.model.endswith(".gguf")
    return OllamaDetails(
        parent_model="" if is_base else base.id,
        format="gguf" if is_gguf else "safetensors",
        family=base.architecture,
        families=[base.architecture],
        parameter_size=_human_number(base.num_parameters),
        quantization_level=base.dtype if base.quantization == "none" else base.quantization,
    )


def _human_number(number: int) -> str:
    for unit, letter, places in _UNITS:
        if number >= unit:
            return f"{number / unit:.{places}f}{letter}"
    return str(number)


def _parameters(defaults: GenerationDefaults) -> list[tuple[str, str]]:
    """List the defaults as a Modelfile's parameters."""
    found = [(_PARAMETERS.get(name, name), f"{value:g}") for name, value in defaults.as_fields().items()]
    return [*found, *(("stop", f'"{stop}"') for stop in defaults.stop_strings)]


def _modelfile(base: BaseSpec, ref: AdapterRef | None, parameters: list[tuple[str, str]]) -> str:
    adapter = [] if ref is None else [f"ADAPTER {ref.name}@{ref.version}"]
    return "\n".join([f"FROM {base.id}", *adapter, *(f"PARAMETER {name} {value}" for name, value in parameters)])


def _model_info(base: BaseSpec, ref: AdapterRef | None) -> dict[str, Any]:
    """Describe the base by GGUF's names, and the adapter on it."""
    family = base.architecture
    adapter = {} if ref is None else {"general.type": "adapter", "adapter.version": ref.version}
    return {
        "general.architecture": family,
        "general.basename": base.id if ref is None else ref.name,
        "general.parameter_count": base.num_parameters,
        f"{family}.block_count": base.num_layers,
        f"{family}.context_length": base.max_model_len,
        f"{family}.embedding_length": base.hidden_size,
        f"{family}.vocab_size": base.vocab_size,
        **adapter,
    }


def _capabilities(chat_format: ChatFormat) -> list[str]:
    template = chat_format.template
    has_tools = chat_format.tools is not None and (template.takes_tools or chat_format.writes_tools)
    reasons = chat_format.reasoning is not None and any(map(template.reads, _THINKING))
    return ["completion", *(["tools"] if has_tools else []), *(["thinking"] if reasons else [])]
