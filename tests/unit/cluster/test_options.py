"""Options of a cluster."""

from __future__ import annotations

import pytest

from loraserve.cluster.options import ClusterOptions
from loraserve.errors import ConfigError


def test_bounds_default_to_the_start() -> None:
    options = ClusterOptions.load(replicas=3)
    assert (options.fewest, options.most) == (3, 3)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"replicas": 0}, "--replicas"),
        ({"replicas": 3, "max_replicas": 2}, "--max-replicas 2"),
        ({"min_replicas": 4}, "--min-replicas 4"),
        ({"replica": 4}, "--replica:"),
        ({"drain_s": -1}, "--drain-s"),
    ],
)
def test_an_impossible_option_is_named(given: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ClusterOptions.load(**given)
