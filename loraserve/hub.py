"""A base or an adapter on the Hugging Face hub, in the place of a path: ``hf:ORG/NAME``.

The user's own `huggingface_hub` fetches it into the cache that all its programs share (HF_HOME),
with its token (HF_TOKEN, or what ``hf auth login`` kept), and goes on where it was interrupted.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import httpx2

from loraserve.adapter_folder import CONFIG_FILE, WEIGHTS_FILES, find_weights, foreign_files, holds_config, is_weights
from loraserve.errors import AdapterFormatError, ConfigError

Kind = Literal["base", "adapter"]

FORM = "hf:ORG/NAME[@REVISION][:FOLDER, GGUF file or its quantization]"
_PREFIX = "hf:"
_NAME = r"[A-Za-z0-9_][\w.-]{0,95}"
_ADDRESS = re.compile(
    # a Path has a single slash of the two
    rf"hf:/{{0,2}}(?P<repo>{_NAME}(/{_NAME})?)(@(?P<revision>[\w][\w./-]{{0,199}}))?(:(?P<part>[^:@]{{1,200}}))?",
    re.ASCII,
)
_READ_BESIDE_WEIGHTS = (".json", ".jinja")
_READ_BY_NAME = ("tokenizer.model", "tool_parser", "reasoning_parser")
_NOT_BASES = ("adapter", "consolidated")
"""Beginnings of weights that are an adapter's, or Mistral's own copy of the same ones."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_SHARD = re.compile(r"-(\d{5})-of-\d{5}\.gguf$")
_PROJECTOR = "mmproj"
_MAX_LISTED = 8


def is_hub(text: str) -> bool:
    """Return whether a text stands for something on the hub, be it well written or not."""
    return text.startswith(_PREFIX)


@dataclass(frozen=True, slots=True)
class HubAddress:
    """A repository of the hub, or a part of one.

    Attributes:
        revision: a branch, a tag or a commit; None: the main branch.
        part: a folder, a GGUF file, or the quantization in the name of one; None: what lies at the
            top.
    """

    repo: str
    revision: str | None = None
    part: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubAddress:
        """Read ``hf:ORG/NAME[@REVISION][:PART]``.

        Raises:
            ConfigError: the text has another form.
        """
        match = _ADDRESS.fullmatch(text)
        if match is None or ".." in text:
            raise ConfigError(f"{text!r} names nothing on the hub.", hint=f"Expected {FORM}.")
        return cls(match["repo"], match["revision"], match["part"])

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{self.revision}"
        return f"{_PREFIX}{self.repo}{revision}" + ("" if self.part is None else f":{self.part}")


@dataclass(frozen=True, slots=True)
class Selection:
    """Files of a repository that belong together.

    Attributes:
        kind: None: a GGUF file, which may be a base or an adapter.
        names: the files, as the repository has them.
        place: the folder that holds them, or the GGUF file; ``""`` is the top.
    """

    kind: Kind | None
    names: tuple[str, ...]
    place: str


@dataclass(frozen=True, slots=True)
class Fetched:
    """Base or adapter in the cache.

    Attributes:
        path: a folder, or a GGUF file.
        commit: the repository's at that time.
    """

    kind: Kind | None
    path: Path
    commit: str


def fetch(address: HubAddress, wanted: Kind | None = None) -> Fetched:
    """Fetch what an address means, unless the cache has it, and show its progress on a terminal.

    Args:
        wanted: None: whichever is there, an adapter first.

    Raises:
        ConfigError: `huggingface_hub` isn't installed; the hub can't be reached, or has no such
            repository or part for this token; no base is there.
        AdapterFormatError: no adapter is there.
    """
    try:
        # optional, and slow to import
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError:
        raise ConfigError(
            f"huggingface_hub isn't installed, so {address} can't be fetched.",
            hint='Give a directory, or run: pip install "loraserve[hub]".',
        ) from None
    if not sys.stderr.isatty():
        disable_progress_bars()
    endpoint = os.environ.get("HF_ENDPOINT") or None
    try:
        try:
            listed = HfApi(endpoint).model_info(address.repo, revision=address.revision, timeout=30)
            names, commit = [file.rfilename for file in listed.siblings or ()], str(listed.sha)
        except (OfflineModeIsEnabled, httpx2.TransportError):
            folder = _cached_folder(address)
            if folder is None:
                raise
            selection = select(_files(folder), address, wanted)
            return Fetched(selection.kind, folder / selection.place, folder.name)
        selection = select(names, address, wanted)
        folder = Path(
            snapshot_download(
                address.repo,
                revision=address.revision,
                allow_patterns=_patterns(selection.names),
                endpoint=endpoint,
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, httpx2.HTTPError, OSError, ValueError) as error:
        raise ConfigError(
            f"{address} can't be fetched from the hub: {_reason(error)}",
            hint="Check the name and the network, and, of a gated or private one, HF_TOKEN.",
        ) from error
    return Fetched(selection.kind, folder / selection.place, commit)


def select(names: Iterable[str], address: HubAddress, wanted: Kind | None) -> Selection:
    """Return the files of a repository that an address means.

    Pickled weights of a base are never among them, nor weights that are there twice.

    Raises:
        ConfigError: it has no such part, several GGUF files, or no base.
        AdapterFormatError: it has no adapter.
    """
    # a hub could name what lies outside of its folder
    names = sorted(name for name in names if not name.startswith("/") and ".." not in PurePosixPath(name).parts)
    place = "" if address.part is None else address.part.strip("/")
    if place and not any(name.startswith(f"{place}/") for name in names):
        return _select_gguf(names, address, place)
    there = {name.removeprefix(f"{place}/" if place else "") for name in names if _is_in(name, place)}
    prefix = f"{place}/" if place else ""
    if wanted != "base" and CONFIG_FILE in there:
        weights = find_weights(there)
        chosen = {name for name in there if is_weights(name)}
        if weights is not None:
            chosen.add(weights)
        return Selection("adapter", _with_small(there, chosen, prefix), place)
    if wanted != "adapter" and "config.json" in there:
        weights_files = {name for name in there if name.endswith(".safetensors") and not name.startswith(_NOT_BASES)}
        if weights_files:
            return Selection("base", _with_small(there, weights_files, prefix), place)
    if any(holds_config(name) for name in there):
        return _select_gguf([prefix + name for name in sorted(there)], address, None)
    raise _nothing(there, address, wanted)


def _select_gguf(names: Sequence[str], address: HubAddress, wanted: str | None) -> Selection:
    """Return the GGUF file of that name or quantization, with its shards; None: the only one."""
    files = [name for name in names if holds_config(name) and not PurePosixPath(name).name.startswith(_PROJECTOR)]
    found = [name for name in files if wanted is None or name == wanted or _has_quantization(name, wanted)]
    firsts = [name for name in found if (shard := _SHARD.search(name)) is None or shard[1] == "00001"]
    if len(firsts) != 1:
        listed = sorted({_SHARD.sub(".gguf", name) for name in (found or files)})
        has = f"GGUF files {', '.join(listed[:_MAX_LISTED])}" if listed else "no GGUF file"
        what = "" if wanted is None else f"nothing named {wanted!r}; it has " if not found else ""
        raise ConfigError(
            f"{address} has {what}{has}.", hint="Name one, by its quantization or whole: hf:ORG/NAME:Q4_K_M"
        )
    first = firsts[0]
    base = _SHARD.sub("", first)
    shards = tuple(name for name in found if _SHARD.sub("", name) == base and _SHARD.search(name))
    return Selection(None, shards or (first,), first)


def _has_quantization(name: str, quantization: str) -> bool:
    stem = _SHARD.sub(".gguf", PurePosixPath(name).name).removesuffix(".gguf")
    return re.search(rf"(^|[._-]){re.escape(quantization)}$", stem, re.IGNORECASE) is not None


def _is_in(name: str, place: str) -> bool:
    return str(PurePosixPath(name).parent) == (place or ".")


def _with_small(there: Iterable[str], weights: Iterable[str], prefix: str) -> tuple[str, ...]:
    small = {name for name in there if name.endswith(_READ_BESIDE_WEIGHTS) or name in _READ_BY_NAME}
    return tuple(prefix + name for name in sorted(small | set(weights)))


def _nothing(there: Iterable[str], address: HubAddress, wanted: Kind | None) -> Exception:
    """Return the error of a place that has neither, or the other kind."""
    names = sorted(there)
    if wanted == "base" and CONFIG_FILE in names:
        return ConfigError(
            f"{address} is an adapter, not a base.",
            hint=f"Serve its base, then push it: loraserve adapter push {address} --name NAME",
        )
    if wanted == "adapter":
        return AdapterFormatError(
            f"{address} has no {CONFIG_FILE}; it holds {foreign_files(names) or _some(names)}.",
            hint=f"Expected {CONFIG_FILE} and {WEIGHTS_FILES[0]}; of those in a folder: hf:ORG/NAME:FOLDER",
        )
    if any(name.endswith(_PICKLES) for name in names):
        return ConfigError(
            f"{address} has pickled weights alone, which may run code and aren't read.",
            hint="Choose a repository or a revision with safetensors, or save them: save_pretrained(DIR)",
        )
    return ConfigError(
        f"{address} has no model; it holds {_some(names)}.",
        hint="Expected config.json and safetensors, a GGUF file, or an adapter; of those in a folder: "
        "hf:ORG/NAME:FOLDER",
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_MAX_LISTED]) or "nothing"


def _patterns(names: Iterable[str]) -> list[str]:
    """Return patterns of `fnmatch` that match these names alone."""
    return [re.sub(r"([*?\[])", r"[\1]", name) for name in names]


def _cached_folder(address: HubAddress) -> Path | None:
    """Return the folder with what earlier calls fetched of a repository; None: nothing.

    It needn't have all files, where an earlier call was interrupted: its reader names those that
    are missing.
    """
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    cache = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=address.repo, repo_type="model")
    revision = address.revision or constants.DEFAULT_REVISION
    reference = cache / "refs" / revision
    folder = cache / "snapshots" / (reference.read_text().strip() if reference.is_file() else revision)
    return folder if folder.is_dir() else None


def _files(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def _reason(error: Any) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
