"""Malformed files are refused with their reason, cheaply; good ones are read without a copy."""

from __future__ import annotations

import io
import json
import pickle
import time
import tracemalloc
import zipfile
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save as save_numpy

from loraserve.adapters.format.peft_format import read_adapter, read_config, read_header, read_tensors
from loraserve.errors import AdapterFormatError, AdapterRejected
from loraserve.limits import LIMITS

MIB = 1 << 20


def entry(dtype: Any = "F32", shape: Any = (2, 2), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def frame(header: Any, body: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + body


def zip_file() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"a": 1}))
    return buffer.getvalue()


def huge_header(length: int) -> bytes:
    body = b'{"a":' + b" " * length
    return frame(body, length=length)


MALFORMED: dict[str, tuple[Any, str]] = {
    "empty": (b"", "has 0 bytes"),
    "seven bytes": (b"\0" * 7, "has 7 bytes"),
    "zip": (zip_file, "zip archive"),
    "pickle 2": (pickle.dumps({"a": [1.0] * 99}, protocol=2), "is a pickle"),
    "pickle 5": (pickle.dumps({"a": [1.0] * 99}, protocol=5), "is a pickle"),
    "gzip": (b"\x1f\x8b" + b"\0" * 40, "gzip"),
    "gguf": (b"GGUF" + b"\0" * 40, "GGUF"),
    "lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git lfs pull"),
    "html": (b"<!DOCTYPE html><html>", "HTML"),
    "random": (bytes(range(200, 255)), "at most 1,048,576"),
    "header of 2**63": (frame({}, length=1 << 63), "at most 1,048,576"),
    "header one over the limit": (lambda: huge_header(MIB + 1), "at most 1,048,576"),
    "header of 97 MB": (lambda: huge_header(97_000_000), "at most 1,048,576"),
    "header longer than the file": (frame(b"{}", length=3), "may be truncated"),
    "header length 0": (frame(b""), "isn't JSON"),
    "not JSON": (frame(b"{nope}"), "isn't JSON"),
    "not UTF-8": (frame(b'{"\xff": 1}'), "isn't UTF-8"),
    "a list": (frame([]), "expected an object"),
    "NaN": (frame(b'{"a": NaN}'), "NaN isn't a JSON number"),
    "1e400": (frame(b'{"a": 1e400}'), "out of range"),
    "an integer of 9000 digits": (frame(b'{"a": ' + b"9" * 9000 + b"}"), "isn't strict JSON"),
    "duplicate names": (
        frame(
            b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
            b"0000",
        ),
        "'a' appears twice",
    ),
    "duplicate keys in an entry": (
        frame(b'{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"0000"),
        "twice",
    ),
    "deep nesting": (frame(b'{"a":' + b"[" * 300_000 + b"]" * 300_000 + b"}"), "nested deeper"),
    "a little too deep": (frame(b'{"a":[[[[1]]]]}'), "nested deeper"),
    "a million empty lists": (frame(b'{"a":[' + b"[]," * 349_000 + b"[]]}"), "expected exactly dtype"),
    "100,000 objects": (frame(b'{"a":[' + b'{"b":1},' * 100_000 + b"1]}"), "expected exactly dtype"),
    "no tensors": (frame({}), "no tensors"),
    "only metadata": (frame({"__metadata__": {"format": "pt"}}), "no tensors"),
    "metadata not strings": (frame({"__metadata__": {"a": 1}, "a": entry()}, b"0" * 16), "object of strings"),
    "too many tensors": (frame({str(i): 0 for i in range(8193)}), "8,193 tensors"),
    "a name of 513": (frame({"a" * 513: entry()}, b"0" * 16), "513 characters"),
    "a name of 1 MB": (frame({"a" * 1_000_000: entry()}, b"0" * 16), "1,000,000 characters"),
    "an empty name": (frame({"": entry()}, b"0" * 16), "plain ASCII"),
    "a name with a newline": (frame({"a\nb": entry()}, b"0" * 16), "plain ASCII"),
    "a name with umlauts": (frame({"gewichtä": entry()}, b"0" * 16), "plain ASCII"),
    "a lone surrogate": (frame(b'{"\\ud800": 1}'), "lone surrogate"),
    "entry is a number": (frame({"a": 1}), "expected exactly dtype"),
    "entry lacks shape": (frame({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, b"0000"), "expected exactly dtype"),
    "entry has more": (frame({"a": entry() | {"x": 1}}, b"0" * 16), "expected exactly dtype"),
    "dtype I8": (frame({"a": entry("I8", [4], [0, 4])}, b"0000"), "dtype 'I8'"),
    "dtype F8": (frame({"a": entry("F8_E4M3", [4], [0, 4])}, b"0000"), "dtype 'F8_E4M3'"),
    "dtype is a list": (frame({"a": entry(["F32"])}, b"0" * 16), "dtype ['F32']"),
    "shape is text": (frame({"a": entry(shape="22")}, b"0" * 16), "expected whole numbers"),
    "a negative size": (frame({"a": entry(shape=[-2, -2])}, b"0" * 16), "expected whole numbers"),
    "a fractional size": (frame({"a": entry(shape=[2.0, 2])}, b"0" * 16), "expected whole numbers"),
    "a boolean size": (frame({"a": entry(shape=[True, 4])}, b"0" * 16), "expected whole numbers"),
    "a gigantic size": (frame({"a": entry(shape=[1 << 62, 1 << 62])}, b"0" * 16), "expected whole numbers"),
    "three dims": (frame({"a": entry(shape=[1, 2, 2])}, b"0" * 16), "3 dims"),
    "100,000 dims": (frame({"a": entry(shape=[1] * 100_000)}, b"0" * 16), "100000 dims"),
    "an empty tensor": (frame({"a": entry(shape=[0, 4], offsets=[0, 0])}), "ZeRO-3"),
    "offsets reversed": (frame({"a": entry(offsets=[16, 0])}, b"0" * 16), "expected [begin, end]"),
    "three offsets": (frame({"a": entry(offsets=[0, 8, 16])}, b"0" * 16), "expected [begin, end]"),
    "size and offsets disagree": (frame({"a": entry(offsets=[0, 12])}, b"0" * 12), "takes 16 bytes"),
    "a gap": (frame({"a": entry(), "b": entry(offsets=[20, 36])}, b"0" * 36), "leaves a gap"),
    "an overlap": (frame({"a": entry(), "b": entry(offsets=[8, 24])}, b"0" * 24), "overlaps"),
    "two names for the same bytes": (frame({"a": entry(), "b": entry()}, b"0" * 16), "overlaps"),
    "bytes before the first tensor": (frame({"a": entry(offsets=[4, 20])}, b"0" * 20), "leaves a gap"),
    "trailing bytes": (frame({"a": entry()}, b"0" * 17), "1 bytes after the last"),
    "a body cut short": (frame({"a": entry()}, b"0" * 15), "may be truncated"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_weights_are_refused_cheaply_with_reason(name: str) -> None:
    made, reason = MALFORMED[name]
    data = made() if callable(made) else made
    # of the processor: other workers share it
    started = time.thread_time()
    with pytest.raises(AdapterFormatError):
        read_tensors(data)
    elapsed = time.thread_time() - started
    # apart, since tracing slows Python down several times
    tracemalloc.start()
    with pytest.raises(AdapterFormatError) as caught:
        read_tensors(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert any(reason in text for text in (str(caught.value), *caught.value.problems))
    assert len(str(caught.value)) < 1500
    assert elapsed < 3.0
    assert peak < 100 * MIB


def test_every_bad_entry_is_reported_at_once() -> None:
    data = frame({"a": entry("I8"), "b": entry(shape=[1, 2, 2]), "c": entry(offsets=[1])}, b"0" * 16)
    with pytest.raises(AdapterFormatError) as caught:
        read_header(data)
    assert [p.split()[0] for p in caught.value.problems] == ["a", "b", "c"]


def test_header_length_resembling_pickle_is_read_as_safetensors() -> None:
    header = json.dumps({"a": entry()}).encode().ljust(0x0280)
    data = frame(header, b"0" * 16)
    assert data[:2] == b"\x80\x02"
    assert read_header(data).tensors[0].name == "a"


def test_tensors_share_the_buffers_memory() -> None:
    data = bytearray(frame({"a": entry()}, np.arange(4, dtype="<f4").tobytes()))
    view = read_tensors(data)["a"]
    assert view.array.tolist() == [[0.0, 1.0], [2.0, 3.0]]
    data[-4:] = np.float32(9).tobytes()
    assert view.array[1, 1] == 9


def test_metadata_may_be_null() -> None:
    """As mlx writes it."""
    data = frame({"__metadata__": None, "a": entry("BF16", [2], [0, 4])}, b"\x80\x3f\x80\xbf")
    assert list(read_tensors(data)) == ["a"]


def test_bfloat16_is_read_as_bit_patterns() -> None:
    data = frame({"a": entry("BF16", [2], [0, 4])}, b"\x80\x3f\x80\xbf")
    view = read_tensors(data)["a"]
    assert view.dtype == "BF16"
    assert view.array.tolist() == [0x3F80, 0xBF80]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"[]", "expected an object"),
        (b"{", "isn't JSON"),
        (b'{"r": NaN}', "NaN"),
        (b'{"r": 1e999}', "out of range"),
        (b'{"r": 1, "r": 2}', "twice"),
        (b'{"r": "\\udc00"}', "lone surrogate"),
        (b"\xff\xfe", "isn't UTF-8"),
        (b'{"a":' * 33 + b"1" + b"}" * 33, "deeper than 32"),
        (b'{"a": "' + b"x" * LIMITS.max_adapter_config_bytes + b'"}', "at most 65,536"),
    ],
)
def test_malformed_configs_are_refused_with_reason(data: bytes, reason: str) -> None:
    with pytest.raises(AdapterFormatError, match=reason):
        read_config(data)


def test_problems_of_two_files_are_reported_together() -> None:
    with pytest.raises(AdapterFormatError) as caught:
        read_adapter(b"{", frame({}))
    assert len(caught.value.problems) == 2


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["F32", "BF16", "F16"]),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4),
    max_leaves=12,
)
_entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F16", "BF16", "I8"]) | _json,
        "shape": st.lists(st.integers(-1, 4), max_size=3) | _json,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | _json,
    }
)


@settings(max_examples=150, deadline=None)
@given(
    header=st.dictionaries(
        st.sampled_from(["a", "b", "__metadata__"]) | st.text(max_size=6), _entries | _json, max_size=3
    ),
    body=st.binary(max_size=40),
)
def test_any_header_is_read_or_rejected(header: Any, body: bytes) -> None:
    try:
        tensors = read_tensors(frame(header, body))
    except AdapterRejected:
        return
    assert sum(t.array.nbytes for t in tensors.values()) == len(body)


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=200), edits=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 255)), max_size=4))
def test_any_bytes_are_read_or_rejected(data: bytes, edits: list[tuple[int, int]]) -> None:
    good = bytearray(frame({"a": entry(), "b": entry(offsets=[16, 32])}, b"0" * 32))
    for position, value in edits:
        good[position] = value
    for candidate in (data, frame(data), bytes(good)):
        try:
            read_tensors(candidate)
        except AdapterRejected:
            pass


def test_float64_is_read_as_float32_like_peft() -> None:
    numbers = np.array([[1 / 3, -2.0, 1e-46], [1e300, np.nan, 7e37]])
    view = read_tensors(save_numpy({"a": numbers, "b": np.ones(3, np.float16)}))["a"]
    loaded = torch.zeros(2, 3)
    loaded.copy_(torch.from_numpy(numbers))
    assert (view.dtype, view.shape) == ("F32", (2, 3))
    assert np.array_equal(view.array, loaded.numpy(), equal_nan=True)
    assert np.isinf(view.array[1, 0])
    with pytest.raises(AdapterFormatError, match="F64 \\[2\\], which takes 16 bytes"):
        read_tensors(frame({"a": entry("F64", [2], [0, 8])}, b"0" * 8))
