"""The tasks by name."""

from __future__ import annotations

from collections.abc import Mapping

from loraserve.demo.smollm.tasks.calls import Calls
from loraserve.demo.smollm.tasks.french import French
from loraserve.demo.smollm.tasks.mails import Subjects
from loraserve.demo.smollm.tasks.orders import Orders
from loraserve.demo.smollm.tasks.pirate import Pirate
from loraserve.demo.smollm.tasks.queries import Queries
from loraserve.demo.smollm.tasks.task import Task

TASKS: Mapping[str, Task] = {task.name: task for task in (Queries(), Orders(), French(), Pirate(), Subjects(), Calls())}
