"""Certificate files are checked before they are used, and wrong ones change nothing."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tls_files import write_certificate

from loraserve.api.http.tls import TlsFiles, wait_for_hello
from loraserve.errors import ConfigError


def test_chain_and_key_may_share_file(tmp_path: Path) -> None:
    write_certificate(tmp_path / "a.pem", tmp_path / "a.key")
    both = tmp_path / "both.pem"
    both.write_bytes((tmp_path / "a.key").read_bytes() + (tmp_path / "a.pem").read_bytes())
    assert TlsFiles(both, None).context.minimum_version is ssl.TLSVersion.TLSv1_2


def test_wrong_files_are_refused_at_start_and_reload(tmp_path: Path, subtests: Any) -> None:
    good, key = tmp_path / "good.pem", tmp_path / "good.key"
    write_certificate(good, key)
    write_certificate(tmp_path / "other.pem", tmp_path / "other.key")
    write_certificate(tmp_path / "locked.pem", tmp_path / "locked.key", passphrase=b"sesame")
    (tmp_path / "empty.pem").write_bytes(b"")
    (tmp_path / "cut.pem").write_bytes(good.read_bytes()[:200])
    (tmp_path / "binary.pem").write_bytes(bytes(range(256)) * 1000)
    files = TlsFiles(good, key)
    for certfile, keyfile, words in (
        ("absent.pem", "good.key", "--ssl-certfile .*absent.pem can't be read: No such file"),
        ("good.pem", "absent.key", "--ssl-keyfile .*absent.key can't be read: No such file"),
        (".", "good.key", "--ssl-certfile .* can't be read: Is a directory"),
        ("good.pem", "other.key", "key values mismatch"),
        ("good.pem", None, "can't be used"),
        ("empty.pem", "good.key", "can't be used"),
        ("cut.pem", "good.key", "can't be used"),
        ("binary.pem", "good.key", "can't be used"),
        ("good.key", "good.key", "can't be used"),
        ("locked.pem", "locked.key", "has a passphrase"),
    ):
        with subtests.test(f"{certfile} {keyfile}"):
            for read in (TlsFiles, files.reload):
                with pytest.raises(ConfigError, match=words):
                    read(tmp_path / certfile, None if keyfile is None else tmp_path / keyfile)


HELLO = b"\x16\x03\x01\x00\x64" + 100 * b"h"


@pytest.fixture
async def pair() -> AsyncIterator[tuple[socket.socket, socket.socket]]:
    """A client's and a server's end of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    for end in (client, accepted):
        end.setblocking(False)
    with client, accepted:
        yield client, accepted


async def test_hello_is_whole_before_wait_ends(pair: tuple[socket.socket, socket.socket]) -> None:
    client, accepted = pair
    waiting = asyncio.create_task(wait_for_hello(accepted))
    for start in range(0, len(HELLO) - 1, 26):
        client.send(HELLO[start : start + 26])
        await asyncio.sleep(0.01)
        assert not waiting.done()
    client.send(HELLO[-1:] + b"more")
    await asyncio.wait_for(waiting, 60)
    # nothing of it was read, and less wakes a reader again
    assert accepted.recv(1000) == HELLO + b"more"
    assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + 20_000 * b"x"])
async def test_wait_ends_without_a_handshake_record(pair: tuple[socket.socket, socket.socket], data: bytes) -> None:
    client, accepted = pair
    await asyncio.get_running_loop().sock_sendall(client, data)
    await asyncio.wait_for(wait_for_hello(accepted), 60)


@pytest.mark.parametrize("sent", [b"", HELLO[:50]])
async def test_wait_ends_where_client_leaves(pair: tuple[socket.socket, socket.socket], sent: bytes) -> None:
    client, accepted = pair
    waiting = asyncio.create_task(wait_for_hello(accepted))
    client.send(sent) if sent else None
    client.close()
    if sent:
        # the TLS object refuses what is cut off
        await asyncio.wait_for(waiting, 60)
    else:
        with pytest.raises(ConnectionAbortedError):
            await asyncio.wait_for(waiting, 60)
