"""Take the console's pictures for docs/images: the demo's adapters under a small load, in Chromium.

make screenshots
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from loraserve import Client
from loraserve.demo.demo_model import Question
from loraserve.demo.demo_server import DemoServer, choose_port
from loraserve.demo.smollm.smollm_demo import smollm_demo
from loraserve.errors import LoraserveError

FOLDER = Path(__file__).resolve().parent.parent / "docs/images"
MAX_BYTES = 150_000
LOAD_S = 45
ANSWER_S = 120
WEIGHTS = {"acme": 2.0, "globex": 1.0}


def set_up(server: DemoServer) -> dict[str, str]:
    """Make two tenants with the adapters; return a key of each."""
    keys = {}
    with Client(server.url, api_key=server.admin_key) as admin:
        for name, weight in WEIGHTS.items():
            admin.tenants.create(name, weight=weight)
            keys[name] = admin.keys.create(name, name="pictures").key
    for name, key in keys.items():
        with Client(server.url, api_key=key) as client:
            for adapter, path in server.model.adapters.items():
                if name == "acme" or adapter in ("french", "json"):
                    client.adapters.push(path, name=adapter)
    folders = server.model.adapters
    with Client(server.url, api_key=keys["acme"]) as client:
        client.adapters.push(folders["json"], name="sql")
        client.adapters.update("sql", notes="Queries for the support desk.", tags={"team": "desk"})
        client.adapters.push(folders["pirate"], name="sql", promote=False)
        client.adapters.set_alias("sql", "live", split={1: 0.8, 2: 0.2}, shadow=(3, 0.5))
        client.adapters.update("json", notes="Orders out of the support desk's mails.")
        client.adapters.push(folders["french"], name="json", promote=False)
    return keys


def load(
    url: str, key: str, names: list[str], questions: Sequence[Question], ended: threading.Event, seed: int
) -> None:
    """Ask one question after the other."""
    drawn = random.Random(seed)
    with Client(url, api_key=key) as client:
        while not ended.wait(drawn.random() * 0.2):
            messages = [{"role": "user", "content": drawn.choice(questions).prompt}]
            try:
                client.chat.completions.create(model=drawn.choice(names), messages=messages, max_tokens=48)
            except LoraserveError as error:
                print(error, file=sys.stderr)


def take(page: Any, url: str, view: str, name: str, *, wait_s: float = 2.0) -> None:
    page.goto(f"{url}/console/#/{view}")
    page.wait_for_timeout(1000 * wait_s)
    save(page, name)


def save(page: Any, name: str) -> None:
    path = FOLDER / f"console-{name}.png"
    page.screenshot(path=path)
    num_bytes = path.stat().st_size
    print(f"{path.name}: {num_bytes / 1000:.0f} kB")
    assert num_bytes < MAX_BYTES, f"{path} has {num_bytes} bytes; at most {MAX_BYTES} belong into the tree"


def sign_in(browser: Any, url: str, key: str, scheme: str) -> Any:
    page = browser.new_page(viewport={"width": 1200, "height": 760}, color_scheme=scheme)
    page.set_default_timeout(1000 * ANSWER_S)
    page.goto(f"{url}/console/")
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Sign in").click()
    page.locator("#main").wait_for()
    return page


def pictures(browser: Any, server: DemoServer, keys: dict[str, str]) -> None:
    admin = sign_in(browser, server.url, server.admin_key, "light")
    dark = sign_in(browser, server.url, server.admin_key, "dark")
    acme = sign_in(browser, server.url, keys["acme"], "light")
    take(acme, server.url, "playground", "playground")
    # the page chooses some models by itself
    wanted = (f"{server.model.base_id} (base)", "sql", "pirate")
    for name in (wanted[0], *server.model.adapters):
        acme.get_by_role("checkbox", name=name, exact=True).set_checked(name in wanted)
    acme.get_by_label("Message", exact=True).fill("How many tickets have a price over 20?")
    acme.get_by_role("button", name="Ask").click()
    acme.get_by_text("3 of 3 answers are complete.").wait_for(state="attached")
    save(acme, "playground")
    take(acme, server.url, "adapters/json", "adapter")
    take(admin, server.url, "residency", "residency", wait_s=4)
    take(admin, server.url, "tenants", "tenants")
    take(admin, server.url, "slow", "slow")
    admin.get_by_text("Why?", exact=True).first.click()
    save(admin, "slow")
    admin.goto(f"{server.url}/console/#/overview")
    admin.wait_for_timeout(1000 * LOAD_S)
    save(admin, "overview")
    save(dark, "overview-dark")
    acme.goto(f"{server.url}/console/#/adapters/sql")
    acme.locator(".compare tbody").wait_for()
    acme.wait_for_timeout(2000)
    save(acme, "compare")


def main() -> int:
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("Chromium isn't installed. Try: apt-get install chromium")
    FOLDER.mkdir(exist_ok=True)
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with (
        tempfile.TemporaryDirectory() as folder,
        DemoServer(Path(folder), choose_port(0), smollm_demo(print)) as server,
    ):
        server.start()
        keys = set_up(server)
        questions = [question for asked in server.model.questions.values() for question in asked if not question.tools]
        ended = threading.Event()
        askers = [
            threading.Thread(target=load, args=(server.url, keys[name], names, questions, ended, seed))
            for seed, (name, names) in enumerate(
                [("acme", ["sql", "french", "json", "pirate"]), ("globex", ["json"])] * 2
            )
        ]
        for asker in askers:
            asker.start()
        try:
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
                pictures(browser, server, keys)
                browser.close()
        finally:
            ended.set()
            for asker in askers:
                asker.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
