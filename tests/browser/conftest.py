"""Debian's Chromium on a real server: `make browser` installs what these need."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from server_process import ADMIN_KEY, ServerProcess

from loraserve import Client
from loraserve.demo.pack import adapter_dirs

ROOT = Path(__file__).resolve().parent.parent.parent
AXE = ROOT / ".browser/node_modules/axe-core/axe.min.js"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

PROMPT = "list the tickets with age over 81"
VIEWS = {
    "overview": "Overview",
    "residency": "Residency",
    "slow": "Why was it slow?",
    "adapters": "Adapters",
    "adapters/sql": "sql",
    "playground": "Playground",
    "tenants": "Tenant",
}
"""Views and the beginnings of their titles."""
HOSTILE = "<script>window.wasRun=1</script><img src=x onerror=\"window.wasRun=1\"> & 'quoted'"


def missing(what: str) -> NoReturn:
    """Skip, or fail where `make browser` has installed what is needed."""
    if os.environ.get("LORASERVE_TEST_BROWSER"):
        pytest.fail(f"{what} isn't installed, though make browser installs it")
    pytest.skip(f"{what} isn't installed: make browser")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    try:
        playwright_api: Any = importlib.import_module("playwright.sync_api")
    except ImportError:
        missing("playwright")
    if CHROMIUM is None:
        missing("Chromium")
    arguments = ["--disable-gpu", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server on the bundled base; asked for after the browser, so that none starts in vain."""
    # an answer that was said before would be there before a test can look at it
    server = ServerProcess(tmp_path_factory.mktemp("browser") / "data", flags=("--speculation", "off"))
    server.start()
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def acme(server: ServerProcess) -> str:
    """A key of acme, which has the seven adapters, `sql` with two versions and hostile words."""
    key = server.make_tenant("acme")
    with Client(server.url, api_key=key) as client:
        for name, path in adapter_dirs().items():
            client.adapters.push(str(path), name=name)
        client.adapters.push(str(adapter_dirs()["french"]), name="sql")
        client.adapters.set_alias("sql", "tried", 1, shadow=(2, 0.5))
        client.adapters.update("sql", notes=HOSTILE, tags={"owner": HOSTILE[:60]})
        client.adapters.update_version("sql", 2, notes=HOSTILE, tags={"owner": HOSTILE[:60]})
        for model in ("sql", "french"):
            client.completions.create(model=model, prompt=PROMPT, max_tokens=16)
    return key


class Console:
    """A page that is signed in, and what went wrong in it."""

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        self.url = url
        self.faults: list[str] = []
        page.set_default_timeout(60_000)  # the bound of a hang
        page.on("pageerror", lambda error: self.faults.append(f"exception: {error}"))
        page.on("console", lambda said: self.faults.append(said.text) if said.type in ("error", "warning") else None)

    def sign_in(self, key: str) -> Console:
        self.page.goto(f"{self.url}/console/")
        self.page.get_by_label("API key").fill(key)
        self.page.get_by_role("button", name="Sign in").click()
        self.page.locator("#main").wait_for()
        return self

    def show(self, view: str, title: str | None = None) -> None:
        self.page.goto(f"{self.url}/console/#/{view}")
        self.page.get_by_role("heading", level=1, name=title or VIEWS[view]).wait_for()
        self.page.locator("main .spinner").first.wait_for(state="detached")

    def dialog(self) -> Any:
        return self.page.get_by_role("dialog")

    def violations(self) -> list[str]:
        """What axe finds of WCAG 2 A and AA, as lines."""
        if not AXE.exists():
            missing("axe-core")
        if not self.page.evaluate("() => 'axe' in window"):
            self.page.evaluate(AXE.read_text())
        rules = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
        found = self.page.evaluate(
            "rules => axe.run(document, {runOnly: {type: 'tag', values: rules}, resultTypes: ['violations']})", rules
        )
        return [
            f"{one['id']}: {node['html'][:160]} {node.get('failureSummary', '')[:300]}"
            for one in found["violations"]
            for node in one["nodes"]
        ]


@pytest.fixture
def open_console(browser: Any, server: ServerProcess) -> Iterator[Callable[..., Console]]:
    """A function that opens the console signed in with a key; the page must have no fault."""
    contexts, consoles = [], []

    def make(key: str, **how: Any) -> Console:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 860}, **how})
        contexts.append(context)
        consoles.append(Console(context.new_page(), server.url))
        return consoles[-1].sign_in(key)

    yield make
    for context in contexts:
        context.close()
    assert [fault for console in consoles for fault in console.faults] == []


@pytest.fixture
def admin_key() -> str:
    return ADMIN_KEY
