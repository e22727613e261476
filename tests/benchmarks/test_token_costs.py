"""Path of a streamed token through the server, as `benchmarks.token_costs` counts it."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.token_costs import measure

MAX_FUNCTIONS, MAX_FILES = 20, 10


@pytest.mark.alone
def test_streamed_token_passes_few_functions_and_files() -> None:
    options = argparse.Namespace(
        size="tiny", model=None, quantize="none", tokens=256, pause_s=0.01, turns=0, chat=False, beside=None
    )
    # a round of one stream looks each token's bytes up
    costs, paths = measure(options, (1,))
    path = paths["this"]
    assert costs == {"this": {1: []}}
    assert len(path.functions) <= MAX_FUNCTIONS, path.functions
    assert path.num_files <= MAX_FILES, path.functions
    assert any("DirectReader.take" in each for each in path.functions), path.functions
