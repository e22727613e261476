"""Choice of the replica that a request goes to: pure policy, without Ray, torch, clocks or files.

:class:`Placement` is the way in; docs/placement.md has the policy in plain words.
"""

from loraserve.cluster.placement.placement import Placement
from loraserve.cluster.placement.policy import PlacementPolicy
from loraserve.cluster.placement.views import PlacementRequest, ReplicaView

__all__ = ["Placement", "PlacementPolicy", "PlacementRequest", "ReplicaView"]
