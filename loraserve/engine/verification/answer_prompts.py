"""Prompts that adapters answer while they are verified.

They are a few plain messages in the base's own chat template, so that an adapter gives answers of
its own kind. Of a base without a tokenizer they are arbitrary tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from loraserve.adapters.ir import AdapterIR
from loraserve.engine.verification.comparison import filler
from loraserve.errors import LoraserveError
from loraserve.types import BaseSpec

logger = logging.getLogger(__name__)

MESSAGES = (
    "How many of our orders were late last month?",
    "Maria Lopez, 52, is a doctor in Lisbon.",
    "Please tell me something about the spring.",
)
LARGE_PARAMETERS = 2_000_000_000
"""Parameters from which a base gets two of the messages, and shorter answers."""
_FILLER_TOKENS = 8
_MAX_PROMPT_TOKENS = 96
"""Tokens of a prompt, from its end: a template's own instructions may be long."""


class AnswerPrompts:
    """Prompts of one base, made when they are first needed.

    Args:
        template_file: chat template in the place of the checkpoint's; None: the checkpoint's.

    Attributes:
        max_answer_tokens: cap on the tokens of each answer.
    """

    def __init__(self, model_dir: Path, base: BaseSpec, template_file: str | None = None) -> None:
        is_large = base.num_parameters > LARGE_PARAMETERS
        self.max_answer_tokens = 10 if is_large else 12
        self._messages = MESSAGES[:2] if is_large else MESSAGES
        self._model_dir, self._base = model_dir, base
        self._template_file = None if template_file is None else Path(template_file)
        self._prompts: tuple[tuple[int, ...], ...] | None = None

    def of(self, adapters: Sequence[AdapterIR]) -> tuple[tuple[int, ...], ...]:
        """List the token ids of each prompt, with the invocation of an activated adapter.

        Empty where the base's context has no room for a prompt and its answer.
        """
        if self._prompts is None:
            self._prompts = self._make()
        invocation = next((ir.invocation_token_ids for ir in adapters if ir.invocation_token_ids), ())
        room = min(_MAX_PROMPT_TOKENS, self._base.max_model_len - self.max_answer_tokens - 1) - len(invocation)
        return tuple((*prompt[-room:], *invocation) for prompt in self._prompts) if room > 0 else ()

    def _make(self) -> tuple[tuple[int, ...], ...]:
        try:
            prompts = self._render()
        except (LoraserveError, ImportError) as error:
            logger.info("certificates use arbitrary tokens for prompts: %s", error)
            prompts = []
        size = self._base.vocab_size
        if not prompts or any(not prompt or max(prompt) >= size for prompt in prompts):
            prompts = [filler(size, 2 + number, _FILLER_TOKENS, ()) for number in range(len(self._messages))]
        return tuple(tuple(prompt) for prompt in prompts)

    def _render(self) -> list[list[int]]:
        # a bare machine has neither tokenizers nor jinja
        from loraserve.text.chat_template import ChatTemplate
        from loraserve.text.tokenizer import Tokenizer

        tokenizer = Tokenizer(self._model_dir)
        template = ChatTemplate(self._model_dir, tokenizer, file=self._template_file)
        if not template.is_available:
            return [tokenizer.encode(message) for message in self._messages]
        texts = [template.render([{"role": "user", "content": message}], True) for message in self._messages]
        return [tokenizer.encode(text, add_special_tokens=False) for text in texts]
