"""Settings and environment variables."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import platformdirs

from loraserve.settings import ENV_PREFIX, Settings

from .describing import sources, type_text

READS = frozenset({"os.environ.get", "os.environ.setdefault", "os.environ.pop", "os.getenv"})
OURS = re.compile(r"LORASERVE_[A-Z_]*[A-Z]")


def test_settings(golden: Callable[..., None]) -> None:
    """One field a line: its variable, its type, its default and what a value must be."""
    properties = Settings.model_json_schema()["properties"]
    user_data = Path(platformdirs.user_data_dir("loraserve"))
    lines = []
    for name, field in sorted(Settings.model_fields.items()):
        default = "required" if field.is_required() else repr(field.get_default(call_default_factory=True))
        if field.get_default(call_default_factory=True) == user_data:
            default = "the user's data folder for loraserve"
        rule = {key: value for key, value in properties[name].items() if key not in ("title", "default", "description")}
        rule_text = json.dumps(rule, sort_keys=True)
        lines.append(
            f"{ENV_PREFIX}{name.upper()} {name}: {type_text(field.annotation)}; default {default}; {rule_text}"
        )
    golden("settings.txt", lines)


def test_environment_variables(golden: Callable[..., None]) -> None:
    """Every variable that the source names: ours anywhere, others where the environment is read."""
    settings = {f"{ENV_PREFIX}{name.upper()}" for name in Settings.model_fields}
    found = {name for _, tree in sources("LORASERVE_|environ|getenv") for name in variables(tree)}
    golden("environment.txt", sorted(found | settings))


def variables(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and OURS.fullmatch(node.value):
            yield node.value
        arguments: list[ast.expr] = []
        if isinstance(node, ast.Call) and ast.unparse(node.func) in READS:
            arguments = node.args[:1]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
            arguments = [node.slice]
        for argument in arguments:
            if isinstance(argument, ast.Constant):
                yield str(argument.value)
