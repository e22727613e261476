"""Parts of the campaigns."""

from __future__ import annotations

from workers import part_of


def test_parts_are_all_cases_each_once() -> None:
    names = [f"a.py::test_x[{number}]" for number in range(7)] + [f"b.py::test_{letter}" for letter in "abcdefghijkl"]
    parts = [part_of(names, number, 3) for number in (1, 2, 3)]
    assert sorted(name for part in parts for name in part) == sorted(names)
    # cases of one test and tests of one case alike
    for prefix in ("a.py", "b.py"):
        assert all(sum(name.startswith(prefix) for name in part) >= 2 for part in parts), parts
    assert part_of(names, 1, 1) == set(names)
