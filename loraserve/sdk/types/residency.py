"""Tiers of adapters' weights, and the use of each tier's memory."""

from __future__ import annotations

from loraserve.contract.residency import AdapterResidency as AdapterResidency
from loraserve.contract.residency import Memory as Memory
from loraserve.contract.residency import ResidencyPage as ResidencyPage
