"""A Ray cluster that runs already: deploy to it, look at it, remove what was deployed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

from loraserve.api.server import prepare_registry
from loraserve.cluster.local import check_installed, prepare_ray, read_state, wait_until_ready
from loraserve.cluster.options import ClusterOptions
from loraserve.errors import ConfigError, EngineUnavailable
from loraserve.settings import Settings

_ANSWER_S = 20.0


@contextlib.contextmanager
def joined(address: str | None, settings: Settings | None) -> Iterator[None]:
    """Join a Ray cluster for the block.

    Args:
        address: of its head; None: the cluster of this machine that runs over the settings' data
            folder.

    Raises:
        ConfigError: there is no such cluster, or Ray isn't installed.
    """
    if address is None:
        if settings is None:
            raise ConfigError("Name a Ray cluster with --address, or the data folder of one with --data-dir.")
        state = read_state(settings.data_dir)
        address = state.address
        prepare_ray(state.token)
    else:
        check_installed()
    import ray

    from loraserve.cluster.ray import APP_NAME

    try:
        ray.init(address=address, namespace=APP_NAME, logging_level="WARNING", log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"The Ray cluster {address} can't be joined: {error}.",
            hint="Check the address (ray status --address), RAY_AUTH_TOKEN, and that Ray's versions are the same.",
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def deploy(address: str, settings: Settings, options: ClusterOptions) -> str:
    """Deploy the application to a Ray cluster, or replace it there; return its URL once it answers.

    Serve's proxies listen where Serve was started to, or at the settings' host and port.

    Raises:
        LoraserveError: why it can't be had.
    """
    with joined(address, None):
        from ray import serve

        from loraserve.cluster.ray import APP_NAME, QUIET, build

        asyncio.run(prepare_registry(settings))
        serve.start(http_options={"host": settings.host, "port": settings.port}, logging_config=QUIET)
        try:
            serve.run(build(settings, options), name=APP_NAME, route_prefix="/", logging_config=QUIET)
        except RuntimeError as error:
            raise EngineUnavailable(f"Serve couldn't deploy the application: {error}") from error
    url = f"http://{settings.host}:{settings.port}"
    wait_until_ready(url)
    return url


def replica_records() -> list[dict[str, Any]]:
    """Request a record of each engine replica that the ingress has.

    Raises:
        ConfigError: the application isn't deployed in the cluster that was joined.
    """
    records: list[dict[str, Any]] = _ingress().replicas.remote().result(timeout_s=_ANSWER_S)
    return records


def remove() -> None:
    """Remove the application from the cluster that was joined."""
    from ray import serve

    from loraserve.cluster.ray import APP_NAME

    _ingress()
    serve.delete(APP_NAME)


def _ingress() -> Any:
    from ray import serve
    from ray.serve.exceptions import RayServeException

    from loraserve.cluster.ray import APP_NAME

    try:
        return serve.get_app_handle(APP_NAME)
    except RayServeException as error:
        raise ConfigError(f"No application {APP_NAME} is deployed there.", hint="loraserve cluster up") from error
