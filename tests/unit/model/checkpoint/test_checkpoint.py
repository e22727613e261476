from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from loraserve.errors import MissingTensor, ModelError
from loraserve.model.checkpoint.files import DTYPES, open_checkpoint


def write_raw(path: Path, header: Any, body: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def write_index(directory: Path, weight_map: dict[str, str]) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_tensors_are_read_as_saved(tmp_path: Path, dtype: torch.dtype) -> None:
    saved = {
        "b": (9 * torch.randn(3, 5)).to(dtype),
        "a": (9 * torch.rand(7)).to(dtype),
        "empty": torch.zeros(0, 4).to(dtype),
    }
    save_file(saved, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_checkpoint(tmp_path)
    read = {stored.name: tensor for stored, tensor, _ in checkpoint.read(frozenset(checkpoint.tensors))}
    assert read.keys() == saved.keys()
    assert all(read[name].dtype == dtype for name in saved)
    assert all(torch.equal(read[name].double(), saved[name].double()) for name in saved)


def test_only_the_asked_for_tensors_are_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "codes": torch.ones(2, dtype=torch.int16)}, tmp_path / "model.safetensors")
    assert [stored.name for stored, _, _ in open_checkpoint(tmp_path).read(frozenset({"a"}))] == ["a"]


def test_shards_are_read_sequentially(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "c": torch.full((2,), 3.0)}, tmp_path / "x-1.safetensors")
    save_file({"b": torch.full((2,), 2.0)}, tmp_path / "x-2.safetensors")
    write_index(tmp_path, {"b": "x-2.safetensors", "a": "x-1.safetensors", "c": "x-1.safetensors"})
    checkpoint = open_checkpoint(tmp_path)
    files = [stored.file.name for stored, _, _ in checkpoint.read(frozenset("abc"))]
    assert files == ["x-1.safetensors", "x-1.safetensors", "x-2.safetensors"]


def test_tensor_with_unsupported_dtype_is_named_when_read(tmp_path: Path) -> None:
    save_file({"codes": torch.ones(2, dtype=torch.int16)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="codes is stored as I16"):
        list(open_checkpoint(tmp_path).read(frozenset({"codes"})))


def test_directory_without_safetensors_lists_found_file(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"it has pytorch_model\.bin, which isn't read"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("header", "body", "message"),
    [
        (b"{not json", b"", "header can't be parsed"),
        (b"[]", b"", "header can't be parsed"),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"", "header can't be parsed"),
        ({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, b"x" * 8, "can't have 8 bytes"),
        ({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, b"x" * 8, "can't have 8 bytes"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}, b"x" * 16, "leave a gap"),
        (
            {
                "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
            },
            b"x" * 12,
            "overlap",
        ),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"x" * 7, "its header describes"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"x" * 9, "its header describes"),
        ({"a": {"dtype": "BOOL", "shape": [2], "data_offsets": [2, 0]}}, b"xx", "gap"),
        ({"a": {"dtype": "I8", "shape": [2], "data_offsets": [2, 0]}}, b"xx", "can't have -2 bytes"),
    ],
)
def test_file_contradicting_header_is_refused(tmp_path: Path, header: Any, body: bytes, message: str) -> None:
    write_raw(tmp_path / "model.safetensors", header, body)
    with pytest.raises(ModelError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x01", b"\xff" * 16, struct.pack("<Q", 1 << 40) + b"{}"])
def test_header_longer_than_the_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="isn't a safetensors file"):
        open_checkpoint(tmp_path)


def test_file_truncated_after_header_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(100)}, path)
    checkpoint = open_checkpoint(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors ends within the tensor a"):
        list(checkpoint.read(frozenset({"a"})))


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": ["a"]}', '{"weight_map": null}'])
def test_malformed_index_is_refused_by_loader(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match="isn't an index"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "absent.safetensors", ".."])
def test_index_reaches_only_files_in_directory(tmp_path: Path, name: str) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "secret.safetensors")
    directory = tmp_path / "model"
    directory.mkdir()
    write_index(directory, {"a": name})
    with pytest.raises(ModelError, match="which isn't in"):
        open_checkpoint(directory)


def test_tensor_missing_from_shard_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    write_index(tmp_path, {"a": "x.safetensors", "b": "x.safetensors"})
    with pytest.raises(MissingTensor, match=r"the tensor b is in x\.safetensors"):
        open_checkpoint(tmp_path)


def test_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "y.safetensors")
    write_index(tmp_path, {"a": "x.safetensors", "b": "y.safetensors"})
    with pytest.raises(ModelError, match=r"tensor a is in both x\.safetensors and y\.safetensors"):
        open_checkpoint(tmp_path)
