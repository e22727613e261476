"""``loraserve serve``: the server itself."""

from __future__ import annotations

import typer

from loraserve.cli.local.serve_flags import takes_settings
from loraserve.cli.options import reporting
from loraserve.cli.output import Format


@takes_settings()
def serve(**settings: str | bool | None) -> None:
    """Serve a base model and its adapters.

    Every flag is also an environment variable and a key of loraserve.toml; the flag wins, then the
    variable. BYTES are written as 8GiB, 500MB or a plain number.
    """
    with reporting(Format.HUMAN):
        from loraserve.background import collector_paused
        from loraserve.settings import Settings

        checked = Settings.load(**settings)
        # loads the server: only after a wrong flag has been refused
        with collector_paused():
            from loraserve.api.server import serve as run_server

        code = run_server(checked, read=lambda: Settings.load(**settings))
    raise typer.Exit(code)
