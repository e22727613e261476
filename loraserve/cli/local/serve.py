"""``loraserve serve``: the server itself. Every flag is a field of `loraserve.settings.Settings`, which checks it."""

from __future__ import annotations

from typing import Annotated

import typer

from loraserve.cli.options import reporting
from loraserve.cli.output import Format

MODEL, ENGINE, STORAGE, SERVER = "Model", "Engine", "Storage", "Server"

# Values go to Settings as they are written, so that a flag, a variable and a line of loraserve.toml are checked by one rule
# and refused in the same words; None: not given.
Text = str | None


def serve(
    model: Annotated[
        Text, typer.Option(help="A directory in Hugging Face's layout, or a Hugging Face id.", rich_help_panel=MODEL)
    ] = None,
    model_id: Annotated[
        Text, typer.Option(help="What clients call the base (default: the directory's name)", rich_help_panel=MODEL)
    ] = None,
    base_names: Annotated[
        Text,
        typer.Option(help="Other names of it that adapters may have, with commas between.", rich_help_panel=MODEL),
    ] = None,
    strict_base: Annotated[
        bool | None,
        typer.Option(
            "--strict-base/--no-strict-base",
            help="Refuse adapters that name another base, instead of a warning.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    device: Annotated[Text, typer.Option(help="auto, cpu or cuda.", rich_help_panel=MODEL)] = None,
    dtype: Annotated[Text, typer.Option(help="auto, float32, bfloat16 or float16.", rich_help_panel=MODEL)] = None,
    quantize: Annotated[
        Text, typer.Option(help="none (as stored), int8, int4, nf4 or fp8.", rich_help_panel=MODEL)
    ] = None,
    activation_dtype: Annotated[
        Text,
        typer.Option(
            help="On a CPU, int8 linears round activations to int8, or multiply them as they are (float). "
            "auto: as the checkpoint asks; int8 with --quantize.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    max_model_len: Annotated[
        Text, typer.Option(help="The longest prompt and answer together, in tokens.", rich_help_panel=MODEL)
    ] = None,
    memory_budget: Annotated[
        Text, typer.Option(help="For KV blocks and adapters together, such as 8GiB.", rich_help_panel=ENGINE)
    ] = None,
    memory_utilization: Annotated[
        Text, typer.Option(help="Without it: the part of a GPU's memory to take.", rich_help_panel=ENGINE)
    ] = None,
    adapter_dtype: Annotated[
        Text,
        typer.Option(help="What adapters are held in: auto, fp32, bf16, fp16 or int8.", rich_help_panel=ENGINE),
    ] = None,
    adapter_rank_error: Annotated[
        Text,
        typer.Option(help="Cut adapters to the fewest ranks within this error, such as 0.01.", rich_help_panel=ENGINE),
    ] = None,
    max_adapter_loss: Annotated[
        Text,
        typer.Option(help="Refuse adapters of which holding them loses more, such as 0.02.", rich_help_panel=ENGINE),
    ] = None,
    certify: Annotated[
        Text,
        typer.Option(
            help="at-upload, or on-request: uploads don't wait for their certificates.", rich_help_panel=ENGINE
        ),
    ] = None,
    host_cache: Annotated[
        Text, typer.Option(help="For adapters that wait in host memory.", rich_help_panel=ENGINE)
    ] = None,
    max_num_seqs: Annotated[Text, typer.Option(help="The most sequences in one step.", rich_help_panel=ENGINE)] = None,
    max_num_batched_tokens: Annotated[
        Text, typer.Option(help="The most tokens in one step.", rich_help_panel=ENGINE)
    ] = None,
    enable_prefix_cache: Annotated[
        bool | None,
        typer.Option(
            "--enable-prefix-cache/--no-enable-prefix-cache", help="Reuse KV of equal prefixes.", rich_help_panel=ENGINE
        ),
    ] = None,
    cuda_graphs: Annotated[
        bool | None,
        typer.Option("--cuda-graphs/--no-cuda-graphs", help="Capture a GPU's decode steps.", rich_help_panel=ENGINE),
    ] = None,
    num_threads: Annotated[Text, typer.Option(help="Threads of the forward pass.", rich_help_panel=ENGINE)] = None,
    loader_threads: Annotated[Text, typer.Option(help="Threads that load adapters.", rich_help_panel=ENGINE)] = None,
    data_dir: Annotated[
        Text, typer.Option(help="The SQLite registry and the adapters' bytes.", rich_help_panel=STORAGE)
    ] = None,
    database_url: Annotated[Text, typer.Option(help="sqlite:///… or postgresql://…", rich_help_panel=STORAGE)] = None,
    store_url: Annotated[Text, typer.Option(help="file:///… or s3://…", rich_help_panel=STORAGE)] = None,
    retention_s: Annotated[
        Text, typer.Option(help="How long what was deleted can be restored.", rich_help_panel=STORAGE)
    ] = None,
    pull_allow: Annotated[
        Text, typer.Option(help="Where admins may pull from: hf://ORG/*, s3://BUCKET/*", rich_help_panel=STORAGE)
    ] = None,
    host: Annotated[Text, typer.Option(help="The address to listen at.", rich_help_panel=SERVER)] = None,
    port: Annotated[Text, typer.Option(help="The port to listen at; 0: any free one.", rich_help_panel=SERVER)] = None,
    grace_s: Annotated[
        Text, typer.Option(help="How long requests may go on after SIGTERM.", rich_help_panel=SERVER)
    ] = None,
    engine_hang_timeout: Annotated[
        Text,
        typer.Option(help="Replace an engine that made no progress for so many seconds.", rich_help_panel=SERVER),
    ] = None,
    log_level: Annotated[Text, typer.Option(help="debug, info, warning or error.", rich_help_panel=SERVER)] = None,
    config: Annotated[
        Text, typer.Option(help="The TOML file (default: loraserve.toml, if there is one)", rich_help_panel=SERVER)
    ] = None,
) -> None:
    """Serve a base model and its adapters. Every flag is also LORASERVE_<FLAG> and a key of loraserve.toml."""
    flags = dict(locals())
    with reporting(Format.HUMAN):
        from loraserve.settings import Settings

        settings = Settings.load(**flags)
        # After the settings, so that a wrong flag is refused at once: this loads the server.
        from loraserve.api.server import serve as run_server

        code = run_server(settings)
    raise typer.Exit(code)
