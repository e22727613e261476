"""The console's files: what is served, with which headers, and what is in them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from email.message import Message

import httpx2
import pytest

from loraserve.api.app import create_app
from loraserve.api.console.pages import CONTENT_SECURITY_POLICY, MEDIA_TYPES, STATIC, docs_url, release_of
from loraserve.api.services import Services
from loraserve.settings import Settings

VENDOR = STATIC / "vendor"
OWN_SCRIPTS = sorted(path for path in STATIC.rglob("*.js") if path.parent != VENDOR)


async def asset_root(client: httpx2.AsyncClient) -> str:
    page = (await client.get("/console/")).text
    found = re.search(r"/console/assets/[0-9a-f]{16}/", page)
    assert found is not None
    return found[0]


async def test_root_redirects_browsers_and_points_clients_to_console(client: httpx2.AsyncClient) -> None:
    browser = await client.get("/", headers={"accept": "text/html,application/xhtml+xml;q=0.9,*/*;q=0.8"})
    assert (browser.status_code, browser.headers["location"]) == (302, "/console/")
    other = await client.get("/")
    assert (other.status_code, other.json()["console"]) == (200, "/console/")
    # neither is another's from a cache
    assert browser.headers["vary"] == other.headers["vary"] == "Accept"
    assert "version" not in other.text
    assert (await client.get("/console")).headers["location"] == "/console/"


async def test_every_file_has_strict_headers(client: httpx2.AsyncClient, subtests: pytest.Subtests) -> None:
    root = await asset_root(client)
    files = [path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*") if path.is_file()]
    assert "main.js" in files
    for path in ("/console/", *(root + name for name in files)):
        with subtests.test(path):
            answer = await client.get(path)
            assert answer.status_code == 200
            headers = answer.headers
            assert headers["content-security-policy"] == CONTENT_SECURITY_POLICY
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"
            assert headers["x-frame-options"] == "DENY"
            assert headers["content-type"] in MEDIA_TYPES.values()
            again = await client.get(path, headers={"if-none-match": headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
            caching = "no-cache" if path == "/console/" else "public, max-age=31536000, immutable"
            assert headers["cache-control"] == again.headers["cache-control"] == caching


def test_policy_allows_no_inline_code_or_foreign_server() -> None:
    assert "default-src 'self'" in CONTENT_SECURITY_POLICY
    assert "unsafe" not in CONTENT_SECURITY_POLICY
    assert "http" not in CONTENT_SECURITY_POLICY
    assert "*" not in CONTENT_SECURITY_POLICY


async def test_page_contains_no_inline_script_or_style(client: httpx2.AsyncClient) -> None:
    page = (await client.get("/console/")).text
    assert re.findall(r"<script[^>]*>[^<]+</script>", page) == []
    assert re.findall(r"<style|\sstyle=|\son[a-z]+=|javascript:", page) == []
    assert "{{" not in page
    assert re.findall(r'(?:src|href)="(?!/console/assets/)', page) == []


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("Documentation, https://git.example.org/docs?a=1&b", "https://git.example.org/docs?a=1&amp;b"),
        ("Documentation, javascript:alert(1)", ""),
        ("Homepage, https://git.example.org", ""),
    ],
)
async def test_page_names_documentation_of_package(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch, line: str, wanted: str
) -> None:
    metadata = Message()
    metadata["Project-URL"] = line
    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: metadata)
    docs_url.cache_clear()
    try:
        assert f'data-docs="{wanted}"' in (await client.get("/console/")).text
    finally:
        docs_url.cache_clear()


@pytest.mark.parametrize(
    "name", ["../pages.py", "..%2fpages.py", "nothing.js", "", "vendor", "//etc/passwd", "main.js/"]
)
async def test_no_other_file_is_served(client: httpx2.AsyncClient, name: str) -> None:
    answer = await client.get(await asset_root(client) + name)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"


async def test_assets_of_different_release_are_absent(client: httpx2.AsyncClient) -> None:
    assert (await client.get("/console/assets/0123456789abcdef/main.js")).status_code == 404


def test_release_changes_with_any_file_but_the_page() -> None:
    files = {"index.html": b"a", "main.js": b"b"}
    assert release_of(files) == release_of(files | {"index.html": b"c"})
    others = (files | {"main.js": b"c"}, files | {"more.js": b""}, {"index.html": b"a", "other.js": b"b"})
    assert len({release_of(files), *map(release_of, others)}) == 4


def test_own_scripts_parse_no_markup_and_no_code() -> None:
    forbidden = ("innerHTML", "outerHTML", "insertAdjacentHTML", "dangerouslySetInnerHTML", "document.write", "eval(")
    for path in OWN_SCRIPTS:
        text = path.read_text()
        assert not [word for word in (*forbidden, "new Function") if word in text], path
        # the key is in the session's storage alone, and in no address
        if path.name != "session.js":
            assert "sessionStorage" not in text, path
        if path.name not in ("theme.js", "main.js"):
            assert "localStorage" not in text, path


def test_vendored_libraries_match_lock_file() -> None:
    lock = json.loads((VENDOR / "vendor.json").read_text())
    known = {"vendor.json", "LICENSES.txt"}
    for name, package in lock.items():
        assert package["integrity"].startswith("sha512-")
        assert f"{name} {package['version']}, {package['licence']}" in (VENDOR / "LICENSES.txt").read_text()
        for file, entry in package["files"].items():
            assert hashlib.sha256((VENDOR / file).read_bytes()).hexdigest() == entry["sha256"], file
            known.add(file)
    assert {path.name for path in VENDOR.iterdir()} == known


async def test_console_can_be_turned_off(services: Services) -> None:
    settings = services.settings
    services.settings = Settings(model=settings.model, data_dir=settings.data_dir, console=False)
    transport = httpx2.ASGITransport(app=create_app(services))
    async with httpx2.AsyncClient(transport=transport, base_url="http://loraserve") as client:
        assert (await client.get("/console/")).status_code == 404
        # the route of LoRAX's clients is there all the same
        assert (await client.get("/", headers={"accept": "text/html"})).status_code == 405
