"""What an installation offers, and what the documents tell readers to import and to run."""

from __future__ import annotations

import importlib
import importlib.util
import re
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points

from .describing import ROOT

DOCUMENTS = ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "Makefile", "docs/*.md", "examples/*.py", "**/CARD.md")
IMPORT = re.compile(r"^\s*from ((?:loraserve|adapters_store)[\w.]*) import ([\w, ]+)", re.MULTILINE)
COMMAND = re.compile(r"python3? (?:-P )?-m (loraserve[\w.]*|adapters_store[\w.]*)")


def documents() -> Iterator[str]:
    for pattern in DOCUMENTS:
        for path in sorted(ROOT.glob(pattern)):
            if not any(part.startswith(".") for part in path.relative_to(ROOT).parts):
                yield path.read_text(encoding="utf-8")


def test_installation(golden: Callable[..., None]) -> None:
    """Names of commands, packages and extras. What a command runs may move; it is there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for script in entry_points(group="console_scripts"):
        if script.name in project["project"]["scripts"]:
            assert callable(script.load())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    lines = [f"command {name}" for name in sorted(project["project"]["scripts"])]
    lines += [f"package {name.split('/')[-1]}" for name in sorted(packages)]
    lines += [f"extra {name}" for name in sorted(project["project"]["optional-dependencies"])]
    golden("installation.txt", lines)


def test_documented_imports(golden: Callable[..., None]) -> None:
    found = set()
    for text in documents():
        for module, names in IMPORT.findall(text):
            for name in (name.strip() for name in names.split(",")):
                loaded = importlib.import_module(module)
                assert hasattr(loaded, name) or importlib.util.find_spec(f"{module}.{name}"), f"{module}.{name}"
                found.add(f"from {module} import {name}")
    golden("documented_imports.txt", sorted(found))


def test_documented_modules(golden: Callable[..., None]) -> None:
    found = {name for text in documents() for name in COMMAND.findall(text)}
    assert all(importlib.util.find_spec(name) for name in found), found
    golden("documented_modules.txt", sorted(f"python -m {name}" for name in found))
