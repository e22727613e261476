"""Source of an adapter to be pushed: a directory, a GGUF file, the hub, or MLflow."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from loraserve.hub import HubAddress, fetch, is_hub
from loraserve.sdk.files.mlflow_source import fetch_mlflow, is_mlflow


class AdapterSource:
    """A directory to push: the caller's own, the hub's cache, or a temporary one of MLflow's."""

    def __init__(self, directory: Path, *, is_temporary: bool) -> None:
        self.directory = directory
        self._is_temporary = is_temporary
        self._joined: Path | None = None

    @classmethod
    def open(cls, source: str | Path) -> AdapterSource:
        """Return the directory, fetched first where `source` is the hub's or MLflow's; `close` it.

        Raises:
            ConfigError: what fetches it isn't installed, or the hub hasn't got it.
            InvalidRequest: it is none of MLflow's forms.
            AdapterFormatError: nothing is there, or no adapter, or several.
        """
        if isinstance(source, str) and is_hub(source):
            return cls(fetch(HubAddress.parse(source), "adapter").path, is_temporary=False)
        if isinstance(source, str) and is_mlflow(source):
            return cls(fetch_mlflow(source), is_temporary=True)
        return cls(Path(source), is_temporary=False)

    def join(self, files: Sequence[Path]) -> Path:
        """Return the file, or for several a temporary one with the bytes of all, until `close`."""
        if len(files) == 1:
            return files[0]
        with tempfile.NamedTemporaryFile(prefix="loraserve-weights-", delete=False) as joined:
            self._joined = Path(joined.name)
            for path in files:
                with path.open("rb") as file:
                    shutil.copyfileobj(file, joined)
        return self._joined

    def close(self) -> None:
        """Remove temporary files."""
        if self._joined is not None:
            self._joined.unlink(missing_ok=True)
        if self._is_temporary:
            shutil.rmtree(self.directory, ignore_errors=True)
