"""One choice of kernels for all replicas: streams go on in the same arithmetic on any of them."""

from __future__ import annotations

import hashlib
from typing import Any, cast

import msgspec
from ray.experimental import internal_kv

from loraserve.config import EngineConfig
from loraserve.types import KernelChoice

_NAMESPACE = b"loraserve"
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[KernelChoice, ...]).decode
_kv = cast("Any", internal_kv)
"""The cluster's key-value store, which is empty again when the cluster is."""


def agreed_kernels(config: EngineConfig) -> tuple[KernelChoice, ...] | None:
    """Return the kernels that a replica of this configuration chose; None: none has yet."""
    found: bytes | None = _kv._internal_kv_get(_key(config), namespace=_NAMESPACE)
    return None if found is None else _decode(found)


def agree_on_kernels(config: EngineConfig, own: tuple[KernelChoice, ...]) -> tuple[KernelChoice, ...]:
    """Return what the first replica chose that called this, maybe `own`."""
    _kv._internal_kv_put(_key(config), _encode(own), overwrite=False, namespace=_NAMESPACE)
    return agreed_kernels(config) or own


def _key(config: EngineConfig) -> bytes:
    return b"kernels:" + hashlib.sha256(_encode(config)).hexdigest().encode()
