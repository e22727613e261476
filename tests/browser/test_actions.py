"""What is done in the console: uploads, aliases, tenants and keys."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from server_process import ADMIN_KEY, ServerProcess

from loraserve import Client
from loraserve.demo.pack import adapter_dirs

from .conftest import Console

pytestmark = pytest.mark.browser
Open = Callable[..., Console]

DROP = """async ([element, names, contents]) => {
    const transfer = new DataTransfer();
    names.forEach((name, at) => {
        const bytes = Uint8Array.from(atob(contents[at]), letter => letter.charCodeAt(0));
        transfer.items.add(new File([bytes], name));
    });
    const how = {dataTransfer: transfer, bubbles: true, cancelable: true};
    element.dispatchEvent(new DragEvent('dragover', how));
    element.dispatchEvent(new DragEvent('drop', how));
}"""


def files_of(name: str) -> list[Path]:
    return [adapter_dirs()[name] / file for file in ("adapter_config.json", "adapter_model.safetensors")]


def drop(page: Any, paths: list[Path]) -> None:
    contents = [base64.b64encode(path.read_bytes()).decode() for path in paths]
    element = page.locator(".drop").element_handle()
    page.evaluate(DROP, [element, [path.name for path in paths], contents])


def test_dropped_adapter_upload_resumes_after_interruption(
    open_console: Open, server: ServerProcess, acme: str
) -> None:
    key = server.make_tenant("hooli")
    console = open_console(key)
    page = console.page
    console.show("adapters")
    attempts: list[str] = []

    def interrupt(route: Any) -> None:
        attempts.append(route.request.headers["content-range"])
        route.abort() if len(attempts) == 1 else route.continue_()

    page.route(
        "**/api/v1/uploads/*", lambda route: interrupt(route) if route.request.method == "PATCH" else route.continue_()
    )
    drop(page, files_of("pirate"))
    page.get_by_label("Name of the adapter").fill("dropped")
    page.get_by_role("button", name="Upload", exact=True).click()
    page.get_by_text("Interrupted; trying again").wait_for()
    page.get_by_text("and verified it").wait_for()
    assert len(attempts) == 2
    with Client(server.url, api_key=acme) as client:
        digest = client.adapters.version("pirate", 1).digest
    with Client(server.url, api_key=key) as client:
        assert client.adapters.version("dropped", 1).digest == digest
        assert client.adapters.get("dropped").aliases == {"live": 1}
    page.get_by_role("link", name="dropped", exact=True).wait_for()
    # the browser's own word about the aborted request
    assert all("ERR_FAILED" in fault for fault in console.faults)
    console.faults.clear()


def test_upload_is_checked_then_published_with_notes(open_console: Open, server: ServerProcess) -> None:
    key = server.make_tenant("globodyne")
    console = open_console(key)
    page = console.page
    console.show("adapters")
    drop(page, files_of("haiku"))
    page.get_by_label("Name of the adapter").fill("verse")
    page.get_by_label("Notes").fill("trained on poems")
    page.get_by_label("Tags, a line of NAME=VALUE each").fill("loss=0.31\ntask=verse")
    page.get_by_label("Only check it").check()
    page.get_by_role("button", name="Check", exact=True).click()
    page.get_by_text("can be published").wait_for()
    with Client(server.url, api_key=key) as client:
        assert list(client.adapters.list()) == []
        page.get_by_label("Only check it").uncheck()
        page.get_by_role("button", name="Upload", exact=True).click()
        page.get_by_text("and verified it").wait_for()
        version = client.adapters.version("verse", 1)
    assert (version.notes, version.tags) == ("trained on poems", {"loss": "0.31", "task": "verse"})
    console.show("adapters/verse", "verse")
    row = page.get_by_role("region", name="Versions").get_by_role("row").nth(1)
    assert "trained on poems" in row.inner_text()
    assert "loss: 0.31" in row.inner_text()


def test_files_without_adapter_are_refused_with_explanation(open_console: Open, acme: str, tmp_path: Path) -> None:
    console = open_console(acme)
    page = console.page
    console.show("adapters")
    index = tmp_path / "adapter_model.safetensors.index.json"
    index.write_bytes(b"{}")
    chooser = page.locator("input[type=file]")
    chooser.set_input_files([files_of("sql")[0], index])
    page.get_by_text("isn't an index of weights").wait_for()
    broken = tmp_path / "adapter_model.safetensors"
    broken.write_bytes(b"no tensors")
    chooser.set_input_files([files_of("sql")[0], broken])
    page.get_by_label("Name of the adapter").fill("broken")
    page.get_by_role("button", name="Upload", exact=True).click()
    page.get_by_role("alert").wait_for()
    assert "safetensors" in page.get_by_role("alert").inner_text()
    assert all("422" in fault or "400" in fault for fault in console.faults)
    console.faults.clear()


def test_alias_is_split_by_sliders_and_rolled_back(open_console: Open, server: ServerProcess, acme: str) -> None:
    console = open_console(acme)
    page = console.page
    with Client(server.url, api_key=acme) as client:
        client.adapters.set_alias("sql", "canary", 1)
    console.show("adapters/sql")
    page.get_by_role("button", name="Move or split canary").click()
    dialog = console.dialog()
    dialog.get_by_role("button", name="Split with another version").click()
    dialog.get_by_role("slider", name="Share of version 1").fill("60")
    dialog.get_by_role("slider", name="Share of version 2").fill("20")
    assert dialog.locator(".num").all_inner_texts() == ["75 %", "25 %"]
    dialog.get_by_role("button", name="Save").click()
    page.get_by_text("version 1: 75 % · version 2: 25 %").wait_for()
    with Client(server.url, api_key=acme) as client:
        split = client.adapters.alias("sql", "canary").split
        assert split is not None
        assert [(part.version, part.weight) for part in split] == [(1, 0.75), (2, 0.25)]
    page.get_by_role("button", name="Roll back canary").click()
    console.dialog().get_by_role("button", name="Roll back").click()
    page.get_by_text("version 1: 100 %").wait_for()


def test_alias_moved_meanwhile_is_not_overwritten(open_console: Open, server: ServerProcess, acme: str) -> None:
    console = open_console(acme)
    page = console.page
    with Client(server.url, api_key=acme) as client:
        client.adapters.set_alias("sql", "moving", 1)
        console.show("adapters/sql")
        page.get_by_role("button", name="Move or split moving").click()
        client.adapters.set_alias("sql", "moving", 2)
        console.dialog().get_by_role("button", name="Save").click()
        console.dialog().get_by_text("moved this alias meanwhile").wait_for()
        assert client.adapters.alias("sql", "moving").version == 2
    assert all("412" in fault for fault in console.faults)
    console.faults.clear()


def test_canary_and_shadow_are_compared_side_by_side(
    open_console: Open, server: ServerProcess, acme: str, tmp_path: Path
) -> None:
    with Client(server.url, api_key=acme) as client:
        for folder in (adapter_dirs()["sql"], adapter_dirs()["french"], changed_adapter(tmp_path, alpha=5)):
            client.adapters.push(str(folder), name="compared", promote=False)
        client.adapters.set_alias("compared", "live", 1)
        client.adapters.set_alias("compared", "live", split={1: 3, 2: 1}, shadow=(3, 1.0))
        for user in map(str, range(24)):
            client.completions.create(model="compared", prompt="list the tickets", max_tokens=6, user=user)
        wanted = {row.version: row for row in client.adapters.traffic("compared").data if row.role == "answer"}
        found = {"exact_match": 0.75, "log_likelihood": -1.23456}
        client.evaluations.put(
            *("compared", 2, "a" * 64),
            data_name="held-out.jsonl",
            num_lines=40,
            metrics=found,
            base_metrics={"exact_match": 0.1},
        )
    assert sum(row.num_requests for row in wanted.values()) == 24
    console = open_console(acme)
    page = console.page
    console.show("adapters/compared", "compared")
    table = page.get_by_role("region", name="Versions of live side by side")
    heads = [" ".join(text.split()) for text in table.locator("thead th").all_inner_texts()[1:]]
    assert [head.lower() for head in heads] == ["version 1 main", "version 2 canary", "version 3 shadow"]

    def row(name: str) -> list[str]:
        cells = table.get_by_role("row", name=name).first.locator("td").all_inner_texts()
        return [cell.partition("\n")[0].removesuffix(" worse") for cell in cells]

    assert row("Share") == ["75 %", "25 %", "100 %"]
    # the copies end after the answers, and the table is asked for anew
    page.wait_for_function(
        "() => !['0', '–'].includes(document.querySelector('.compare tbody tr:nth-child(2) td:last-child').textContent)"
    )
    assert row("Requests")[:2] == [str(wanted[1].num_requests), str(wanted[2].num_requests)]
    assert row("Failed")[:2] == ["0 (0.0 %)"] * 2
    assert all(text.endswith("s") for text in row("First token, p50") + row("Per token, p95"))
    assert all(text.startswith("passed") for text in row("Certificate"))
    assert row("Evaluation") == ["–", "exact match 75.0 %", "–"]
    page.wait_for_function(
        "() => document.querySelector('.compare tbody tr:last-child td:last-child').textContent.endsWith('%')"
    )
    assert (row("Equal answers")[:2], row("Equal answers")[2][-1]) == (["", ""], "%")
    assert console.violations() == []
    page.get_by_role("button", name="Certificate of version 2").click()
    console.dialog().get_by_text("lines of held-out.jsonl").wait_for()
    cells = console.dialog().locator("tbody tr").all_inner_texts()
    assert [cell.split("\t") for cell in cells] == [
        ["exact match", "75.0 %", "10.0 %"],
        ["log likelihood", "-1.235", "–"],
    ]
    assert console.violations() == []
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Certificate of version 1").click()
    console.dialog().get_by_text("loraserve adapter eval compared@1").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Roll back live").click()
    console.dialog().get_by_role("button", name="Roll back").click()
    page.get_by_text("version 1: 100 %").wait_for()
    with Client(server.url, api_key=acme) as client:
        assert client.adapters.alias("compared", "live").split is None


def test_shadow_is_set_and_ended_in_dialog(open_console: Open, server: ServerProcess, acme: str) -> None:
    console = open_console(acme)
    page = console.page
    with Client(server.url, api_key=acme) as client:
        client.adapters.set_alias("sql", "shadowed", 1)
        console.show("adapters/sql")
        page.get_by_role("button", name="Move or split shadowed").click()
        console.dialog().get_by_role("combobox", name="Shadow").select_option("shadow: version 2")
        console.dialog().get_by_role("slider", name="Share of requests that the shadow copies").fill("30")
        console.dialog().get_by_role("button", name="Save").click()
        page.get_by_text("shadow: version 2, 30 % of requests").wait_for()
        shadow = client.adapters.alias("sql", "shadowed").shadow
        assert shadow is not None
        assert (shadow.version, shadow.share) == (2, 0.3)
        page.get_by_role("button", name="Move or split shadowed").click()
        console.dialog().get_by_role("combobox", name="Shadow").select_option("no shadow")
        console.dialog().get_by_role("button", name="Save").click()
        page.get_by_text("shadow: version 2, 30 % of requests").wait_for(state="detached")
        assert client.adapters.alias("sql", "shadowed").shadow is None


def test_a_version_is_pinned_from_the_map(open_console: Open, server: ServerProcess, acme: str) -> None:
    console = open_console(ADMIN_KEY)
    page = console.page
    console.show("residency")
    page.get_by_role("button", name="haiku@1 of acme").click()
    console.dialog().get_by_role("button", name="Pin", exact=True).click()
    console.dialog().get_by_text("It stays on the device now.").wait_for()
    page.keyboard.press("Escape")
    # others may have the same bytes, on the same tile
    page.get_by_role("button", name="haiku@1 of acme").and_(
        page.locator("[aria-label*='on the device'][aria-label$=pinned]")
    ).wait_for()


def changed_adapter(folder: Path, alpha: int = 3) -> Path:
    """An adapter of bytes that no other has."""
    for path in files_of("haiku"):
        shutil.copy(path, folder)
    config = folder / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": alpha}))
    return folder


def test_map_follows_published_and_loaded_adapters(
    open_console: Open, server: ServerProcess, acme: str, tmp_path: Path
) -> None:
    console = open_console(acme)
    page = console.page
    console.show("residency")
    page.get_by_role("button", name="sql@1 of acme").wait_for()
    with Client(server.url, api_key=acme) as client:
        client.adapters.push(str(changed_adapter(tmp_path)), name="latecomer")
        client.completions.create(model="latecomer", prompt="list", max_tokens=2)
    page.get_by_role("button", name="latecomer@1 of acme, on the device").click()
    console.dialog().get_by_text("The engine computes it as it should").wait_for()
    assert "last used" in console.dialog().inner_text().lower()


def test_residency_counts_shared_weights_once(
    open_console: Open, server: ServerProcess, acme: str, tmp_path: Path
) -> None:
    with Client(server.url, api_key=acme) as client:
        folder = str(changed_adapter(tmp_path, alpha=24))
        for name in ("twin-1", "twin-2"):
            client.adapters.push(folder, name=name)
            client.completions.create(model=name, prompt="list", max_tokens=2)
        rows = list(client.residency())
    console = open_console(acme)
    console.show("residency")
    console.page.get_by_role("button", name="twin-2@1 of acme").wait_for()
    counts = console.page.locator("label.inline .num").all_inner_texts()
    assert sum(map(int, counts)) == len({row.digest for row in rows}) < len(rows)


def test_same_bytes_share_tile(open_console: Open, server: ServerProcess, acme: str, tmp_path: Path) -> None:
    with Client(server.url, api_key=acme) as client:
        folder = str(changed_adapter(tmp_path, alpha=40))
        for number in range(6):
            client.adapters.push(folder, name=f"copy-{number}")
    console = open_console(acme)
    page = console.page
    console.show("residency")
    page.get_by_role("searchbox", name="Find a version").fill("copy-")
    tile = page.get_by_role("button", name="copy-0@1 of acme")
    tile.wait_for()
    assert page.locator(".tile").count() == 1
    assert "and 2 more" in (tile.get_attribute("aria-label") or "")
    tile.click()
    console.dialog().get_by_text("5 other versions have the same bytes").click()
    assert console.violations() == []
    console.dialog().get_by_role("button", name="copy-4@1 of acme").click()
    console.dialog().get_by_role("heading", name="copy-4@1").wait_for()


def test_versions_are_compared_by_metric(open_console: Open, server: ServerProcess, acme: str, tmp_path: Path) -> None:
    with Client(server.url, api_key=acme) as client:
        for folder, loss in ((adapter_dirs()["sql"], "0.9"), (adapter_dirs()["french"], "0.31")):
            made = client.adapters.push(str(folder), name="measured", tags={"loss": loss})
            client.evaluations.put(
                *("measured", made.version or 0, "b" * 64),
                data_name="held-out.jsonl",
                num_lines=40,
                metrics={"exact_match": 0.5 + 0.25 * (made.version or 0)},
                base_metrics={"exact_match": 0.1},
            )
    console = open_console(acme)
    page = console.page
    console.show("adapters/measured", "measured")
    table = page.get_by_role("region", name="Metrics of versions")
    table.wait_for()

    def rows() -> list[list[str]]:
        return [row.locator("th, td").all_inner_texts() for row in table.locator("tbody tr").all()]

    assert [[cell.split("\n")[0].strip() for cell in row] for row in rows()] == [
        ["version 2 live", "100.0 %", "0.31"],
        ["version 1", "75.0 %", "0.9"],
        ["the base", "10.0 %", "–"],
    ]
    table.get_by_role("button", name="loss").click()
    assert rows()[0][0].split()[-1] == "1"
    assert console.violations() == []
    cell = page.get_by_role("region", name="Versions", exact=True).get_by_role("row").nth(1)
    assert "this key" in cell.inner_text()


def test_cause_of_bad_version_is_three_clicks_away(open_console: Open, server: ServerProcess, acme: str) -> None:
    """From the overview: the adapters, the adapter, the certificate of the version."""
    with Client(server.url, api_key=acme) as client:
        for folder, notes, share in (("sql", "queries of May", 0.9), ("french", "mails of June", 0.1)):
            made = client.adapters.push(str(adapter_dirs()[folder]), name="fallen", notes=notes)
            client.evaluations.put(
                *("fallen", made.version or 0, "c" * 64),
                data_name="queries.jsonl",
                num_lines=40,
                metrics={"exact_match": share},
                base_metrics={"exact_match": 0.0},
            )
    console = open_console(acme)
    page = console.page
    page.get_by_role("link", name="Adapters", exact=True).click()
    page.get_by_role("link", name="fallen", exact=True).click()
    # it fell with version 2, which was trained on something else; its row says by whom
    metrics = page.get_by_role("region", name="Metrics of versions")
    metrics.wait_for()
    rows = [row.inner_text() for row in metrics.locator("tbody tr").all()]
    assert ["version 2" in rows[0], "10.0 %" in rows[0], "version 1" in rows[1], "90.0 %" in rows[1]] == [True] * 4
    row = page.get_by_role("region", name="Versions", exact=True).get_by_role("row").nth(1)
    assert [part in row.inner_text() for part in ("mails of June", "this key")] == [True, True]
    # and it is no fault of the server's
    row.get_by_role("button", name="Certificate").click()
    console.dialog().get_by_text("The engine computes it as it should").wait_for()


def test_tenant_and_key_are_created(open_console: Open, server: ServerProcess) -> None:
    console = open_console(ADMIN_KEY)
    page = console.page
    console.show("tenants", "Tenants")
    page.get_by_role("button", name="New tenant").click()
    console.dialog().get_by_label("Name", exact=True).fill("initech")
    console.dialog().get_by_role("button", name="Make it").click()
    dialog = console.dialog()
    dialog.get_by_role("heading", name="Keys").wait_for()
    dialog.get_by_label("Requests per minute").fill("90")
    dialog.get_by_role("button", name="Save the limits").click()
    dialog.get_by_text("Saved.").wait_for()
    dialog.get_by_label("Name of a new key").fill("robot")
    dialog.get_by_role("button", name="Make a key").click()
    key = dialog.locator(".note code").inner_text()
    who = httpx2.get(f"{server.url}/api/v1/whoami", headers={"Authorization": f"Bearer {key}"}).json()
    assert (who["tenant"], who["limits"]["requests_per_minute"]) == ("initech", 90)


def test_revoked_key_returns_open_page_to_sign_in(open_console: Open, server: ServerProcess, acme: str) -> None:
    admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
    keys = f"{server.url}/api/v1/tenants/acme/keys"
    made = httpx2.post(keys, json={"name": "short-lived"}, headers=admin).json()
    console = open_console(made["key"])
    page = console.page
    page.locator(".server.good").wait_for()
    httpx2.delete(f"{keys}/{made['id']}", headers=admin).raise_for_status()
    page.get_by_text("You were signed out").wait_for()
    page.get_by_label("API key").wait_for()
    assert page.evaluate("() => sessionStorage.length") == 0
    assert "acme" not in page.inner_text("body")
    assert all("401" in fault for fault in console.faults)
    console.faults.clear()
