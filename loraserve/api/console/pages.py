"""Serve the console's files.

They hold nothing of any tenant, so they need no key: the page prompts for one, unless the server
requires none, keeps it in the browser's session, and sends it with each request to the API. The
page may load and call nothing but this server, and run no script and no style but these files.
"""

from __future__ import annotations

import functools
import hashlib
import html
import importlib.metadata
from collections.abc import Mapping
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from loraserve.api import scopes
from loraserve.api.management.payloads.responses import header_list, names_etag
from loraserve.api.services import services_of
from loraserve.errors import NotFound

router = APIRouter()

PATH = "/console/"
STATIC = Path(__file__).parent / "static"
INDEX = "index.html"
RELEASE_MARK = b"{{release}}"
"""Place of the release in the page: its files are below a path that changes with any of them."""

AUTH_MARK = b"{{auth}}"
"""Place in the page that says whether the server requires keys: ``key`` or ``none``."""

DOCS_MARK = b"{{docs}}"
"""Place in the page of the documentation's address; nothing where the installation names none."""

MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "object-src 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_HINT = {
    "message": "This is loraserve. Its API is OpenAI's, below /v1, and its own, below /api/v1.",
    "console": PATH,
    "openapi": "/api/v1/openapi.json",
}


@router.get("/", include_in_schema=False)
@scopes.open
async def root(request: Request) -> Response:
    """Send a browser to the console; tell other clients where the API is."""
    headers = {"vary": "Accept", "cache-control": "no-cache"}
    if _wants_page(request):
        return RedirectResponse(PATH, 302, headers=headers)
    return JSONResponse(_HINT, headers=headers)


@router.get("/console", include_in_schema=False)
@scopes.open
async def console() -> Response:
    """Send the browser to the console's page."""
    return RedirectResponse(PATH, 308)


@router.get("/console/", include_in_schema=False)
@scopes.open
async def page(request: Request) -> Response:
    """Return the console's page, which is asked for anew at each visit."""
    auth = b"key" if services_of(request).settings.auth else b"none"
    content = _files()[INDEX].replace(AUTH_MARK, auth).replace(DOCS_MARK, html.escape(docs_url()).encode())
    return _answer(request, INDEX, content, "no-cache")


@router.get("/console/assets/{release}/{file:path}", include_in_schema=False)
@scopes.open
async def asset(release: str, file: str, request: Request) -> Response:
    """Return a file of the console; a browser never asks for it again."""
    content = _files().get(file)
    if content is None or release != release_of(_files()):
        raise NotFound("The console has no such file.", hint=f"Load {PATH} again.")
    return _answer(request, file, content, "public, max-age=31536000, immutable")


def release_of(files: Mapping[str, bytes]) -> str:
    """Hash this set of files to its name: all but the page that has the name in it."""
    digest = hashlib.sha256()
    for name in sorted(files.keys() - {INDEX}):
        for part in (name.encode(), files[name]):
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
    return digest.hexdigest()[:16]


@functools.cache
def docs_url() -> str:
    """Return the documentation's address as the installed package names it; empty: it names none.

    Packages of a release have it (`hatch_metadata.py`).
    """
    try:
        named = importlib.metadata.metadata("loraserve").get_all("Project-URL", [])
    except importlib.metadata.PackageNotFoundError:
        return ""
    urls = dict(line.split(", ", 1) for line in named if ", " in line)
    url = urls.get("Documentation", "")
    return url if url.startswith("https://") else ""


@functools.cache
def _files() -> Mapping[str, bytes]:
    """Read the console's files by their path, a few hundred KiB in all."""
    paths = (path for path in STATIC.rglob("*") if path.suffix in MEDIA_TYPES)
    files = {path.relative_to(STATIC).as_posix(): path.read_bytes() for path in paths}
    files[INDEX] = files[INDEX].replace(RELEASE_MARK, release_of(files).encode())
    return files


def _answer(request: Request, file: str, content: bytes, cache_control: str) -> Response:
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**_HEADERS, "etag": etag, "cache-control": cache_control}
    if names_etag(header_list(request, "if-none-match") or "", etag):
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=MEDIA_TYPES[Path(file).suffix])


def _wants_page(request: Request) -> bool:
    accepted = (header_list(request, "accept") or "").split(",")
    return any(part.partition(";")[0].strip().lower() == "text/html" for part in accepted)
