"""Tenants, their keys, the adapters granted to them, and their usage."""

from __future__ import annotations

from loraserve.contract.alias import Grant as Grant
from loraserve.contract.tenant import AdminKey as AdminKey
from loraserve.contract.tenant import Key as Key
from loraserve.contract.tenant import NewAdminKey as NewAdminKey
from loraserve.contract.tenant import NewKey as NewKey
from loraserve.contract.tenant import Tenant as Tenant
from loraserve.contract.usage import UsageSum as UsageSum
from loraserve.sdk.types.fields import Limits as Limits
