"""The cluster's listening socket, which each ingress has a copy of."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

from loraserve.api.http.listener import listener_url

_WAIT_S = 10.0


class SharedListener:
    """Gives a listening socket to every process that connects to a Unix socket.

    A connection is taken by the process that accepts first: where an ingress goes or dies, those
    that wait are for the next one, and none is refused.
    """

    def __init__(self, listener: socket.socket, path: Path) -> None:
        """Begin to listen, and to give the socket away.

        Args:
            path: of the Unix socket, in a folder of this user's alone.
        """
        self.path = path
        self._listener = listener
        listener.listen(socket.SOMAXCONN)
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(str(path))
        self._door.listen()
        threading.Thread(target=self._give, name="listener", daemon=True).start()

    @property
    def url(self) -> str:
        """URL that clients connect to."""
        return listener_url(self._listener)

    def close(self) -> None:
        """Give it away no more, and close this process' copy."""
        # a close alone doesn't wake what accepts
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        self._listener.close()

    def _give(self) -> None:
        while True:
            try:
                asking, _ = self._door.accept()
            except OSError:
                return
            # one that has gone again gets nothing
            with asking, contextlib.suppress(OSError):
                socket.send_fds(asking, [b"\0"], [self._listener.fileno()])


def take_listener(path: Path) -> socket.socket:
    """Receive a copy of the socket that is given away at `path`.

    Raises:
        OSError: nothing is given there.
    """
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(_WAIT_S)
        asking.connect(str(path))
        _, (number,), _, _ = socket.recv_fds(asking, 1, 1)
    listener = socket.socket(fileno=number)
    listener.setblocking(False)
    return listener
