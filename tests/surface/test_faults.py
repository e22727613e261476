"""Fault points: names that `LORASERVE_FAULTS` takes."""

from __future__ import annotations

import ast
from collections.abc import Callable

from .describing import sources


def test_fault_points(golden: Callable[..., None]) -> None:
    points = set()
    for path, tree in sources(r"\bhit\("):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("faults.hit", "hit"):
                (point,) = node.args
                assert isinstance(point, ast.Constant), f"{path}:{node.lineno}: a fault point isn't a literal"
                points.add(str(point.value))
    golden("fault_points.txt", sorted(points))
