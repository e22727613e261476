"""``loraserve quantize``: a float checkpoint rounded to int4 on calibration text, to be served."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from loraserve.cli.options import FormatOption, reporting
from loraserve.errors import ConfigError


class RoundedFormat(StrEnum):
    """Formats that are calibrated."""

    INT4 = "int4"


def quantize(
    model: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of the float checkpoint.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory to make; it mustn't be there.")],
    to: Annotated[RoundedFormat, typer.Option(help="Format of the layers' linears.")] = RoundedFormat.INT4,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Calibration text (default: a bundled one of several kinds).")
    ] = None,
    keep_int8: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Linears that get 8 bits instead, for example v_proj,o_proj,down_proj; an empty string: none "
            "(default: v_proj and k_proj, within 5 bits a weight).",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1024, help="Tokens of the text that are computed, at most.")] = 12_288,
    window: Annotated[
        int, typer.Option(min=64, help="Tokens of the text that see each other; the base's context at most.")
    ] = 512,
    num_threads: Annotated[int, typer.Option(min=0, help="Threads of the products; 0: as many as cores.")] = 0,
    format: FormatOption = None,
) -> None:
    """Round a base to int4 so that errors make up for each other on calibration text.

    The result is a checkpoint in compressed-tensors' format, which serve loads as it is: it keeps
    much more of the base than serve --quantize int4, at nearly as few bytes. An interrupted run
    leaves nothing.
    """
    with reporting(format) as output:
        from loraserve.planning.quantizing import quantize as run
        from loraserve.types import QuantizeRequest

        if not (model / "config.json").is_file():
            raise ConfigError(f"{model} has no config.json.", hint="Give the directory of a base.")
        request = QuantizeRequest(
            str(model.resolve()),
            str(out.absolute()),
            text_file=None if text is None else str(text.resolve()),
            max_tokens=tokens,
            window=window,
            num_threads=num_threads,
            int8_modules=None if keep_int8 is None else tuple(name for name in keep_int8.split(",") if name),
        )
        with output.stages() as tell:
            done = run(request, lambda count, total: tell(f"rounding linears to {to}", count, total))
        output.done(
            {"directory": done.out_dir, "tokens": done.num_tokens},
            f"{done.out_dir} is calibrated on {done.num_tokens:,} tokens. Serve it: loraserve serve --model {out}",
        )
