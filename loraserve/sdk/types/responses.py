"""Answers of `/v1/responses`."""

from __future__ import annotations

from loraserve.contract.response import IncompleteDetails as IncompleteDetails
from loraserve.contract.response import ModelResponse as ModelResponse
from loraserve.contract.response import OutputItem as OutputItem
from loraserve.contract.response import OutputPart as OutputPart
from loraserve.contract.response import ResponseUsage as ResponseUsage
from loraserve.contract.usage import ReasoningDetails as ReasoningDetails
