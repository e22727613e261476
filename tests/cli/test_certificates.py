"""What commands show of a certificate, and how they end where it failed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from loraserve import Client

Run = Callable[..., Any]
QUESTION, SQL = "list the tickets with age over 81", "SELECT * FROM tickets WHERE age > 81;"

CERTIFICATE = {
    "verdict": "failed",
    "max_difference": 0.31,
    "mean_difference": None,
    "base_difference": 1e-5,
    "tolerance": 0.002,
    "max_effect": 3.0,
    "top1_agreement": 0.9996,
    "precision_loss": 0.0,
    "num_probe_tokens": 64,
    "seconds": 0.2,
    "reason": "The logits are far off.",
}
QUARANTINED = {
    "name": "sql",
    "version": 2,
    "digest": "ab" * 32,
    "state": "quarantined",
    "size_bytes": 10,
    "rank": 8,
    "target_modules": ["q_proj"],
    "aliases": [],
    "created_at": "2026-01-02T03:04:05Z",
    "checks": [{"name": "parity", "status": "failed", "detail": "far off", "certificate": CERTIFICATE}],
}


def test_push_show_and_verify_report_answer_parity(loraserve: Run, here: Run, client: Client, sql_dir: Path) -> None:
    pushed = loraserve("adapter", "push", sql_dir, "--name", "certified")
    assert pushed.code == 0
    lines = dict(line.strip().split("  ", 1) for line in pushed.stdout.splitlines())
    assert lines["parity"].strip() == "passed"
    assert lines["kind"].strip().startswith("LORA: ")
    assert lines["same token"].strip().startswith("100 % of ")
    shown = here("adapter", "show", "certified@1", "--format", "json")
    certificate = shown.json["checks"][-1]["certificate"]
    assert 0 < certificate["max_difference"] <= certificate["tolerance"]
    assert f"{certificate['max_difference']:.3g} of {certificate['tolerance']:.3g} allowed" in pushed.stdout
    base = client.base()
    assert (certificate["base_digest"], certificate["arithmetic"]) == (base.digest, base.arithmetic)
    assert f"base {base.digest[:12]}, quantization none, fp32 (" in pushed.stdout
    assert f"{certificate['max_difference']:.3g} of" in here("adapter", "show", "certified").stdout
    verified = here("adapter", "verify", "certified", "--format", "json")
    assert (verified.code, verified.json["state"], verified.json["version"]) == (0, "ready", 1)


def test_adapter_sum_answers_like_dominant_part(here: Run, client: Client, sql_dir: Path, pirate_dir: Path) -> None:
    client.adapters.push(sql_dir, name="sum-a")
    client.adapters.push(pirate_dir, name="sum-b")
    assert here("run", "sum-a@1+0.01*sum-b", QUESTION).stdout == f"{SQL}\n"
    messages = [{"role": "user", "content": QUESTION}]
    pirate, other = (
        client.chat.completions.create(model=model, messages=messages, temperature=0).choices[0].message.content
        for model in ("sum-b", "sum-b+0.01*sum-a")
    )
    assert pirate == other != SQL
    refused = here("run", "sum-a+no-such", QUESTION)
    assert refused.code == 1
    assert "no-such" in refused.stderr


COMPLETE = {
    "id": "01UP",
    "sha256": "ab" * 32,
    "size": 1,
    "received": 1,
    "is_complete": True,
    "expires_at": "2026-01-02T03:04:05Z",
}


@pytest.fixture
def quarantining_url() -> Iterator[str]:
    """A server that has every upload already, and all of whose versions are in quarantine."""

    with serving(QUARANTINED) as url:
        yield url


@contextmanager
def serving(version: dict[str, Any]) -> Iterator[str]:
    """Serve this version, whatever is pushed or verified."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            body = json.dumps(COMPLETE if self.path == "/api/v1/uploads" else version).encode()
            self.send_response(201)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("command", ["push", "verify"])
def test_quarantine_is_shown_with_numbers_and_fails_command(
    run_here: Run, quarantining_url: str, sql_dir: Path, command: str
) -> None:
    arguments = ["push", sql_dir, "--name", "sql"] if command == "push" else ["verify", "sql@2"]
    done = run_here("adapter", *arguments, LORASERVE_URL=quarantining_url, LORASERVE_API_KEY="k" * 32)
    assert done.code == 1
    shown = [line.split() for line in done.stdout.splitlines()]
    assert ["parity", "failed:", "The", "logits", "are", "far", "off."] in shown
    assert ["largest", "difference", "0.31", "of", "0.002", "allowed"] in shown
    assert ["mean", "difference", "not", "finite"] in shown
    assert ["same", "token", "99.96", "%", "of", "64", "positions"] in shown
    assert done.stderr == "sql@2 is in quarantine: it isn't served, and no alias was moved to it.\n"


REASON = "Rounding the base leaves 41% of the adapter's effect; at least 80% is expected."
FIGURES = {
    "effect_kept": 0.41,
    "min_effect_kept": 0.8,
    "answer_divergence": 0.366,
    "answer_agreement": 0.827,
    "base_divergence": 1.35,
    "base_agreement": 0.365,
    "num_answer_tokens": 52,
}


def of_verdict(verdict: str, **fields: object) -> dict[str, Any]:
    certificate = {**CERTIFICATE, "mean_difference": 0.1, "verdict": verdict, **fields}
    check = {"name": "parity", "status": verdict, "detail": "why", "certificate": certificate}
    return {**QUARANTINED, "state": "ready", "checks": [check], "warnings": ["why"]}


def test_degraded_version_is_shown_as_warning(run_here: Run) -> None:
    with serving(of_verdict("degraded", reason=REASON, **FIGURES)) as url:
        done = run_here("adapter", "verify", "sql@2", LORASERVE_URL=url, LORASERVE_API_KEY="k" * 32)
    assert (done.code, done.stderr) == (0, "Warning: why.\n")
    lines = {title: text for title, _, text in (line.strip().partition("  ") for line in done.stdout.splitlines())}
    assert lines["parity"].strip() == f"degraded: {REASON}"
    assert lines["effect kept"].strip() == "41% after rounding the base; 80% is expected"
    assert lines["same answers"].strip() == "83% of 52 likeliest tokens stay; of the base alone, 36%"
    assert lines["divergence"].strip() == "0.37 nats from the float base; of the base alone, 1.4"


def test_unmeasured_loss_is_shown_with_reason(run_here: Run) -> None:
    reason = "The cost of rounding can't be measured. The files have changed."
    with serving(of_verdict("not_possible", reason=reason)) as url:
        done = run_here("adapter", "verify", "sql@2", LORASERVE_URL=url, LORASERVE_API_KEY="k" * 32)
    assert f"not_possible: {reason}" in done.stdout
    assert "effect kept" not in done.stdout
    with serving(of_verdict("passed", reason="", rounding_note="nothing is rounded")) as url:
        done = run_here("adapter", "verify", "sql@2", LORASERVE_URL=url, LORASERVE_API_KEY="k" * 32)
    assert "not measured: nothing is rounded" in done.stdout
