"""The playground: answers side by side, and a stream whose engine or server ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from server_process import ServerProcess

from loraserve import Client
from loraserve.demo.pack import adapter_dirs

from .conftest import PROMPT, Console

pytestmark = pytest.mark.browser
Open = Callable[..., Console]


def ask(console: Console, prompt: str = PROMPT) -> None:
    page = console.page
    box = page.get_by_role("textbox", name="Message", exact=True)
    box.or_(page.get_by_role("textbox", name="Prompt", exact=True)).fill(prompt)
    page.get_by_role("button", name="Ask").click()


def choose(page: Any, *names: str) -> None:
    boxes = page.get_by_role("group", name="Models").get_by_role("checkbox")
    for box in boxes.all():
        box.set_checked(box.evaluate("box => box.parentElement.textContent.trim()") in names)


def answer_of(page: Any, model: str) -> Any:
    return page.get_by_role("article", name=f"Answer of {model}", exact=True)


def test_eight_models_and_base_answer_side_by_side(open_console: Open, server: ServerProcess, acme: str) -> None:
    console = open_console(acme)
    page = console.page
    console.show("playground")
    names = sorted(adapter_dirs())
    choose(page, "base (base)", *names)
    page.get_by_role("button", name="Add a sum").click()
    page.get_by_role("slider", name=f"Weight of {names[1]} in sum 1").fill("0.25")
    total = f"{names[0]}+0.25*{names[1]}"
    assert page.get_by_role("button", name="Add a sum").is_disabled()
    ask(console)
    page.get_by_text("9 of 9 answers are complete.").wait_for(state="attached")
    with Client(server.url, api_key=acme) as client:
        for model in ("base", *names, total):
            text = client.completions.create(model=model, prompt=PROMPT, max_tokens=64, temperature=0).choices[0].text
            assert answer_of(page, model).locator(".answer-text").inner_text().strip() == text.strip(), model
    assert "prefill" in answer_of(page, "base").inner_text()


def test_a_conversation_goes_on(open_console: Open, acme: str) -> None:
    console = open_console(acme)
    page = console.page
    console.show("playground")
    choose(page, "sql", "base (base)")
    page.get_by_role("button", name="Chat").click()
    for turn in (1, 2):
        ask(console)
        page.get_by_text("2 of 2 answers are complete.").wait_for(state="attached")
        page.wait_for_function("n => document.querySelectorAll('.turn-user').length === 2 * n", arg=turn)


def test_playground_opens_as_chat_with_system_message(open_console: Open, acme: str) -> None:
    console = open_console(acme)
    page = console.page
    console.show("playground")
    assert page.get_by_role("button", name="Chat").get_attribute("aria-pressed") == "true"
    page.get_by_role("textbox", name="System message").fill("Answer in one word.")
    shown = page.get_by_label("Snippet", exact=True).inner_text()
    assert '"role": "system"' in shown
    assert "/v1/chat/completions" in shown
    page.get_by_role("button", name="Completion").click()
    assert "Answer in one word." not in page.get_by_label("Snippet", exact=True).inner_text()


def test_answer_has_requested_form(open_console: Open, acme: str) -> None:
    console = open_console(acme)
    page = console.page
    console.show("playground")
    choose(page, "base (base)")
    page.get_by_label("Response format").select_option("regex")
    page.get_by_role("textbox", name="Regular expression").fill("[0-9]{5}")
    assert "structured_outputs" in page.get_by_label("Snippet", exact=True).inner_text()
    ask(console)
    page.get_by_text("1 of 1 answers are complete.").wait_for(state="attached")
    assert answer_of(page, "base").locator(".answer-text").inner_text().isdigit()
    page.get_by_label("Response format").select_option("schema")
    page.get_by_role("textbox", name="JSON schema").fill("{")
    ask(console)
    page.get_by_text("The schema isn't JSON").first.wait_for()


def test_error_of_single_model_leaves_other_answers(open_console: Open, server: ServerProcess, acme: str) -> None:
    console = open_console(acme)
    page = console.page
    with Client(server.url, api_key=acme) as client:
        client.adapters.push(str(adapter_dirs()["json"]), name="fleeting")
        console.show("playground")
        choose(page, "fleeting", "sql")
        client.adapters.delete("fleeting")
    ask(console)
    page.get_by_text("1 of 2 answers are complete.").wait_for(state="attached")
    assert "fleeting" in answer_of(page, "fleeting").get_by_role("alert").inner_text()


def long_answer(console: Console) -> None:
    page = console.page
    console.show("playground")
    choose(page, "base (base)")
    page.get_by_role("button", name="Completion").click()
    page.get_by_label("Response format").select_option("regex")
    page.get_by_role("textbox", name="Regular expression").fill("([a-z]{3} ){90}")
    page.get_by_label("Max tokens").fill("400")


def test_stream_continues_with_same_text_after_engine_kill(
    open_console: Open, server: ServerProcess, acme: str
) -> None:
    console = open_console(acme)
    page = console.page
    long_answer(console)
    ask(console)
    page.get_by_text("1 of 1 answers are complete.").wait_for(state="attached")
    text = answer_of(page, "base").locator(".answer-text").inner_text()
    ask(console)
    page.wait_for_function("() => document.querySelector('.answer-text.caret')?.textContent.length > 8")
    engine = server.engine_pid()
    assert engine is not None
    os.kill(engine, signal.SIGKILL)
    # the new engine may be ready before the page asks again how the server is
    page.locator(".server.good").wait_for()
    page.get_by_text("1 of 1 answers are complete.").wait_for(state="attached")
    assert answer_of(page, "base").locator(".answer-text").inner_text() == text
    assert server.engine_pid() not in (None, engine)


def test_a_stopped_answer_says_so(open_console: Open, server: ServerProcess, acme: str) -> None:
    console = open_console(acme)
    page = console.page
    console.show("playground")
    engine = server.engine_pid()
    assert engine is not None
    os.kill(engine, signal.SIGSTOP)
    try:
        ask(console)
        page.get_by_role("button", name="Stop").click()
        answer_of(page, "base").get_by_text("stopped").wait_for()
    finally:
        os.kill(engine, signal.SIGCONT)


def test_lost_server_is_reported_and_found_again(open_console: Open, server: ServerProcess, acme: str) -> None:
    console = open_console(acme)
    page = console.page
    page.locator(".server.good").wait_for()
    server.kill()
    page.get_by_text("Not connected").wait_for()
    console.page.goto(f"{server.url}/console/#/adapters")
    page.get_by_text("The server can't be reached.").first.wait_for()
    server.start()
    page.locator(".server.good").wait_for()
    console.faults.clear()
