"""torch.save's archives are read as torch reads them, and nothing in them is executed."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loraserve.adapters.format import torch_pickle
from loraserve.adapters.format.torch_archive import read_archive, read_archive_beginning
from loraserve.errors import AdapterFormatError
from loraserve.limits import Limits

NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def rezipped(data: bytes, **entries: bytes | None) -> bytes:
    """The archive with other contents of some entries, stored; None: without it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as new:
        for name in old.namelist():
            short = name.partition("/")[2].replace("/", "_").replace(".", "_")
            content = entries.get(short, old.read(name))
            if content is not None:
                new.writestr(name, content)
    return buffer.getvalue()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_tensors_equal_torchs_for_each_dtype(dtype: torch.dtype) -> None:
    whole = torch.randn(5, 6).to(dtype)
    tensors = {
        NAME: whole,
        "transposed": whole.T,
        "part": whole[1:4, 2:],
        "vector": torch.randn(7).to(dtype),
        "parameter": torch.nn.Parameter(torch.randn(3, 2).to(dtype)),
    }
    data = saved(OrderedDict(tensors))
    found = read_archive(data)
    expected = torch.load(io.BytesIO(data), weights_only=True)
    assert found.keys() == expected.keys()
    for name, view in found.items():
        value = expected[name].detach().float().numpy()
        array = view.array
        if view.dtype == "BF16":
            array = (array.astype(np.uint32) << 16).view(np.float32)
        assert np.array_equal(array, value), name
        assert view.shape == value.shape
    # the state of an OrderedDict, as a module's state_dict has it
    state = torch.nn.Linear(2, 3).state_dict()
    assert set(read_archive(saved(state))) == {"weight", "bias"}


class Bomb:
    """Pickled as a call of a function."""

    def __init__(self, function: Any, *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [2, 4])
def test_malicious_pickle_is_refused_by_name(tmp_path: Path, protocol: int) -> None:
    target = tmp_path / "boom"
    for bomb, name in ((Bomb(os.system, f"touch {target}"), "posix.system"), (Bomb(eval, "1"), "eval")):
        buffer = io.BytesIO()
        torch.save({NAME: torch.ones(2, 2), "bomb": bomb}, buffer, pickle_protocol=protocol)
        data = buffer.getvalue()
        for read in (read_archive, read_archive_beginning):
            with pytest.raises(AdapterFormatError, match=f"names '.*{name}'.*could run any code"):
                read(data)
    assert not target.exists()


def pickled(*codes: bytes) -> bytes:
    return b"\x80\x02" + b"".join(codes) + b"."


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


PICKLES: dict[str, tuple[bytes, str]] = {
    "list": (pickled(b"]"), r"code b'\]'"),
    "extension": (pickled(b"\x82\x01"), "code"),
    "text": (pickled(text("a")), "holds a str"),
    "empty stack": (pickled(b"0"), "code"),
    "nothing": (b"\x80\x02.", "empty stack"),
    "mark": (pickled(b"("), "behind a mark"),
    "no mark": (pickled(b"t"), "no mark"),
    "unstored": (pickled(b"h\x07"), "hasn't stored"),
    "protocol": (b"\x80\x09.", "protocol 9"),
    "number": (pickled(b"}", text("a"), b"K\x01", b"s"), "has a int under 'a'"),
    "nested": (pickled(b"}", text("a"), b"}", b"s"), "has a dictionary under 'a'"),
    "twice": (pickled(b"}", text("a"), b"N", b"s", text("a"), b"N", b"s"), "twice"),
    "numbers' key": (pickled(b"}", b"K\x01", b"N", b"s"), "has a int for the name"),
    "call of a text": (pickled(text("a"), b")R"), "isn't a function"),
    "call with nothing": (pickled(b"ctorch._utils\n_rebuild_tensor_v2\n", b")R"), "shape or strides"),
    "integers": (pickled(b"ctorch\nLongStorage\n"), "torch.LongStorage"),
    "storage": (pickled(b")Q"), "storage of floats"),
    "long integer": (pickled(b"\x8a\xff" + bytes(255)), "integer of 255 bytes"),
    "wide tuple": (pickled(b"(" + b"N" * 9 + b"t"), "tuple of more than 8"),
    "tuples that double": (pickled(b")", b"q\x00h\x00\x86" * 3), "tuples of tuples"),
    "build": (pickled(b"N}b"), "attributes of something"),
    "long name": (pickled(b"c" + b"a" * 300 + b"\n"), "more than 255 bytes"),
}


@pytest.mark.parametrize(("data", "words"), PICKLES.values(), ids=PICKLES.keys())
def test_pickle_is_refused_by_cause(data: bytes, words: str) -> None:
    with pytest.raises(AdapterFormatError, match=words):
        torch_pickle.read_pickle(data, file="adapter_model.bin")


def test_pickle_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_pickle, "MAX_PICKLE_BYTES", 1000)
    with pytest.raises(AdapterFormatError, match="more than 1,000 bytes"):
        torch_pickle.read_pickle(b"\x80\x02}" + text("a" * 2000), file="adapter_model.bin")
    monkeypatch.setattr(torch_pickle, "_MAX_STEPS", 50)
    with pytest.raises(AdapterFormatError, match="more than 50 steps"):
        torch_pickle.read_pickle(b"\x80\x02" + b"N" * 99, file="adapter_model.bin")


def test_every_cut_of_pickle_is_incomplete() -> None:
    data = zipfile.ZipFile(io.BytesIO(saved({NAME: torch.ones(2, 2)})))
    content = data.read(next(name for name in data.namelist() if name.endswith("data.pkl")))
    for end in range(len(content)):
        with pytest.raises(torch_pickle.PickleIncomplete):
            torch_pickle.read_pickle(content[:end], file="adapter_model.bin")


def test_compressed_archive_is_refused_without_unpacking() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", pickle.dumps({}, 2))
        archive.writestr("a/data/0", bytes(50_000_000))
    assert len(buffer.getvalue()) < 100_000
    with pytest.raises(AdapterFormatError, match=r"compressed \(method 8\)"):
        read_archive(buffer.getvalue())
    with pytest.raises(AdapterFormatError, match=r"expected a stored data\.pkl"):
        read_archive_beginning(buffer.getvalue())


def test_expanding_views_are_refused() -> None:
    small = torch.ones(1)
    data = saved({f"a.{i}": small.expand(1 << 14, 1 << 14) for i in range(4)})
    assert len(data) < 5000
    for read in (read_archive, read_archive_beginning):
        with pytest.raises(AdapterFormatError, match="views of fewer numbers"):
            read(data)


def test_damaged_archive_is_refused_at_every_cut() -> None:
    data = saved({NAME: torch.ones(3, 5), "b": torch.ones(4)})
    for end in range(0, len(data), 7):
        with pytest.raises(AdapterFormatError):
            read_archive(data[:end])
    random = np.random.default_rng(0)
    for _ in range(400):
        broken = bytearray(data)
        for place in random.integers(0, len(data), 3):
            broken[place] = random.integers(256)
        try:
            read_archive(bytes(broken))
        except AdapterFormatError:
            continue


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"data_pkl": None}, "no data.pkl"),
        ({"data_0": None}, "no numbers for"),
        ({"data_0": bytes(8)}, "8 bytes of numbers"),
        ({"byteorder": b"big"}, "byte order"),
        ({"data_pkl": pickled(b"}")}, "no tensors"),
        ({"data_pkl": b"\x80\x02}"}, "ends within its pickle"),
    ],
)
def test_archive_with_other_entries_is_refused(entries: dict[str, bytes | None], words: str) -> None:
    with pytest.raises(AdapterFormatError, match=words):
        read_archive(rezipped(saved({NAME: torch.ones(3, 5)}), **entries))


def test_tensor_is_refused_by_name_and_shape() -> None:
    with pytest.raises(AdapterFormatError, match="3 dims"):
        read_archive(saved({NAME: torch.ones(1, 2, 3)}))
    with pytest.raises(AdapterFormatError, match="plain ASCII"):
        read_archive(saved({"a b": torch.ones(1)}))
    with pytest.raises(AdapterFormatError, match=r"torch\.LongStorage"):
        read_archive(saved({"a": torch.ones(1, dtype=torch.int64)}))
    with pytest.raises(AdapterFormatError, match="at most 2 are allowed"):
        read_archive(saved({f"a{i}": torch.ones(1) for i in range(3)}), Limits(max_adapter_tensors=2))


def test_beginning_bounds_the_file() -> None:
    data = saved({NAME: torch.ones(300, 500), "b": torch.ones(4)})
    found = [read_archive_beginning(data[:end]) for end in range(100, 5000, 50)]
    assert found[0] is None
    assert found[-1] is not None
    assert len(data) <= found[-1] <= len(data) + (5 << 20)
