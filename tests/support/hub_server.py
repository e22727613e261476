"""A Hugging Face hub on the loopback: the routes that `huggingface_hub` asks for a model."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "c0ffee0123456789c0ffee0123456789c0ffee01"


class Hub(ThreadingHTTPServer):
    """Repositories by id, each a file's bytes by name; `main` and `v1.0` are one commit.

    Attributes:
        token: asked for a repository whose id begins with ``private/``.
        asked: method, path and range of each request.
        cut_after: bytes of a body after which the connection ends, once.
    """

    daemon_threads = True

    def __init__(self, repositories: Mapping[str, Mapping[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.token = "hf_secret"
        self.asked: list[tuple[str, str, str | None]] = []
        self.cut_after: int | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def downloads(self) -> list[str]:
        """Return the names of the files whose bytes were asked for."""
        return [
            path.partition("/resolve/")[2].partition("/")[2]
            for method, path, _ in self.asked
            if method == "GET" and "/resolve/" in path
        ]


@contextmanager
def running_hub(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[Hub]:
    hub = Hub(repositories)
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self.server.asked.append((self.command, self.path, self.headers.get("Range")))
        path = self.path.partition("?")[0]
        route = r"/api/models/(?P<repo>.+?)(/(?P<what>revision|tree)/(?P<revision>.+))?"
        if (match := re.fullmatch(route, path)) is not None:
            if self._may_read(match["repo"]) and self._has(match["revision"] or "main"):
                (self._tree if match["what"] == "tree" else self._model)(match["repo"])
            return
        match = re.fullmatch(r"/(?P<repo>.+?)/resolve/(?P<revision>[^/]+)/(?P<file>.+)", path)
        if match is None:
            self._refuse(404, "")
        elif self._may_read(match["repo"]) and self._has(match["revision"]):
            data = self.server.repositories[match["repo"]].get(match["file"])
            if data is None:
                self._refuse(404, "EntryNotFound")
            else:
                self._file(data)

    def _may_read(self, repo: str) -> bool:
        is_allowed = (
            not repo.startswith("private/") or self.headers.get("Authorization") == f"Bearer {self.server.token}"
        )
        if repo in self.server.repositories and is_allowed:
            return True
        self._refuse(401, "RepoNotFound")
        return False

    def _has(self, revision: str) -> bool:
        if revision in ("main", "v1.0", COMMIT):
            return True
        self._refuse(404, "RevisionNotFound")
        return False

    def _model(self, repo: str) -> None:
        siblings = [{"rfilename": name} for name in self.server.repositories[repo]]
        self._send(200, json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode(), {})

    def _tree(self, repo: str) -> None:
        files = [
            {
                "type": "file",
                "path": name,
                "size": len(data),
                "oid": hashlib.sha1(data, usedforsecurity=False).hexdigest(),
            }
            for name, data in self.server.repositories[repo].items()
        ]
        self._send(200, json.dumps(files).encode(), {})

    def _file(self, data: bytes) -> None:
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(data).hexdigest()}"', "Accept-Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if wanted is None:
            self._send(200, data, headers)
        else:
            first = int(wanted[1])
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
            self._send(206, data[first:], headers)

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "GET":
            return
        cut = self.server.cut_after
        if cut is not None and len(body) > cut:
            self.server.cut_after = None
            self.wfile.write(body[:cut])
            self.close_connection = True
            self.connection.close()
            return
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass
