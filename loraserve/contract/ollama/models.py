"""Models, the version and errors in Ollama's shape."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from loraserve.contract.result import Result


class OllamaDetails(Result):
    parent_model: str
    """Id of the base; empty: this is the base."""
    format: str
    """gguf or safetensors."""
    family: str
    """Architecture of the base."""
    families: list[str]
    parameter_size: str
    """Number of the base's parameters, for people: ``8.0B``."""
    quantization_level: str
    """Format of the base's weights, or their data type."""


class OllamaModel(Result):
    """The base, or an adapter."""

    name: str
    model: str
    modified_at: datetime
    size: int
    """Bytes: of the base in memory, of an adapter's files."""
    digest: str
    details: OllamaDetails


class OllamaModelList(Result):
    models: list[OllamaModel]


class OllamaLoadedModel(Result):
    """A model in memory."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: datetime
    """The end of time: nothing is unloaded by the clock."""
    size_vram: int
    """Bytes of a GPU's memory."""
    context_length: int


class OllamaLoadedModelList(Result):
    models: list[OllamaLoadedModel]


class OllamaModelDescription(Result):
    """An answer of `/api/show`."""

    modelfile: str
    parameters: str
    """Defaults of options, a line each."""
    template: str
    """Chat template, in Jinja; empty: it is another tenant's."""
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: datetime


class OllamaVersion(Result):
    version: str
    """Version of Ollama whose API is answered: clients compare it."""
    loraserve: str
    """Version of this server."""


class OllamaError(Result):
    error: str
    code: str
    param: str | None
