"""Adapters, their versions and aliases in the management API."""

from __future__ import annotations

from loraserve.contract.adapter import Action as Action
from loraserve.contract.adapter import Adapter as Adapter
from loraserve.contract.adapter import Certificate as Certificate
from loraserve.contract.adapter import Evaluation as Evaluation
from loraserve.contract.adapter import ExtraFile as ExtraFile
from loraserve.contract.adapter import Share as Share
from loraserve.contract.adapter import Version as Version
from loraserve.contract.alias import Alias as Alias
from loraserve.contract.alias import Shadow as Shadow
from loraserve.contract.alias import ShadowHour as ShadowHour
from loraserve.contract.result import IdPage as IdPage
from loraserve.contract.result import Page as Page
from loraserve.contract.traffic import Durations as Durations
from loraserve.contract.traffic import Traffic as Traffic
from loraserve.contract.traffic import VersionTraffic as VersionTraffic
