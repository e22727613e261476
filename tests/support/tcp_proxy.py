"""A way to a TCP server that can be cut and mended:
for a database that goes away and comes back while programs use it.
"""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass, field
from enum import StrEnum


class State(StrEnum):
    UP = "up"
    REFUSING = "refusing"
    """Connections are closed, those that are open and new ones: the server's process is gone."""
    SILENT = "silent"
    """Connections stay and new ones are taken, and nothing comes through: a cable is cut,
    or the server hangs.
    """


@dataclass
class TcpProxy:
    """Forwards a port of the loopback to `host`:`port`. Runs as long as the with block."""

    host: str
    port: int
    _listener: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))
    _state: State = State.UP
    _is_up: threading.Event = field(default_factory=threading.Event)
    _sockets: set[socket.socket] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_closed: bool = False

    @property
    def local_port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def become(self, state: State) -> None:
        """Connections that were silent don't come back: their other end is closed too."""
        with self._lock:
            was, self._state = self._state, state
            sockets = list(self._sockets) if State.REFUSING in (state, was) or was is State.SILENT else []
        for each in sockets:
            close(each)
        if state is State.UP:
            self._is_up.set()
        else:
            self._is_up.clear()

    def __enter__(self) -> TcpProxy:
        self._is_up.set()
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed = True
        self.become(State.REFUSING)
        self._is_up.set()
        close(self._listener)

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._state is State.REFUSING:
                close(client)
                continue
            try:
                server = socket.create_connection((self.host, self.port))
            except OSError:
                close(client)
                continue
            with self._lock:
                self._sockets |= {client, server}
            for source, target in ((client, server), (server, client)):
                threading.Thread(target=self._pump, args=(source, target), name="proxy", daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                self._is_up.wait()
                target.sendall(data)
        except OSError:
            pass
        with self._lock:
            self._sockets -= {source, target}
        close(source)
        close(target)


def close(each: socket.socket) -> None:
    try:
        each.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    each.close()
