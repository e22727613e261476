"""Listening socket, limit of open files, and protocol of connections."""

from __future__ import annotations

import resource
import socket
from dataclasses import dataclass

from loraserve.errors import ConfigError
from loraserve.limits import LIMITS, Limits

_FILES_BESIDE_CONNECTIONS = 256
"""Open files for blobs, the database, the journal and the engine's sockets."""


@dataclass(frozen=True, slots=True)
class DescriptorBudget:
    """Budget of the process's descriptors.

    Attributes:
        max_connections: connections that it allows.
        first_reserved: lowest descriptor that is kept for other files; None: there is no limit.
    """

    max_connections: int
    first_reserved: int | None


def open_listener(host: str, port: int) -> socket.socket:
    """Bind a non-blocking TCP socket to the address.

    Raises:
        ConfigError: the address can't be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"Can't listen on {host} port {port}: {error.strerror or error}.",
            hint="Choose another with --host or --port.",
        ) from error
    listener.setblocking(False)
    return listener


def listener_url(listener: socket.socket, scheme: str = "http") -> str:
    """Format the URL of a listener's address, without a slash at its end."""
    host, port, *_ = listener.getsockname()
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def raise_file_limit(limits: Limits = LIMITS) -> DescriptorBudget:
    """Raise the limit of open files towards one per connection and ephemeral adapter.

    At least half of the limit is left to connections.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_beside = _FILES_BESIDE_CONNECTIONS + limits.max_ephemeral_versions
    wanted = limits.max_connections + num_beside
    if soft == resource.RLIM_INFINITY:
        return DescriptorBudget(limits.max_connections, None)
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    num_reserved = min(num_beside, soft // 2)
    return DescriptorBudget(max(1, min(limits.max_connections, soft - num_reserved)), soft - num_reserved)
