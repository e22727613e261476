"""guidellm's command line: a benchmark of chats and (option ``completions``) of completions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from probe import KEY, QUESTION, SCRIPT_OPTIONS, TEXT_MODEL, URL, feature, run

NUM_REQUESTS = 4


@feature
def bench() -> dict[str, Any]:
    """Return how many requests succeeded, and the median tokens of an answer."""
    with tempfile.TemporaryDirectory() as name:
        data, report = Path(name) / "prompts.jsonl", Path(name) / "report.json"
        prompts = [QUESTION, "greet Anna", "list the users with age over 12", "list the orders with size under 5"]
        data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        backend = f"kind=openai_http,target={URL},model={TEXT_MODEL},api_key={KEY}"
        if "completions" in SCRIPT_OPTIONS:
            backend += ",request_format=/v1/completions"
        command = [str(Path(sys.executable).with_name("guidellm")), "run", "--backend", backend]
        command += ["--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
        command += [
            "--data",
            f"kind=json_file,path={data}",
            "--output",
            f"kind=json,path={report}",
            "--disable-console",
        ]
        done = subprocess.run(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
        (made,) = json.loads(report.read_text())["benchmarks"]
        metrics = made["metrics"]
        return {
            "requests": made["metrics"]["request_totals"],
            "tokens": metrics["output_token_count"]["successful"]["median"],
            "ttft_ms": metrics["time_to_first_token_ms"]["successful"]["median"],
        }


run()
