"""A cluster on this machine: Ray, Serve and the application, started and ended with one command."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any

import httpx2
import msgspec

from loraserve.api.http.listener import open_listener
from loraserve.api.server import prepare_registry
from loraserve.cluster.options import ClusterOptions
from loraserve.cluster.shared_listener import SharedListener
from loraserve.errors import ConfigError, EngineUnavailable, InvariantViolation
from loraserve.settings import Settings
from loraserve.types import Struct

if TYPE_CHECKING:
    from ray.serve import Application

    from loraserve.cluster.ray import ClusterParts

logger = logging.getLogger(__name__)

STATE_FILE = "cluster.json"
_OBJECT_STORE_BYTES = 100 << 20
"""Ray's own memory for large objects: ours travel outside it."""
_START_S, _STOP_S = 600.0, 120.0
_POLL_S = 0.2
_RAY_STARTS, _MAX_REASON = 3, 300
"""Attempts to start Ray, and characters of its reason that are shown."""
_LOG_HINT = "The replicas' logs have more."

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # this machine's cluster listens on the loopback alone
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_COLOR_PREFIX": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    # it logs at each process that is started that it does nothing then
    "GRPC_VERBOSITY": "ERROR",
}
"""Variables that Ray reads when it is imported."""


class ClusterState(Struct, frozen=True):
    """State of a running cluster that other commands need."""

    pid: int
    url: str
    address: str
    """Address of Ray's head."""
    token: str
    """Token of Ray's own connections."""


def state_path(data_dir: Path) -> Path:
    """Locate the file that a cluster over this folder holds locked while it runs."""
    return data_dir / STATE_FILE


def read_state(data_dir: Path) -> ClusterState:
    """Read the state of the cluster that runs over a data folder.

    Raises:
        ConfigError: none does.
    """
    path = state_path(data_dir)
    try:
        with path.open("rb") as file:
            if not _try_lock(file):
                return msgspec.json.decode(file.read(), type=ClusterState)
    except (OSError, msgspec.DecodeError):
        pass
    raise ConfigError(
        f"No cluster runs over the data folder {data_dir}.",
        hint="Start one: loraserve cluster up --model DIR --replicas 2",
    )


def prepare_ray(token: str | None = None) -> None:
    """Set the variables that Ray reads when it is imported, and check that it is there.

    Args:
        token: of the cluster to join; None: a new one.

    Raises:
        ConfigError: the extra isn't installed.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["RAY_AUTH_TOKEN"] = token or secrets.token_hex(32)
    check_installed()


def check_installed() -> None:
    """Check that Ray Serve is there.

    Raises:
        ConfigError: the extra isn't installed.
    """
    try:
        import ray.serve  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"A cluster needs Ray Serve, and {error.name or 'it'} isn't installed.",
            hint='Install it: pip install "loraserve[ray]"',
        ) from error
    logging.getLogger("ray.serve").setLevel(logging.WARNING)


def start_ray(init: Callable[[], Any], shutdown: Callable[[], object]) -> Any:
    """Start Ray; try again where it isn't done within its own 30 s.

    On a busy machine its processes need longer the first time than the second, when their files are
    in memory.

    Raises:
        EngineUnavailable: it failed as often as it is tried.
    """
    for attempt in range(1, _RAY_STARTS + 1):
        try:
            return init()
        # Ray raises bare Exceptions here
        except Exception as error:
            shutdown()
            reason = " ".join(str(error).split())[:_MAX_REASON]
            if attempt == _RAY_STARTS:
                raise EngineUnavailable(
                    f"Ray's processes didn't start, {_RAY_STARTS} times: {reason}",
                    hint="Try again when this machine is less busy, or with fewer --replicas.",
                ) from error
            logger.warning("Ray's processes didn't start (%d of %d), trying again: %s", attempt, _RAY_STARTS, reason)
    raise InvariantViolation("Ray was never started.")


class LocalCluster:
    """Ray, Serve and the application, for one block."""

    def __init__(
        self, settings: Settings, options: ClusterOptions, make_parts: Callable[[], ClusterParts] | None = None
    ) -> None:
        """Check what can be checked without Ray.

        Args:
            make_parts: called once Ray can be imported; None: ours.

        Raises:
            ConfigError: the settings don't fit a cluster.
        """
        if settings.ssl_certfile is not None:
            raise ConfigError(
                "--ssl-certfile is for one server.",
                hint="End TLS in a proxy before the cluster.",
            )
        self._settings, self._options, self._make_parts = settings, options, make_parts
        self._listener_path: Path | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[ClusterState]:
        """Start everything, and end it with the block, streams first.

        Raises:
            ConfigError: another cluster runs over the data folder, or the port is taken.
            LoraserveError: why the application can't be had.
        """
        settings = self._settings
        settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.ExitStack() as ending:
            lock = ending.enter_context(_locked(state_path(settings.data_dir)))
            # what can fail without a registry, whose admin key is shown once
            prepare_ray()
            temp_dir = tempfile.mkdtemp(prefix="loraserve-ray-")
            ending.callback(shutil.rmtree, temp_dir, ignore_errors=True)
            listener = SharedListener(open_listener(settings.host, settings.port), Path(temp_dir) / "listener")
            ending.callback(listener.close)
            # before there are several servers, whose logs are elsewhere
            asyncio.run(prepare_registry(settings))
            state = self._start(Path(temp_dir), listener, ending)
            lock.seek(0)
            lock.truncate()
            lock.write(msgspec.json.encode(state))
            lock.flush()
            yield state

    def restart(self, settings: Settings, options: ClusterOptions) -> None:
        """Replace the ingress and the replicas one after the other, with these settings.

        Streams continue: Serve lets the old ones drain. What makes the cluster itself stays: host,
        port, data folder.

        Raises:
            LoraserveError: the new ones can't be had; the old ones stay.
        """
        from ray import serve

        from loraserve.cluster.ray import APP_NAME, QUIET

        application = self._build(settings, options)
        try:
            serve.run(application, name=APP_NAME, route_prefix="/", logging_config=QUIET)
        except RuntimeError as error:
            raise EngineUnavailable(f"Serve couldn't replace the application: {error}") from error

    def _build(self, settings: Settings, options: ClusterOptions) -> Application:
        from loraserve.cluster.ray import OURS, build

        parts = OURS if self._make_parts is None else self._make_parts()
        return build(settings, options, parts, self._listener_path)

    def _start(self, temp_dir: Path, listener: SharedListener, ending: contextlib.ExitStack) -> ClusterState:
        import ray
        from ray import serve

        from loraserve.cluster.ray import APP_NAME, QUIET

        settings, options = self._settings, self._options
        self._listener_path = listener.path
        application = self._build(settings, options)
        context = start_ray(
            lambda: ray.init(
                address="local",
                namespace=APP_NAME,
                num_cpus=max(1, round(options.most * options.cpus_per_replica + 0.5)),
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                logging_level="WARNING",
                _temp_dir=str(temp_dir),
                _system_config={"enable_worker_prestart": False, "prestart_worker_first_driver": False},
            ),
            ray.shutdown,
        )
        ending.callback(ray.shutdown)
        # the ingress answers clients itself: a piece costs more than a token by Serve's proxies
        serve.start(proxy_location="Disabled", logging_config=QUIET)
        ending.callback(_end_serve, APP_NAME)
        try:
            serve.run(application, name=APP_NAME, route_prefix="/", logging_config=QUIET)
        except RuntimeError as error:
            raise EngineUnavailable(f"Serve couldn't deploy the application: {error}", hint=_LOG_HINT) from error
        state = ClusterState(
            pid=os.getpid(),
            url=listener.url,
            address=context.address_info["gcs_address"],
            token=os.environ["RAY_AUTH_TOKEN"],
        )
        wait_until_ready(state.url)
        return state


def wait_until_ready(url: str, within_s: float = _START_S) -> None:
    """Wait until the cluster at `url` answers requests.

    Raises:
        EngineUnavailable: it doesn't in time.
    """
    deadline = time.monotonic() + within_s
    detail = "nothing answers"
    with httpx2.Client(timeout=5.0, trust_env=False) as client:
        while time.monotonic() < deadline:
            try:
                answer = client.get(f"{url}/readyz")
                if answer.status_code == httpx2.codes.OK:
                    return
                detail = answer.json().get("detail", detail)
            except (httpx2.TransportError, ValueError):
                pass
            time.sleep(_POLL_S)
    raise EngineUnavailable(f"The cluster isn't ready after {within_s:.0f} s. {detail}", hint=_LOG_HINT)


def wait_for_signal() -> signal.Signals:
    """Wait for the next SIGTERM, SIGINT or SIGHUP."""
    came = threading.Event()
    found: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        found.append(number)
        came.set()

    kept = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        # in pieces: a handler runs between two of them
        while not came.wait(_POLL_S):
            pass
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
    return signal.Signals(found[0])


def tell_to_restart(state: ClusterState) -> None:
    """Have a running cluster replace its replicas one after the other."""
    os.kill(state.pid, signal.SIGHUP)


def end_cluster(state: ClusterState, data_dir: Path) -> None:
    """End the cluster that runs over a data folder, streams first; return once it is gone.

    Raises:
        EngineUnavailable: it is still there after two minutes.
    """
    os.kill(state.pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_S
    while time.monotonic() < deadline:
        try:
            read_state(data_dir)
        except ConfigError:
            return
        time.sleep(_POLL_S)
    raise EngineUnavailable(f"The cluster (process {state.pid}) hasn't ended after {_STOP_S:.0f} s.")


def _end_serve(name: str) -> None:
    from ray import serve

    serve.delete(name)
    serve.shutdown()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[IO[bytes]]:
    """Hold the state file while a cluster runs; it is gone afterwards.

    Raises:
        ConfigError: another cluster holds it.
    """
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
        if not _try_lock(file):
            raise ConfigError(
                f"A cluster runs over the data folder {path.parent} already.",
                hint="End it with loraserve cluster down, or choose another --data-dir.",
            )
        try:
            yield file
        finally:
            path.unlink(missing_ok=True)


def _try_lock(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
