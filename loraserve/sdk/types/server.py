"""The server's base, its bounds, and its audit log."""

from __future__ import annotations

from loraserve.contract.server import AuditEntry as AuditEntry
from loraserve.contract.server import Base as Base
from loraserve.contract.server import BasePrecision as BasePrecision
from loraserve.contract.server import Limits as Limits
