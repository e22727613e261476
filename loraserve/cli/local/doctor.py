"""``loraserve doctor``: check that this installation can serve.

It also checks that the running server has these settings.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import unquote, unquote_plus, urlsplit

import typer

from loraserve import errors
from loraserve.cli.local.serve_flags import takes_settings
from loraserve.cli.options import FormatOption, UrlOption, reporting
from loraserve.cli.output import Format, Output

if TYPE_CHECKING:
    from loraserve.doctor.checks import Check
    from loraserve.doctor.installation import TorchFacts
    from loraserve.doctor.server import Expected
    from loraserve.settings import Settings
    from loraserve.types import RoundingCost

SETTINGS = (
    "model",
    "device",
    "dtype",
    "model_impl",
    "quantize",
    "activation_dtype",
    "memory_budget",
    "adapter_dtype",
    "max_model_len",
    "num_threads",
    "tensor_parallel",
    "pipeline_parallel",
    "data_dir",
    "database_url",
    "config",
)


NO_MODEL = "/"
"""A name that no base has: without one, everything else of the settings can be looked at."""


@takes_settings(SETTINGS)
def doctor(
    url: UrlOption = None,
    precision: Annotated[
        bool,
        typer.Option("--precision", help="Load the base in a separate process and measure its rounding error."),
    ] = False,
    kernels: Annotated[
        bool,
        typer.Option(
            "--kernels",
            help="Run no other check: time every CPU kernel for linears in each format (or only --quantize's), "
            "and show which one is used.",
        ),
    ] = False,
    format: FormatOption = None,
    **settings: str | None,
) -> None:
    """Check this installation, and the server if one answers. Changes nothing.

    Flags, LORASERVE_* variables and loraserve.toml say which server, as for `serve`. With an admin
    key in LORASERVE_API_KEY most is checked. The exit code is 1 if a check failed.
    """
    flags = settings
    with reporting(format) as output:
        from loraserve.doctor.checks import Status, masked

        if kernels:
            _show_kernels(output, flags)
            return
        costs: list[RoundingCost] = []
        if precision:
            output.note("Measuring the rounding error: the base is loaded, and evaluated twice in float32 …")
        checks = masked(_checks(flags, url, costs if precision else None), _secrets(flags))
        _show(output, checks, costs)
    if any(check.status is Status.FAIL for check in checks):
        raise typer.Exit(1)


def _checks(flags: dict[str, str | None], url: str | None, costs: list[RoundingCost] | None) -> Iterator[Check]:
    """Yield all checks that these settings call for.

    Args:
        costs: what rounding costs is measured and appended; None: it isn't measured.
    """
    from loraserve.doctor import installation, storage
    from loraserve.doctor.checks import fail, run
    from loraserve.planning.machine import gpu_memory

    yield from run("python", installation.check_python)
    yield from run("packages", installation.check_packages)
    settings, problem = _settings(flags)
    probed: TorchFacts | None = None
    try:
        probed = installation.probe()
    except OSError as error:
        yield fail("torch", str(error), "a process that imports torch", installation.INSTALL)
    if probed is not None:
        dtype, device = (settings.dtype, settings.device) if settings is not None else ("auto", "auto")
        yield from installation.check_torch(probed, dtype)
        yield from installation.check_gpu(probed, device, gpu_memory())
    yield from run("files", storage.check_files)
    if settings is None:
        yield fail("settings", problem.message if problem else "", "", (problem.hint if problem else "") or "")
    else:
        yield from _of_settings(settings)
    expected: list[Expected] = []
    if settings is not None:
        yield from run("model", lambda: _model(settings, probed, expected))
        yield from run("kernels", lambda: _kernels(settings, probed))
    if costs is not None:
        yield from run("precision", lambda: _precision(expected[0] if expected else None, costs))
    served: list[str] = []
    yield from _server(url, settings, expected[0] if expected else None, served)
    if settings is not None:
        database_url = settings.resolved_database_url
        yield from run("bases", lambda: storage.check_bases(database_url, served[0] if served else None))


def _kernels(settings: Settings, probed: TorchFacts | None) -> Iterator[Check]:
    """Check the kernels that compute what the settings name, if a CPU serves."""
    from loraserve.doctor import kernels

    is_on_gpu = settings.device == "cuda" or (settings.device == "auto" and probed is not None and probed.gpu_bytes)
    formats = kernels.formats_of(settings.quantize, settings.dtype, settings.activation_dtype)
    if formats and not is_on_gpu and probed is not None:
        yield from kernels.check(kernels.tried(formats, is_quick=True))


def _show_kernels(output: Output, flags: dict[str, str | None]) -> None:
    from loraserve.doctor import kernels

    quantize = flags["quantize"]
    formats = kernels.formats_of(quantize, "", "") if quantize else ()
    output.note("Trying every kernel, a few seconds for each format …")
    try:
        found = kernels.tried(formats)
    except OSError as error:
        told = str(error)
        raise errors.ConfigError(f"{told[:1].upper()}{told[1:]}.", hint="loraserve doctor") from error
    if output.format is Format.JSON:
        output.json(found)
        return
    output.records(kernels.records(found), name="kernel")


def _settings(flags: dict[str, str | None]) -> tuple[Settings | None, errors.ConfigError | None]:
    """Load the server's settings; without a model where none is named."""
    from loraserve.settings import Settings

    try:
        return Settings.load(**flags), None
    except errors.ConfigError as error:
        problem = error
    try:
        return Settings.load(**{**flags, "model": NO_MODEL}), None
    except errors.ConfigError:
        return None, problem


def _of_settings(settings: Settings) -> Iterator[Check]:
    from loraserve.doctor import storage
    from loraserve.doctor.checks import Status, run

    yield from run("data_dir", lambda: storage.check_data_dir(settings.data_dir))
    yield from run("disk", lambda: storage.check_disk(settings.data_dir))
    database = run("database", lambda: storage.check_database(settings.resolved_database_url))
    yield from database
    if all(check.status is Status.OK for check in database):
        yield from run(
            "store", lambda: storage.check_store(settings.resolved_store_url, settings.resolved_database_url)
        )


def _model(settings: Settings, probed: TorchFacts | None, expected: list[Expected]) -> Iterator[Check]:
    """Check the base, by its headers, and how memory would be divided.

    What is expected of a server is appended.
    """
    from pathlib import Path

    import msgspec

    from loraserve.cli.output import size
    from loraserve.doctor.checks import Status, fail, ok, run, warn
    from loraserve.doctor.parallel import check_parallel
    from loraserve.doctor.server import Expected
    from loraserve.model.checkpoint.source import local_draft_dir, local_model_dir
    from loraserve.model.config.implementation import NATIVE, choose_implementation
    from loraserve.planning.base import plan_base
    from loraserve.planning.draft import plan_draft
    from loraserve.planning.machine import available_memory, gpu_memory
    from loraserve.planning.memory import load_bytes, plan_arena, plan_step

    if settings.model == NO_MODEL:
        yield warn("model", "not named", "--model, LORASERVE_MODEL or loraserve.toml", "loraserve doctor --model DIR")
        return
    model_dir = local_model_dir(Path(settings.model).expanduser())
    if not model_dir.is_dir():
        yield warn(
            "model",
            f"{settings.model} is no directory and no GGUF file",
            "one, or hf:ORG/NAME",
            "Give its directory.",
        )
        return
    config = settings.engine_config(model_dir, local_draft_dir(settings.draft_model))
    gpu_bytes = probed.gpu_bytes if probed is not None else gpu_memory()
    device = config.device if config.device != "auto" else "cuda" if gpu_bytes and probed and probed.triton else "cpu"
    parallel = run("parallel", lambda: check_parallel(config, device, probed is None or probed.gloo))
    yield from parallel
    if any(check.status is Status.FAIL for check in parallel):
        # the rest is looked at as for one process
        config = msgspec.structs.replace(config, tensor_parallel=1, pipeline_parallel=1)
    if choose_implementation(model_dir, config.model_impl) != NATIVE:
        yield ok(
            "model", f"computed by transformers' code (--model-impl {config.model_impl}); its memory isn't planned"
        )
        return
    base = plan_base(config, device)
    yield ok(
        "model", f"{base.spec.architecture}, {base.spec.quantization} on {device}: {size(base.num_bytes)} resident"
    )
    expected.append(Expected(config, base, None))
    step = plan_step(base, config)
    try:
        draft = plan_draft(config, base)
        arena = plan_arena(base, config, step, gpu_bytes, draft_kv_bytes=0 if draft is None else draft.kv_bytes)
    except (errors.ConfigError, errors.ModelError) as error:
        yield fail("memory", error.message, "", error.hint or "")
        return
    expected[0] = Expected(config, base, arena)
    needed, left = (
        base.num_bytes + step.reserved_bytes + arena.budget_bytes + config.host_cache_bytes + load_bytes(config, arena),
        available_memory(),
    )
    if draft is not None:
        needed += draft.base.num_bytes + draft.kv_bytes
    if device == "cpu" and left is not None and needed > left:
        found = f"{size(left)} available now"
        wanted = f"{size(needed)}: base, step, budget, host cache and loads"
        yield warn("memory", found, wanted, "Lower --memory-budget or --host-cache, unless a server has it already.")
    else:
        yield ok("memory", f"{size(arena.budget_bytes)} for KV and adapters ({arena.source})")


def _precision(expected: Expected | None, costs: list[RoundingCost]) -> Iterator[Check]:
    """Check what rounding costs the base that the settings name.

    It is appended to `costs` where it could be measured.
    """
    from loraserve.doctor import precision
    from loraserve.doctor.checks import fail
    from loraserve.planning.machine import available_memory

    if expected is None:
        yield fail("precision", "no base", "a base that can be loaded", "loraserve doctor --precision --model DIR")
        return
    refusals = list(precision.room(expected.base.num_bytes, expected.base.device, available_memory()))
    yield from refusals
    if not refusals:
        costs.append(precision.measure(expected.config))
        yield from precision.check(costs[-1])


def _server(
    url: str | None, settings: Settings | None, expected: Expected | None, served: list[str]
) -> Iterator[Check]:
    """Check the server that answers, if there is one.

    The digest of its base is appended to `served`.
    """
    from loraserve.doctor import server
    from loraserve.doctor.checks import fail, ok, run, warn
    from loraserve.sdk.config import DEFAULT_URL, ClientConfig

    asked = url or os.environ.get(ClientConfig.URL_VARIABLE)
    at = _checked(asked or DEFAULT_URL)
    if not server.is_there(at):
        if asked:
            yield fail(
                "server",
                f"nothing answers at {at}",
                "a running server",
                "loraserve serve --model DIR (or: loraserve demo)",
            )
        else:
            yield ok("server", f"nothing answers at {at}, and no server was named")
        return
    yield from run("server", lambda: server.check_probes(at))
    key = os.environ.get(ClientConfig.KEY_VARIABLE) or None
    if not key and settings is not None and settings.admin_key is not None:
        key = settings.admin_key.get_secret_value()
    if not key and (settings is None or settings.auth):
        yield warn(
            "key",
            "none",
            "LORASERVE_API_KEY",
            "export LORASERVE_API_KEY=…: without a key, base and budget can't be compared.",
        )
        return
    yield from run("server", lambda: server.check_server(at, key, expected))
    # what is wrong with the server or the key has just been said
    with contextlib.suppress(errors.LoraserveError):
        served.append(server.base_digest(at, key))


def _checked(url: str) -> str:
    """Check a server's URL; return its root.

    Raises:
        ConfigError: it isn't a URL, or holds a password.
    """
    from loraserve.sdk.config import ClientConfig

    # any key will do: the URL alone is looked at
    return ClientConfig.resolve(url, "none", None, 1.0, 0).url


def _secrets(flags: dict[str, Any]) -> list[str]:
    """Collect the secrets that must never be printed: keys, and passwords of databases."""
    found = [os.environ.get(name, "") for name in ("LORASERVE_API_KEY", "LORASERVE_ADMIN_KEY")]
    settings, _ = _settings(flags)
    urls = [flags.get("database_url"), os.environ.get("LORASERVE_DATABASE_URL")]
    if settings is not None:
        urls.append(settings.database_url)
        found.append(settings.admin_key.get_secret_value() if settings.admin_key is not None else "")
    for url in urls:
        found += _passwords(url or "")
    return sorted({secret for secret in found if secret}, key=len, reverse=True)


def _passwords(url: str) -> list[str]:
    """Find a URL's passwords, encoded and decoded.

    They are its user's, and those in PostgreSQL's options after the question mark.
    """
    try:
        parts = urlsplit(url)
        password = parts.password or ""
    except ValueError:
        return []
    options = (option.partition("=") for option in parts.query.split("&"))
    written = [password, *(value for name, _, value in options if "pass" in name.lower())]
    return [*written, *map(unquote_plus, written), *map(unquote, written)]


def _show(output: Output, checks: list[Check], costs: list[RoundingCost]) -> None:
    if output.format is Format.JSON:
        import msgspec

        is_ok = all(check.status != "fail" for check in checks)
        shown: dict[str, Any] = {"is_ok": is_ok, "checks": [asdict(check) for check in checks]}
        if costs:
            shown["precision"] = msgspec.to_builtins(costs[0])
        output.json(shown)
        return
    for check in checks:
        if output.format is Format.QUIET:
            if check.status != "ok":
                output.line(check.name)
            continue
        rest = f"; expected {check.expected}" if check.expected and check.status != "ok" else ""
        rest += f". {check.next}" if check.next else ""
        output.state_line(str(check.status), f"{check.status:<4}", f"  {check.name:<14}  {check.found}{rest}")
