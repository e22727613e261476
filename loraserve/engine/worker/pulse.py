"""Report the progress of the engine's working thread to the server, from another thread."""

from __future__ import annotations

import os
import threading
import time

import zmq

from loraserve.engine_client import messages as m
from loraserve.progress import Progress

_ORPHAN_PATIENCE_S = 10.0
"""Seconds after which an engine without a server that makes no progress is ended.

Others end by themselves between steps.
"""


class Pulses:
    """Send a `Pulse` every `interval_s` from `start` to `stop`.

    A server that gets none concludes that the process stands still; one whose pulses have the same
    count of moves concludes that the working thread does. The server counts the seconds, since only
    it can tell for how long it listened.

    Args:
        context: makes the thread's own socket.
        server_pid: the parent, as long as it lives.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        progress: Progress,
        interval_s: float,
        server_pid: int,
    ) -> None:
        self._context, self._endpoint, self._progress = context, endpoint, progress
        self._interval_s, self._server_pid = interval_s, server_pid
        self._is_over = False
        self._wanted = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def send_now(self) -> None:
        """Send a pulse before the interval is over."""
        self._wanted.set()

    def stop(self) -> None:
        """End the thread and close its socket."""
        self._is_over = True
        self._wanted.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        with self._context.socket(zmq.PUSH) as socket:
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self._endpoint)
            num_moves, moved_s = -1, time.monotonic()
            while True:
                progress = self._progress
                socket.send(
                    m.encode_output(m.Pulse(num_moves=progress.num_moves, what=progress.what, doing=str(progress)))
                )
                now = time.monotonic()
                if progress.num_moves != num_moves or os.getppid() == self._server_pid:
                    num_moves, moved_s = progress.num_moves, now
                elif now - moved_s > _ORPHAN_PATIENCE_S:
                    # the hanging thread can't be reached, and no server is left to kill the process
                    os._exit(1)
                self._wanted.wait(self._interval_s)
                self._wanted.clear()
                if self._is_over:
                    return
