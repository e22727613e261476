"""Adapters that a real MLflow keeps in a file store, pushed from here."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import run_here

from loraserve import AsyncClient, Client, errors
from loraserve.demo.pack import adapter_dirs
from loraserve.sdk.files import mlflow_source
from loraserve.sdk.files.adapter_source import AdapterSource

SQL_FILES = {"adapter_config.json", "adapter_model.safetensors"}
BESIDE = {"tokenizer_config.json", "adapter_model-00001-of-00001.safetensors"}
STORE = """
import sys, mlflow
from mlflow import MlflowClient
with mlflow.start_run() as run:
    mlflow.log_artifacts(sys.argv[1], "model/peft")
    mlflow.log_text("a base", "model/base/weights.bin")
    for name in ("tokenizer_config.json", "adapter_model-00001-of-00001.safetensors", "optimizer.pt"):
        mlflow.log_text("{}", "model/peft/" + name)
with mlflow.start_run() as two:
    mlflow.log_artifacts(sys.argv[1], "checkpoint-1")
    mlflow.log_artifacts(sys.argv[2], "checkpoint-2")
client = MlflowClient()
client.create_registered_model("sql")
version = client.create_model_version("sql", f"runs:/{run.info.run_id}/model", run.info.run_id)
client.set_registered_model_alias("sql", "best", version.version)
print(run.info.run_id, two.info.run_id)
"""


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {
        "MLFLOW_TRACKING_URI": (tmp_path_factory.mktemp("mlflow") / "runs").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    }


@pytest.fixture(scope="module")
def runs(variables: dict[str, str]) -> list[str]:
    """The ids of a run with one adapter, the registered model `sql`, and of one with two."""
    pytest.importorskip("mlflow")
    directories = [str(adapter_dirs()[name]) for name in ("sql", "pirate")]
    command = [sys.executable, "-P", "-W", "ignore", "-c", STORE, *directories]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-2:]


@pytest.fixture
def in_mlflow(runs: list[str], variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return runs


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapter_of_run_or_model_is_fetched_alone(in_mlflow: list[str], subtests: Any) -> None:
    one, _ = in_mlflow
    for source in (
        f"runs:/{one}/model/peft",
        f"runs:/{one}/model",
        f"runs:/{one}",
        f"mlflow://runs/{one}/model/peft",
        "models:/sql/1",
        "models:/sql@best",
        "mlflow://models/sql@best",
    ):
        with subtests.test(source=source):
            found = AdapterSource.open(source)
            names = {path.name for path in found.directory.iterdir() if path.is_file()}
            # neither the base beside it nor what else the run has
            assert names == SQL_FILES | BESIDE
            config = (found.directory / "adapter_config.json").read_bytes()
            assert config == (adapter_dirs()["sql"] / "adapter_config.json").read_bytes()
            found.close()
            assert not found.directory.exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_artifact_missing_in_mlflow_is_named(in_mlflow: list[str], subtests: Any) -> None:
    one, two = in_mlflow
    for source, words in (
        (f"runs:/{two}", "several adapters"),
        (f"runs:/{one}/nowhere", "no adapter"),
        ("runs:/0000/model", "MLflow can't read runs:/0000/model"),
        ("models:/sql/7", "MLflow can't read models:/sql/7"),
        ("models:/absent@best", "MLflow can't read"),
    ):
        with subtests.test(source=source), pytest.raises(errors.AdapterFormatError, match=words):
            AdapterSource.open(source)


def test_malformed_source_is_refused_before_mlflow_is_loaded(subtests: Any) -> None:
    for source in ("runs:", "runs:/", "runs://x", "models:/a/../b", "mlflow://elsewhere/x", "mlflow:x", "runs:/a b"):
        with subtests.test(source=source), pytest.raises(errors.InvalidRequest, match="names nothing in MLflow"):
            AdapterSource.open(source)


def test_missing_library_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow.artifacts", None)
    done = run_here("adapter", "push", "runs:/1/x", "--name", "a", LORASERVE_API_KEY="k")
    assert done.code == 2
    assert "MLflow isn't installed" in done.stderr
    assert 'pip install "loraserve[mlflow]"' in done.stderr


def test_server_is_not_sent_to_mlflow() -> None:
    done = run_here("adapter", "pull", "a", "--from", "runs:/1/x", LORASERVE_API_KEY="k")
    assert done.code == 2
    assert "loraserve adapter push runs:/1/x --name a" in " ".join(done.stderr.split())


def test_search_for_an_adapter_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def list_artifacts(artifact_uri: str) -> list[Any]:
        asked.append(artifact_uri)
        return [SimpleNamespace(path=f"x/{number}", is_dir=True) for number in range(1000)]

    artifacts = SimpleNamespace(list_artifacts=list_artifacts)
    monkeypatch.setitem(sys.modules, "mlflow.artifacts", artifacts)
    with pytest.raises(errors.AdapterFormatError, match="no adapter"):
        AdapterSource.open("runs:/1/x")
    assert len(asked) <= mlflow_source.MAX_FOLDERS


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
async def test_sync_and_async_clients_push_mlflow_adapters(
    in_mlflow: list[str], server: Any, client: Client, async_client: AsyncClient
) -> None:
    size = (adapter_dirs()["sql"] / "adapter_model.safetensors").stat().st_size
    for _ in range(2):
        server.answer_with_upload(size, size=size)
        server.answer_with_version()
    assert client.adapters.push("models:/sql@best", name="sql").model == "sql@1"
    assert (await async_client.adapters.push("models:/sql@best", name="sql")).model == "sql@1"
