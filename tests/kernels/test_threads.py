"""Which of OpenMP's threads a kernel, or work beside the step, may use."""

from __future__ import annotations

import pytest
import torch

from loraserve_kernels.cpu import threads


def test_background_work_uses_single_thread_and_restores_setting() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        if torch.get_num_threads() != 2 or threads._runtime() is None:
            pytest.skip("this build of torch has no OpenMP, or a single thread")
        with threads.alone():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with pytest.raises(ValueError, match="inside"), threads.alone():
            raise ValueError("inside")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
