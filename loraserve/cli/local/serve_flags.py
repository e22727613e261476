"""Flags that are settings.

Each is a field of `loraserve.settings.Settings`, which checks it and holds its help.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer

from loraserve.cli.help import Command

F = TypeVar("F", bound=Callable[..., Any])

SERVE = "As for serve"
"""The section of these flags in the help of other commands."""
SECTIONS = {
    "Model": "model model_id model_aliases base_names strict_base device dtype model_impl quantize activation_dtype "
    "max_model_len tool_call_parser reasoning_parser generation_config chat_template default_chat_template_kwargs "
    "json_whitespace json_numbers",
    "Engine": "memory_budget memory_utilization adapter_dtype adapter_rank_error max_adapter_loss certify "
    "strict_certificates host_cache max_num_seqs max_num_batched_tokens max_inter_token_ms enable_prefix_cache "
    "speculation draft_model draft_quantize cuda_graphs num_threads tensor_parallel pipeline_parallel loader_threads",
    "Storage": "data_dir database_url store_url retention_s store_responses pull_allow lora_dir ephemeral_loads "
    "ephemeral_ttl_s ephemeral_memory result_cache_bytes",
    "Server": "host port auth ssl_certfile ssl_keyfile trusted_proxies client_address_source "
    "management_requests_per_minute console router_metrics "
    "cors_allow_origins grace_s whole_answer_keep_alive_s "
    "engine_hang_timeout log_level access_log trace_endpoint trace_sample config",
}
"""Flags of `serve`, by their section in its help.

The admin key isn't a flag: a process list would show it.
"""
SWITCHES = frozenset(
    {
        "strict_base",
        "strict_certificates",
        "store_responses",
        "ephemeral_loads",
        "enable_prefix_cache",
        "cuda_graphs",
        "access_log",
        "auth",
        "console",
        "router_metrics",
    }
)
VALUES = {
    "BYTES": "memory_budget host_cache ephemeral_memory result_cache_bytes",
    "SECONDS": "retention_s ephemeral_ttl_s grace_s engine_hang_timeout whole_answer_keep_alive_s",
    "PATH": "data_dir config ssl_certfile ssl_keyfile",
    "FILE": "chat_template",
    "DIR": "lora_dir draft_model",
    "URL": "database_url store_url trace_endpoint",
    "FRACTION": "memory_utilization adapter_rank_error max_adapter_loss trace_sample",
    "TOKENS": "max_model_len max_num_batched_tokens",
    "MS|auto|off": "max_inter_token_ms",
    "N": "max_num_seqs num_threads tensor_parallel pipeline_parallel loader_threads port "
    "management_requests_per_minute",
    "DIR|ID": "model",
    "NAME": "model_id",
    "NAME,…": "base_names",
    "PATTERN=MODEL,…": "model_aliases",
    "PATTERN,…": "pull_allow",
    "ORIGIN,…": "cors_allow_origins",
    "CIDR,…": "trusted_proxies",
    "ADDRESS": "host",
    "PARSER": "tool_call_parser",
    "JSON": "default_chat_template_kwargs",
}
"""Names of values in the help; those with a short choice show it."""
_MAX_CHOICES = 60
"""Characters of a choice that stand next to its flag; a longer one is listed after its help."""


def takes_settings(names: Sequence[str] | None = None) -> Callable[[F], F]:
    """Give a command these settings as flags, or all.

    It gets them as ``**settings``, None for those not given. Values are passed on as they are
    written, so that a flag, a variable and a line of loraserve.toml are checked by one rule and
    refused in the same words.
    """

    def add(function: F) -> F:
        signature = inspect.signature(function, eval_str=True)
        flags = [
            _flag(name, section if names is None else SERVE)
            for section, of_section in SECTIONS.items()
            for name in of_section.split()
            if names is None or name in names
        ]
        own = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in signature.parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        parameters = [*flags, *own]
        function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters} | {"return": None}
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return function

    return add


def _flag(name: str, section: str) -> inspect.Parameter:
    flag = f"--{name.replace('_', '-')}"
    is_switch = name in SWITCHES
    option = typer.Option(f"{flag}/--no-{flag[2:]}" if is_switch else flag, rich_help_panel=section)
    annotation = Annotated[bool | None, option] if is_switch else Annotated[str | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


class SettingsCommand(Command):
    """A command with settings as flags.

    `Settings` describes them, and is loaded only when help is shown.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        from loraserve.settings import ENV_PREFIX, Settings

        params: list[Any] = self.get_params(ctx)
        for param in params:
            if getattr(param, "help", "") is not None or param.name not in Settings.model_fields:
                continue
            field = Settings.model_fields[param.name]
            default = _default_text(field.default)
            facts = [f"env var: {ENV_PREFIX}{param.name.upper()}", *([f"default: {default}"] if default else [])]
            words = " ".join((field.description or "").split())
            choices = _choices(field.annotation)
            if len("|".join(choices)) > _MAX_CHOICES:
                words = f"{words} One of {', '.join(choices)}."
            param.help = f"{words}  [{'; '.join(facts)}]"
            if param.name not in SWITCHES:
                param.metavar = _value_name(param.name, choices)
        super().format_options(ctx, formatter)


def _choices(annotation: Any) -> tuple[str, ...]:
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _value_name(name: str, choices: Sequence[str]) -> str:
    if 0 < len("|".join(choices)) <= _MAX_CHOICES:
        return "|".join(choices)
    return next(value for value, names in VALUES.items() if name in names.split())


def _default_text(default: object) -> str | None:
    match default:
        case bool():
            return "on" if default else "off"
        case int() if default >= 1 << 30:
            return f"{default >> 30}GiB"
        case int() | float():
            return f"{default:.10g}"
        case str() | Path():
            return str(default)
    return None
