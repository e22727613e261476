"""An S3 service of the tests' own: moto's server, with the variables that lead a client to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

boto3 = pytest.importorskip("boto3", reason="needs moto's server")

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}


@dataclass(frozen=True)
class BucketService:
    endpoint: str

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to reach it."""
        return {**KEYS, "AWS_ENDPOINT_URL": self.endpoint}

    @property
    def client(self) -> Any:
        """boto3's, so that what is looked at isn't our own word."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=KEYS["AWS_REGION"],
            aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
        )

    def make(self, bucket: str) -> str:
        """A new bucket's URL."""
        self.client.create_bucket(Bucket=bucket)
        return f"s3://{bucket}"

    def put(self, path: str, data: bytes) -> None:
        """An object, ``bucket/key``, as any other client would put it."""
        bucket, _, key = path.partition("/")
        self.client.put_object(Bucket=bucket, Key=key, Body=data)


@contextmanager
def bucket_service() -> Iterator[BucketService]:
    """A running service; the test is skipped where moto isn't installed."""
    server = pytest.importorskip("moto.server", reason="needs moto's server").ThreadedMotoServer(
        ip_address="127.0.0.1", port=0, verbose=False
    )
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield BucketService(f"http://{host}:{port}")
    finally:
        server.stop()
