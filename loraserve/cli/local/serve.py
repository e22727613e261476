"""``loraserve serve``: the server itself."""

from __future__ import annotations

from typing import Annotated

import typer

from loraserve.cli.local.serve_flags import takes_settings
from loraserve.cli.options import reporting
from loraserve.cli.output import Format
from loraserve.errors import ConfigError


@takes_settings()
def serve(
    base: Annotated[
        str | None,
        typer.Argument(metavar="DIR|FILE|hf:ORG/NAME", show_default=False, help="The base, in the place of --model."),
    ] = None,
    **settings: str | bool | None,
) -> None:
    """Serve a base model and its adapters.

    Every flag is also an environment variable and a key of loraserve.toml; the flag wins, then the
    variable. BYTES are written as 8GiB, 500MB or a plain number.
    """
    with reporting(Format.HUMAN):
        from loraserve.background import collector_paused
        from loraserve.settings import Settings

        if base is not None:
            if settings["model"] is not None:
                raise ConfigError("The base is named twice, by the argument and by --model.", hint="Name it once.")
            settings["model"] = base
        checked = Settings.load(**settings)
        # loads the server: only after a wrong flag has been refused
        with collector_paused():
            from loraserve.api.server import serve as run_server

        code = run_server(checked, read=lambda: Settings.load(**settings))
    raise typer.Exit(code)
