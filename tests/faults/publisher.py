"""Publishes until it is killed: the program that test_publish_kill.py kills.

    python publisher.py DATABASE_URL STORE_URL UPLOADS_DIR < rounds

A round is a line ``POINT@N`` (killed at the N-th hit of a fault point) or ``after SECONDS`` of
publishing. Each runs in a fork, so that the imports are paid for once. Every acknowledged publish
and alias move is a line on stdout, written before the next begins.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import msgspec

from adapters_store import open_store
from loraserve import faults
from loraserve.db.session import Database
from loraserve.registry.records import AliasTarget
from loraserve.registry.registry import Registry
from loraserve.tenancy.identity.auth import Authenticator
from loraserve.types import BaseSpec

PER_ROUND = 10


@dataclass(frozen=True)
class Inputs:
    base: BaseSpec
    config: bytes
    weights: list[bytes]

    @classmethod
    def read(cls, folder: Path) -> Inputs:
        return cls(
            msgspec.json.decode((folder / "base.json").read_bytes(), type=BaseSpec),
            (folder / "config.json").read_bytes(),
            [path.read_bytes() for path in sorted(folder.glob("*.safetensors"))],
        )


async def publish_forever(database_url: str, store_url: str, inputs: Inputs, round_number: int, started: int) -> None:
    database = Database(database_url)
    store = open_store(store_url)
    authenticator = Authenticator(database, admin_key="a" * 32)
    await authenticator.open()
    tenant = (await authenticator.authenticate("a" * 32)).tenant
    registry = Registry(database, store, lambda: inputs.base)
    os.write(started, b"s")
    # Bytes that no earlier round has stored: otherwise a missing blob would be there by chance.
    mine = inputs.weights[round_number * PER_ROUND : (round_number + 1) * PER_ROUND]
    for number in count():
        name = f"round-{round_number}-{number // PER_ROUND}"
        staged = await registry.uploads.stage(tenant)
        staged.write(mine[number % PER_ROUND])
        published = await registry.publisher.publish(tenant, name, inputs.config, staged, actor="test")
        await registry.uploads.release(tenant, staged)
        version = published.version.version
        os.write(1, f"published {name} {version} {published.version.digest}\n".encode())
        if version is not None and version > 1:
            await registry.aliases.set(tenant, name, "previous", AliasTarget(version - 1), actor="test")
            os.write(1, f"moved {name} previous {version - 1}\n".encode())


def main() -> None:
    database_url, store_url, uploads = sys.argv[1:]
    inputs = Inputs.read(Path(uploads))
    reader, started = os.pipe()
    for number, line in enumerate(sys.stdin):
        what, _, seconds = line.strip().partition(" ")
        child = os.fork()
        if child == 0:
            point, _, nth = what.partition("@")
            with faults.arm(point, f"kill@{nth or 1}"):
                asyncio.run(publish_forever(database_url, store_url, inputs, number, started))
        os.read(reader, 1)
        if seconds:
            time.sleep(float(seconds))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            sys.exit(f"round {line.strip()}: ended by itself with {status}")


main()
