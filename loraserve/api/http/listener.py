"""Listening socket, limit of open files, and protocol of connections."""

from __future__ import annotations

import importlib.util
import resource
import socket

from loraserve.api.http.connection import BoundedProtocol
from loraserve.errors import ConfigError
from loraserve.limits import LIMITS, Limits
from loraserve.tenancy.limits.shares import Shares

_FILES_BESIDE_CONNECTIONS = 256
"""Open files for blobs, the database and the engine's sockets."""


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
    """Return the URL of a listener's address, without a slash at its end."""
    host, port, *_ = listener.getsockname()
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def raise_file_limit(limits: Limits = LIMITS) -> int:
    """Raise the limit of open files towards one per connection.

    Return the connections that it allows.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.max_connections + _FILES_BESIDE_CONNECTIONS
    if soft == resource.RLIM_INFINITY:
        return limits.max_connections
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(limits.max_connections, soft - _FILES_BESIDE_CONNECTIONS))


def connection_class(connections: Shares, protocol: type[BoundedProtocol] | None = None) -> type[BoundedProtocol]:
    """Return the protocol class for uvicorn. Each connection takes a place in `connections`.

    Args:
        protocol: None: httptools (llhttp), or h11 (pure Python) where httptools isn't installed.
    """
    return type("Connection", (protocol or _fastest_protocol(),), {"connection_shares": connections})


def _fastest_protocol() -> type[BoundedProtocol]:
    if importlib.util.find_spec("httptools") is not None:
        from loraserve.api.http.httptools_connection import HttptoolsConnection

        return HttptoolsConnection
    from loraserve.api.http.h11_connection import H11Connection

    return H11Connection
