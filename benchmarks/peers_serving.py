"""The contenders of `make bench ARGS=peers`, running: ours and each peer, on 127.0.0.1 only, each
stopped by its process id however its turn ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil

from benchmarks import peers_installing as installing
from benchmarks.formats import AS_STORED, CALIBRATED, FORMATS, file_type
from benchmarks.peers_installing import CACHE, PeerUnavailableError, last_words, plain
from benchmarks.peers_rows import BASE, MIXED
from benchmarks.run import Peft
from benchmarks.serving import HERE, free_port, say, serve
from loraserve.errors import InvariantViolation

OUTPUT_TOKENS = 64
READY_TIMEOUT_S = 900.0
"""vLLM compiles for some minutes before its first start is over."""
STOP_TIMEOUT_S = 30.0
KV_GIB = 2
_NOT_FOR_PEERS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")
"""Set for our own threads. A peer has the machine for itself in its turns and is fastest with its
own settings, in which threads that wait spin for a while.
"""


@dataclass(frozen=True, slots=True)
class Work:
    """Work that every contender is given: a base, adapters and how they are asked.

    Attributes:
        calibrated: the checkpoint that `loraserve quantize` made of the base, if one is asked.
        max_requests: at once.
        max_prompt_tokens: of the longest prompt.
        text_tokens: file of a text's token ids, of which prompts are windows; None: random ids.
        speculation: `auto`: each has its own default; `off`; `on`: by what the prompt and the
            answer said before.
    """

    model: Path
    adapters: tuple[Path, ...]
    vocab: int
    max_requests: int
    cores: tuple[int, ...]
    calibrated: Path | None = None
    max_prompt_tokens: int = 64
    text_tokens: Path | None = None
    speculation: str = "auto"

    @property
    def context_tokens(self) -> int:
        """Return the room of a request: twice what it takes."""
        return 2 * (self.max_prompt_tokens + OUTPUT_TOKENS)

    @property
    def max_rank(self) -> int:
        return max(json.loads((path / "adapter_config.json").read_text())["r"] for path in self.adapters)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the files, base and adapters."""
        files = [self.model / "model.safetensors", *(path / "adapter_model.safetensors" for path in self.adapters)]
        return sum(path.stat().st_size for path in files)


@dataclass(frozen=True, slots=True)
class Running:
    """A contender that can be asked.

    Attributes:
        settings: instruction set, arithmetic and threads, in words.
        burst: so many requests at once, in a mode, of prompts of so many tokens, of a seed →
            figures with `tokens_per_s`.
    """

    pid: int
    settings: str
    burst: Callable[[int, str, int, int], dict[str, Any]]


Start = Callable[[Work, str, str], contextlib.AbstractContextManager[Running]]
"""Starts a contender: the work, its format, the mode that it's going to be asked in."""


def load(
    url: str, models: Callable[[str], str], fields: Callable[[str], Mapping[str, Any]], work: Work, key: str = "none"
) -> Callable[[int, str, int, int], dict[str, Any]]:
    """The load generator, for a server with OpenAI's completions."""

    def burst(concurrency: int, mode: str, prompt_tokens: int, seed: int) -> dict[str, Any]:
        arguments = {
            "url": url,
            "models": models(mode),
            "adapters": len(work.adapters) if mode == MIXED else 1,
            "concurrency": concurrency,
            "prompt-tokens": prompt_tokens,
            "output-tokens": OUTPUT_TOKENS,
            "vocab": work.vocab,
            "seed": seed,
            "body": json.dumps(fields(mode)),
        }
        if work.text_tokens is not None:
            arguments["text-tokens"] = work.text_tokens
        command = [sys.executable, "-P", str(HERE / "load.py")]
        for name, value in arguments.items():
            command += [f"--{name}", str(value)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, "LORASERVE_API_KEY": key}
        )
        if done.returncode:
            raise PeerUnavailableError(f"a request failed: {last_words(done.stderr)}")
        figures: dict[str, Any] = json.loads(done.stdout)
        return figures

    return burst


@contextlib.contextmanager
def ours(work: Work, name: str, mode: str) -> Iterator[Running]:
    chosen, model = FORMATS.get(name), work.model
    if (type_name := file_type(name)) is not None:
        chosen, model = AS_STORED, installing.gguf_base(work.model, type_name)
    elif chosen is None:
        if work.calibrated is None:
            raise InvariantViolation(f"{name} is a format of a calibrated base, and there is none")
        chosen, model = CALIBRATED[name], work.calibrated
    # certificates take the engine a quarter of an hour and aren't what is measured
    flags = ["--certify", "on-request", *chosen.flags]
    if work.speculation != "auto":
        flags += ["--speculation", {"off": "off", "on": "auto"}[work.speculation]]
    with serve(model, chosen.quantize, work.adapters, flags, dtype=chosen.dtype) as server:
        headers = {"Authorization": f"Bearer {server.admin_key}"}
        base = httpx2.get(f"{server.url}/api/v1/base", headers=headers).raise_for_status().json()
        threads = os.environ.get("OMP_NUM_THREADS", str(len(work.cores)))
        held = "as stored" if chosen.adapters == "auto" else chosen.adapters
        settings = (
            f"{base['arithmetic']}, {base['kernels']}, {base['instructions']}, activations {base['dtype']}, "
            f"adapters {held}; {threads} threads, OMP_WAIT_POLICY={os.environ.get('OMP_WAIT_POLICY', '')}"
        )

        def models(mode: str) -> str:
            return "base" if mode == BASE else "lora-{:04d}"

        yield Running(server.pid, settings, load(server.url, models, lambda mode: {}, work, server.key))


@contextlib.contextmanager
def llama_cpp(work: Work, name: str, mode: str) -> Iterator[Running]:
    programs = installing.llama_cpp()
    base_format, _, adapter_format = name.partition("+")
    adapter_format = adapter_format or "F16"
    base = installing.gguf_base(work.model, base_format)
    adapters = installing.gguf_adapters(work.model, work.adapters, adapter_format)
    port, threads, slots = free_port(), str(len(work.cores)), work.max_requests
    command = [programs / "llama-server", "-m", base, "--host", "127.0.0.1", "--port", port, "--offline"]
    command += ["-t", threads, "-tb", threads, "-np", slots, "-c", slots * work.context_tokens]
    command += ["--lora", ",".join(map(str, adapters)), "--lora-init-without-apply"]
    if work.speculation == "on":
        command += ["--spec-type", "ngram-simple"]
    with _started("llama.cpp", command, port, {}) as (process, _):
        instructions = instructions_of(_system_info(programs))
        settings = (
            f"{base_format}, adapters {adapter_format}; {instructions}; -t {threads}, -np {slots}, default wait policy"
            f"{', --spec-type ngram-simple' if work.speculation == 'on' else ''}"
        )

        def fields(mode: str) -> dict[str, Any]:
            # without the field it applies all adapters at once
            lora = {"id": "{}", "scale": 1.0} if mode == MIXED else {"id": 0, "scale": 0.0}
            return {"lora": [lora], "cache_prompt": False}

        yield Running(process.pid, settings, load(f"http://127.0.0.1:{port}", lambda mode: "base", fields, work))


@contextlib.contextmanager
def vllm(work: Work, name: str, mode: str) -> Iterator[Running]:
    """With LoRA only where it's asked for: its base is faster without."""
    python, port, slots = installing.vllm_python(), free_port(), len(work.adapters)
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, work.cores)),
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CACHE_ROOT": str(CACHE / "vllm-cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(CACHE / "vllm-cache" / "inductor"),
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": ":".join(map(str, installing.vllm_libraries())),
    }
    # the command `vllm` looks for the metadata of a package of that name, and ends
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", work.model]
    command += ["--served-model-name", "base", "--host", "127.0.0.1", "--port", port, "--dtype", name]
    command += ["--max-model-len", work.context_tokens, "--max-num-seqs", work.max_requests]
    if mode == MIXED:
        command += ["--enable-lora", "--max-loras", slots, "--max-cpu-loras", slots]
        command += ["--max-lora-rank", work.max_rank]
    with _started("vLLM", command, port, environment) as (process, _):
        url = f"http://127.0.0.1:{port}"
        for adapter in work.adapters if mode == MIXED else ():
            body = {"lora_name": adapter.name, "lora_path": str(adapter)}
            response = httpx2.post(f"{url}/v1/load_lora_adapter", json=body, timeout=120)
            if response.status_code != 200:
                raise PeerUnavailableError(f"{adapter.name} can't be loaded: {plain(response.text[:300])}")
        slots_words = f"{slots} LoRA slots" if mode == MIXED else "started without LoRA"
        settings = f"{name}, {_torch_words(python)}, {slots_words}; threads on cores {environment[_BIND]}"

        def models(mode: str) -> str:
            return "base" if mode == BASE else "lora-{:04d}"

        yield Running(process.pid, settings, load(url, models, lambda mode: {}, work))


@contextlib.contextmanager
def peft(work: Work, name: str, mode: str) -> Iterator[Running]:
    """Generate in process, without a server; all rows begin and end together."""
    python = installing.peft_python()
    peer = None
    try:
        peer = Peft(work.model, len(work.adapters), python=str(python), dtype=name)
        settings = f"{name}, {_torch_words(python)}, in process; {len(work.cores)} threads, default wait policy"

        def burst(concurrency: int, mode: str, prompt_tokens: int, seed: int) -> dict[str, Any]:
            assert peer is not None
            with _said("PEFT"):
                return peer.generate(concurrency, mode)

        yield Running(peer.pid, settings, burst)
    finally:
        if peer is not None:
            peer.close()


START: Mapping[str, Start] = {"llama.cpp": llama_cpp, "vllm": vllm, "peft": peft}
_BIND = "VLLM_CPU_OMP_THREADS_BIND"


@contextlib.contextmanager
def started_peer(peer: str, work: Work, name: str, mode: str) -> Iterator[Running]:
    """A peer that has answered a first burst, not counted.

    Raises:
        PeerUnavailableError: it can't be installed, started or asked.
    """
    with contextlib.ExitStack() as stack:
        with _said(peer):
            running = stack.enter_context(START[peer](work, name, mode))
        running.burst(work.max_requests, mode, min(work.max_prompt_tokens, 64), 0)
        yield running


@contextlib.contextmanager
def _said(peer: str) -> Iterator[None]:
    """Turn what a peer's start or answer ends with into the reason on its row."""
    try:
        yield
    except SystemExit as error:
        # a signal's is a number
        if not isinstance(error.code, str):
            raise
        raise PeerUnavailableError(plain(error.code)) from error
    except (OSError, httpx2.HTTPError, ValueError) as error:
        raise PeerUnavailableError(f"{peer}: {plain(f'{type(error).__name__}: {error}')}") from error


@contextlib.contextmanager
def _started(
    peer: str, command: Sequence[object], port: int, environment: Mapping[str, str]
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A peer's server, once it answers /health; it and its children are gone afterwards."""
    log = CACHE / "logs" / f"{peer}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    inherited = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_PEERS}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            list(map(str, command)), stdout=sink, stderr=sink, env={**inherited, **environment}, cwd=CACHE
        )
    try:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not _is_healthy(f"http://127.0.0.1:{port}/health"):
            if process.poll() is not None:
                words = last_words(log.read_text(errors="replace"))
                raise PeerUnavailableError(f"it ended with {process.returncode} at its start: {words}")
            if time.monotonic() > deadline:
                raise PeerUnavailableError(f"it wasn't ready after {READY_TIMEOUT_S:.0f} s.")
            time.sleep(0.3)
        yield process, log
    finally:
        stop(process)


def _is_healthy(url: str) -> bool:
    try:
        return httpx2.get(url, timeout=5).status_code == 200
    except httpx2.HTTPError:
        return False


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process that was started here and what it started, first by asking."""
    children: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(children, timeout=3)
    for child in alive:
        say(f"process {child.pid} outlived its peer; it's killed")
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(alive, timeout=3)


def instructions_of(system_info: str) -> str:
    """Return the instruction sets that llama.cpp says it was built for."""
    parts = [part.rpartition(":")[2].strip() for part in system_info.split("|")]
    return " ".join(part.partition(" = ")[0] for part in parts if part.endswith(" = 1"))


def _system_info(programs: Path) -> str:
    """Ask llama.cpp's library, in a process of its own: the server doesn't log it."""
    code = (
        "import ctypes, sys; library = ctypes.CDLL(sys.argv[1]); info = library.llama_print_system_info; "
        "info.restype = ctypes.c_char_p; print(info().decode())"
    )
    command = [sys.executable, "-P", "-c", code, str(programs / "libllama.so")]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _torch_words(python: Path) -> str:
    code = "import torch; print(f'torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}')"
    done = subprocess.run([str(python), "-P", "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "torch"
