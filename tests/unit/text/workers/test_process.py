"""What is said of a process's end: memory, stack, time, a kill and a crash aren't the same."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from loraserve.text.workers.process import Death, WorkerDied, WorkerProcess, WorkerStartFailed

WORKER = """
import ctypes, os, signal, sys
from loraserve.text.workers.child import serve

class Panic(BaseException):
    pass

def answer(question):
    match question.decode():
        case "memory":
            bytearray(1 << 40)
        case "depth":
            (f := lambda: f())()
        case "panic":
            raise Panic("in here")
        case "rust-memory":
            print("memory allocation of 99 bytes failed", file=sys.stderr, flush=True)
            os.abort()
        case "rust-stack":
            print("thread 'x' has overflowed its stack", file=sys.stderr, flush=True)
            os.abort()
        case "words":
            print("memory allocation of 99 bytes failed", file=sys.stderr, flush=True)
        case "flood":
            for _ in range(100):
                os.write(2, b"x" * 1000)
        case "import":
            import large
        case "abort":
            os.abort()
        case "exit":
            sys.stdout.flush()
            os._exit(1)
        case name if name.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, name))
    return b"done"

sys.exit(serve(lambda setup: answer, max_work_bytes=1 << 28, niceness=0, recursion_limit=1000))
"""


@pytest.fixture
async def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[WorkerProcess]:
    (tmp_path / "dying_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    made = WorkerProcess("dying_worker", b"")
    yield made
    await made.close()


async def test_process_end_is_reported_by_cause(process: WorkerProcess, subtests) -> None:
    causes = {
        "memory": Death.MEMORY,
        "rust-memory": Death.MEMORY,
        "depth": Death.STACK,
        "rust-stack": Death.STACK,
        "SIGSEGV": Death.STACK,
        "SIGXCPU": Death.TIME,
        "SIGKILL": Death.KILLED,
        "panic": Death.CRASH,
        "abort": Death.CRASH,
        "exit": Death.CRASH,
    }
    for question, expected in causes.items():
        with subtests.test(question):
            with pytest.raises(WorkerDied) as caught:
                await process.ask(question.encode(), 20, 20)
            assert caught.value.death is expected
            # and the next question has another process
            assert await process.ask(b"any", 20, 20) == b"done"


async def test_earlier_questions_output_does_not_explain_later_death(process: WorkerProcess) -> None:
    assert await process.ask(b"words", 20, 20) == b"done"
    with pytest.raises(WorkerDied) as caught:
        await process.ask(b"abort", 20, 20)
    assert caught.value.death is Death.CRASH


async def test_extra_process_output_is_bounded(process: WorkerProcess) -> None:
    with pytest.raises(WorkerDied) as caught:
        await process.ask(b"flood", 20, 20)
    # the write fails, which is an exception here
    assert caught.value.death is Death.CRASH


async def test_bounded_process_keeps_no_cut_bytecode(process: WorkerProcess, tmp_path: Path) -> None:
    """A file longer than the process may write would break the module for every later one."""
    (tmp_path / "large.py").write_text("\n".join(f"name_{n} = 'text {n}'" for n in range(3000)))
    assert await process.ask(b"import", 30.0, 30.0) == b"done"
    cache = tmp_path / "__pycache__"
    assert not [name for name in os.listdir(cache) if name.startswith("large.")]


async def test_no_descriptor_is_left(process: WorkerProcess) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(WorkerDied):
            await process.ask(b"abort", 20, 20)
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_process_killed_at_start_is_restarted(process: WorkerProcess, tmp_path: Path) -> None:
    mark = tmp_path / "was-killed"
    kill = f"import os, pathlib\nmark = pathlib.Path({str(mark)!r})\n"
    kill += "if not mark.exists():\n    mark.touch()\n    os.kill(os.getpid(), 9)\n"
    (tmp_path / "dying_worker.py").write_text(kill + WORKER)
    assert await process.ask(b"anything", 60, 60) == b"done"
    assert process.num_starts == 2


async def test_process_always_dying_at_start_fails(process: WorkerProcess, tmp_path: Path) -> None:
    (tmp_path / "dying_worker.py").write_text("import os\nos._exit(1)\n")
    with pytest.raises(WorkerStartFailed):
        await process.ask(b"anything", 60, 60)
    assert process.num_starts == 2
