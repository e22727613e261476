"""``loraserve demo``: show a small base and its adapters, or train the bundled ones again."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from loraserve.cli.help import App
from loraserve.cli.options import FormatOption, reporting
from loraserve.cli.output import Format
from loraserve.errors import ConfigError


class Quantize(StrEnum):
    """The formats of ``serve --quantize``."""

    NONE = "none"
    INT8 = "int8"
    INT4 = "int4"
    NF4 = "nf4"
    FP8 = "fp8"


class DemoBase(StrEnum):
    """The bases that a demo can serve."""

    SMOLLM = "smollm"
    PACK = "pack"


app = App(help="Serve a small base and its adapters, and show them.", invoke_without_command=True)


@app.callback()
def demo(
    context: typer.Context,
    once: Annotated[
        bool, typer.Option("--once", help="Run a scripted tour; exit with 0 only if every answer is right.")
    ] = False,
    model: Annotated[
        DemoBase,
        typer.Option(
            help="smollm: SmolLM2-135M-Instruct, 93 MB, downloaded once. pack: a toy that knows forty words, bundled.",
            case_sensitive=True,
        ),
    ] = DemoBase.SMOLLM,
    quantize: Annotated[
        Quantize, typer.Option(help="Format of the pack's linears, as for serve.", case_sensitive=True)
    ] = Quantize.NONE,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = None,
) -> None:
    """Serve a small base with adapters, and show questions answered by both, and checked."""
    if context.invoked_subcommand is not None:
        return
    with reporting(Format.HUMAN):
        from rich.console import Console

        from loraserve.demo.tour import run_tour, teller, terminable

        console = Console()
        if model is DemoBase.PACK:
            from loraserve.demo.pack_demo import pack_demo

            chosen = pack_demo()
        else:
            from loraserve.demo.demo_server import check_float
            from loraserve.demo.smollm.smollm_demo import TITLE, smollm_demo

            # before anything is downloaded
            check_float(TITLE, quantize)
            with terminable():
                chosen = smollm_demo(teller(console))
        code = run_tour(chosen, once=once, port=port, quantize=quantize, console=console)
    raise typer.Exit(code)


@app.command()
def train(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory to write the pack to; an existing one is replaced.")
    ],
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of the training: the same seed gives the same pack (default: the shipped one's)."),
    ] = None,
    format: FormatOption = None,
) -> None:
    """Train the bundled pack's base and adapters again, in some minutes on one core.

    Exit with 0 only if every adapter is good enough to ship.
    """
    with reporting(format) as output:
        try:
            from loraserve.demo.trainer import DEFAULT_SEED
            from loraserve.demo.trainer import train as train_pack
        except ImportError as error:
            raise ConfigError(
                f"The trainer needs {error.name}, which isn't installed.",
                hint='Install it: pip install "loraserve[demo-train]"',
            ) from error

        with output.stages() as progress:
            card = train_pack(directory, DEFAULT_SEED if seed is None else seed, progress)
        output.records(
            [{"style": score.style, "exact": score.exact, "exact_int8": score.exact_int8} for score in card.scores],
            name="style",
        )
        output.note(f"The pack and its card are in {directory}.")
    if not all(score.is_good for score in card.scores):
        raise typer.Exit(1)
