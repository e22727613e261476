"""Render versions' chat templates in processes of their own, in tenants' turns."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping

import msgspec

from loraserve.errors import ChatTemplateFailed, EngineUnavailable, InvalidRequest
from loraserve.limits import LIMITS, Limits
from loraserve.memory.timings import Timings
from loraserve.tenancy.limits.processes import START_S, TenantProcesses
from loraserve.text.template_worker import InspectTemplate, TemplateAnswer, TemplateSetup
from loraserve.text.workers.process import WorkerDied, WorkerProcess, WorkerStartFailed
from loraserve.types import Histogram

logger = logging.getLogger(__name__)

_MODULE = "loraserve.text.template_worker"

RENDERED, REFUSED, KILLED = "rendered", "refused", "killed"
OUTCOMES = (RENDERED, REFUSED, KILLED)


class TemplateRenderer:
    """Have processes render prompts and inspect templates.

    Args:
        special_tokens: called when a process is made.

    Attributes:
        num_by_outcome: questions since the start. `REFUSED`: the template made no prompt; `KILLED`:
            neither did its process, which was over its bounds.
    """

    def __init__(
        self,
        special_tokens: Callable[[], Mapping[str, str]],
        *,
        limits: Limits = LIMITS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.num_by_outcome: Counter[str] = Counter()
        self._special_tokens, self._limits, self._clock = special_tokens, limits, clock
        self._processes = TenantProcesses(self._make)
        self._seconds = Timings()

    @property
    def render_s(self) -> Histogram:
        """Seconds of each question, with the way to the process and without the wait for one."""
        return self._seconds.histogram

    @property
    def num_waiting(self) -> int:
        """Questions that wait for a process."""
        return self._processes.num_waiting

    @property
    def num_starts(self) -> int:
        """Processes since the start."""
        return self._processes.num_starts

    async def inspect(self, tenant: str, source: str) -> TemplateAnswer:
        """Inspect a template: find its `problems`, or what it reads.

        Raises:
            EngineUnavailable: no process can be started.
        """
        answer = await self._ask(tenant, msgspec.json.encode(InspectTemplate(source=source, tenant=tenant)))
        if answer is None:
            return TemplateAnswer(problems=("it takes more time, memory or stack than a template may",))
        return answer

    async def render(self, tenant: str, question: bytes) -> str:
        """Render the prompt of a `VersionTemplate.question`.

        Args:
            tenant: the one whose request it is.

        Raises:
            ChatTemplateFailed: the template refuses these messages, or is over its bounds.
            InvalidRequest: the last message can't be continued.
            EngineUnavailable: no process can be started.
        """
        answer = await self._ask(tenant, question)
        if answer is None or answer.is_spent:
            name = msgspec.json.decode(question, type=_Named).name
            raise ChatTemplateFailed(
                f"The chat template of {name} takes more time, memory or stack than it may for these messages "
                f"({self._limits.template_timeout_s:g} s).",
                param="messages",
                hint="Send fewer messages, or push a version with a simpler template.",
            )
        if answer.error is not None:
            if answer.param == "messages":
                raise ChatTemplateFailed(answer.error, param=answer.param)
            raise InvalidRequest(answer.error, param=answer.param)
        return answer.text

    async def close(self) -> None:
        """Kill the processes."""
        await self._processes.close()

    def _make(self) -> WorkerProcess:
        setup = TemplateSetup(special_tokens=dict(self._special_tokens()))
        return WorkerProcess(_MODULE, msgspec.json.encode(setup))

    async def _ask(self, tenant: str, question: bytes) -> TemplateAnswer | None:
        """Send a question, and wait for the answer; None: it was over the process's bounds."""
        async with self._processes.take(tenant) as process:
            started = self._clock()
            try:
                answer = await self._ask_twice(process, question)
            finally:
                self._seconds.add(self._clock() - started)
        is_killed = answer is None or answer.is_spent
        is_refused = answer is not None and (answer.error is not None or answer.problems)
        self.num_by_outcome[KILLED if is_killed else REFUSED if is_refused else RENDERED] += 1
        return answer

    async def _ask_twice(self, process: WorkerProcess, question: bytes) -> TemplateAnswer | None:
        """Send the question to a new process where another may have spent or ended this one."""
        answer = None
        for _ in range(2):
            was_new = not process.is_running
            try:
                frame = await process.ask(question, self._limits.template_timeout_s, START_S)
            except TimeoutError:
                return None
            except WorkerDied:
                answer = None
            except WorkerStartFailed as error:
                logger.exception("the process that renders chat templates can't be started")
                raise EngineUnavailable("Chat templates can't be rendered now: their process didn't start.") from error
            else:
                answer = msgspec.json.decode(frame, type=TemplateAnswer)
                if not answer.is_spent:
                    return answer
                await process.close()
            if was_new:
                return answer
        return answer


class _Named(msgspec.Struct):
    name: str
