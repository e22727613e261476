"""lm-eval's command line, on completions and (option ``chat``) on chats, with tasks of its own.

Prompts are cut into tokens by the server (``tokenizer_backend`` is ``auto``): no tokenizer is
downloaded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from probe import BASE_URL, KEY, QUESTION, SCRIPT_OPTIONS, TEXT_MODEL, feature, run

RIGHT = "SELECT * FROM tickets WHERE age > 81;"
DOCS = [
    {"question": QUESTION, "choices": ["SELECT * FROM users WHERE age > 81;", RIGHT, "Hello, Anna."], "answer": 1},
    {"question": "greet Anna", "choices": ["SELECT 'Hello, Anna';", "SELECT 1;", RIGHT], "answer": 0},
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{prompt}"
{how}
"""
CHOICES = """
output_type: multiple_choice
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc}]
"""
TEXTS = """
output_type: generate_until
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["<|end|>"], max_gen_toks: 48, temperature: 0}
metric_list: [{metric: exact_match}]
"""


IS_CHAT = "chat" in SCRIPT_OPTIONS
MARKED = "<|user|>{{question}}<|assistant|>"


@cache
def results() -> dict[str, dict[str, Any]]:
    """Return each task's metrics; one run makes all of them."""
    tasks = {"texts": ("{{question}}", TEXTS)} if IS_CHAT else {"choices": (MARKED, CHOICES), "texts": (MARKED, TEXTS)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "docs.jsonl"
        data.write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
        for task, (prompt, how) in tasks.items():
            (folder / f"{task}.yaml").write_text(TASK.format(name=task, data=data, prompt=prompt, how=how))
        options = f"model={TEXT_MODEL},num_concurrent=2,max_retries=1,max_length=512,auth_token={KEY}"
        command = [sys.executable, "-m", "lm_eval", "--tasks", ",".join(tasks), "--include_path", name]
        command += ["--model", "local-chat-completions" if IS_CHAT else "local-completions"]
        command += ["--model_args", f"{options},base_url={BASE_URL}/{'chat/' if IS_CHAT else ''}completions"]
        command += ["--output_path", str(folder / "out"), *(["--apply_chat_template"] if IS_CHAT else [])]
        variables = {"OPENAI_API_KEY": KEY, "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": name}
        done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
        (report,) = (folder / "out").rglob("results_*.json")
        found: dict[str, dict[str, Any]] = json.loads(report.read_text())["results"]
        return found


@feature
def loglikelihood() -> float:
    return results()["choices"]["acc,none"]


@feature
def completion() -> float:
    return results()["texts"]["exact_match,none"]


@feature
def chat() -> float:
    return results()["texts"]["exact_match,none"]


run()
