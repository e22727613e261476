"""The console of a server without keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from server_process import ServerProcess

from .conftest import Console


def test_console_without_keys_needs_no_sign_in(browser: Any, tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data", flags=("--no-auth",))
    server.start()
    context = browser.new_context()
    try:
        console = Console(context.new_page(), server.url)
        console.show("overview")
        console.show("adapters")
        assert console.page.get_by_role("button", name="Sign out").count() == 0
        assert console.faults == []
    finally:
        context.close()
        assert server.stop() == 0
