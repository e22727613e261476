"""An adapter that MLflow keeps, fetched by the user's own MLflow to be pushed from here.

MLflow's library reads the user's configuration (MLFLOW_TRACKING_URI and its credentials); the
server never talks to MLflow.
"""

from __future__ import annotations

import importlib
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from loraserve import errors
from loraserve.adapter_folder import CONFIG_FILE, WEIGHTS_FILE, is_weights
from loraserve.sdk.files.peft_directory import EXTRA_FILES, PARSER_FILES, VARIABLES_FILE
from loraserve.tokenizer_identity import TOKENIZER_FILES

FORMS = "runs:/RUN_ID[/PATH], models:/NAME/VERSION, models:/NAME@ALIAS, or mlflow://runs/… and mlflow://models/…"
MAX_FOLDERS = 64
"""Folders of a run that are looked into for an adapter."""
MAX_DEPTH = 3

_SCHEMES = ("runs:", "models:", "mlflow:")
_URI = re.compile(r"(runs|models):/[^/\s][^\s]*")
_BESIDE = (*EXTRA_FILES.values(), *PARSER_FILES, VARIABLES_FILE, *TOKENIZER_FILES)


def is_mlflow(source: str | Path) -> bool:
    """Return whether `source` names something of MLflow's, and no directory here."""
    return isinstance(source, str) and source.startswith(_SCHEMES)


def fetch_mlflow(source: str) -> Path:
    """Return a temporary directory with the adapter that MLflow keeps there.

    Raises:
        ConfigError: MLflow isn't installed.
        InvalidRequest: `source` is none of the known forms.
        AdapterFormatError: nothing is there, or no adapter, or several.
    """
    uri = _mlflow_uri(source)
    artifacts = _import_artifacts()
    directory = Path(tempfile.mkdtemp(prefix="loraserve-mlflow-"))
    try:
        _fetch(artifacts, uri, directory)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return directory


def _mlflow_uri(source: str) -> str:
    """Return the URI as MLflow writes it.

    Raises:
        InvalidRequest: it is none of the known forms.
    """
    uri = re.sub(r"^mlflow://(runs|models)/", r"\1:/", source).rstrip("/")
    if not _URI.fullmatch(uri) or ".." in uri.split("/"):
        raise errors.InvalidRequest(f"{source!r} names nothing in MLflow.", hint=f"Expected {FORMS}.")
    return uri


def _import_artifacts() -> Any:
    try:
        return importlib.import_module("mlflow.artifacts")
    except ImportError as error:
        raise errors.ConfigError(
            "MLflow isn't installed, so that its runs and models can't be read.",
            hint='Install it: pip install "loraserve[mlflow]"',
        ) from error


def _fetch(artifacts: Any, uri: str, directory: Path) -> None:
    """Download the files of the one adapter below `uri`, and nothing else that is there.

    Raises:
        AdapterFormatError: MLflow can't read it, or no adapter or several are there.
    """
    try:
        folder, names = _find(artifacts, uri)
        for name in names:
            path = Path(artifacts.download_artifacts(artifact_uri=f"{folder}/{name}", dst_path=str(directory)))
            if path != directory / name:
                shutil.move(path, directory / name)
    except errors.LoraserveError:
        raise
    except Exception as error:
        # MLflow's own errors, and those of every store that it reads
        reason = " ".join(str(error).split())[:400] or type(error).__name__
        raise errors.AdapterFormatError(
            f"MLflow can't read {uri}: {reason}", hint="Check MLFLOW_TRACKING_URI, and the name."
        ) from error


def _list(artifacts: Any, uri: str) -> Iterable[Any]:
    """Return what is in a folder; MLflow takes a whole run by its id alone."""
    scheme, _, run_id = uri.partition(":/")
    if scheme == "runs" and "/" not in run_id:
        return artifacts.list_artifacts(run_id=run_id)  # type: ignore[no-any-return]
    return artifacts.list_artifacts(artifact_uri=uri)  # type: ignore[no-any-return]


def _is_read(name: str) -> bool:
    return name == CONFIG_FILE or name in _BESIDE or is_weights(name)


def _find(artifacts: Any, uri: str) -> tuple[str, list[str]]:
    """Return the URI of the folder that has an adapter, and the names of its files.

    Raises:
        AdapterFormatError: there are none, or several.
    """
    found: list[tuple[str, list[str]]] = []
    level, num_seen = [uri], 0
    for _ in range(MAX_DEPTH + 1):
        folders: list[str] = []
        for folder in level:
            num_seen += 1
            if num_seen > MAX_FOLDERS:
                break
            # paths are of the whole run or model: only their last part is of this folder
            entries = {PurePosixPath(entry.path).name: entry for entry in _list(artifacts, folder)}
            if CONFIG_FILE in entries:
                found.append((folder, [name for name, entry in entries.items() if not entry.is_dir and _is_read(name)]))
            else:
                folders += [f"{folder}/{name}" for name, entry in entries.items() if entry.is_dir]
        # the nearest ones: a model's own adapter hides those of its checkpoints
        if found:
            break
        level = folders
    if len(found) != 1:
        what = "no adapter" if not found else f"several adapters ({', '.join(folder for folder, _ in found[:5])})"
        raise errors.AdapterFormatError(
            f"{uri} has {what}.",
            hint=f"Expected one folder with {CONFIG_FILE} and {WEIGHTS_FILE}: name it, as in runs:/RUN_ID/PATH.",
        )
    return found[0]
