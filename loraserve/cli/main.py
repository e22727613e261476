"""``loraserve``: the root command, with every noun under it."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Annotated

import typer

from loraserve import errors
from loraserve.cli import audit, bench, operation, ps, run, usage
from loraserve.cli.adapters import adapter, adapter_alias, adapter_eval, adapter_memory
from loraserve.cli.help import App
from loraserve.cli.local import backup, cluster, db, demo, doctor, plan, pull, quantize, serve
from loraserve.cli.local.serve_flags import SettingsCommand
from loraserve.cli.options import FormatOption, choose_format
from loraserve.cli.output import Format, Output
from loraserve.cli.tenants import admin_key, grant, key, tenant

app = App(
    name="loraserve",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        from loraserve import __version__

        Output.plain(__version__)
        raise typer.Exit


@app.callback()
def _root(
    format: FormatOption = None,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Serve thousands of LoRA adapters on one resident base model.

    Data goes to stdout, messages to stderr. LORASERVE_URL names the server, LORASERVE_API_KEY holds
    the key.
    """
    choose_format(format)


app.command("serve", cls=SettingsCommand)(serve.serve)
app.add_typer(demo.app, name="demo")
app.add_typer(cluster.app, name="cluster")
adapter_alias.register(adapter.app)
adapter_memory.register(adapter.app)
adapter_eval.register(adapter.app)
app.add_typer(adapter.app, name="adapter")
app.add_typer(grant.app, name="grant")
app.add_typer(operation.app, name="operation")
app.add_typer(tenant.app, name="tenant")
app.add_typer(key.app, name="key")
app.add_typer(admin_key.app, name="admin-key")
app.command("usage")(usage.usage)
app.command("audit")(audit.audit)
app.command("ps")(ps.ps)
app.command("run")(run.run)
app.add_typer(db.app, name="db")
app.command("backup", cls=SettingsCommand)(backup.backup)
app.command("restore", cls=SettingsCommand)(backup.restore)
app.command("bench")(bench.bench)
app.command("plan", cls=SettingsCommand)(plan.plan)
app.command("pull")(pull.pull)
app.command("quantize")(quantize.quantize)
app.command("doctor", cls=SettingsCommand)(doctor.doctor)


def main() -> None:
    """Run the command line and exit.

    The exit code is 0 fine, 1 failed, 2 wrong usage or configuration, 130 interrupted.
    """
    try:
        app(prog_name="loraserve")
    except ModuleNotFoundError as error:
        # the index has the client alone too (loraserve-client)
        if not _is_servers(error.name) or find_spec("loraserve.api") is not None:
            raise
        command = " ".join(word for word in sys.argv[1:2] if not word.startswith("-"))
        Output(Format.HUMAN).fail(
            errors.ConfigError(
                f"loraserve {command} needs the server, and only loraserve's client is installed here.",
                hint="Install the server beside it: pip install loraserve",
            )
        )
        raise SystemExit(2) from None


def _is_servers(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in ("loraserve", "adapters_store")


if __name__ == "__main__":
    main()
