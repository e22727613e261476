"""Flags of ``serve`` that other commands take too, to say which server is meant. Values go to `loraserve.settings` as they are written."""

from __future__ import annotations

from typing import Annotated

import typer

Text = str | None
SERVE = "As for serve"
"""Their panel in the help."""

ModelFlag = Annotated[Text, typer.Option(help="The base's directory.", rich_help_panel=SERVE)]
DtypeFlag = Annotated[Text, typer.Option(help="auto, float32, bfloat16 or float16.", rich_help_panel=SERVE)]
QuantizeFlag = Annotated[Text, typer.Option(help="none, int8, int4, nf4 or fp8.", rich_help_panel=SERVE)]
ActivationDtypeFlag = Annotated[
    Text, typer.Option(help="What int8 linears multiply on a CPU: auto, int8 or float.", rich_help_panel=SERVE)
]
MemoryBudgetFlag = Annotated[
    Text, typer.Option(help="For KV blocks and adapters together, such as 8GiB.", rich_help_panel=SERVE)
]
AdapterDtypeFlag = Annotated[Text, typer.Option(help="auto, fp32, bf16, fp16 or int8.", rich_help_panel=SERVE)]
MaxModelLenFlag = Annotated[
    Text, typer.Option(help="The longest prompt and answer together, in tokens.", rich_help_panel=SERVE)
]
ConfigFlag = Annotated[
    Text, typer.Option(help="The TOML file (default: loraserve.toml, if there is one)", rich_help_panel=SERVE)
]
