"""The table of tool call formats, and the format of a chat template."""

from __future__ import annotations

from collections.abc import Mapping

from loraserve.text.tokenizer import Tokenizer
from loraserve.text.tool_parsers.format import ToolFormat
from loraserve.text.tool_parsers.functiongemma import FunctionGemma
from loraserve.text.tool_parsers.generic import Generic
from loraserve.text.tool_parsers.granite import Granite
from loraserve.text.tool_parsers.hermes import Hermes
from loraserve.text.tool_parsers.llama3_json import Llama3Json
from loraserve.text.tool_parsers.mistral import Mistral
from loraserve.text.tool_parsers.phi4_mini_json import Phi4MiniJson
from loraserve.text.tool_parsers.pythonic import Pythonic
from loraserve.text.tool_parsers.qwen3_coder import Qwen3Coder

# In the order in which a template is tried: Hermes' marker is in the templates of several others.
_FORMATS: tuple[type[ToolFormat], ...] = (
    FunctionGemma,
    Mistral,
    Qwen3Coder,
    Granite,
    Phi4MiniJson,
    Hermes,
    Pythonic,
    Llama3Json,
)
TOOL_FORMATS: Mapping[str, type[ToolFormat]] = {format_.name: format_ for format_ in _FORMATS} | {
    "generic": Generic,
    "granite4": Hermes,
    "llama4_json": Llama3Json,
    "llama4_pythonic": Pythonic,
    "qwen3_xml": Qwen3Coder,
}
"""Formats by their names in vLLM's ``--tool-call-parser``, and ``generic``."""


def tool_format(name: str, tokenizer: Tokenizer, template: str, *, takes_tools: bool = True) -> ToolFormat | None:
    """Choose the format of a name; None: there is none.

    ``auto`` is the format that the chat template's text shows.

    Args:
        takes_tools: whether tools reach the prompt by the template; otherwise ``auto`` is generic.
    """
    chosen: type[ToolFormat] | None
    if name != "auto":
        chosen = TOOL_FORMATS.get(name)
    elif not takes_tools:
        chosen = Generic
    else:
        chosen = next((format_ for format_ in _FORMATS if format_.is_of(template)), None)
    return None if chosen is None else chosen(tokenizer, template)
