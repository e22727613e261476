"""The number of replicas, by requests and by time to the first token."""

from __future__ import annotations

from dataclasses import dataclass, field

from loraserve.cluster.autoscaling import QueueAndTtftPolicy


@dataclass
class Config:
    target: float = 10.0

    def get_target_ongoing_requests(self) -> float:
        return self.target


@dataclass
class Context:
    """The part of Serve's context that the policy reads."""

    current_num_replicas: int
    total_num_requests: float = 0.0
    aggregated_metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    target_num_replicas: int = 1
    config: Config = field(default_factory=Config)


def desired(context: Context) -> float:
    return QueueAndTtftPolicy(max_ttft_s=2.0)(context)[0]  # type: ignore[arg-type]


def test_replicas_follow_requests() -> None:
    assert desired(Context(1, 30)) == 3
    assert desired(Context(3, 1)) <= 1


def test_requests_reported_by_replicas_count_too() -> None:
    assert desired(Context(1, 0, {"waiting": {"a": 15}, "running": {"a": 5}})) == 2


def test_late_first_tokens_add_replica_while_requests_wait() -> None:
    late = {"ttft_s": {"a": 3.0, "b": 0.1}}
    assert desired(Context(2, 5, late | {"waiting": {"a": 1}})) == 3
    assert desired(Context(2, 5, late)) < 2


def test_no_replica_leaves_while_rest_would_fill_up() -> None:
    assert desired(Context(2, 9)) == 2
    assert desired(Context(2, 7)) <= 1


def test_links_are_no_requests() -> None:
    assert desired(Context(1, 11, {"links": {"a": 1}})) == 1
