"""Next steps for a user of the demo, and the questions that its models understand.

Each command that is printed is one that a test runs.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from loraserve.demo.card import EXAMPLE
from loraserve.demo.checks import Access
from loraserve.demo.frames import Assign, Describe, Frame, Greet, Origin
from loraserve.demo.words import CITIES, FIELDS, NAMES, OPERATORS, QUALITIES, TABLES, THINGS

UNDERSTOOD: tuple[Frame, ...] = (
    EXAMPLE,
    Origin("show", "boats", "Porto"),
    Describe("describe", "red", "bike"),
    Greet("greet", "Anna"),
    Assign("set", "price", "lamp", 40),
)
"""A question of each kind that the models were trained on."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Lines to copy into a shell, and what they are for."""

    title: str
    lines: tuple[str, ...]


def advice(access: Access, admin_key: str) -> tuple[Advice, ...]:
    """List the next steps for another terminal, in the order in which they are run."""
    program = shutil.which("loraserve")
    here = Path(sys.executable).parent
    path = () if program is not None else (f"export PATH={shlex.quote(str(here))}:$PATH",)
    prompt = shlex.quote(EXAMPLE.prompt)
    return (
        Advice(
            "In another terminal:",
            (*path, f"export LORASERVE_URL={access.url}", f"export LORASERVE_API_KEY={access.api_key}"),
        ),
        Advice(
            "Then try:",
            (
                f"loraserve run sql {prompt}",
                f"loraserve run 'sql+0.5*pirate' {prompt}",
                "loraserve adapter list",
                "loraserve adapter show sql",
                "loraserve usage",
            ),
        ),
        Advice("Talk to an adapter (/help shows what else can be typed):", ("loraserve run sql",)),
        Advice(
            "As the operator, with the admin key (it is gone with this demo):",
            (
                f"export LORASERVE_API_KEY={shlex.quote(admin_key)}",
                "loraserve ps",
                "loraserve tenant list",
                "loraserve audit",
            ),
        ),
    )


def what_is_understood() -> tuple[str, ...]:
    """Describe the kinds of questions that the models answer, and the words in them.

    It is a toy of a million parameters: to anything else it answers something of this kind.
    """
    words = (
        ("tables", TABLES),
        ("fields", FIELDS),
        ("comparisons", OPERATORS),
        ("cities", CITIES),
        ("things", THINGS),
        ("qualities", QUALITIES),
        ("names", NAMES),
    )
    return (
        "The models are toys: they understand five kinds of questions, and answer anything else with one of them.",
        *(f"  {frame.prompt}" for frame in UNDERSTOOD),
        "with these words:",
        *(f"  {what:<11}  {', '.join(known)}" for what, known in words),
        "and numbers from 1 to 99.",
    )
