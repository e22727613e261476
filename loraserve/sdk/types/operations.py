"""Operations: work that outlasts its request."""

from __future__ import annotations

from loraserve.contract.operation import Operation as Operation
