"""What PostgreSQL does for the statements of the product's own calls: how often it is asked, for
how long, and which rows it reads.

The statements are recorded as SQLAlchemy sends them, and explained afterwards with the same
parameters on a connection of their own, in a transaction that is undone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import asyncpg
from sqlalchemy import event
from sqlalchemy.engine import Engine

BIG = ("adapters", "adapter_versions", "aliases", "audit", "usage_hours")
"""Tables that grow with the number of versions."""
SCANS = ("Seq Scan", "Index Scan", "Index Only Scan", "Bitmap Heap Scan")


@dataclass(slots=True)
class Statement:
    text: str
    parameters: Any
    seconds: float = 0.0


@dataclass(slots=True)
class Recorder:
    """Statements of all engines of this process while it is on."""

    statements: list[Statement] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(one.seconds for one in self.statements)


@contextmanager
def recording() -> Iterator[Recorder]:
    """Record what is sent to any database within the block."""
    recorder = Recorder()

    def before(_c: Any, _k: Any, statement: str, parameters: Any, context: Any, is_many: bool) -> None:
        one = Statement(statement, parameters[0] if is_many and parameters else parameters, -time.perf_counter())
        context.benchmark_statement = one
        recorder.statements.append(one)

    def after(_c: Any, _k: Any, _s: str, _p: Any, context: Any, _m: bool) -> None:
        context.benchmark_statement.seconds += time.perf_counter()

    event.listen(Engine, "before_cursor_execute", before)
    event.listen(Engine, "after_cursor_execute", after)
    try:
        yield recorder
    finally:
        event.remove(Engine, "before_cursor_execute", before)
        event.remove(Engine, "after_cursor_execute", after)


@dataclass(slots=True)
class Plan:
    """What one statement reads."""

    statement: str
    rows_read: int
    """Rows of the tables that grow that scans returned or threw away, and not those that an index
    alone told; 0 for statements that write, which aren't run again.
    """
    blocks: int
    seq_scans: list[str]
    """Big tables that are read from one end to the other."""
    tree: Any

    def as_json(self) -> dict[str, Any]:
        """Return the statement, and its plan as one line for each node."""
        return {
            "statement": " ".join(self.statement.split()),
            "rows_read": self.rows_read,
            "blocks": self.blocks,
            "nodes": list(_lines(self.tree)),
        }


async def explain(connection: asyncpg.Connection, one: Statement, *, growth: float = 1.0) -> Plan:
    """Explain a statement, and run it again if it only reads.

    Args:
        growth: times as many rows for which to plan: reading a small table whole is right.
    """
    is_read = one.text.lstrip().upper().startswith(("SELECT", "WITH"))
    options = "ANALYZE, BUFFERS, FORMAT JSON" if is_read else "FORMAT JSON"
    transaction = connection.transaction()
    await transaction.start()
    try:
        if growth > 1:
            # what the planner goes by, within this transaction
            await connection.execute(
                """UPDATE pg_class SET reltuples = reltuples * $1::float8
                WHERE relnamespace = 'public'::regnamespace AND reltuples >= 500""",
                growth,
            )
        found = await connection.fetchval(f"EXPLAIN ({options}) {one.text}", *_values(one.parameters))
    finally:
        await transaction.rollback()
    tree = json.loads(found)[0]["Plan"]
    nodes = list(_nodes(tree))
    rows_read = sum(_rows(node) for node in nodes if node.get("Relation Name") in BIG and node["Node Type"] in SCANS)
    return Plan(
        one.text,
        int(rows_read) if is_read else 0,
        tree.get("Shared Hit Blocks", 0) + tree.get("Shared Read Blocks", 0),
        [node["Relation Name"] for node in nodes if _is_whole(node)],
        tree,
    )


def _values(parameters: Any) -> Sequence[Any]:
    return list(parameters.values()) if isinstance(parameters, dict) else list(parameters or ())


def _nodes(node: dict[str, Any], *, is_limited: bool = False) -> Iterator[dict[str, Any]]:
    yield {**node, "is_limited": is_limited}
    # a limit right above a scan ends it
    for child in node.get("Plans", ()):
        yield from _nodes(child, is_limited=node["Node Type"] == "Limit")


def _lines(node: dict[str, Any], depth: int = 0) -> Iterator[str]:
    place = " ".join(node[key] for key in ("Index Name", "Relation Name", "CTE Name") if key in node)
    rows = f"{node['Actual Rows']} rows × {node['Actual Loops']}" if "Actual Rows" in node else "not run"
    yield f"{'  ' * depth}{node['Node Type']}{' ' if place else ''}{place}: {rows}"
    for child in node.get("Plans", ()):
        yield from _lines(child, depth + 1)


def _rows(node: dict[str, Any]) -> float:
    if node["Node Type"] == "Index Only Scan":
        return float(node.get("Heap Fetches", 0))
    names = ("Actual Rows", "Rows Removed by Filter", "Rows Removed by Index Recheck")
    return float(sum(node.get(name, 0) for name in names) * node.get("Actual Loops", 0))


def _is_whole(node: dict[str, Any]) -> bool:
    """Whether the node reads a big table in its order, but for the first rows of one."""
    is_first = node["is_limited"] and "Filter" not in node
    return node["Node Type"] == "Seq Scan" and node.get("Relation Name") in BIG and not is_first
