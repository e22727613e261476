"""The Python client of a loraserve server: `Client` and `AsyncClient`.

It stands alone: it imports `loraserve.errors` and `loraserve.contract`, the shapes of answers, and
neither torch nor the server.

`_async` is written by hand, `_sync` is generated from it; the other modules do no I/O and serve
both.

    with Client("http://127.0.0.1:8000", api_key="sk-lora-…") as client:
        client.adapters.push("./my-peft-dir", name="sql")
        answer = client.completions.create(model="sql", prompt="list the tickets", max_tokens=32)
        text = answer.choices[0].text
"""

from __future__ import annotations

from loraserve.contract.operation import Progress
from loraserve.sdk._async.client import AsyncClient
from loraserve.sdk._async.streaming import AsyncStream
from loraserve.sdk._sync.client import Client
from loraserve.sdk._sync.streaming import Stream

__all__ = ["AsyncClient", "AsyncStream", "Client", "Progress", "Stream"]
