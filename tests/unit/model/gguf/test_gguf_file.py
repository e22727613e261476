from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraserve.errors import ModelError
from loraserve.model.gguf.gguf_file import is_gguf, read_gguf

VALUES: dict[str, Any] = {
    "a.string": "grüße",
    "a.flag": True,
    "a.count": 3,
    "a.number": 0.5,
    "a.strings": ["x", "", "ü"],
    "a.numbers": [1, -2, 3],
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "file.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("a.string", VALUES["a.string"])
    writer.add_bool("a.flag", True)
    writer.add_uint32("a.count", 3)
    writer.add_float32("a.number", 0.5)
    writer.add_array("a.strings", VALUES["a.strings"])
    writer.add_array("a.numbers", VALUES["a.numbers"])
    writer.add_tensor("one", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("two", np.zeros((4, 34), dtype=np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_header_has_metadata_and_places(file: Path) -> None:
    found = read_gguf(file)
    assert {key: found.metadata[key] for key in VALUES} == VALUES
    reader = gguf.GGUFReader(file)
    assert [(t.name, t.begin, t.end - t.begin) for t in found.tensors.values()] == [
        (t.name, t.data_offset, t.n_bytes) for t in reader.tensors
    ]
    assert found.tensors["one"].shape == (2, 3)
    assert found.tensors["two"].shape == (4, 32)
    assert found.tensors["two"].type.name == "Q8_0"


def test_gguf_file_is_recognized_by_magic_bytes(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGU")
    assert is_gguf(file)
    assert not is_gguf(other)
    assert not is_gguf(tmp_path / "missing")


def test_other_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(b"PK" * 40)
    with pytest.raises(ModelError, match="doesn't begin with GGUF"):
        read_gguf(path)
    path.write_bytes(b"")
    with pytest.raises(ModelError, match="isn't a GGUF file"):
        read_gguf(path)


def test_old_version_is_refused(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "old.gguf"
    path.write_bytes(b"GGUF\x01\x00\x00\x00" + file.read_bytes()[8:])
    with pytest.raises(ModelError, match="version 1 of GGUF"):
        read_gguf(path)


def test_truncated_file_is_refused_everywhere(file: Path, tmp_path: Path) -> None:
    data, path = file.read_bytes(), tmp_path / "part.gguf"
    end = read_gguf(file).tensors["two"].end
    for length in range(0, end, 7):
        path.write_bytes(data[:length])
        with pytest.raises(ModelError):
            read_gguf(path)


@given(place=st.integers(4, 500), octets=st.binary(min_size=1, max_size=8))
def test_changed_header_is_read_or_refused(
    file: Path, tmp_path_factory: pytest.TempPathFactory, place: int, octets: bytes
) -> None:
    data = bytearray(file.read_bytes())
    data[place : place + len(octets)] = octets
    path = tmp_path_factory.getbasetemp() / "changed.gguf"
    path.write_bytes(data)
    try:
        found = read_gguf(path)
    except ModelError:
        return
    assert all(0 <= tensor.begin <= tensor.end <= len(data) for tensor in found.tensors.values())
