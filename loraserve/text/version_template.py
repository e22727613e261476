"""A version's own chat template: it is a tenant's, so that it isn't rendered in this process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from loraserve.text.chat_template import TemplateText, check_variables
from loraserve.text.template_worker import RenderMessages


class VersionTemplate(TemplateText):
    """Template of a version, as questions to the process that renders it.

    Args:
        name: name of the version, for messages.
    """

    def __init__(self, name: str, source: str, read: Iterable[str]) -> None:
        super().__init__({"default": source}, read)
        self._name = name

    def question(
        self,
        tenant: str,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        continues_last: bool = False,
    ) -> bytes:
        """Encode the question for the prompt of `messages`.

        Args:
            tenant: the one whose request it is.
            continues_last: whether the prompt ends with the last message's text.

        Raises:
            InvalidRequest: a variable has a field of its own.
        """
        check_variables(variables or {})
        return msgspec.json.encode(
            RenderMessages(
                name=self._name,
                source=self.source,
                tenant=tenant,
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None if tools is None else list(tools),
                variables=dict(variables or {}),
                continues_last=continues_last,
            )
        )
