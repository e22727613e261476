"""Operations that differ between the two clients: waiting, work on files, opening connections.

`_sync` is generated from `_async` by replacing each `async_` name with its `sync_` counterpart.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

import anyio
import anyio.to_thread
import httpx2

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

async_sleep = anyio.sleep
sync_sleep = time.sleep


async def async_call(function: Callable[[*Ts], T], *args: *Ts) -> T:
    """Call `function` on a thread.

    So reading or writing a file doesn't hold up the event loop.
    """
    return await anyio.to_thread.run_sync(function, *args)


def sync_call(function: Callable[[*Ts], T], *args: *Ts) -> T:
    """Call `function`."""
    return function(*args)


def async_http_client(url: str) -> httpx2.AsyncClient:
    """Return a client for the server at `url`.

    Its connections have no bound: tasks are cheap, and the server admits.
    """
    return httpx2.AsyncClient(limits=httpx2.Limits(max_connections=None), verify=_trusted(url))


def sync_http_client(url: str) -> httpx2.Client:
    """Return a client for the server at `url`, with httpx2's own bound on connections."""
    return httpx2.Client(verify=_trusted(url))


def _trusted(url: str) -> ssl.SSLContext | bool:
    """Return the certificates that a client of `url` trusts.

    For plain HTTP none: reading the system's takes longer than a call (60 ms on a slow core).
    """
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if url.startswith("http://") else True
