"""The Python client of a loraserve server: `Client` and `AsyncClient`.

It stands alone: of loraserve it imports nothing but `loraserve.errors`, and neither torch nor the server.

    with Client("http://127.0.0.1:8000", api_key="sk-lora-…") as client:
        client.adapters.push("./my-peft-dir", name="sql")
        text = client.completions.create(model="sql", prompt="list the tickets", max_tokens=32).choices[0].text
"""

from __future__ import annotations

from loraserve.sdk.client import AsyncClient, Client
from loraserve.sdk.file_piece import Progress
from loraserve.sdk.transport.streaming import AsyncStream, Stream

__all__ = ["AsyncClient", "AsyncStream", "Client", "Progress", "Stream"]
