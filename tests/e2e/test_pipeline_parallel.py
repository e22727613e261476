"""A base whose layers several processes share, over HTTP: any mix of requests, each answered as by
one process, also when one of the processes dies.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import ServerProcess

from .test_many_streams import make_work
from .test_tensor_parallel import FLAGS, answers, followers, outlive_a_kill, says_what_one_process_says, start


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, str]]:
    """A server on the bundled base, of which two processes have half of the layers each."""
    server, key = start(tmp_path_factory.mktemp("stages") / "data", "--pipeline-parallel", "2")
    yield server, key
    assert server.stop() == 0


@pytest.mark.slow
async def test_texts_match_single_process(stages: tuple[ServerProcess, str], tmp_path: Path) -> None:
    await says_what_one_process_says(*stages, tmp_path / "data")
    metrics = stages[0].metrics()
    # the first stage receives nothing, and steps of many rows are several micro-batches
    received = {rank: metrics[f'loraserve_parallel_bytes_total{{kind="transfer",rank="{rank}"}}'] for rank in (0, 1)}
    assert received[0] > 0 == received[1]
    assert metrics["loraserve_parallel_micro_batches_total"] > metrics["loraserve_engine_steps_total"]


@pytest.mark.slow
async def test_killing_a_stage_changes_no_streams_text(stages: tuple[ServerProcess, str]) -> None:
    await outlive_a_kill(*stages)


@pytest.mark.slow
async def test_stages_of_two_ranks_say_the_same(stages: tuple[ServerProcess, str], tmp_path: Path) -> None:
    expected = await answers(*stages, make_work(12, seed=7))
    server, key = start(tmp_path / "data", "--pipeline-parallel", "2", "--tensor-parallel", "2", "--quantize", "none")
    try:
        engine_pid = server.engine_pid()
        assert engine_pid is not None
        assert len(followers(engine_pid)) == 3
        assert await answers(server, key, make_work(12, seed=7)) == expected
    finally:
        assert server.stop() == 0


def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data", flags=(*FLAGS, "--pipeline-parallel", "99"))
    with pytest.raises(AssertionError):
        server.start()
    assert "--pipeline-parallel 99: this base has" in server.tail()
    assert "at most" in server.tail()
