"""The start of a cluster on this machine, as far as it needs no Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loraserve.cluster import local
from loraserve.cluster.local import LocalCluster, start_ray
from loraserve.cluster.options import ClusterOptions
from loraserve.demo.pack import base_dir
from loraserve.errors import ConfigError, EngineUnavailable
from loraserve.settings import Settings


def test_cluster_makes_no_registry_without_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its admin key would be shown once, and lost."""

    def refuse() -> None:
        raise ConfigError("A cluster needs Ray Serve.")

    monkeypatch.setattr(local, "check_installed", refuse)
    settings = Settings.load(model=str(base_dir()), data_dir=str(tmp_path / "data"), port="0")
    with pytest.raises(ConfigError, match="needs Ray Serve"), LocalCluster(settings, ClusterOptions.load()).running():
        pass
    assert {path.name for path in (tmp_path / "data").iterdir()} == set()


class Starts:
    def __init__(self, num_failures: int) -> None:
        self.num_failures, self.num_shutdowns = num_failures, 0

    def init(self) -> Any:
        if self.num_failures:
            self.num_failures -= 1
            raise Exception("The current node timed out during startup.\n  It could happen.")
        return "context"

    def shut_down(self) -> None:
        self.num_shutdowns += 1


def test_ray_is_started_again_after_timeout(caplog: pytest.LogCaptureFixture) -> None:
    starts = Starts(2)
    assert start_ray(starts.init, starts.shut_down) == "context"
    assert starts.num_shutdowns == 2
    assert "timed out during startup. It could happen." in caplog.text


def test_unstartable_ray_is_reported_in_single_sentence() -> None:
    starts = Starts(10)
    with pytest.raises(EngineUnavailable, match="didn't start, 3 times: The current node timed out") as caught:
        start_ray(starts.init, starts.shut_down)
    assert "less busy" in (caught.value.hint or "")
