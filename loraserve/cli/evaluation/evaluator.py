"""Requests of an evaluation: every line to every model, a bounded number at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio

from loraserve import errors
from loraserve.cli.evaluation.data_file import DataFile, DataLine
from loraserve.cli.evaluation.metrics import (
    ACCURACY,
    EXACT_MATCH,
    JSON_MATCH,
    LOG_LIKELIHOOD,
    REGEX_MATCH,
    has_fields,
    is_accurate,
    is_exact,
    matches,
)

if TYPE_CHECKING:
    from loraserve.contract.result import Answer
    from loraserve.sdk import AsyncClient


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """Requests to send.

    Attributes:
        models: the base's id first, then versions as ``NAME@VERSION``.
        metrics: metrics to compute.
        max_tokens: longest answer.
        stop: texts before which an answer ends.
        concurrency: requests in flight at once.
    """

    models: tuple[str, ...]
    data: DataFile
    metrics: tuple[str, ...]
    max_tokens: int
    stop: tuple[str, ...]
    concurrency: int

    @property
    def num_answers(self) -> int:
        return len(self.models) * len(self.data.lines)

    @property
    def settings(self) -> dict[str, str]:
        """Settings on which the metrics depend, as they are kept with the result."""
        stop = {"stop": json.dumps(self.stop, ensure_ascii=False)} if self.stop else {}
        return {"max_tokens": str(self.max_tokens)} | stop


@dataclass(frozen=True, slots=True)
class EvaluatedAnswer:
    """Answer of a model to a line."""

    text: str
    is_cut: bool
    """Whether it ended at `max_tokens`."""
    prompt_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LineOutcome:
    """Answer of a model to a line, and what it is worth."""

    answer: EvaluatedAnswer
    is_right: dict[str, bool]
    """Verdict by metric, of those that judge the answer."""
    sum_logprobs: float = 0.0
    """Log probability of the reference answer, in nats."""
    num_tokens: int = 0
    """Tokens of the reference answer; 0: it has no log probability."""


@dataclass(slots=True)
class ModelOutcomes:
    """Outcomes of one model by line."""

    model: str
    lines: list[LineOutcome] = field(default_factory=list)

    @property
    def num_cut(self) -> int:
        return sum(outcome.answer.is_cut for outcome in self.lines)

    def metrics(self) -> dict[str, float]:
        """Compute each metric's mean: over the lines that have it, or the references' tokens."""
        found = {}
        for name in (EXACT_MATCH, ACCURACY, REGEX_MATCH, JSON_MATCH):
            verdicts = [outcome.is_right[name] for outcome in self.lines if name in outcome.is_right]
            if verdicts:
                found[name] = sum(verdicts) / len(verdicts)
        num_tokens = sum(outcome.num_tokens for outcome in self.lines)
        if num_tokens:
            found[LOG_LIKELIHOOD] = sum(outcome.sum_logprobs for outcome in self.lines) / num_tokens
        return found


async def evaluate(
    client: AsyncClient, plan: EvaluationPlan, tell: Callable[[int], object] = lambda _: None
) -> list[ModelOutcomes]:
    """Send every line to every model, and judge the answers.

    The first request that fails ends it all: results of fewer lines couldn't be compared.

    Args:
        tell: called with the number of answers so far, after each.

    Raises:
        LoraserveError: a request failed, for other reasons than those for which the client tries
            again; the message has the line's number and the model.
    """
    outcomes: dict[tuple[str, int], LineOutcome] = {}
    failures: list[errors.LoraserveError] = []
    # lines of all models one after the other: their prompts are alike, and in one batch
    work = iter([(line, model) for line in plan.data.lines for model in plan.models])

    async with anyio.create_task_group() as tasks:

        async def run() -> None:
            for line, model in work:
                try:
                    outcomes[model, line.number] = await judge(client, plan, line, model)
                except errors.LoraserveError as error:
                    error.message = f"{plan.data.name}:{line.number}, {model}: {error.message}"
                    failures.append(error)
                    tasks.cancel_scope.cancel()
                    return
                tell(len(outcomes))

        for _ in range(min(plan.concurrency, plan.num_answers)):
            tasks.start_soon(run)
    if failures:
        raise failures[0]
    return [ModelOutcomes(model, [outcomes[model, line.number] for line in plan.data.lines]) for model in plan.models]


async def judge(client: AsyncClient, plan: EvaluationPlan, line: DataLine, model: str) -> LineOutcome:
    """Send the line to the model, and compute the plan's metrics of the answer.

    Raises:
        LoraserveError: a request failed, or another version answered.
    """
    wanted = [name for name in line.metrics if name in plan.metrics]
    is_read = wanted != [LOG_LIKELIHOOD]
    answer = await ask(client, line, model, max_tokens=plan.max_tokens if is_read else 1, stop=plan.stop)
    verdicts: dict[str, Callable[[], bool]] = {
        EXACT_MATCH: lambda: is_exact(answer.text, line.answer),
        ACCURACY: lambda: is_accurate(answer.text, line.answer, line.choices),
        REGEX_MATCH: lambda: matches(answer.text, line.regex or ""),
        JSON_MATCH: lambda: has_fields(answer.text, line.answer, line.json_fields),
    }
    is_right = {name: verdicts[name]() for name in wanted if name in verdicts}
    if LOG_LIKELIHOOD not in wanted:
        return LineOutcome(answer, is_right)
    sum_logprobs, num_tokens = await score(client, answer.prompt_tokens, line.answer, model)
    return LineOutcome(answer, is_right, sum_logprobs, num_tokens)


async def ask(
    client: AsyncClient, line: DataLine, model: str, *, max_tokens: int, stop: Sequence[str]
) -> EvaluatedAnswer:
    """Return the model's likeliest answer to the line.

    Raises:
        LoraserveError: the request failed, or another version answered.
    """
    stops = list(stop) or None
    if line.prompt is None:
        chat = await client.chat.completions.create(
            model=model,
            messages=line.messages,
            max_tokens=max_tokens,
            temperature=0,
            stop=stops,
            return_token_ids=True,
        )
        check_answered_by(chat.answer, model)
        text, reason = chat.choices[0].message.content or "", chat.choices[0].finish_reason
        tokens = chat.prompt_token_ids
    else:
        completion = await client.completions.create(
            model=model,
            prompt=line.prompt,
            max_tokens=max_tokens,
            temperature=0,
            stop=stops,
            return_token_ids=True,
        )
        check_answered_by(completion.answer, model)
        choice = completion.choices[0]
        text, reason, tokens = choice.text, choice.finish_reason, choice.prompt_token_ids
    if tokens is None:
        raise errors.UnexpectedAnswer(
            "The server's answer has no prompt_token_ids, which were requested.",
            hint="Check that this is a loraserve server of the same version as this client.",
        )
    return EvaluatedAnswer(text, reason == "length", tuple(tokens))


async def score(client: AsyncClient, prompt: Sequence[int], reference: str, model: str) -> tuple[float, int]:
    """Return the log probability of the reference after the prompt, and its number of tokens.

    The reference is tokenized by itself, so that its tokens follow the prompt's own.

    Raises:
        LoraserveError: a request failed, or another version answered.
    """
    tokens = (await client.tokenize(reference, model=model, add_special_tokens=False)).tokens
    scored = await client.completions.create(
        model=model, prompt=[*prompt, *tokens], max_tokens=0, echo=True, logprobs=0, add_special_tokens=False
    )
    check_answered_by(scored.answer, model)
    logprobs = scored.choices[0].logprobs
    found = [] if logprobs is None else logprobs.token_logprobs[len(prompt) :]
    numbers = [number for number in found if number is not None]
    # nothing predicts a first token: where the prompt has none, the reference begins with it
    num_expected = len(tokens) - (not prompt)
    if len(numbers) != num_expected:
        raise errors.UnexpectedAnswer(
            f"The server answered {len(numbers)} log probabilities for {num_expected} tokens of the reference answer.",
            hint="Leave the metric out, with --metric for each of the others.",
        )
    return sum(numbers), len(numbers)


def check_answered_by(answer: Answer | None, model: str) -> None:
    """Check that no fallback answered in the place of the version.

    Raises:
        AdapterUnavailable: one did.
    """
    if answer is not None and answer.fell_back_from is not None:
        raise errors.AdapterUnavailable(
            f"{answer.adapter or 'the base'} answered in the place of {answer.fell_back_from} "
            f"({answer.fell_back_for}).",
            hint=f"Evaluate it once it is served. See: loraserve adapter show {model}",
        )
