"""Checks of the scripted tour.

They look at every answer, the access of other tenants, and the state after a restart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from loraserve import AsyncClient, Client
from loraserve.demo.demo_model import Access, DemoAnswer, DemoModel, Question, TourCheck
from loraserve.demo.side_by_side import stream_answer
from loraserve.errors import AuthenticationError, LoraserveError, NotFound


def check_answers(
    access: Access, questions: Mapping[str, Sequence[Question]], max_tokens: int, *, when: str = ""
) -> list[TourCheck]:
    """Send every model its questions, all at once and streamed, and judge the answers.

    Return one check per model.
    """
    answers = asyncio.run(answer_questions(access, questions, max_tokens))
    return [_judged(f"{access.model(name)}{when}", asked, answers[name]) for name, asked in questions.items()]


async def answer_questions(
    access: Access, questions: Mapping[str, Sequence[Question]], max_tokens: int
) -> dict[str, list[DemoAnswer]]:
    """Send every model its questions, all at once and streamed; return the answers by model."""
    # neighbours in the queue need different adapters
    order = sorted(
        ((index, name) for name, asked in questions.items() for index in range(len(asked))), key=lambda pair: pair[0]
    )
    async with AsyncClient(access.url, api_key=access.api_key) as client:

        async def ask(name: str, question: Question) -> DemoAnswer:
            parts = stream_answer(client, access.model(name), question.prompt, question.tools, max_tokens)
            answers = [answer async for answer in parts]
            return answers[-1] if answers else DemoAnswer("")

        answers = await asyncio.gather(*(ask(name, questions[name][index]) for index, name in order))
    found: dict[str, list[DemoAnswer]] = {name: [] for name in questions}
    for (_, name), answer in zip(order, answers, strict=True):
        found[name].append(answer)
    return found


def check_time(took_s: float, max_s: float) -> TourCheck:
    """Check that the answers came in the time that they may take."""
    problem = None if took_s <= max_s else f"they took {took_s:.0f} s, expected {max_s:.0f} s at most"
    return TourCheck("answered in time", int(problem is None), 1, problem)


def check_models(access: Access, model: DemoModel) -> TourCheck:
    """Check that the tenant sees the base and its adapters, and nothing else."""
    with Client(access.url, api_key=access.api_key) as client:
        found = sorted(listed.id for listed in client.models.list())
    expected = sorted((access.base_id, *model.adapters))
    problem = None if found == expected else f"/v1/models lists {found}, expected {expected}"
    return TourCheck("the models listed", int(problem is None), 1, problem)


def check_stranger(access: Access, model: DemoModel, stranger_key: str) -> TourCheck:
    """Check that another tenant's key finds none of the adapters, in any way.

    A made-up key must find nothing at all.
    """
    with (
        Client(access.url, api_key=stranger_key) as stranger,
        Client(access.url, api_key="sk-lora-made-up-by-the-tour") as nobody,
    ):
        tries: list[tuple[str, Callable[[], object], type[LoraserveError]]] = [
            ("list models", nobody.models.list, AuthenticationError),
            (
                "ask the base",
                partial(nobody.completions.create, model=access.base_id, prompt="hi"),
                AuthenticationError,
            ),
        ]
        for name in model.adapters:
            tries += [
                (f"ask {name}", partial(stranger.completions.create, model=name, prompt="hi"), NotFound),
                (f"read {name}", partial(stranger.adapters.get, name), NotFound),
                (f"delete {name}", partial(stranger.adapters.delete, name), NotFound),
            ]
        problems = [problem for what, act, error in tries if (problem := _refusal_problem(what, act, error))]
        seen = [listed.id for listed in stranger.models.list() if listed.id != access.base_id]
        if seen:
            problems.append(f"another tenant's list of models shows {seen}")
    return TourCheck(
        "other keys refused", len(tries) + 1 - len(problems), len(tries) + 1, problems[0] if problems else None
    )


def _refusal_problem(what: str, act: Callable[[], object], error: type[LoraserveError]) -> str | None:
    try:
        act()
    except error:
        return None
    except LoraserveError as other:
        return f"a foreign key that tried to {what} got {type(other).__name__}, expected {error.__name__}"
    return f"a foreign key could {what}"


def _judged(what: str, questions: Sequence[Question], answers: Sequence[DemoAnswer]) -> TourCheck:
    wrong = [
        f"{question.prompt!r} was answered {str(answer)!r}: {problem}"
        for question, answer in zip(questions, answers, strict=True)
        if (problem := question.judge(answer)) is not None
    ]
    return TourCheck(what, len(questions) - len(wrong), len(questions), wrong[0] if wrong else None)
