"""TLS of the listening socket: its certificate, and another one while the server runs."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from pathlib import Path

from loraserve.errors import ConfigError

_RECORD_HEAD_BYTES = 5
"""Bytes of a TLS record's type, version and length."""
_HANDSHAKE_RECORD = 22
_MAX_RECORD_BYTES = 1 << 14
"""Longest plaintext of a record (RFC 8446, 5.1)."""


class TlsFiles:
    """Certificate chain and key in PEM files, read again by `reload`.

    Connections that are open keep what they began with; new ones get the new certificate.
    """

    def __init__(self, certfile: Path, keyfile: Path | None) -> None:
        """Read the files.

        Args:
            keyfile: None: the key is in `certfile`.

        Raises:
            ConfigError: a file can't be read, isn't PEM, has a passphrase, or the two don't fit
                together.
        """
        self.context = _context()
        self.reload(certfile, keyfile)

    def reload(self, certfile: Path, keyfile: Path | None) -> None:
        """Read the files again, or others; what was read before stays if they are wrong.

        Raises:
            ConfigError: as `__init__`.
        """
        # a context that a wrong file was loaded into may have half of it
        _load(_context(), certfile, keyfile)
        _load(self.context, certfile, keyfile)


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    return context


def _load(context: ssl.SSLContext, certfile: Path, keyfile: Path | None) -> None:
    for flag, path in (("--ssl-certfile", certfile), ("--ssl-keyfile", keyfile)):
        if path is None:
            continue
        try:
            with open(path, "rb") as file:
                file.read(1)
        except OSError as error:
            raise ConfigError(f"{flag} {path} can't be read: {error.strerror or error}.") from error
    both = f"--ssl-certfile {os.fspath(certfile)}" + (f" and --ssl-keyfile {keyfile}" if keyfile else "")
    try:
        context.load_cert_chain(certfile, keyfile, password=_no_passphrase)
    except _HasPassphrase:
        raise ConfigError(
            f"The key of {both} has a passphrase.", hint="Give a key without one, readable by this user only."
        ) from None
    except (ssl.SSLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or "no PEM"
        raise ConfigError(
            f"{both} can't be used: {str(reason).replace('_', ' ').lower()}.",
            hint="Expected a certificate chain in PEM, the server's own first, and the key that belongs to it.",
        ) from error


class _HasPassphrase(Exception):
    pass


def _no_passphrase() -> str:
    # OpenSSL would ask for it on the terminal
    raise _HasPassphrase


async def wait_for_hello(sock: socket.socket) -> None:
    """Wait until the client's first record is in the system's buffer, reading nothing of it.

    Only then are a TLS object and its buffers made, some 50 KiB: a connection that stays silent,
    or sends its first record byte by byte, costs a few KiB. What isn't a handshake's record is left
    to the TLS object to refuse.

    Raises:
        ConnectionError: the client left before.
    """
    try:
        begin = await _peek(sock, _RECORD_HEAD_BYTES)
        if begin[0] == _HANDSHAKE_RECORD and len(begin) == _RECORD_HEAD_BYTES:
            num_bytes = min(int.from_bytes(begin[3:], "big"), _MAX_RECORD_BYTES)
            await _peek(sock, _RECORD_HEAD_BYTES + num_bytes)
    finally:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)


async def _peek(sock: socket.socket, num_bytes: int) -> bytes:
    """Peek at the first bytes once that many have come, fewer where the client ends.

    The system wakes nothing before: a client that sends single bytes causes no turns of the loop.
    """
    loop = asyncio.get_running_loop()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
    readable: asyncio.Future[None] = loop.create_future()

    def note() -> None:
        # once: the loop calls it as long as there is something to read
        loop.remove_reader(sock)
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(sock, note)
    try:
        await readable
    finally:
        loop.remove_reader(sock)
    data = sock.recv(num_bytes, socket.MSG_PEEK)
    if not data:
        raise ConnectionAbortedError("the client ended before its first record")
    return data
