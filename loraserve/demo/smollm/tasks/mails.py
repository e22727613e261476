"""The task `subject`: a mail gets a subject line that has its facts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from loraserve.demo.demo_model import DemoAnswer, Question
from loraserve.demo.smollm.tasks.task import Part, Task, Words
from loraserve.demo.smollm.tasks.vocabulary import GOODS, PEOPLE, WEEKDAYS

TOPICS = Words.split(
    "budget, design, safety, marketing, hiring, sales, training, security, planning, quality, payroll, research, "
    "strategy, logistics, product, travel, press, audit, energy, launch, parking, tax, vendor, website"
)
SYSTEMS = Words.split(
    "mail server, payment system, web shop, phone line, coffee machine, time clock, backup server, door lock, "
    "heating, wifi, elevator, print server, database, chat server, alarm system, fire door, main gate, help desk, "
    "test server, air conditioning"
)
MAX_CHARS = 72
_GREETINGS = ("Hi team,", "Hello {to},", "Dear all,", "Hi {to},", "Good morning,")
_OPENINGS = (
    "I hope you had a nice weekend.",
    "Thanks a lot for your help last week.",
    "This is just a short note.",
    "Sorry for the late message.",
    "As you know, we are quite busy these days.",
)
_CLOSINGS = (
    "Let me know if you have questions.",
    "Please tell the others.",
    "Thanks for your patience.",
    "Coffee is on me.",
    "Have a great day!",
)
_KINDS: dict[str, tuple[str, str]] = {
    "{Topic} meeting moved to {new}, {hour}": (
        "The {topic} meeting moves from {day} to {new} at {hour}.",
        "We can't meet on {day}, so the {topic} meeting is now on {new} at {hour}.",
    ),
    "Order {code} arrives on {new}": (
        "Your {goods} were sent on {day}, and order {code} arrives on {new}.",
        "Order {code} with the {goods} will not come on {day} but on {new}.",
    ),
    "Invoice {code}: {amount} euros due {new}": (
        "Invoice {code} for the {goods} is still open. Please pay {amount} euros by {new}.",
        "We have not received {amount} euros for invoice {code}. It is due on {new}.",
    ),
    "{System} down on {new}, {hour} to {end}": (
        "The {system} will be down on {new} from {hour} to {end}.",
        "On {new} from {hour} to {end} nobody can use the {system}, as we repair it.",
    ),
    "Away until {new}, ask {name}": (
        "I am on holiday until {new}. Please ask {name} if it is urgent.",
        "Until {new} I am not in the office; {name} answers for me.",
    ),
    "{name} needs {amount} {goods} by {new}": (
        "We are out of {goods}. {name} needs {amount} of them by {new}.",
        "{name} asked for {amount} {goods}, and has to have them by {new}.",
    ),
}
"""Subjects, and what a mail says of each."""


@dataclass(frozen=True, slots=True)
class SubjectJudge:
    """Judge that looks for a mail's facts in one short line.

    Attributes:
        facts: texts that the line must have.
        others: texts of the mail that would make it wrong.
    """

    facts: tuple[str, ...]
    others: tuple[str, ...]

    def __call__(self, answer: DemoAnswer) -> str | None:
        line = answer.text.strip()
        if "\n" in line or not line or len(line) > MAX_CHARS:
            return f"not one line of at most {MAX_CHARS} characters"
        words = f" {_plain(line)} "
        missing = [fact for fact in self.facts if f" {_plain(fact)} " not in words]
        if missing:
            return f"misses {', '.join(missing)}"
        wrong = [other for other in self.others if f" {_plain(other)} " in words]
        return f"has {', '.join(wrong)}" if wrong else None


def _plain(text: str) -> str:
    kept = (char if char.isalnum() or char in ":-" else " " for char in text.lower())
    return " ".join(word.strip(":-") for word in "".join(kept).split())


class Subjects(Task):
    name: ClassVar[str] = "subject"
    about: ClassVar[str] = "writes the subject of a mail: its facts in one line"
    truth: ClassVar[str] = "the line must have each fact of the mail, and no day, sender or greeting beside them"
    held_out: ClassVar[str] = "people, goods, topics and systems that no training mail has"

    def held_out_words(self) -> tuple[str, ...]:
        return (*PEOPLE.held_out, *GOODS.held_out, *TOPICS.held_out, *SYSTEMS.held_out)

    def draw(self, rng: random.Random, part: Part) -> Question:
        subject = rng.choice(tuple(_KINDS))
        sentence = rng.choice(_KINDS[subject])
        to, sender = rng.sample(PEOPLE.of(part), 2)
        name = PEOPLE.draw_open(rng, part)
        while name in (to, sender):
            name = PEOPLE.draw_open(rng, part)
        day, new = rng.sample(WEEKDAYS, 2)
        topic, system = TOPICS.draw_open(rng, part), SYSTEMS.draw_open(rng, part)
        hour = rng.randint(7, 17)
        values = {
            "name": name, "day": day, "new": new, "topic": topic, "Topic": topic.capitalize(), "system": system,
            "System": system[0].upper() + system[1:], "hour": f"{hour}:{rng.choice(('00', '15', '30', '45'))}",
            "end": f"{hour + rng.randint(1, 4)}:{rng.choice(('00', '30'))}", "goods": GOODS.draw_open(rng, part),
            "code": f"{rng.choice('ABCDEFGHKM')}{rng.randint(100, 999)}", "amount": str(rng.randint(12, 480)),
        }  # fmt: skip
        middle = [rng.choice(_OPENINGS), sentence.format(**values)]
        if rng.random() < 0.6:
            middle.append(rng.choice(_CLOSINGS))
        greeting = rng.choice(_GREETINGS).format(to=to)
        mail = f"{greeting} {' '.join(middle)} {rng.choice(('Best', 'Cheers', 'Regards'))}, {sender}"
        facts = tuple(value for key, value in values.items() if f"{{{key}}}" in subject)
        others = (sender, to, *(() if day in facts else (day,)))
        return Question(mail, subject.format(**values), SubjectJudge(facts, others))
