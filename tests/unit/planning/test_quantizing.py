"""A base that is rounded in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loraserve.demo.pack import base_dir
from loraserve.errors import ConfigError, EngineError
from loraserve.planning import quantizing
from loraserve.types import QuantizeDone, QuantizeRequest


def test_process_writes_checkpoint_and_tells_progress(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    request = QuantizeRequest(str(base_dir()), str(tmp_path / "out"), max_tokens=1024, window=64, num_threads=1)
    done = quantizing.quantize(request, lambda count, total: told.append((count, total)))
    assert done == QuantizeDone(str(tmp_path / "out"), 1024)
    assert [count for count, _ in told] == list(range(1, told[-1][1] + 1))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_interrupted_command_leaves_no_files(tmp_path: Path) -> None:
    def interrupt(*_: int) -> None:
        raise KeyboardInterrupt

    request = QuantizeRequest(str(base_dir()), str(tmp_path / "out"), max_tokens=1024, window=64, num_threads=1)
    with pytest.raises(KeyboardInterrupt):
        quantizing.quantize(request, interrupt)
    assert list(tmp_path.iterdir()) == []


def test_subprocess_problem_is_reported_with_original_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        quantizing.quantize(
            QuantizeRequest(str(base_dir()), str(tmp_path / "out"), text_file=str(tmp_path / "none")), lambda *_: None
        )
    monkeypatch.setattr(quantizing, "_MODULE", "loraserve.nowhere")
    with pytest.raises(EngineError, match=r"exit code 1.*loraserve\.nowhere"):
        quantizing.quantize(QuantizeRequest(str(base_dir()), str(tmp_path / "out")), lambda *_: None)
