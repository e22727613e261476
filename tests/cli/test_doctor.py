"""``loraserve doctor``: without a server, and against a real one.

Once as people run it; then in this process, without asking torch again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess
from typer.testing import CliRunner

from loraserve import Client
from loraserve.cli.local.doctor import _secrets
from loraserve.cli.main import app
from loraserve.demo.pack import base_dir
from loraserve.doctor import installation, kernels
from loraserve.doctor.installation import TorchFacts

from .conftest import variables_for

Run = Callable[..., Any]


@dataclass(frozen=True)
class Done:
    code: int
    output: str

    @property
    def statuses(self) -> dict[str, str]:
        return {check["name"]: check["status"] for check in json.loads(self.output)["checks"]}


@pytest.fixture
def examine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Done]:
    """Runs ``loraserve doctor ARGUMENTS`` in an empty directory of a machine without a GPU, with
    these variables and none else of ours.
    """
    monkeypatch.setattr(
        installation, "probe", lambda: TorchFacts("2.13.0", None, None, None, None, None, "", 2, ("fbgemm",))
    )
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("LORASERVE_")]:
        monkeypatch.delenv(name)

    def run(*arguments: str | Path, **variables: str) -> Done:
        found = CliRunner().invoke(app, ["doctor", *map(str, arguments)], env=variables)
        return Done(found.exit_code, found.output)

    return run


def test_doctor_without_a_server_checks_the_installation(examine: Callable[..., Done], tmp_path: Path) -> None:
    url = "http://127.0.0.1:9"
    done = examine("--model", base_dir(), "--data-dir", tmp_path / "data", "--url", url, "--format", "json")
    assert done.code == 1
    found = done.statuses
    assert found.pop("server") == "fail"
    assert {"python", "packages", "torch", "gpu", "data_dir", "disk", "database", "model", "memory"} <= found.keys()
    assert "fail" not in found.values()
    assert list(tmp_path.iterdir()) == []


def test_doctor_checks_processes_sharing_base(examine: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    def check(*flags: str) -> dict[str, str]:
        done = examine("--model", base_dir(), "--url", "http://127.0.0.1:9", "--format", "json", *flags)
        return next((c for c in json.loads(done.output)["checks"] if c["name"] == "parallel"), {})

    assert check() == {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    assert check("--pipeline-parallel", "2", "--tensor-parallel", "2")["status"] == "ok"
    few = check("--pipeline-parallel", "2", "--num-threads", "3")
    assert few["status"] == "warn"
    assert few["found"] == "2 processes of 3 threads on 4 cores"
    heads = check("--tensor-parallel", "3")
    assert heads["status"] == "fail"
    assert "4 attention heads" in heads["found"]
    layers = check("--pipeline-parallel", "5")
    assert layers["status"] == "fail"
    assert "has 4 layers" in layers["found"]
    assert check("--pipeline-parallel", "2", "--device", "cuda")["status"] == "fail"

    def refused(*_: object, **__: object) -> None:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr("loraserve.doctor.parallel.socket.create_server", refused)
    loopback = check("--pipeline-parallel", "2")
    assert loopback["status"] == "fail"
    assert "127.0.0.1 can't be connected to: Network is unreachable" in loopback["found"]


def test_doctor_accepts_matching_server_and_reports_differing_settings(
    loraserve: Run, examine: Callable[..., Done], real_server: ServerProcess, client: Client, sql_dir: Path
) -> None:
    version = client.adapters.push(sql_dir, name="examined")
    client.adapters.warm("examined", version.version or 0)
    done = loraserve("doctor", "--model", base_dir(), "--memory-budget", "64MiB", "--format", "json")
    assert done.code == 0
    checks = {check["name"]: check for check in done.json["checks"]}
    names = ("server", "base", "limits", "invariants", "budget", "kv_blocks", "adapter_budget", "adapters")
    assert {name: checks[name]["status"] for name in names} == dict.fromkeys(names, "ok")
    assert "compared, as planned" in checks["adapters"]["found"]
    assert " 0 compared" not in checks["adapters"]["found"]

    others = ("--memory-budget", "32MiB", "--max-model-len", "256", "--adapter-dtype", "int8")
    other = examine("--model", base_dir(), *others, "--format", "json", **variables_for(real_server))
    different = {name for name, status in other.statuses.items() if status == "warn"}
    assert {"base", "budget", "kv_blocks", "adapter_budget", "adapters"} <= different


@pytest.mark.parametrize(
    "place",
    [
        "me:s3cret%2Bp4ss@127.0.0.1/r",
        "127.0.0.1/r?user=me&password=s3cret%2Bp4ss",
        "127.0.0.1/r?sslpassword=s3cret%2Bp4ss",
    ],
)
def test_doctor_knows_the_passwords_of_a_database_url(place: str) -> None:
    assert {"s3cret%2Bp4ss", "s3cret+p4ss"} <= set(_secrets({"database_url": f"postgresql://{place}"}))


def test_doctor_shows_no_secret(examine: Callable[..., Done], real_server: ServerProcess) -> None:
    key, url = "sk-lora-not-a-key-of-anybody", "postgresql://somebody:s3cret-p4ss@127.0.0.1:9/registry"
    done = examine("--database-url", url, LORASERVE_URL=real_server.url, LORASERVE_API_KEY=key)
    assert done.code == 1
    assert "fail  database" in done.output
    assert "fail  server" in done.output
    assert [secret for secret in ("s3cret-p4ss", key) if secret in done.output] == []


def test_doctor_without_key_compares_no_settings(examine: Callable[..., Done], real_server: ServerProcess) -> None:
    done = examine("--url", real_server.url, "--format", "quiet")
    assert "key" in done.output.splitlines()


def test_doctor_names_wrong_setting(examine: Callable[..., Done]) -> None:
    done = examine("--memory-budget", "much", "--format", "quiet")
    assert done.code == 1
    assert "settings" in done.output.splitlines()


@pytest.mark.campaign
def test_doctor_measures_rounding_cost(examine: Callable[..., Done], tmp_path: Path) -> None:
    arguments = ("--model", base_dir(), "--quantize", "fp8", "--data-dir", tmp_path / "data", "--precision")
    done = examine(*arguments, "--format", "json")
    # words for people go to stderr, which the runner mixes in
    found, _ = json.JSONDecoder().raw_decode(done.output[done.output.index("{") :])
    assert done.code == 0
    names = [check["name"] for check in found["checks"] if check["name"].startswith("precision")]
    assert names == ["precision", "precision_weights", "precision_activations"]
    cost = found["precision"]
    assert (cost["arithmetic"], cost["num_positions"]) == ("w8a16-fp8", 256)
    assert 0.9 < cost["total"]["top1_agreement"] < 1
    assert 0 < cost["total"]["mean_difference"] < cost["total"]["max_difference"]
    assert cost["activations"]["max_difference"] < 1e-4


def test_doctor_measures_no_rounding_without_a_base(examine: Callable[..., Done]) -> None:
    done = examine("--precision")
    assert done.code == 1
    assert "precision" in done.output
    assert "a base that can be loaded" in done.output


def test_kernels_are_tried_without_a_server(examine: Callable[..., Done]) -> None:
    done = examine("--kernels", "--quantize", "int4", "--format", "json")
    assert done.code == 0
    found, _ = json.JSONDecoder().raw_decode(done.output[done.output.index("{") :])
    assert found["instructions"].keys() == {"onednn", "fbgemm", "torch", "numba"}
    # the head is in int8
    assert {one["format"] for one in found["formats"]} == {"int4-rounded", "int8"}
    for one in found["formats"]:
        assert [row["rows"] for row in one["rows"]] == [1, 8, 64, 256]
        assert all(row["gops"] > 0 for row in one["rows"])
        taken = next(c for c in one["candidates"] if c["kernel"] == one["kernel"])
        assert taken["verdict"] == "usable"
        assert taken["rows"] == one["rows"]


def test_untestable_kernels_are_reported(examine: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_MODULE", "loraserve_kernels.nowhere")
    done = examine("--kernels")
    assert done.code == 2
    assert "The kernels can't be timed" in done.output
    done = examine("--quantize", "int8", "--format", "json")
    assert done.statuses["kernels"] == "fail"


@pytest.mark.parametrize(("is_slower", "status"), [(False, "ok"), (True, "warn")])
def test_format_slower_than_float32_gets_warning(
    examine: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, is_slower: bool, status: str
) -> None:
    asked: list[tuple[str, ...]] = []

    def tried(formats: tuple[str, ...], *, is_quick: bool) -> dict[str, Any]:
        asked.append(formats)
        one = {"format": "nf4", "arithmetic": "w4a16-nf4", "kernel": "widened", "instructions": "avx2"}
        return {"formats": [{**one, "rows": [{"ratio": 21.0, "rows": 1}], "is_slower": is_slower}]}

    monkeypatch.setattr(kernels, "tried", tried)
    done = examine("--quantize", "nf4", "--format", "json")
    assert done.statuses["kernels"] == status
    assert asked == [("nf4", "int8")]
    # linears in float32 have nothing to try
    assert "kernels" not in examine("--format", "json").statuses
    assert "kernels" not in examine("--quantize", "nf4", "--device", "cuda", "--format", "json").statuses


@pytest.mark.parametrize(
    ("quantize", "dtype", "activation_dtype", "formats"),
    [
        ("none", "auto", "auto", ()),
        ("none", "bfloat16", "auto", ("bfloat16",)),
        ("int8", "auto", "auto", ("int8",)),
        ("int8", "auto", "float", ("int8-weights",)),
        ("int4", "auto", "auto", ("int4-rounded", "int8")),
        ("int4", "auto", "float", ("int4-zeros", "int8-weights")),
        ("fp8", "auto", "auto", ("fp8",)),
    ],
)
def test_settings_mean_formats(quantize: str, dtype: str, activation_dtype: str, formats: tuple[str, ...]) -> None:
    assert kernels.formats_of(quantize, dtype, activation_dtype) == formats
