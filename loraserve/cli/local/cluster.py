"""``loraserve cluster``: several engines behind one address, on Ray Serve."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraserve.cli.help import App
from loraserve.cli.local.serve_flags import SettingsCommand, takes_settings
from loraserve.cli.options import FormatOption, reporting
from loraserve.cli.output import Format
from loraserve.errors import LoraserveError

if TYPE_CHECKING:
    from loraserve.settings import Settings

app = App(help="Run several engines behind one address, on Ray Serve.", no_args_is_help=True)

PLACE = ("data_dir", "config")
"""Settings by which a cluster of this machine is found again."""
AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="Head of a Ray cluster that runs already (default: one of this machine's own, for this command).",
        show_default=False,
    ),
]


def _option(help: str, metavar: str = "N", **bounds: Any) -> Any:
    return typer.Option(help=help, metavar=metavar, show_default=False, **bounds)


@app.command(cls=SettingsCommand)
@takes_settings()
def up(
    replicas: Annotated[int | None, _option("Engine replicas at the start (default: 2).")] = None,
    min_replicas: Annotated[int | None, _option("Fewest replicas later (default: as at the start).")] = None,
    max_replicas: Annotated[int | None, _option("Most replicas under load (default: as at the start).")] = None,
    target_requests: Annotated[
        float | None, _option("Requests per replica to keep (default: three quarters of --max-num-seqs).")
    ] = None,
    max_ttft: Annotated[
        float | None,
        _option("Mean time to the first token beyond which a replica is added (default: 2).", "SECONDS"),
    ] = None,
    scale_up_delay: Annotated[
        float | None, _option("How long more replicas must be needed (default: 5).", "SECONDS")
    ] = None,
    scale_down_delay: Annotated[
        float | None, _option("How long fewer replicas must be enough (default: 120).", "SECONDS")
    ] = None,
    cpus_per_replica: Annotated[
        float | None, _option("Processors that Ray reserves for a replica (default: 1).")
    ] = None,
    gpus_per_replica: Annotated[float | None, _option("GPUs that Ray reserves for a replica (default: 0).")] = None,
    drain_s: Annotated[
        float | None,
        _option("How long streams stay at a replica that leaves, before they move (default: 10).", "SECONDS"),
    ] = None,
    address: AddressOption = None,
    **settings: str | bool | None,
) -> None:
    """Start a cluster: the flags of serve, and those of its replicas.

    Without --address it runs on this machine until Ctrl-C or `loraserve cluster down`, with Ray's
    processes on the loopback. With --address it is deployed to a Ray cluster, and stays there.
    """
    with reporting(Format.HUMAN) as output:
        from loraserve.cluster.options import ClusterOptions
        from loraserve.settings import Settings

        given = {
            "replicas": replicas,
            "min_replicas": min_replicas,
            "max_replicas": max_replicas,
            "target_requests": target_requests,
            "max_ttft": max_ttft,
            "scale_up_delay": scale_up_delay,
            "scale_down_delay": scale_down_delay,
            "cpus_per_replica": cpus_per_replica,
            "gpus_per_replica": gpus_per_replica,
            "drain_s": drain_s,
        }
        checked, options = Settings.load(**settings), ClusterOptions.load(**given)
        began = time.monotonic()
        if address is not None:
            from loraserve.cluster.remote import deploy

            url = deploy(address, checked, options)
            output.note(f"Ready at {url} after {time.monotonic() - began:.1f} s. It stays there without this command.")
            return
        from loraserve.cluster.local import LocalCluster, wait_for_signal

        cluster = LocalCluster(checked, options)
        with cluster.running() as state:
            output.note(
                f"Ready at {state.url} after {time.monotonic() - began:.1f} s, with {options.replicas} engine replicas."
                " Ctrl-C or loraserve cluster down ends it."
            )
            while (number := wait_for_signal()).name == "SIGHUP":
                output.note("Replacing the ingress and the replicas, one after the other.")
                try:
                    cluster.restart(Settings.load(**settings), ClusterOptions.load(**given))
                    output.note("Replaced.")
                except LoraserveError as error:
                    output.fail(error)
            output.note("Ending: streams first, then the replicas.")
        output.note("The cluster has ended.")
    if number.name == "SIGINT":
        raise typer.Exit(130)


@app.command(cls=SettingsCommand)
@takes_settings(PLACE)
def status(address: AddressOption = None, format: FormatOption = None, **settings: str | bool | None) -> None:
    """List the engine replicas of a cluster, with their processes and requests."""
    with reporting(format) as output:
        from loraserve.cluster.remote import joined, replica_records

        with joined(address, None if address else _place(settings)):
            records = replica_records()
        output.records(records, name="replica")
        if not records:
            output.note("No engine replica has reported yet.")


@app.command(cls=SettingsCommand)
@takes_settings(PLACE)
def restart(format: FormatOption = None, **settings: str | bool | None) -> None:
    """Replace the ingress and the replicas of this machine's cluster, one after the other.

    Streams go on. Settings are read again: the variables are those of the cluster's own process.
    """
    with reporting(format) as output:
        from loraserve.cluster.local import read_state, tell_to_restart

        tell_to_restart(read_state(_place(settings).data_dir))
        output.note("The cluster replaces its replicas; its own output says when it has.")


@app.command(cls=SettingsCommand)
@takes_settings(PLACE)
def down(address: AddressOption = None, format: FormatOption = None, **settings: str | bool | None) -> None:
    """End a cluster: streams first, then the replicas."""
    with reporting(format) as output:
        if address is not None:
            from loraserve.cluster.remote import joined, remove

            with joined(address, None):
                remove()
        else:
            from loraserve.cluster.local import end_cluster, read_state

            data_dir = _place(settings).data_dir
            end_cluster(read_state(data_dir), data_dir)
        output.note("The cluster has ended.")


def _place(settings: dict[str, str | bool | None]) -> Settings:
    """Load settings of which the data folder alone counts."""
    from loraserve.settings import Settings

    return Settings.load(model="none", **settings)
