"""Answers of inference: OpenAI's shapes, with vLLM's additions."""

from __future__ import annotations

from loraserve.contract.chat import ChatChoice as ChatChoice
from loraserve.contract.chat import ChatChunkChoice as ChatChunkChoice
from loraserve.contract.chat import ChatCompletion as ChatCompletion
from loraserve.contract.chat import ChatCompletionChunk as ChatCompletionChunk
from loraserve.contract.chat import ChatLogprobs as ChatLogprobs
from loraserve.contract.chat import ChatMessage as ChatMessage
from loraserve.contract.chat import FunctionCall as FunctionCall
from loraserve.contract.chat import TokenLogprob as TokenLogprob
from loraserve.contract.chat import ToolCall as ToolCall
from loraserve.contract.chat import TopLogprob as TopLogprob
from loraserve.contract.completion import Completion as Completion
from loraserve.contract.completion import CompletionChoice as CompletionChoice
from loraserve.contract.completion import CompletionLogprobs as CompletionLogprobs
from loraserve.contract.completion import PromptLogprob as PromptLogprob
from loraserve.contract.completion import Tokens as Tokens
from loraserve.contract.server import Model as Model
from loraserve.contract.server import ModelList as ModelList
from loraserve.contract.usage import PromptTokensDetails as PromptTokensDetails
from loraserve.contract.usage import Usage as Usage
