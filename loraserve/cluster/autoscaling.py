"""Ray Serve's autoscaling policy for engine replicas: by requests, and by time to the first token.

Serve pickles this module by value into its controller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

WAITING, RUNNING, LINKS, TTFT_S = "waiting", "running", "links", "ttft_s"
"""Names of what a replica reports to the policy."""
_SPARE = 0.8
"""Part of a replica's requests beyond which there aren't fewer replicas: the next burst fits."""


class QueueAndTtftPolicy:
    """Returns the number of replicas for the requests under way, one more if first tokens are late.

    Serve keeps it between the bounds, and waits before it follows, by its configuration.
    """

    def __init__(self, max_ttft_s: float) -> None:
        """Make a policy.

        Args:
            max_ttft_s: mean seconds to the first token of a replica beyond which another is added.
        """
        self._max_ttft_s = max_ttft_s

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """Decide how many replicas should be there; keep no state."""
        current = context.current_num_replicas
        if current == 0:
            return context.target_num_replicas, {}
        target: float = context.config.get_target_ongoing_requests()
        metrics = context.aggregated_metrics or {}
        waiting, running = _sum(metrics, WAITING), _sum(metrics, RUNNING)
        # Serve counts each link of an ingress to a replica as a request
        num_requests = max(context.total_num_requests - _sum(metrics, LINKS), waiting + running)
        desired = num_requests / target
        ttft_s = max(metrics.get(TTFT_S, {}).values(), default=0.0)
        if waiting and ttft_s > self._max_ttft_s:
            return max(desired, current + 1), {}
        # not fewer until those that stay would have room for more
        if desired < current and num_requests > _SPARE * target * (current - 1):
            return current, {}
        return desired, {}


def _sum(metrics: Any, name: str) -> float:
    return float(sum(metrics.get(name, {}).values()))
