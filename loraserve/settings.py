"""The server's settings: flags, then LORASERVE_* variables, then loraserve.toml, then defaults."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

import platformdirs
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PositiveFloat,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from loraserve.config import EngineConfig
from loraserve.errors import ConfigError, closest
from loraserve.hub import HubAddress, is_hub
from loraserve.limits import (
    DEFAULT_EPHEMERAL_BYTES,
    DEFAULT_EPHEMERAL_TTL_S,
    DEFAULT_RESULT_CACHE_BYTES,
    GIB,
    LIMITS,
    UNBOUNDED_S,
)
from loraserve.template_variables import check_variables, parse_variables

ENV_PREFIX = "LORASERVE_"
DEFAULT_CONFIG_FILE = "loraserve.toml"

# Read by the command line, the SDK and the tests, not by the server.
_OTHER_VARIABLES = frozenset(
    {
        "LORASERVE_URL",
        "LORASERVE_API_KEY",
        "LORASERVE_TENANT",
        "LORASERVE_FORMAT",
        "LORASERVE_HISTORY",
        "LORASERVE_FAULTS",
    }
)
_OTHER_PREFIXES = ("LORASERVE_TEST_",)

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")
_UNITS = {"": 1, "b": 1}
_UNITS |= {unit: 1000**power for power, unit in enumerate(("kb", "mb", "gb", "tb"), start=1)}
_UNITS |= {unit: 1024**power for power, unit in enumerate(("kib", "mib", "gib", "tib"), start=1)}


def parse_size(value: object) -> int:
    """Parse ``8GiB``, ``500 MB``, ``1.5GiB`` or a plain number of bytes.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError("should be a size such as 8GiB, 500MB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2].lower()])


Size = Annotated[int, BeforeValidator(parse_size), Field(ge=1 << 20, le=1 << 50)]
OptionalSize = Annotated[int, BeforeValidator(parse_size), Field(ge=0, le=1 << 50)]


def parse_patterns(value: object) -> object:
    """Return the parts of ``hf://acme/*, s3://models/*``; a list is one already."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return tuple(value) if isinstance(value, list) else value


def check_pattern(value: str) -> str:
    """Return the pattern if it could match something that can be pulled.

    Raises:
        ValueError: it couldn't.
    """
    if not re.fullmatch(r"(hf|s3)://[A-Za-z0-9!_.*'()=/-]+", value) or ".." in value:
        raise ValueError("should be patterns such as hf://acme/* or s3://models/adapters/*")
    return value


# NoDecode: a variable holds them with commas between, not as JSON.
Patterns = Annotated[
    tuple[Annotated[str, AfterValidator(check_pattern)], ...], NoDecode, BeforeValidator(parse_patterns)
]


def check_origins(values: tuple[str, ...]) -> tuple[str, ...]:
    """Return the origins if a browser could send each, or if they are ``*`` alone.

    Raises:
        ValueError: one isn't an origin, or ``*`` stands beside others.
    """
    if values == ("*",):
        return values
    for value in values:
        if not re.fullmatch(r"[a-z][a-z0-9+.-]{0,31}://[a-z0-9._:\[\]-]{1,253}", value):
            raise ValueError(
                "should be origins such as https://app.example.org or http://localhost:3000, in lower case and "
                "without a path, or * alone"
            )
    return values


def check_networks(values: tuple[str, ...]) -> tuple[str, ...]:
    """Return the networks if each is an address or a CIDR.

    Raises:
        ValueError: one isn't.
    """
    for value in values:
        try:
            ip_network(value)
        except ValueError:
            raise ValueError(
                "should be addresses or networks such as 10.0.0.7, 10.0.0.0/8 or fd00::/8, without bits beyond the "
                f"prefix; found {value[:64]!r}"
            ) from None
    return values


Networks = Annotated[tuple[str, ...], NoDecode, BeforeValidator(parse_patterns), AfterValidator(check_networks)]

Origins = Annotated[tuple[str, ...], NoDecode, BeforeValidator(parse_patterns), AfterValidator(check_origins)]

Names = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=1024)], ...], NoDecode, BeforeValidator(parse_patterns)
]


def check_model_aliases(values: tuple[str, ...]) -> tuple[str, ...]:
    """Return aliases of models as they are.

    Raises:
        ValueError: one isn't a pattern and a model.
    """
    for value in values:
        pattern, _, model = value.partition("=")
        if not pattern.strip() or not model.strip():
            raise ValueError("should be PATTERN=MODEL, separated by commas, such as claude-*=sql,gpt-4o=base")
    return values


ModelAliases = Annotated[Names, AfterValidator(check_model_aliases)]


def check_trace_endpoint(value: str) -> str:
    """Return the URL to which traces are posted: one without a path gets OTLP's.

    Raises:
        ValueError: it isn't a URL of HTTP, or holds a password.
    """
    url = urlsplit(value)
    # a port that is none raises too
    is_url = url.scheme in ("http", "https") and url.hostname and url.port != 0
    if not is_url or url.query or url.fragment or not value.isascii():
        raise ValueError("should be a URL such as http://collector:4318 or https://collector/v1/traces")
    if url.username is not None or url.password is not None:
        raise ValueError("should hold no password; set OTEL_EXPORTER_OTLP_HEADERS for the collector's")
    return value if url.path.strip("/") else f"{value.rstrip('/')}/v1/traces"


TraceEndpoint = Annotated[str, Field(min_length=1, max_length=2048), AfterValidator(check_trace_endpoint)]


def parse_template_variables(value: object) -> object:
    """Return the object in JSON; a table of the TOML file is one already.

    Raises:
        ValueError: it isn't one, or sets what a request's own fields do.
    """
    return parse_variables(value) if isinstance(value, str) else check_variables(value)


TemplateVariables = Annotated[dict[str, Any], NoDecode, BeforeValidator(parse_template_variables)]

# The names of `loraserve.text`'s tables, which a test compares: settings load none of it.
ToolCallParser = Literal[
    "auto",
    "none",
    "functiongemma",
    "generic",
    "granite",
    "granite4",
    "hermes",
    "llama3_json",
    "llama4_json",
    "llama4_pythonic",
    "mistral",
    "phi4_mini_json",
    "pythonic",
    "qwen3_coder",
    "qwen3_xml",
]
ReasoningParserName = Literal["auto", "none", "deepseek_r1", "granite", "mistral", "qwen3"]


class Settings(BaseSettings):
    """The settings of ``loraserve serve``, complete and checked. Make them with `Settings.load`.

    Every field is the flag ``--field-name``, the variable ``LORASERVE_FIELD_NAME`` and the key
    ``field_name`` of the TOML file.
    """

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )

    config: Path | None = None
    """The TOML file. Default: loraserve.toml in the current directory, if it exists."""

    model: str = Field(min_length=1)
    """A directory in Hugging Face's layout, a GGUF file, or what the hub has:
    hf:ORG/NAME[@REVISION][:FILE], or ORG/NAME.
    """
    model_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}$")
    """Name of the base in requests' `model`.

    Letters, digits and ``. _ - / :``. Default: the directory's or the file's name, or the Hugging
    Face id.
    """
    model_aliases: ModelAliases = ()
    """Models that answer for names that a tenant has none of, as PATTERN=MODEL, separated by
    commas: claude-*=sql,gpt-4o=base. The first pattern (of * and ?) that fits counts; *=MODEL is
    for all.
    """
    base_names: Names = ()
    """Other names of the base that adapters' configs may carry without a warning, separated by
    commas.
    """
    strict_base: bool = False
    """Reject adapters whose config names another base, instead of a warning."""
    tool_call_parser: ToolCallParser = "auto"
    """Format of the base's tool calls; auto: recognized in its chat template; none: tools are
    refused."""
    reasoning_parser: ReasoningParserName = "auto"
    """Format of the base's reasoning; auto: recognized in its chat template; none: reasoning stays
    in the answer."""
    generation_config: Literal["auto", "none"] = "auto"
    """Defaults of fields that a request doesn't send: auto: those of the base's
    generation_config.json; none: the API's own.
    """
    chat_template: Annotated[Path, AfterValidator(Path.absolute)] | None = None
    """Jinja file with the chat template of the base, and of versions without one of their own.

    Default: the checkpoint's.
    """
    default_chat_template_kwargs: TemplateVariables = Field(default={})
    """Variables of chat templates, as a JSON object, that versions and requests may set otherwise:
    {"enable_thinking": false}.
    """
    json_whitespace: Literal["one-line", "bounded", "any"] = "one-line"
    """White space in answers that are JSON: single spaces after commas and colons, these and
    indented lines, or as much as JSON allows.
    """
    json_numbers: Literal["bounded", "any"] = "bounded"
    """Digits of numbers in answers that are JSON, where a schema doesn't bound them: at most 19
    before the point and 9 behind it, or any number.
    """
    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 picks a free one."""
    auth: bool = True
    """Require a key of each request. Without (for --host 127.0.0.1 alone), a request that has no
    valid key is an admin's, for the tenant "default" or the one in X-Tenant.
    """
    data_dir: Path = Field(default_factory=lambda: Path(platformdirs.user_data_dir("loraserve")))
    """Directory of the SQLite registry and the adapters' files. Default: the user's data folder."""
    database_url: str | None = None
    """Database of the registry: sqlite:///… or postgresql://….

    Default: SQLite in the data directory.
    """
    store_url: str | None = None
    """Store of the adapters' files: file:///… or s3://…. Default: the data directory."""
    retention_s: float = Field(default=7 * 86_400.0, ge=0, le=10 * 365 * 86_400.0)
    """How long deleted adapters can be restored; their files are collected after that."""
    pull_allow: Patterns = ()
    """Sources that admins may pull adapters from: hf://ORG/*, s3://BUCKET/PREFIX/*.

    Default: none.
    """
    lora_dir: str | None = Field(default=None, min_length=1)
    """Directory below which requests to /v1/load_lora_adapter may name adapters by their path;
    {tenant} in it stands for the name of the request's tenant. Default: none.
    """
    store_responses: bool = True
    """Store the input and output of /v1/responses for 30 days, so that later responses can continue
    them, unless a request has "store": false.
    """
    result_cache_bytes: OptionalSize = DEFAULT_RESULT_CACHE_BYTES
    """Memory of the server for answers to deterministic requests that ask to be kept ("cache"), of
    tenants that may; 0: none are kept.
    """
    ephemeral_loads: bool = False
    """Hold adapters that vLLM's and SGLang's routes load in memory alone, unless the request says
    otherwise: nothing of them is stored, and a restart forgets them.
    """
    ephemeral_ttl_s: float = Field(
        default=DEFAULT_EPHEMERAL_TTL_S, ge=LIMITS.min_ephemeral_ttl_s, le=LIMITS.max_ephemeral_ttl_s
    )
    """How long after its load an ephemeral adapter is unloaded, unless the request says."""
    ephemeral_memory: Size = DEFAULT_EPHEMERAL_BYTES
    """Memory of the server for ephemeral adapters; a tenant may have as much of it as is free."""
    admin_key: SecretStr | None = None
    """The first admin key, of 32 characters or more. Default: one is made and printed."""
    ssl_certfile: Path | None = None
    """Certificate chain in PEM: the server speaks HTTPS. Default: it speaks HTTP."""
    ssl_keyfile: Path | None = None
    """Key of the certificate in PEM, without a passphrase. Default: it is in --ssl-certfile."""
    trusted_proxies: Networks = ()
    """Proxies whose word on their clients' addresses is taken, by address or CIDR, separated by
    commas. Default: none.
    """
    client_address_source: Literal["x-forwarded-for", "forwarded", "proxy-protocol"] = "x-forwarded-for"
    """Where trusted proxies say their client's address: in one of these headers, or before the
    connection's first byte (PROXY protocol, version 1 or 2).
    """
    management_requests_per_minute: int = Field(default=3000, ge=0)
    """Requests to /api/v1 per minute of a tenant, of which one key may make three quarters; 0: any
    number. Operators' are not counted.
    """
    cors_allow_origins: Origins = ()
    """Web pages that may call this server from a browser, by origin, separated by commas; *: all.

    Default: none.
    """
    console: bool = True
    """Serve the web console at /console/."""
    router_metrics: bool = False
    """Serve the metrics that routers read at /metrics/router, without a key.

    They name the adapters in use, and no tenant. Routers such as the Gateway API's endpoint picker
    can't send a key.
    """
    whole_answer_keep_alive_s: float | None = Field(default=None, gt=0, le=3600)
    """Write a space each time that a whole answer isn't there after so long: proxies and clients
    end connections that are silent. Its status is 200 from then on, whatever its body says.

    Default: write nothing before the answer is there.
    """
    grace_s: float = Field(default=30.0, ge=0, le=3600)
    """How long running requests may continue after SIGTERM."""
    engine_hang_timeout: float = Field(default=30.0, ge=1, le=86_400)
    """Replace an engine that makes no progress for this long; four times as long while it loads the
    base.
    """
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe messages to log."""
    access_log: bool = True
    """Log a line for each request: its model, tenant, tokens and times, nothing of its text."""
    trace_endpoint: TraceEndpoint | None = None
    """OpenTelemetry collector that traces are sent to by OTLP over HTTP: http://collector:4318.

    Needs the extra otel. Default: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, OTEL_EXPORTER_OTLP_ENDPOINT;
    without these nothing is traced.
    """
    trace_sample: float | None = Field(default=None, ge=0, le=1)
    """Share of the requests to trace, of those that don't come with a sampling decision.

    Default: OTEL_TRACES_SAMPLER, or all.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the engine; auto: a GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of activations and of weights that aren't quantized."""
    model_impl: Literal["auto", "native", "transformers"] = "auto"
    """Code that computes the base: loraserve's own, or transformers' with loraserve's attention and
    linears; auto: loraserve's own for each architecture that it has.
    """
    quantize: Literal["none", "int8", "int4", "nf4", "fp8"] = "none"
    """Format that a float checkpoint's linears are rounded to while loading; none: as stored."""
    activation_dtype: Literal["auto", "int8", "float"] = "auto"
    """Activations that int8 and int4 linears multiply on a CPU: rounded to int8, or float.

    auto and int8: by row where weights are rotated (--quantize int8 or int4, and checkpoints of
    loraserve quantize), in groups of 32 inputs where a checkpoint stores int8 or int4 otherwise.
    """
    memory_budget: Size | None = None
    """Memory for KV blocks and adapters together.

    Default: 8GiB on a CPU, all free memory on a GPU.
    """
    memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory that the engine may use in all, if no budget is given."""
    adapter_dtype: Literal["auto", "fp32", "bf16", "fp16", "int8"] = "auto"
    """Data type of adapters in memory; auto: on a GPU the activations', on a CPU as stored. fp32 is
    for CPUs.
    """
    adapter_rank_error: float | None = Field(default=None, gt=0, lt=1)
    """Reduce each module of an adapter to the fewest ranks within this relative (Frobenius) error,
    e.g. 0.01. Default: keep all ranks.
    """
    max_adapter_loss: float | None = Field(default=None, ge=0, le=1)
    """Reject adapters whose precision loss in any module exceeds this value, e.g. 0.02.

    Default: reject none.
    """
    certify: Literal["at-upload", "on-request"] = "at-upload"
    """When adapters are certified: uploads wait for a pass over the base's weights, or `adapter
    verify` runs it.
    """
    strict_certificates: bool = False
    """Reject adapters whose certificate isn't passed: rounding the base takes too much of their
    effect, or that can't be measured.
    """
    cuda_graphs: bool = True
    """Capture a GPU's decode steps as CUDA graphs."""
    host_cache: Size = 4 * GIB
    """Host memory for adapters that are not on the device."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Longest prompt and answer together. Default: as the model's config says."""
    max_num_seqs: int = Field(default=64, ge=1, le=4096)
    """Most sequences in one step."""
    max_num_batched_tokens: int = Field(default=512, ge=16, le=1 << 20)
    """Most tokens in one step."""
    max_inter_token_ms: Literal["auto", "off"] | PositiveFloat = "auto"  # noqa: S105 - no secret
    """Milliseconds between a running stream's tokens while prompts are read, which are spread over
    more steps; auto: four times what streams take without prompts, and at least 30; off: no bound.
    """
    enable_prefix_cache: bool = True
    """Reuse the KV blocks of equal prompt prefixes."""
    speculation: Literal["auto", "off"] = "auto"
    """Verify several tokens in one step that earlier text suggests, where this saves time and can't
    change an answer; auto: on CPUs.
    """
    draft_model: Path | None = None
    """Directory or hf:ORG/NAME of a small base with the same tokenizer, which proposes tokens too.
    CPUs only.
    """
    draft_quantize: Literal["auto", "none", "int8", "int4", "nf4", "fp8"] = "auto"
    """Format that the draft base's linears are rounded to; auto: as --quantize."""
    num_threads: int = Field(default=0, ge=0, le=1024)
    """Threads of the forward pass; 0: torch's own choice, shared out among the ranks."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Processes that share each layer and its KV cache, each with a part of both. CPUs only."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """Stages that share the base and its KV cache, each with some of the layers and as many
    processes as --tensor-parallel says. CPUs only.
    """
    loader_threads: int = Field(default=2, ge=1, le=64)
    """Threads that load adapters."""

    @classmethod
    def load(cls, **flags: object) -> Settings:
        """Load and check the settings; a flag that is None wasn't given.

        Raises:
            ConfigError: a flag, a variable or a key is unknown, missing or impossible. The message
                says which, and where it came from.
        """
        given = {name: value for name, value in flags.items() if value is not None}
        _refuse_unknown_variables(cls)
        try:
            return cls(**given)  # type: ignore[arg-type]
        except ValidationError as error:
            raise _config_error(cls, error, given) from None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, InitSettingsSource(settings_cls, _read_toml(cls, init_settings()))

    @field_validator("admin_key")
    @classmethod
    def _check_admin_key(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and len(value.get_secret_value()) < 32:
            raise ValueError("should have 32 characters or more")
        return value

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("--ssl-keyfile needs --ssl-certfile, the certificate that it belongs to")
        return self

    @model_validator(mode="after")
    def _check_no_auth(self) -> Self:
        if self.auth:
            return self
        if self.host != "127.0.0.1":
            raise ValueError(
                "--no-auth makes every request an admin's, and is for --host 127.0.0.1 alone; --host is "
                f"{self.host[:64]}: leave out one of the two"
            )
        if self.trusted_proxies:
            raise ValueError(
                "--no-auth is for clients on this machine; leave out --trusted-proxies, whose are elsewhere"
            )
        if self.cors_allow_origins == ("*",):
            raise ValueError(
                "--no-auth lets every page in with --cors-allow-origins *; name the pages' origins instead"
            )
        return self

    @model_validator(mode="after")
    def _check_certificates(self) -> Self:
        if self.strict_certificates and self.certify == "on-request":
            raise ValueError("--strict-certificates needs --certify at-upload: uploads get no certificate otherwise")
        return self

    @property
    def resolved_database_url(self) -> str:
        return self.database_url or f"sqlite:///{(self.data_dir / 'registry.db').absolute()}"

    @property
    def resolved_store_url(self) -> str:
        return self.store_url or (self.data_dir / "blobs").absolute().as_uri()

    @property
    def model_source(self) -> str:
        """The model as adapters' configs may name it: a path, or the hub's id."""
        return HubAddress.parse(self.model).repo if is_hub(self.model) else self.model

    @property
    def base_id(self) -> str:
        """The base model's name in requests."""
        if self.model_id:
            return self.model_id
        if is_hub(self.model):
            return self.model_source
        path = Path(self.model)
        if path.suffix == ".gguf":
            return path.stem
        return path.resolve().name if path.is_dir() else self.model

    def engine_config(self, model_dir: str | Path, draft_dir: Path | None = None) -> EngineConfig:
        """Return the engine's configuration.

        The engine resolves ``auto``: the server's process knows no devices.

        Raises:
            ConfigError: flags that contradict each other.
        """
        if self.device == "cuda" and self.adapter_dtype == "fp32":
            raise ConfigError(
                "--adapter-dtype fp32 is for CPUs; a GPU holds adapters in at most 16 bits.",
                hint="Leave --adapter-dtype out.",
            )
        draft = draft_dir or self.draft_model
        self._check_draft(draft)
        return EngineConfig(
            model_dir=str(Path(model_dir).absolute()),
            model_id=self.base_id,
            chat_template_file=None if self.chat_template is None else str(self.chat_template),
            store_url=self.resolved_store_url,
            device=self.device,
            dtype=self.dtype,
            model_impl=self.model_impl,
            quantize=self.quantize,
            activation_dtype=self.activation_dtype,
            memory_budget_bytes=self.memory_budget or 0,
            memory_utilization=self.memory_utilization,
            adapter_dtype=self.adapter_dtype,
            adapter_rank_error=self.adapter_rank_error,
            max_adapter_loss=self.max_adapter_loss,
            cuda_graphs=self.cuda_graphs,
            host_cache_bytes=self.host_cache,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_inter_token_s=self._max_inter_token_s(),
            enable_prefix_cache=self.enable_prefix_cache,
            speculation=self.speculation,
            draft_model_dir=None if draft is None else str(draft.absolute()),
            draft_quantize=self.quantize if self.draft_quantize == "auto" else self.draft_quantize,
            num_threads=self.num_threads,
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
            loader_threads=self.loader_threads,
        )

    def _max_inter_token_s(self) -> float | None:
        match self.max_inter_token_ms:
            case "auto":
                return None
            case "off":
                return UNBOUNDED_S
            case milliseconds:
                return milliseconds / 1e3

    def _check_draft(self, draft: Path | None) -> None:
        """Refuse a draft base that could never be asked.

        Raises:
            ConfigError: it is no directory, or another flag stands against it.
        """
        if draft is None:
            if self.draft_quantize != "auto":
                raise ConfigError(
                    "--draft-quantize is for a draft base, and there is none.", hint="Give --draft-model too."
                )
            return
        if self.speculation == "off":
            raise ConfigError(
                "--draft-model proposes tokens, and --speculation off refuses them.",
                hint="Leave one of the two out.",
            )
        if self.device == "cuda":
            raise ConfigError(
                "--draft-model is for CPUs: a GPU's steps overlap, and verify no proposed tokens.",
                hint="Leave --draft-model out, or use --device cpu.",
            )
        # a path that the system can't have is no directory either
        if not os.path.isdir(draft):
            raise ConfigError(
                f"--draft-model {self.draft_model} isn't a directory; expected a base in Hugging Face's layout."
            )


def _read_toml(cls: type[Settings], init_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the file's keys; none if no file was named and the current directory has none."""
    named = init_kwargs.get("config") or os.environ.get(f"{ENV_PREFIX}CONFIG")
    path = Path(named or DEFAULT_CONFIG_FILE)
    if not path.is_file():
        if named:
            raise ConfigError(f"The configuration file {path} doesn't exist.")
        return {}
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    # --memory-budget is written memory-budget by some and memory_budget by others
    values = {key.replace("-", "_"): value for key, value in values.items()}
    if unknown := sorted(values.keys() - cls.model_fields.keys()):
        shown = ", ".join(f"{key}{_guess(key, cls.model_fields)}" for key in unknown)
        raise ConfigError(f"{path} has unknown keys: {shown}.", hint=_known(cls))
    return values


def _refuse_unknown_variables(cls: type[Settings]) -> None:
    known = {f"{ENV_PREFIX}{name}".upper() for name in cls.model_fields} | _OTHER_VARIABLES
    unknown = [
        name
        for name in sorted(os.environ)
        if name.upper().startswith(ENV_PREFIX)
        and name.upper() not in known
        and not name.upper().startswith(_OTHER_PREFIXES)
    ]
    if unknown:
        shown = ", ".join(f"{name}{_guess(name, known)}" for name in unknown)
        raise ConfigError(f"Unknown environment variables: {shown}.", hint=_known(cls))


def _config_error(cls: type[Settings], error: ValidationError, flags: dict[str, object]) -> ConfigError:
    reasons = []
    for problem in error.errors(include_url=False):
        message = problem["msg"].removeprefix("Value error, ")
        if not problem["loc"]:
            # of several settings together: it names them itself
            reasons.append(message)
            continue
        name = str(problem["loc"][0])
        flag = f"--{name.replace('_', '-')}"
        if problem["type"] == "missing":
            reasons.append(f"{flag} is required (or {ENV_PREFIX}{name.upper()}, or `{name}` in {DEFAULT_CONFIG_FILE})")
            continue
        if problem["type"] == "extra_forbidden":
            reasons.append(f"{flag} is unknown")
            continue
        if name in flags:
            source = flag
        elif f"{ENV_PREFIX}{name.upper()}" in {key.upper() for key in os.environ}:
            source = f"{ENV_PREFIX}{name.upper()}"
        else:
            source = f"`{name}` in {DEFAULT_CONFIG_FILE}"
        guess = _guess(problem["input"], _literals(problem)) if problem["type"] == "literal_error" else ""
        reasons.append(f"{source}: {message[:1].lower()}{message[1:]}{guess}")
    return ConfigError("; ".join(reasons) + ".")


def _literals(problem: Mapping[str, Any]) -> list[str]:
    """List the words that a setting may be, of pydantic's error."""
    return re.findall(r"'([^']*)'", str(problem["ctx"]["expected"]))


def _guess(word: object, known: Iterable[str]) -> str:
    """Format the known word that may be meant by a mistyped one; empty: none is near."""
    found = closest(word, known) if isinstance(word, str) else None
    return "" if found is None else f" (did you mean {found}?)"


def _known(cls: type[Settings]) -> str:
    return f"Known: {', '.join(sorted(cls.model_fields))}."
