"""An operator's walk through the console while 16 streams run: none of them is disturbed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from server_process import ServerProcess

from loraserve import Client
from loraserve.demo.pack import adapter_dirs

from .conftest import PROMPT, Console
from .streams import streaming
from .test_actions import drop, files_of
from .test_playground import answer_of, ask, choose

pytestmark = pytest.mark.browser
NUM_STREAMS = 16
STREAMED = ("sql@1", "french", "haiku", "json", "base")
"""Models that the walk changes nothing of."""


CAUSES = {
    "queue_s": "waited in the queue",
    "adapter_s": "waited for its adapter's weights",
    "prefill_s": "went into its prompt",
    "decode_s": "went into the answer itself",
    "other_s": "passed outside the engine",
}


def find_the_cause(console: Console) -> None:
    """Go from "slow!" on the overview to the cause, and on from there, in three clicks."""
    page = console.page
    # what the page was answered: slower requests that end later push others out of the list
    answers = []
    page.on("response", lambda answer: answers.append(answer) if "/requests/slow" in answer.url else None)
    console.show("overview")
    page.get_by_role("link", name="Why was it slow?").click()
    page.get_by_text("Why?", exact=True).first.click()
    told = page.locator(".slow details[open]")
    words = told.inner_text()
    listed = {one["id"]: one for answer in answers for one in answer.json()["data"]}
    (one,) = (one for name, one in listed.items() if name in words)
    stages = {name: one[name] for name in ("queue_s", "adapter_s", "prefill_s")}
    stages["decode_s"] = one["duration_s"] - one["first_token_s"]
    stages["other_s"] = one["duration_s"] - sum(stages.values())
    assert CAUSES[max(stages, key=lambda name: stages[name])] in words
    if told.get_by_role("link").count():
        told.get_by_role("link").first.click()
        page.get_by_role("heading", level=1).and_(page.locator("#title:focus")).wait_for()


def move_split_and_roll_back(console: Console, server: ServerProcess, key: str) -> None:
    page = console.page
    console.show("adapters/walked", "walked")
    # the upload moved it, and the page shows that once it has asked again
    page.get_by_text("version 2: 100 %").wait_for()
    page.get_by_role("button", name="Move or split live").click()
    dialog = console.dialog()
    dialog.get_by_role("button", name="Split with another version").click()
    dialog.get_by_role("slider", name="Share of version 2").fill("90")
    dialog.get_by_role("slider", name="Share of version 1").fill("10")
    dialog.get_by_role("button", name="Save").click()
    page.get_by_text("version 1: 10 %").wait_for()
    with Client(server.url, api_key=key) as client:
        split = client.adapters.alias("walked", "live").split
        assert split is not None
        assert {part.version: part.weight for part in split} == {1: 0.1, 2: 0.9}
        page.get_by_role("button", name="Roll back live").click()
        console.dialog().get_by_role("button", name="Roll back").click()
        page.get_by_text("version 2: 100 %").wait_for()
        rolled_back = client.adapters.alias("walked", "live")
        assert (rolled_back.version, rolled_back.split) == (2, None)


def compare(console: Console, server: ServerProcess, key: str) -> None:
    page = console.page
    console.show("playground")
    choose(page, "walked", "sql", "base (base)")
    ask(console)
    page.get_by_text("3 of 3 answers are complete.").wait_for(state="attached")
    with Client(server.url, api_key=key) as client:
        for model in ("walked", "sql", "base"):
            text = client.completions.create(model=model, prompt=PROMPT, max_tokens=64, temperature=0).choices[0].text
            assert answer_of(page, model).locator(".answer-text").inner_text().strip() == text.strip(), model


def read_the_certificate(console: Console) -> None:
    console.show("adapters/walked", "walked")
    console.page.get_by_role("button", name="Certificate of version 2").click()
    console.dialog().get_by_text("The engine computes it as it should").wait_for()
    assert console.violations() == []
    console.page.keyboard.press("Escape")


def test_an_operator_walks_while_sixteen_streams_run(
    open_console: Callable[..., Console], server: ServerProcess, acme: str
) -> None:
    with Client(server.url, api_key=acme) as client:
        client.adapters.push(str(adapter_dirs()["pirate"]), name="walked")
    console = open_console(acme)
    page = console.page
    with streaming(server.url, acme, STREAMED, PROMPT, count=NUM_STREAMS) as streams:
        page.wait_for_function(
            "least => Number(document.querySelector('#main').innerText.match(/(\\d+) running/)?.[1]) >= least",
            arg=NUM_STREAMS // 2,
        )
        find_the_cause(console)
        console.show("adapters/walked", "walked")
        drop(page, files_of("french"))
        page.get_by_role("button", name="Upload", exact=True).click()
        page.get_by_text("and verified it").wait_for()
        move_split_and_roll_back(console, server, acme)
        compare(console, server, acme)
        read_the_certificate(console)
        num_ended = streams.num_ended.total()
    assert streams.wrong == []
    assert num_ended > NUM_STREAMS
