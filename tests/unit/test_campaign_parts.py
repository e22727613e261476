"""Parts of the campaigns."""

from __future__ import annotations

from workers import part_of


def test_parts_of_campaigns_are_all_cases_together() -> None:
    names = [f"a.py::test_x[{number}]" for number in range(7)] + ["b.py::test_y", "b.py::test_z[0]", "b.py::test_z[1]"]
    parts = [part_of(names, number, 3) for number in (1, 2, 3)]
    assert set().union(*parts) == set(names)
    assert sorted(name for name in parts[1] if "test_x" in name) == ["a.py::test_x[1]", "a.py::test_x[4]"]
    for part in parts:
        assert {name.partition("[")[0] for name in part} == {"a.py::test_x", "b.py::test_y", "b.py::test_z"}
    assert part_of(names, 1, 1) == set(names)
