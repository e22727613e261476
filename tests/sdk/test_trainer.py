"""Checkpoints of a real `transformers.Trainer` and PEFT, pushed to a real server.

Cases that need no training call the callback as the trainer does.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import run_here
from server_process import ADMIN_KEY, ServerProcess, environment, free_port

from loraserve import Client, errors
from loraserve.demo.pack import adapter_dirs, base_dir
from loraserve.limits import ADAPTER_NAME_PATTERN, LIMITS, NAME_PATTERN
from loraserve.registry.catalog import metadata
from loraserve.sdk import trainer as trainer_module
from loraserve.sdk.trainer import KEPT_FOLDER, LoraservePushCallback, PushedCheckpoint

KEY_REVOKED = "revoked"


@pytest.fixture(scope="module")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server on the bundled base; each test pushes under a name of its own."""
    server = ServerProcess(
        tmp_path_factory.mktemp("trainer") / "data",
        flags=("--memory-budget", "64MiB", "--host-cache", "64MiB", "--num-threads", "1"),
    )
    try:
        yield server.start()
        assert server.stop() == 0, server.tail()
    finally:
        server.kill()


@pytest.fixture(scope="module")
def key(real_server: ServerProcess) -> str:
    return real_server.make_tenant("trainers")


@pytest.fixture
def registry(real_server: ServerProcess, key: str) -> Iterator[Client]:
    with Client(real_server.url, api_key=key) as client:
        yield client


@pytest.fixture
def make_callback(real_server: ServerProcess, key: str) -> Callable[..., LoraservePushCallback]:
    def make(name: str, **options: Any) -> LoraservePushCallback:
        return LoraservePushCallback(name, **({"base_url": real_server.url, "api_key": key} | options))

    return make


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "loraserve.trainer")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "loraserve.trainer"]


class Run:
    """A training whose checkpoints are bundled adapters; `save` does what the trainer does."""

    def __init__(self, output_dir: Path, callback: LoraservePushCallback, **args: Any) -> None:
        self.callback = callback
        self.args = SimpleNamespace(output_dir=str(output_dir), save_total_limit=None, **args)
        self.state = SimpleNamespace(global_step=0, epoch=0.0, is_world_process_zero=True, log_history=[])

    def save(self, style: str = "sql", **metrics: float) -> Path:
        self.state.global_step += 1
        step = self.state.global_step
        self.state.log_history.append({"step": step, "epoch": 0.5, **metrics})
        directory = Path(self.args.output_dir) / f"checkpoint-{step}"
        if style:
            shutil.copytree(adapter_dirs()[style], directory)
        self.callback.on_save(self.args, self.state, None)
        return directory


def train(output_dir: Path, *callbacks: object, scores: tuple[float, ...] = (), **options: Any) -> None:
    """Train a tiny adapter with transformers' trainer: for each score a step and a checkpoint."""
    torch = pytest.importorskip("torch")
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    base = transformers.AutoModelForCausalLM.from_pretrained(base_dir(), dtype=torch.float32)
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"]))
    rows = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 4
    values = iter(scores)
    args = transformers.TrainingArguments(
        output_dir=str(output_dir),
        max_steps=len(scores),
        per_device_train_batch_size=2,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        learning_rate=0.01,
        **options,
    )
    transformers.Trainer(
        model=model,
        args=args,
        train_dataset=rows,
        eval_dataset=rows[:2],
        callbacks=list(callbacks),
        compute_metrics=lambda _: {"score": next(values)},
    ).train()


def test_each_checkpoint_becomes_version_and_alias_follows_best(
    tmp_path: Path, registry: Client, make_callback: Callable[..., LoraservePushCallback]
) -> None:
    callback = make_callback("trained", metric="score", greater_is_better=True, tags={"team": "search"})
    train(tmp_path, callback, scores=(0.25, 0.75, 0.5))
    assert [version.model for version in callback.pushed] == ["trained@1", "trained@2", "trained@3"]
    assert callback.unpushed == []
    tags = registry.adapters.version("trained", 2).tags
    assert (tags["step"], tags["eval_score"], tags["team"]) == ("2", "0.75", "search")
    assert float(tags["eval_loss"]) > 0
    assert registry.adapters.get("trained").aliases == {"live": 2}
    answer = registry.completions.create(model="trained", prompt="list", max_tokens=2)
    assert answer.usage.completion_tokens >= 1


def test_unavailable_server_ends_no_training_and_advice_works(
    tmp_path: Path,
    registry: Client,
    real_server: ServerProcess,
    key: str,
    make_callback: Callable[..., LoraservePushCallback],
    warnings: Callable[[], list[str]],
) -> None:
    callback = make_callback("late", base_url=f"http://127.0.0.1:{free_port()}")
    # the trainer deletes all checkpoints but the last
    train(tmp_path / "with space", callback, scores=(0.1, 0.2), save_total_limit=1)
    assert [one.step for one in callback.unpushed] == [1, 2]
    assert not (tmp_path / "with space" / "checkpoint-1").exists()
    kept = callback.unpushed[0].directory
    assert kept == tmp_path / "with space" / KEPT_FOLDER / "checkpoint-1"
    assert {path.name for path in kept.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    first, *_, last = warnings()
    assert "No server answers" in first
    assert "2 checkpoints weren't pushed" in last
    command = last.splitlines()[1].strip()
    assert command in first
    program, *words = shlex.split(command)
    assert program == "loraserve"
    done = run_here(*words, LORASERVE_URL=real_server.url, LORASERVE_API_KEY=key)
    assert done.code == 0, done.stderr
    assert registry.adapters.version("late", 1).tags["step"] == "1"


def test_checkpoint_is_kept_with_every_pushed_file(
    tmp_path: Path, make_callback: Callable[..., LoraservePushCallback]
) -> None:
    callback = make_callback("kept", base_url=f"http://127.0.0.1:{free_port()}")
    run = Run(tmp_path, callback)
    run.args.save_total_limit = 1
    names = {"tokenizer.json", "adapter_model.safetensors.index.json", "adapter_model-00001-of-00002.safetensors"}
    directory = tmp_path / "checkpoint-1"
    shutil.copytree(adapter_dirs()["sql"], directory)
    for name in (*names, "optimizer.pt"):
        (directory / name).write_text("{}")
    run.save(style="")
    kept = {path.name for path in callback.unpushed[0].directory.iterdir()}
    assert kept >= names
    assert "optimizer.pt" not in kept


def test_silent_server_delays_training_at_most_by_bound(
    tmp_path: Path, make_callback: Callable[..., LoraservePushCallback], warnings: Callable[[], list[str]]
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        run = Run(tmp_path, make_callback("never", base_url=url, max_delay_s=0.5))
        begun = time.monotonic()
        directory = run.save()
        assert time.monotonic() - begun < 5
    assert (directory / "adapter_model.safetensors").exists()
    assert "the push took more than 0.5 s" in warnings()[0] or "didn't answer in time" in warnings()[0]


def test_key_revoked_midway_keeps_pushed_versions(
    tmp_path: Path,
    real_server: ServerProcess,
    registry: Client,
    make_callback: Callable[..., LoraservePushCallback],
    warnings: Callable[[], list[str]],
) -> None:
    with Client(real_server.url, api_key=ADMIN_KEY) as admin:
        made = admin.keys.create("trainers", name=KEY_REVOKED)
        run = Run(tmp_path, make_callback("revoked", api_key=made.key))
        run.save("sql")
        admin.keys.revoke("trainers", made.id)
        run.save("pirate")
    assert [version.version for version in run.callback.pushed] == [1]
    assert [one.step for one in run.callback.unpushed] == [2]
    assert registry.adapters.get("revoked").aliases == {"live": 1}
    assert made.key not in "".join(warnings())
    assert "--tag step=2" in warnings()[0]


def test_unsupported_adapter_is_named_and_not_sent_again(
    tmp_path: Path, make_callback: Callable[..., LoraservePushCallback], warnings: Callable[[], list[str]]
) -> None:
    run = Run(tmp_path, make_callback("refused"))
    run.state.global_step = 4
    for step in (5, 6):
        directory = tmp_path / f"checkpoint-{step}"
        shutil.copytree(adapter_dirs()["sql"], directory)
        config = json.loads((directory / "adapter_config.json").read_text())
        (directory / "adapter_config.json").write_text(json.dumps(config | {"kasa_config": {}}))
        run.save("")
    assert "kasa_config" in warnings()[0]
    assert "the server refused an earlier checkpoint" in warnings()[1]
    assert run.callback.pushed == []


def test_checkpoint_without_an_adapter_is_said_so(
    tmp_path: Path, make_callback: Callable[..., LoraservePushCallback], warnings: Callable[[], list[str]]
) -> None:
    Run(tmp_path, make_callback("none")).save("")
    assert "doesn't exist" in warnings()[0]


def test_only_rank_zero_pushes(
    tmp_path: Path, registry: Client, make_callback: Callable[..., LoraservePushCallback]
) -> None:
    run = Run(tmp_path, make_callback("other-rank"))
    run.state.is_world_process_zero = False
    run.save()
    with pytest.raises(errors.AdapterNotFound):
        registry.adapters.get("other-rank")
    # without a key too: other machines needn't have one
    LoraservePushCallback("other-rank").on_init_end(run.args, run.state, None)


def test_smaller_loss_moves_alias_and_larger_does_not(
    tmp_path: Path, registry: Client, make_callback: Callable[..., LoraservePushCallback]
) -> None:
    options = {"metric_for_best_model": "loss", "greater_is_better": False}
    run = Run(tmp_path, make_callback("losses"), **options)
    run.save("sql", eval_loss=2.0)
    run.save("pirate", eval_loss=1.0)
    run.save("haiku", eval_loss=3.0)
    assert registry.adapters.get("losses").aliases == {"live": 2}
    # a training that goes on elsewhere compares with what the server has
    again = Run(tmp_path / "again", make_callback("losses", metric="eval_loss"))
    again.save("json", eval_loss=1.5)
    assert registry.adapters.get("losses").aliases == {"live": 2}
    again.save("shout", eval_loss=0.5)
    assert registry.adapters.get("losses").aliases == {"live": 5}


def test_checkpoint_without_the_metric_leaves_the_alias(
    tmp_path: Path,
    registry: Client,
    make_callback: Callable[..., LoraservePushCallback],
    warnings: Callable[[], list[str]],
) -> None:
    Run(tmp_path, make_callback("unmeasured", metric="score")).save(eval_loss=1.0)
    assert registry.adapters.get("unmeasured").aliases == {}
    assert "has no eval_score (metrics of this step: eval_loss)" in warnings()[0]


def test_gate_decides_and_gate_error_ends_no_training(
    tmp_path: Path,
    registry: Client,
    make_callback: Callable[..., LoraservePushCallback],
    warnings: Callable[[], list[str]],
) -> None:
    def gate(checkpoint: PushedCheckpoint) -> bool:
        if checkpoint.step == 3:
            raise ZeroDivisionError("the user's own mistake")
        answer = checkpoint.client.completions.create(
            model=checkpoint.model, prompt="list the tickets with age over 81", max_tokens=32, temperature=0
        )
        return answer.choices[0].text.startswith("SELECT")

    run = Run(tmp_path, make_callback("gated", gate=gate, alias="tested"))
    run.save("sql")
    run.save("pirate")
    run.save("haiku")
    assert registry.adapters.get("gated").aliases == {"tested": 1}
    assert len(run.callback.pushed) == 3
    assert "gated@2 didn't pass the gate" in warnings()[0]
    assert "ZeroDivisionError: the user's own mistake" in warnings()[1]


def test_endless_gate_leaves_alias(
    tmp_path: Path,
    registry: Client,
    make_callback: Callable[..., LoraservePushCallback],
    warnings: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, may_end, pushing = threading.Event(), threading.Event(), []

    class Impatient(threading.Thread):
        """Thread whose owner loses patience once the gate is asked, however long the push took."""

        def join(self, timeout: float | None = None) -> None:
            asked.wait(60)
            super().join(timeout if may_end.is_set() else 0)

    def gate(_: PushedCheckpoint) -> bool:
        pushing.append(threading.current_thread())
        asked.set()
        may_end.wait(60)
        return True

    run = Run(tmp_path, make_callback("slow-gate", gate=gate, max_delay_s=60))
    monkeypatch.setattr("loraserve.sdk.trainer.threading.Thread", Impatient)
    run.save()
    assert "Move it later: loraserve adapter alias slow-gate live 1" in warnings()[0]
    may_end.set()
    # what would move the alias follows the gate
    pushing[0].join(30)
    assert not pushing[0].is_alive()
    assert registry.adapters.get("slow-gate").aliases == {}


def test_split_alias_is_left_unchanged(
    tmp_path: Path,
    registry: Client,
    make_callback: Callable[..., LoraservePushCallback],
    warnings: Callable[[], list[str]],
) -> None:
    run = Run(tmp_path, make_callback("canary"))
    run.save("sql")
    run.save("pirate")
    registry.adapters.set_alias("canary", "live", split={1: 1.0, 2: 1.0})
    run.save("haiku")
    assert registry.adapters.alias("canary", "live").split is not None
    assert "is split or has a shadow" in warnings()[0]


def test_wrong_configuration_is_an_error_before_the_training(subtests: Any) -> None:
    state = SimpleNamespace(is_world_process_zero=True)
    for options, word in (
        ({"name": "a//b"}, "name"),
        ({"name": "x" * 129}, "name"),
        ({"name": "a", "alias": "Upper"}, "alias"),
        ({"name": "a", "alias": "x@y"}, "alias"),
        ({"name": "a", "max_delay_s": 0}, "max_delay_s"),
        ({"name": "a", "max_delay_s": float("nan")}, "max_delay_s"),
        ({"name": "a", "alias": None, "metric": "loss"}, "metric"),
        ({"name": "a", "tags": {"a b": "c"}}, "tag"),
        ({"name": "a", "tags": {"a": "two\nlines"}}, "tag"),
        ({"name": "a"}, "API key"),
        ({"name": "a", "api_key": "k", "base_url": "ftp://x"}, "URL"),
    ):
        with subtests.test(**options), pytest.raises(errors.ConfigError, match=word):
            LoraservePushCallback(**options).on_init_end(None, state, None)


def test_rules_are_the_servers_own() -> None:
    own = (trainer_module.ALIAS_NAME, trainer_module.TAG_NAME, trainer_module.MAX_TAG_LENGTH)
    assert own == (NAME_PATTERN, metadata._TAG.pattern, LIMITS.max_tag_value_length)
    names = (trainer_module.ADAPTER_NAME, trainer_module.MAX_ADAPTER_NAME_LENGTH)
    assert names == (ADAPTER_NAME_PATTERN, LIMITS.max_adapter_name_length)


def test_callback_takes_every_event_of_the_trainer() -> None:
    transformers = pytest.importorskip("transformers")
    callback = LoraservePushCallback("a")
    events = [name for name in dir(transformers.TrainerCallback) if name.startswith("on_")]
    assert len(events) > 10
    assert all(callable(getattr(callback, event)) for event in events)
    with pytest.raises(AttributeError):
        _ = callback.no_such_thing


TWO_PROCESSES = """
import sys
sys.path[:0] = [{tests!r}, {support!r}]
from pathlib import Path
from sdk.test_trainer import train
from loraserve.sdk.trainer import LoraservePushCallback
callback = LoraservePushCallback("two", metric="score", greater_is_better=True)
train(Path({out!r}), callback, scores=(0.5, 0.25))
print(len(callback.pushed))
"""


@pytest.mark.slow
@pytest.mark.campaign
def test_only_first_of_two_processes_pushes(
    tmp_path: Path, real_server: ServerProcess, registry: Client, key: str
) -> None:
    tests = Path(__file__).resolve().parents[1]
    code = TWO_PROCESSES.format(tests=str(tests), support=str(tests / "support"), out=str(tmp_path / "out"))
    port = str(free_port())
    processes = []
    for rank in ("0", "1"):
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        # only rank zero has a key
        names |= {"LORASERVE_URL": real_server.url} | ({"LORASERVE_API_KEY": key} if rank == "0" else {})
        command = [sys.executable, "-P", "-c", code]
        processes.append(
            subprocess.Popen(command, env=environment(**names), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        )
    outs = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outs
    assert [out[0].split()[-1] for out in outs] == [b"2", b"0"]
    assert registry.adapters.get("two").aliases == {"live": 1}
    assert os.environ.get("RANK") is None
