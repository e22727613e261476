"""Ingresses share a listening socket: what one doesn't take is for the next."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraserve.api.http.listener import open_listener
from loraserve.cluster.shared_listener import SharedListener, take_listener

HOST = "127.0.0.1"


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[SharedListener]:
    listener = SharedListener(open_listener(HOST, 0), tmp_path / "listener")
    yield listener
    listener.close()


def connect(shared: SharedListener) -> socket.socket:
    return socket.create_connection((HOST, int(shared.url.rpartition(":")[2])), timeout=10)


def test_a_connection_waits_while_there_is_no_ingress(shared: SharedListener) -> None:
    take_listener(shared.path).close()
    with connect(shared) as client, take_listener(shared.path) as next_one:
        client.sendall(b"?")
        connection, _ = next_one.accept()
        with connection:
            connection.settimeout(10)
            assert connection.recv(1) == b"?"


def test_each_connection_is_taken_by_single_listener(shared: SharedListener) -> None:
    with take_listener(shared.path) as one, take_listener(shared.path) as two, connect(shared):
        one.accept()[0].close()
        with pytest.raises(BlockingIOError):
            two.accept()


def test_no_connection_is_given_after_end(shared: SharedListener) -> None:
    shared.close()
    with pytest.raises(ConnectionRefusedError):
        take_listener(shared.path)
