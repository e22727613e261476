"""SmolLM2-135M-Instruct with its adapters, as the demo serves it. Imports no torch.

adapters/<name>/    adapter_config.json, adapter_model.safetensors, generation_config.json,
                    card.json
CARD.md             how they were made, and how often they are right
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from loraserve.demo.demo_model import BASE, DemoModel, Question, ShownQuestion
from loraserve.demo.smollm.adapter_card import CARD_FILE, read_adapter_card
from loraserve.demo.smollm.base_file import find_base_file
from loraserve.demo.smollm.tasks.calls import offered
from loraserve.demo.smollm.tasks.table import TASKS
from loraserve.demo.smollm.tasks.task import held_out_questions
from loraserve.errors import ConfigError

BASE_ID = "SmolLM2-135M-Instruct"
TITLE = f"{BASE_ID} (Q4_1)"
BASE_NAME = f"HuggingFaceTB/{BASE_ID}"
"""Name of the base in the adapters' configs."""
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "generation_config.json", CARD_FILE)
SCORE_SEED = 2
NUM_CHECKED = 5
SHIPPED = ("sql", "json", "french", "pirate", "subject", "tools")
"""Tasks with a shipped adapter. Others are trained and added here once their scores allow it."""
_NUM_SHOWN = 4
MAX_TOKENS = 80
SERVE_FLAGS = ("--memory-budget", "512MiB", "--max-model-len", "4096")
_SQL_EXAMPLE = "How many tickets have a price over 20?"


def smollm_dir() -> Path:
    """Locate the folder of the shipped adapters and their card."""
    return Path(__file__).resolve().parent


def adapter_dir(name: str) -> Path:
    """Locate the PEFT directory of an adapter."""
    return smollm_dir() / "adapters" / name


def adapter_files() -> tuple[Path, ...]:
    """List the files of the shipped adapters.

    Raises:
        ConfigError: one of them isn't there.
    """
    files = [adapter_dir(name) / file for name in SHIPPED for file in ADAPTER_FILES]
    missing = [str(path.relative_to(smollm_dir())) for path in files if not path.is_file()]
    if missing:
        raise ConfigError(
            f"The demo's adapters are incomplete; missing: {', '.join(missing)}.", hint="Install loraserve again."
        )
    return tuple(files)


def reliable_questions(name: str) -> list[Question]:
    """Select the card's held-out questions that the adapter answered right in every arithmetic.

    A server that answers one of these otherwise is wrong: the adapter isn't.
    """
    card = read_adapter_card(adapter_dir(name))
    if card.served is None:
        raise ConfigError(f"The card of {name} has no score of a server.", hint="python -P tools/score_demo.py")
    doubtful = {prompt for score in card.scores() for prompt, _, _ in score.wrong}
    asked = held_out_questions(TASKS[name], card.served.num_questions, SCORE_SEED)
    return [question for question in asked if question.prompt not in doubtful]


def smollm_demo(tell: Callable[[str], object]) -> DemoModel:
    """Describe the trained model, whose base is downloaded if it isn't there.

    Args:
        tell: called with a line before a download.

    Raises:
        ConfigError: the adapters are incomplete, or the base can't be had.
    """
    adapter_files()
    reliable = {name: reliable_questions(name) for name in SHIPPED}
    shown = [_shown(name, reliable[name][index]) for index in range(_NUM_SHOWN) for name in SHIPPED]
    return DemoModel(
        title=TITLE,
        base=find_base_file(tell),
        base_id=BASE_ID,
        base_names=(BASE_NAME,),
        adapters={name: adapter_dir(name) for name in SHIPPED},
        questions={name: asked[_NUM_SHOWN : _NUM_SHOWN + NUM_CHECKED] for name, asked in reliable.items()},
        shown=shown,
        num_first=len(SHIPPED),
        typed_models=(BASE,),
        max_tokens=MAX_TOKENS,
        max_answers_s=60.0,
        help=_help(),
        examples=(
            f"run sql {shlex.quote(_SQL_EXAMPLE)}",
            "run json 'Anna from Paris ordered 3 lamps at 20 euros each.'",
            "run pirate 'Hello my friend, where is your house?'",
            f"run --temperature 0 {BASE_ID} 'What is the capital of France?'",
        ),
        example=("sql", _SQL_EXAMPLE),
        session="sql",
        truths={name: TASKS[name].truth for name in SHIPPED},
        tools={"tools": offered()} if "tools" in SHIPPED else {},
        serve_flags=SERVE_FLAGS,
        is_quantized=True,
    )


def _shown(name: str, question: Question) -> ShownQuestion:
    about = f"{name}: {TASKS[name].about} ({TASKS[name].truth})"
    return ShownQuestion(question.prompt, {BASE: question, name: question}, question.tools, about)


def _help() -> tuple[str, ...]:
    return (
        f"{BASE_ID} is a small chat model: ask it anything, in English. Each adapter does one task:",
        *(f"  {name:<8}  {TASKS[name].about}" for name in SHIPPED),
    )
