"""Every view: it is there, readable in both themes and on a small screen, and text is text."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx2
import pytest
from server_process import ServerProcess

from loraserve import Client

from .conftest import HOSTILE, VIEWS, Console

pytestmark = pytest.mark.browser
Open = Callable[..., Console]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_views_meet_wcag_aa(open_console: Open, acme: str, scheme: str, subtests: pytest.Subtests) -> None:
    console = open_console(acme, color_scheme=scheme)
    for view in VIEWS:
        console.show(view)
        with subtests.test(view):
            assert console.violations() == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_admin_views_and_dialogs_meet_wcag_aa(
    open_console: Open, acme: str, admin_key: str, scheme: str, subtests: pytest.Subtests
) -> None:
    console = open_console(admin_key, color_scheme=scheme)
    page = console.page
    for view, title in (("overview", None), ("residency", None), ("slow", None), ("tenants", "Tenants")):
        console.show(view, title)
        with subtests.test(view):
            assert console.violations() == []
    page.get_by_role("button", name="acme").click()
    console.dialog().get_by_role("heading", name="Keys").wait_for()
    with subtests.test("a tenant's dialog"):
        assert console.violations() == []
    page.keyboard.press("Escape")
    console.show("residency")
    page.get_by_role("button", name="sql@1 of acme").click()
    console.dialog().get_by_text("The engine computes it as it should").wait_for()
    with subtests.test("a version's dialog"):
        assert console.violations() == []


def test_sign_in_meets_wcag_aa_and_explains_errors(open_console: Open, acme: str) -> None:
    console = open_console(acme)
    page = console.page
    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("API key").fill("sk-lora-" + "a" * 43)
    page.get_by_role("button", name="Sign in").click()
    page.get_by_text("The server doesn't know this key.").wait_for()
    assert console.violations() == []
    assert page.evaluate("() => sessionStorage.getItem('loraserve.key')") is None
    # the browser itself says that a request was answered with 401
    assert all("401" in fault for fault in console.faults)
    console.faults.clear()


def test_no_view_scrolls_sideways_at_360_pixels(
    open_console: Open, acme: str, admin_key: str, subtests: pytest.Subtests
) -> None:
    for key, views in ((acme, VIEWS), (admin_key, {"overview": "Overview", "tenants": "Tenants"})):
        console = open_console(key, viewport={"width": 360, "height": 740})
        for view, title in views.items():
            console.show(view, title)
            with subtests.test(view):
                assert console.page.evaluate("() => document.documentElement.scrollWidth") == 360


def test_small_screen_menu_leads_to_each_view(open_console: Open, acme: str) -> None:
    console = open_console(acme, viewport={"width": 360, "height": 740})
    page = console.page
    link = page.get_by_role("link", name="Playground")
    assert not link.is_visible()
    page.get_by_role("button", name="Menu").click()
    link.click()
    page.get_by_role("heading", level=1, name="Playground").wait_for()
    # the menu closes in an effect, after the view is drawn
    link.wait_for(state="hidden")


def test_keyboard_reaches_all_controls(open_console: Open, acme: str) -> None:
    console = open_console(acme)
    page = console.page
    console.show("adapters/sql")
    page.reload()
    page.get_by_role("heading", level=1, name="sql").wait_for()
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    assert page.evaluate("() => document.activeElement.id") == "main"
    reached = []
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("() => document.activeElement.textContent.trim()"))
        if reached[-1].startswith("Move or split"):
            break
    assert reached[-1] == "Move or split live"
    page.keyboard.press("Enter")
    console.dialog().wait_for()
    page.keyboard.press("Escape")
    console.dialog().wait_for(state="detached")
    # the focus goes back where it came from, in an effect
    page.wait_for_function("() => document.activeElement.textContent.trim() === 'Move or split live'")


def test_opened_view_focuses_title(open_console: Open, acme: str) -> None:
    console = open_console(acme)
    console.page.get_by_role("link", name="Adapters", exact=True).click()
    console.page.get_by_role("heading", level=1, name="Adapters").wait_for()
    console.page.wait_for_function("() => document.activeElement.id === 'title'")
    assert console.page.title() == "Adapters · loraserve"


def test_theme_is_kept(open_console: Open, acme: str) -> None:
    page = open_console(acme, color_scheme="light").page
    ground = "() => getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_role("button", name="Dark theme").click()
    dark = page.evaluate(ground)
    page.reload()
    page.get_by_role("button", name="Light theme").wait_for()
    assert (page.evaluate(ground), dark != light) == (dark, True)


def test_user_supplied_text_is_shown_as_plain_text(open_console: Open, acme: str) -> None:
    console = open_console(acme)
    page = console.page
    console.show("adapters")
    page.get_by_text(HOSTILE).wait_for()
    page.get_by_text(f"owner: {HOSTILE[:60]}").wait_for()
    console.show("adapters/sql")
    page.locator(".lead", has_text=HOSTILE).wait_for()
    page.get_by_role("region", name="Versions").get_by_text(HOSTILE).wait_for()
    page.get_by_role("button", name="Certificate of version 2").click()
    console.dialog().get_by_text(HOSTILE).wait_for()
    # as a part of the address too
    page.goto(f"{console.url}/console/#/adapters/{HOSTILE}")
    page.get_by_role("heading", level=1, name="<script>").wait_for()
    page.get_by_role("alert").wait_for()
    page.wait_for_timeout(500)
    assert page.evaluate("() => window.wasRun") is None
    assert page.locator("main script, main img").count() == 0
    assert all("404" in fault or "400" in fault for fault in console.faults)
    console.faults.clear()


def test_injected_markup_does_not_run(open_console: Open, acme: str) -> None:
    console = open_console(acme)
    page = console.page
    refused = page.evaluate(
        "() => { try { document.body.innerHTML = '<b>x</b>'; } catch (error) { return error.name; } }"
    )
    assert refused == "TypeError"
    refused = page.evaluate(
        """() => new Promise(found => {
            document.addEventListener('securitypolicyviolation', event => found(event.effectiveDirective));
            const style = document.createElement('style');
            style.textContent = 'body { color: red }';
            document.head.append(style);
        })"""
    )
    assert refused.startswith("style-src")
    console.faults.clear()


def test_tenants_see_only_own_data(open_console: Open, server: ServerProcess, acme: str) -> None:
    console = open_console(server.make_tenant("globex"))
    page = console.page
    for view in ("overview", "residency", "slow", "adapters", "playground", "tenants"):
        console.show(view)
        page.wait_for_timeout(300)
        text = page.inner_text("body")
        assert [word for word in ("acme", "sql", "french") if word in text] == [], view
    console.show("overview")
    page.locator(".figure").first.wait_for()
    assert page.get_by_text("KV in use").count() == 0


def test_slow_leads_to_the_cause_in_three_clicks(open_console: Open, acme: str) -> None:
    console = open_console(acme)
    page = console.page
    page.get_by_role("link", name="Why was it slow?").click()
    page.get_by_text("Why?", exact=True).first.click()
    page.get_by_text("of the time").first.wait_for()
    page.get_by_role("button", name="First token").click()
    page.get_by_text("Why?", exact=True).first.wait_for()


def test_overview_follows_requests(open_console: Open, server: ServerProcess, acme: str) -> None:
    console = open_console(acme)
    page = console.page
    page.get_by_text("Tokens per second").first.wait_for()
    with Client(server.url, api_key=acme) as client:
        before = int(page.get_by_text("since the start").inner_text().split()[0])
        client.completions.create(model="sql", prompt="list the tickets", max_tokens=8)
    page.wait_for_function(
        "before => Number(document.querySelector('.stat p:last-child').textContent.trim().split(' ')[0]) > before",
        arg=before,
    )


def test_overview_begins_with_past_figures(open_console: Open, server: ServerProcess, acme: str) -> None:
    # the server makes a point every 20 s
    headers, deadline = {"Authorization": f"Bearer {acme}"}, time.monotonic() + 120
    while not httpx2.get(f"{server.url}/api/v1/live/history", headers=headers).json()["data"]:
        assert time.monotonic() < deadline
        time.sleep(1)
    console = open_console(acme)
    page = console.page
    with page.expect_response(lambda response: response.url.endswith("/api/v1/live/history")) as found:
        page.reload()
    assert found.value.status == 200
    # without waiting for a second event of the stream, two seconds later
    page.get_by_text("Tokens per second").first.wait_for()
    assert page.locator(".stat .figure").first.inner_text() != "–"


def test_overview_shows_rounding(open_console: Open, server: ServerProcess, admin_key: str) -> None:
    with Client(server.url, api_key=admin_key) as admin:
        deadline = time.monotonic() + 60
        while not admin.base().precision_note:
            assert time.monotonic() < deadline
            time.sleep(0.2)
    console = open_console(admin_key)
    console.page.get_by_text("nothing is rounded").wait_for()
