"""Acceptance of connections: each takes its slot before a byte of it is read."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import socket
import ssl
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

import uvicorn

from loraserve.api.http.client_address import ProxyHeaderInvalid, TrustedProxies, read_proxy_header
from loraserve.api.http.tls import wait_for_hello
from loraserve.errors import LoraserveError, Overloaded, RateLimited
from loraserve.limits import LIMITS, Limits
from loraserve.tenancy.limits.shares import ConnectionSlot, Shares, address_holder

if TYPE_CHECKING:
    from loraserve.api.http.connection import BoundedProtocol

logger = logging.getLogger(__name__)

_MAX_ACCEPTED = 64
"""Connections that are accepted in one turn of the event loop."""
_UNREAD_BYTES = 64 * 1024
"""Bytes of a refused connection that are discarded: unread ones would cancel the refusal."""
_PAUSE_S = 0.5
"""Seconds without accepting after the system had no descriptor or memory for a connection."""
_MIN_HANDSHAKE_S = 0.1
"""Minimum time for the remaining handshake of a client whose first record came late."""
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Acceptor:
    """Accepts the connections of one listener and gives each its protocol.

    A connection counts from its acceptance on, through the PROXY protocol's header and the TLS
    handshake, which both have `limits.handshake_s`. Beyond its address's share, or with a
    descriptor that is kept for other files, it is refused at once.

    Args:
        first_reserved: lowest descriptor that no connection may have; None: there is no limit. The
            system gives the lowest free one, so those from here on are left to other files.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[ConnectionSlot], BoundedProtocol],
        connections: Shares,
        *,
        proxies: TrustedProxies,
        tls: ssl.SSLContext | None = None,
        first_reserved: int | None = None,
        limits: Limits = LIMITS,
    ) -> None:
        self.sockets = [listener]
        self._listener = listener
        self._make_protocol = make_protocol
        self._connections = connections
        self._proxies = proxies
        self._tls = tls
        self._first_reserved = math.inf if first_reserved is None else first_reserved
        self._limits = limits
        self._beginning: set[asyncio.Task[None]] = set()
        """Connections that have no protocol yet."""
        self._pause: asyncio.TimerHandle | None = None
        self._is_closed = False

    def start(self, backlog: int) -> None:
        """Listen, and accept from now on."""
        self._listener.setblocking(False)
        self._listener.listen(backlog)
        self._resume()

    def close(self) -> None:
        """Accept no more, and close the listener; no-op when called again."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._pause is not None:
            self._pause.cancel()
        else:
            asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()

    async def wait_closed(self) -> None:
        """End the connections that have no protocol yet."""
        for task in self._beginning:
            task.cancel()
        await asyncio.gather(*self._beginning, return_exceptions=True)

    def _resume(self) -> None:
        self._pause = None
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_MAX_ACCEPTED):
            try:
                sock, address = self._accept_one()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._wait(error)
                    return
                # the client has left already
                continue
            self._take(sock, address[0])

    def _accept_one(self) -> tuple[socket.socket, tuple[str, int]]:
        return self._listener.accept()

    def _wait(self, error: OSError) -> None:
        """Stop accepting for a moment; the system keeps up to a backlog of connections."""
        logger.error("no connection can be accepted for now: %s", error.strerror)
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener)
        self._pause = loop.call_later(_PAUSE_S, self._resume)

    def _take(self, sock: socket.socket, host: str) -> None:
        sock.setblocking(False)
        try:
            if sock.fileno() >= self._first_reserved:
                self._connections.num_refused["full"] += 1
                raise Overloaded("The server has no descriptor for another connection.", retry_after_s=1.0)
            slot = ConnectionSlot(self._connections, host)
        except (RateLimited, Overloaded) as error:
            self._refuse(sock, error)
            return
        task = asyncio.create_task(self._begin(sock, slot), name="connection")
        self._beginning.add(task)
        task.add_done_callback(self._beginning.discard)

    async def _begin(self, sock: socket.socket, slot: ConnectionSlot) -> None:
        loop = asyncio.get_running_loop()
        seconds = self._limits.handshake_s
        handshake: dict[str, float] = {}
        protocol: BoundedProtocol | None = None
        try:
            if self._proxies.sends_proxy_header(slot.host):
                async with asyncio.timeout(seconds):
                    await self._read_proxy_header(sock, slot)
            if self._tls is not None:
                deadline_s = loop.time() + seconds
                async with asyncio.timeout_at(deadline_s):
                    await wait_for_hello(sock)
                left_s = max(_MIN_HANDSHAKE_S, deadline_s - loop.time())
                handshake = {"ssl_handshake_timeout": left_s, "ssl_shutdown_timeout": seconds}
            _, protocol = await loop.connect_accepted_socket(
                lambda: self._make_protocol(slot), sock, ssl=self._tls, **handshake
            )
        except LoraserveError as error:
            self._refuse(sock, error)
        except ProxyHeaderInvalid as error:
            logger.warning("a connection of the trusted proxy %s was refused: %s", slot.host, error)
        except OSError:
            pass  # it left, or didn't shake hands; TimeoutError and ssl.SSLError are such errors
        finally:
            # a protocol that has its connection gives the slot back with it
            if protocol is None:
                sock.close()
                slot.release()

    async def _read_proxy_header(self, sock: socket.socket, slot: ConnectionSlot) -> None:
        host = await read_proxy_header(sock)
        if host is not None:
            slot.move(address_holder(host))
            slot.host = host

    def _refuse(self, sock: socket.socket, error: LoraserveError) -> None:
        """Answer at once, reading nothing but what would cancel the answer, and close."""
        with sock:
            if self._tls is not None:
                return
            try:
                sock.send(_refusal(error))
                sock.recv(_UNREAD_BYTES)
            except OSError:
                pass


def _refusal(error: LoraserveError) -> bytes:
    """Build an answer that costs nothing: nothing of the request is parsed."""
    is_share = isinstance(error, RateLimited)
    retry_after_s = math.ceil(getattr(error, "retry_after_s", 1.0))
    status = b"429 Too Many Requests" if is_share else b"503 Service Unavailable"
    head = b"HTTP/1.1 %s\r\nretry-after: %d\r\nx-content-type-options: nosniff\r\n" % (status, retry_after_s)
    return head + b"content-length: 0\r\nconnection: close\r\n\r\n"


class HTTPServer(uvicorn.Server):
    """uvicorn, whose connections come from acceptors, and without its signal handlers.

    Those would end the process by the signal instead of a drain.

    Args:
        make_acceptor: makes the acceptor of a listener, given what makes protocols.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        make_acceptor: Callable[[socket.socket, Callable[[ConnectionSlot], BoundedProtocol]], Acceptor],
    ) -> None:
        super().__init__(config)
        self._make_acceptor = make_acceptor

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept the listeners' connections from now on."""
        await self.lifespan.startup()
        self.servers = []
        for listener in sockets or ():
            acceptor = self._make_acceptor(listener, self._make_protocol)
            acceptor.start(self.config.backlog)
            self.servers.append(acceptor)  # type: ignore[arg-type]
        self.started = True

    def _make_protocol(self, slot: ConnectionSlot) -> BoundedProtocol:
        protocol: type[BoundedProtocol] = self.config.http_protocol_class  # type: ignore[assignment]
        return protocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state, slot=slot)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
