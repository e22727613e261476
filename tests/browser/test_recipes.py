"""Actions copied as curl, Python and commands: they do the same, and have no secret in them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from server_process import ADMIN_KEY, ServerProcess

from loraserve import Client
from loraserve.demo.pack import adapter_dirs

from .conftest import Console
from .test_actions import drop, files_of

pytestmark = pytest.mark.browser
Open = Callable[..., Console]
KINDS = ("curl", "Python", "CLI")


def run(kind: str, text: str, key: str, folder: Path) -> str:
    """Run a copied text as a person would who has the key in a variable; return what it prints."""
    is_python = kind in ("Python", "OpenAI")
    done = subprocess.run(
        [sys.executable, "-c", text] if is_python else ["bash", "-ec", text],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        env={
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(folder),
            "LORASERVE_API_KEY": key,
        },
    )
    assert done.returncode == 0, (text, done.stdout, done.stderr)
    # curl's exit code says nothing of a refusal
    assert '"code":' not in done.stdout, done.stdout
    return done.stdout


def copied(place: Any, kind: str) -> str:
    """Read the place's folded commands, in a language."""
    box = place.locator("details.copy-as")
    if box.get_attribute("open") is None:
        box.locator("summary").click()
    box.get_by_role("button", name=kind, exact=True).click()
    text: str = box.locator("pre").inner_text()
    return text


@pytest.mark.parametrize("kind", [*KINDS, "OpenAI"])
def test_playground_request_runs_elsewhere(open_console: Open, acme: str, tmp_path: Path, kind: str) -> None:
    console = open_console(acme)
    page = console.page
    console.show("playground")
    for box in page.get_by_role("group", name="Models").get_by_role("checkbox").all():
        box.set_checked(box.evaluate("box => box.parentElement.textContent.trim()") == "sql")
    page.get_by_role("button", name="Completion").click()
    prompt = 'it\'s "true", true, null\nand $HOME `x` \\n'
    page.get_by_role("textbox", name="Prompt", exact=True).fill(prompt)
    page.get_by_label("Max tokens").fill("5")
    page.get_by_label("Response format").select_option("regex")
    page.get_by_role("textbox", name="Regular expression").fill("[a-z]{5}")
    page.get_by_role("button", name=kind, exact=True).click()
    text = page.get_by_label("Snippet", exact=True).inner_text()
    assert "LORASERVE_API_KEY" in text or kind == "CLI"
    assert acme not in text
    assert "sk-lora" not in text
    said = run(kind, text, acme, tmp_path)
    with Client(console.url, api_key=acme) as client:
        wanted = client.completions.create(
            model="sql",
            prompt=prompt,
            max_tokens=5,
            temperature=0,
            extra_body={"structured_outputs": {"regex": "[a-z]{5}"}},
        )
    assert wanted.choices[0].text in said


@pytest.mark.parametrize("kind", KINDS)
def test_copied_upload_publishes_same_version(
    open_console: Open, server: ServerProcess, tmp_path: Path, kind: str
) -> None:
    key = server.make_tenant(f"copying-{kind.lower()}")
    console = open_console(key)
    page = console.page
    console.show("adapters")
    drop(page, files_of("pirate"))
    page.get_by_label("Name of the adapter").fill("team/copied")
    page.get_by_label("Notes").fill("it's copied")
    page.get_by_label("Tags, a line of NAME=VALUE each").fill("loss=0.31")
    page.get_by_label("Set the alias live").uncheck()
    (tmp_path / "my-peft-dir").symlink_to(adapter_dirs()["pirate"])
    text = copied(page.locator("form"), kind)
    if kind == "curl":
        text = text.replace("/VERSION", "/1")
    run(kind, text, key, tmp_path)
    with Client(server.url, api_key=key) as client:
        version = client.adapters.version("team/copied", 1)
        assert (version.notes, version.tags, version.aliases) == ("it's copied", {"loss": "0.31"}, [])


@pytest.mark.parametrize("kind", KINDS)
def test_copied_split_moves_alias(
    open_console: Open, server: ServerProcess, acme: str, tmp_path: Path, kind: str
) -> None:
    alias = f"copied-{kind.lower()}"
    with Client(server.url, api_key=acme) as client:
        client.adapters.set_alias("sql", alias, 1)
        console = open_console(acme)
        console.show("adapters/sql")
        console.page.get_by_role("button", name=f"Move or split {alias}").click()
        dialog = console.dialog()
        dialog.get_by_role("button", name="Split with another version").click()
        dialog.get_by_role("slider", name="Share of version 1").fill("75")
        dialog.get_by_role("slider", name="Share of version 2").fill("25")
        dialog.get_by_role("combobox", name="Shadow").select_option("shadow: version 2")
        text = copied(dialog, kind)
        assert console.violations() == []
        run(kind, text, acme, tmp_path)
        found = client.adapters.alias("sql", alias)
        assert found.split is not None
        assert [(part.version, part.weight) for part in found.split] == [(1, 0.75), (2, 0.25)]
        assert found.shadow is not None
        assert (found.shadow.version, found.shadow.share) == (2, 0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_copied_key_creation_by_admin_names_tenant(
    open_console: Open, server: ServerProcess, tmp_path: Path, kind: str
) -> None:
    tenant = f"handed-{kind.lower()}"
    server.make_tenant(tenant)
    console = open_console(ADMIN_KEY)
    page = console.page
    console.show("tenants", "Tenants")
    page.get_by_role("button", name=tenant).click()
    dialog = console.dialog()
    dialog.get_by_label("Name of a new key").fill("copied key")
    dialog.get_by_label("Works for").select_option("90 days")
    dialog.get_by_role("checkbox", name="adapters:write").uncheck()
    form = dialog.locator("form", has=page.get_by_label("Name of a new key"))
    text = copied(form, kind)
    assert ADMIN_KEY not in text
    run(kind, text, ADMIN_KEY, tmp_path)
    with Client(server.url, api_key=ADMIN_KEY) as admin:
        made = next(key for key in admin.keys.list(tenant) if key.name == "copied key")
    assert sorted(made.scopes) == ["adapters:read", "inference"]
    assert made.expires_at is not None


def test_openapi_document_is_saved(open_console: Open, acme: str) -> None:
    console = open_console(acme)
    page = console.page
    with page.expect_download() as download:
        page.get_by_role("button", name="OpenAPI document").click()
    assert download.value.suggested_filename == "loraserve-openapi.json"
    assert '"/v1/chat/completions"' in Path(download.value.path()).read_text()


def test_small_numbers_give_distinct_axis_labels(open_console: Open, acme: str) -> None:
    page = open_console(acme).page
    chart = page.evaluate("() => document.querySelector('script[type=module]').src.replace('main.js', 'lib/chart.js')")
    labels = page.evaluate("async from => (await import(from)).distinct(['0', '0', '1', '1', '2'])", chart)
    assert labels == ["0", "", "1", "", "2"]
