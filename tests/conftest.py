"""What tests of several packages share.

Databases: SQLite always, PostgreSQL too when LORASERVE_TEST_POSTGRES_URL names a server
(tests/postgres.sh). Uploads: the two files of a tiny PEFT adapter, and the base that it fits.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import asyncpg
import numpy as np
import pytest
from safetensors.numpy import save
from sqlalchemy import make_url
from zygote import create_engine

from loraserve.db import migrate
from loraserve.db.models import Base
from loraserve.types import BaseSpec, Certificate, Digest

with suppress(ImportError):
    from hypothesis import settings

    # a bound on the seconds of an example would test how busy the machine is
    settings.register_profile("without deadline", deadline=None)
    settings.load_profile("without deadline")

pytest_plugins = ["certificates", "failures", "garbage", "interpreted", "rank_pool", "statements", "workers"]

POSTGRES_URL = os.environ.get("LORASERVE_TEST_POSTGRES_URL")
BACKENDS = ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]


def run_on_postgres(statements: str, url: str | None = None) -> None:
    async def run() -> None:
        connection = await asyncpg.connect(url or POSTGRES_URL)
        try:
            await connection.execute(statements)
        finally:
            await connection.close()

    asyncio.run(run())


def postgres_url(name: str) -> str:
    return make_url(POSTGRES_URL or "").set(database=name).render_as_string(hide_password=False)


@pytest.fixture(scope="session", autouse=True)
def engines_are_forks() -> Iterator[None]:
    """Start the engines of servers that run in this process as forks."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(asyncio, "create_subprocess_exec", create_engine)
        yield


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file that the real migrations made, to copy."""
    path = tmp_path_factory.mktemp("template") / "registry.db"
    asyncio.run(migrate.upgrade(f"sqlite:///{path}"))
    return path


@pytest.fixture(scope="session")
def migrated_postgres() -> Iterator[str]:
    """The URL of a PostgreSQL database that the real migrations made,
    for one test after the other.
    """
    if POSTGRES_URL is None:
        pytest.skip("LORASERVE_TEST_POSTGRES_URL isn't set")
    name = f"test_{uuid.uuid4().hex}"
    run_on_postgres(f"CREATE DATABASE {name}")
    asyncio.run(migrate.upgrade(postgres_url(name)))
    yield postgres_url(name)
    run_on_postgres(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(scope="module")
def make_postgres_url() -> Iterator[Callable[[], str]]:
    """A function that makes a PostgreSQL database without a table, for servers that a module's
    tests share, and returns its URL.
    """
    if POSTGRES_URL is None:
        pytest.skip("LORASERVE_TEST_POSTGRES_URL isn't set")
    names: list[str] = []

    def make() -> str:
        names.append(f"empty_{uuid.uuid4().hex}")
        run_on_postgres(f"CREATE DATABASE {names[-1]}")
        return postgres_url(names[-1])

    yield make
    for name in names:
        run_on_postgres(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(params=BACKENDS)
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a database without a table."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'registry.db'}"
        return
    if POSTGRES_URL is None:
        pytest.skip("LORASERVE_TEST_POSTGRES_URL isn't set")
    name = f"empty_{uuid.uuid4().hex}"
    run_on_postgres(f"CREATE DATABASE {name}")
    yield postgres_url(name)
    run_on_postgres(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(params=BACKENDS)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a database at the newest revision, without rows."""
    if request.param == "sqlite":
        template: Path = request.getfixturevalue("migrated_sqlite")
        shutil.copyfile(template, tmp_path / "registry.db")
        yield f"sqlite:///{tmp_path / 'registry.db'}"
        return
    # Emptying the tables takes milliseconds, another database most of a second.
    url: str = request.getfixturevalue("migrated_postgres")
    tables = ", ".join(table.name for table in Base.metadata.sorted_tables)
    run_on_postgres(
        f"TRUNCATE {tables} RESTART IDENTITY CASCADE; UPDATE alembic_version SET version_num = '{migrate.head()}'", url
    )
    yield url


@pytest.fixture
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's cache of the test's own, with the kernels that the machine has compiled already."""
    kernels = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "loraserve" / "kernels"
    kernels.mkdir(mode=0o700, parents=True, exist_ok=True)
    home = tmp_path / "cache"
    (home / "loraserve").mkdir(parents=True)
    (home / "loraserve" / "kernels").symlink_to(kernels)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home


@pytest.fixture
def small_base() -> BaseSpec:
    """A base of two layers with nothing but q_proj [8, 8] and v_proj [4, 8]."""
    return BaseSpec(
        id="org/base:1",
        digest=Digest("b" * 64),
        architecture="LlamaForCausalLM",
        num_layers=2,
        hidden_size=8,
        vocab_size=32,
        max_model_len=64,
        modules={"q_proj": (8, 8), "v_proj": (4, 8)},
        module_paths={"q_proj": "self_attn.q_proj", "v_proj": "self_attn.v_proj"},
        layers_path="model.layers",
        eos_token_ids=(0,),
        dtype="float32",
        quantization="none",
        arithmetic="fp32",
        kernels="onednn",
        instructions="avx2",
        device="cpu",
    )


@pytest.fixture
def make_upload() -> Callable[..., tuple[bytes, bytes]]:
    """A function that makes (adapter_config.json, adapter_model.safetensors) for `small_base`;
    another seed, other weights.
    """

    def make(seed: int = 0, rank: int = 2, *, hidden_size: int = 8, fill: float | None = None) -> tuple[bytes, bytes]:
        rng = np.random.default_rng(seed)
        tensors = {}
        for layer in range(2):
            for module, out_features in (("q_proj", 8), ("v_proj", 4)):
                prefix = f"base_model.model.model.layers.{layer}.self_attn.{module}"
                tensors[f"{prefix}.lora_A.weight"] = rng.standard_normal((rank, hidden_size), dtype=np.float32)
                tensors[f"{prefix}.lora_B.weight"] = rng.standard_normal((out_features, rank), dtype=np.float32)
        if fill is not None:
            tensors[min(tensors)][0, 0] = fill
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["q_proj", "v_proj"]}
        return json.dumps(config).encode(), save(tensors)

    return make


@pytest.fixture
def make_certificate() -> Callable[..., Certificate]:
    """A function that makes a certificate with some of its fields as given."""
    passed = {
        "verdict": "passed",
        "max_difference": 1e-5,
        "mean_difference": 1e-6,
        "base_difference": 2e-5,
        "tolerance": 1e-3,
        "max_effect": 3.0,
        "top1_agreement": 1.0,
        "precision_loss": 0.0,
        "num_probe_tokens": 64,
        "seconds": 0.25,
    }
    return lambda **fields: Certificate(**{**passed, **fields})
