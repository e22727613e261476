"""Shape of the tree, held so that a newcomer's first guess stays right: small folders, no crumbs,
one class per name, SQL in known places.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UNIT = ROOT / "tests" / "unit"
SOURCES = {"loraserve": ROOT / "loraserve", "adapters_store": ROOT / "adapters_store"}
SOURCES["loraserve_kernels"] = ROOT / "kernels" / "loraserve_kernels"
MAX_MODULES = 14
MIN_LINES = 60
MAX_SAME_NAME = 3
"""Packages that a file name may be in."""

STAND_ALONE = {
    "loraserve.api.live_adapters.pausing": "a router",
    "loraserve.api.live_adapters.server_info": "a router",
    "loraserve.api.logs": "set up once, before the server",
    "loraserve.api.management.files": "a router",
    "loraserve.api.management.grants": "a router",
    "loraserve.cli.audit": "a command",
    "loraserve.cli.local.pull": "a command",
    "loraserve.cli.local.serve": "a command",
    "loraserve.cli.tenants.grant": "a command",
    "loraserve.demo.smollm.tasks.table": "a table",
    "loraserve.text.passage": "a text",
    "loraserve.text.tool_parsers.granite": "a table's entry",
    "loraserve.text.tool_parsers.hermes": "a table's entry",
    "loraserve.text.tool_parsers.llama3_json": "a table's entry",
    "loraserve.text.tool_parsers.phi4_mini_json": "a table's entry",
    "loraserve.text.tool_parsers.table": "a table",
}
"""Modules that stay small and apart though one module reads them.

Each is a command, a router or data of its own.
"""

SQL = {
    "loraserve.conversations": "stored_responses",
    "loraserve.backups": "backup restore table_rows",
    "loraserve.batches": "batches progress stored_files",
    "loraserve.db": "audit database_file idempotency leases migrate models session upsert",
    "loraserve.doctor": "storage",
    "loraserve.registry": "blob_references changes operations quota repository residency routing storage_totals",
    "loraserve.registry.catalog": "aliases grants pins shadow_hours",
    "loraserve.registry.health": "base_precision certificate_backfill certificates",
    "loraserve.registry.publishing": "push",
    "loraserve.registry.storage_gc": "collector deletion_locks store_claim",
    "loraserve.registry.uploads": "chunks resumable",
    "loraserve.tenancy.billing": "usage_hours usage_report",
    "loraserve.tenancy.identity": "admin_keys auth keys tenant_keys tenants",
    "loraserve.tenancy.limits": "servers",
}
"""Modules by package that may import sqlalchemy: all queries and sessions are in these."""

MIRRORS = ("loraserve.contract.", "loraserve.sdk.")
"""Packages that repeat names on purpose: what programs see of the server's own classes."""

SAME_NOUN = (
    "loraserve.cli.",
    "loraserve.contract.",
    "loraserve.sdk.",
    "loraserve.api.management.",
)
"""Packages with a module per noun, named alike in each."""


@cache
def modules() -> dict[str, Path]:
    """Return the path of every module of the product by its dotted name."""
    found = {}
    for package, folder in SOURCES.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(modules()[name].read_text())


@cache
def importers() -> dict[str, set[str]]:
    """Return which modules import each module, anywhere in their text."""
    found: dict[str, set[str]] = defaultdict(set)
    for name in modules():
        for imported in imports(name):
            found[imported].add(name)
    return found


def imports(name: str) -> Iterator[str]:
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in modules() else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def is_package(name: str) -> bool:
    return modules()[name].name == "__init__.py"


def test_a_folder_has_at_most_fourteen_modules() -> None:
    counts = Counter(path.parent for path in modules().values() if path.name != "__init__.py")
    large = {str(folder.relative_to(ROOT)): count for folder, count in counts.items() if count > MAX_MODULES}
    assert not large, f"split by noun into packages of at most {MAX_MODULES} modules: {large}"


def test_every_package_has_docstring() -> None:
    mute = [name for name in modules() if is_package(name) and not ast.get_docstring(tree(name))]
    assert not mute, f"a package's __init__.py says in a line what it holds: {mute}"


def test_small_module_has_several_readers() -> None:
    crumbs = {}
    for name, path in modules().items():
        readers = importers()[name]
        num_lines = len(path.read_text().splitlines())
        if not is_package(name) and num_lines < MIN_LINES and len(readers) == 1 and name not in STAND_ALONE:
            crumbs[name] = f"{num_lines} lines, read by {next(iter(readers))} alone"
    assert not crumbs, f"move them into their reader: {crumbs}"
    assert not set(STAND_ALONE) - set(modules()), "STAND_ALONE names modules that are gone"


def test_class_name_has_single_meaning() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for name in modules():
        if not name.startswith(MIRRORS):
            for node in ast.walk(tree(name)):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(name)
    shared = {name: found for name, found in places.items() if len(found) > 1}
    assert not shared, f"rename all but one of each: {shared}"


def test_file_name_occurs_in_at_most_three_packages() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for name, path in modules().items():
        if path.name != "__init__.py" and not name.startswith(SAME_NOUN):
            places[path.stem].append(name)
    often = {stem: found for stem, found in places.items() if len(found) > MAX_SAME_NAME}
    assert not often, f"say what each is of: {often}"


def test_folders_of_unit_tests_are_packages() -> None:
    packages = {name.removeprefix("loraserve.") for name in modules() if is_package(name)}
    folders = {file.parent.relative_to(UNIT) for file in UNIT.rglob("test_*.py") if file.parent != UNIT}
    unknown = {str(folder) for folder in folders if ".".join(folder.parts) not in packages}
    assert not unknown, f"tests mirror the tree; no package is called so: {unknown}"


def test_sql_is_in_known_modules() -> None:
    known = {f"{package}.{name}" for package, names in SQL.items() for name in names.split()}
    found = {name for name in modules() if any(imported.split(".")[0] == "sqlalchemy" for imported in imports(name))}
    assert not found - known, f"ask a module that has SQL, or add to SQL with a reason: {found - known}"
    assert not known - found, f"remove from SQL: {known - found}"


def test_scheduling_loads_thirty_modules_and_no_model() -> None:
    code = "import sys, loraserve.engine.scheduling.scheduler; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    loaded = run.stdout.split()
    ours = [name for name in loaded if name.partition(".")[0] in SOURCES]
    assert len(ours) <= 30, ours
    assert not {"torch", "numpy"} & set(loaded)
