"""Fault points do nothing until a test arms them."""

from __future__ import annotations

import errno

import pytest

from loraserve import faults
from loraserve.errors import ConfigError


def test_unarmed_point_has_no_effect() -> None:
    faults.hit("nowhere")


def test_armed_point_raises_errno_until_block_ends() -> None:
    with faults.arm("here", "EIO"):
        with pytest.raises(OSError, match="Input/output") as caught:
            faults.hit("here")
        assert caught.value.errno == errno.EIO
        faults.hit("there")
    faults.hit("here")


def test_numbered_fault_acts_only_on_nth_hit() -> None:
    with faults.arm("here", "EIO@2"):
        faults.hit("here")
        with pytest.raises(OSError):  # noqa: PT011
            faults.hit("here")
        faults.hit("here")


def test_a_callable_can_be_armed() -> None:
    calls: list[int] = []
    with faults.arm("here", lambda: calls.append(1)):
        faults.hit("here")
    assert calls == [1]


def test_an_unknown_action_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="unknown action"), faults.arm("here", "explode"):
        pass
