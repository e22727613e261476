"""The Gateway API's endpoint picker (EPP), as far as it reads and scores a model server.

Written after the sources of llm-d's router (``llm-d/llm-d-inference-scheduler``, May 2026: the data
source ``metrics-data-source``, ``core-metrics-extractor``, and the scorers of LoRA affinity, queue
and KV cache), which ``kubernetes-sigs/gateway-api-inference-extension`` 1.5.0 has too, and of that
one's earlier releases (``pkg/epp/backend/metrics``). Both are Apache-2.0. No package registry has
a binary of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import httpx2

QUEUED, RUNNING, KV_USAGE = "vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"
LORA, CACHE = "vllm:lora_requests_info", "vllm:cache_config_info"
"""What both read if they aren't told otherwise: their engine ``vllm``."""

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"'
_SAMPLE = re.compile(rf"({_NAME})(?:\{{((?:{_LABEL},?)*)\}})? (\S+)(?: (-?\d+))?")
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}
_SUFFIXES = ("_bucket", "_sum", "_count")


@dataclass(frozen=True)
class Metric:
    labels: tuple[tuple[str, str], ...]
    value: float
    timestamp_ms: int = 0


@dataclass(frozen=True)
class Endpoint:
    """What the picker knows of a server."""

    waiting_queue_size: int = 0
    running_requests_size: int = 0
    kv_cache_usage_percent: float = 0.0
    active_models: frozenset[str] = frozenset()
    waiting_models: frozenset[str] = frozenset()
    max_active_models: int = 0
    cache_block_size: int = 0
    cache_num_blocks: int = 0
    errors: tuple[str, ...] = field(default=(), compare=False)


def scrape(client: httpx2.Client, url: str) -> dict[str, list[Metric]]:
    """Ask as Go's client does, which sends no key; anything but 200 is an error."""
    headers = {"user-agent": "Go-http-client/1.1", "accept-encoding": "gzip", "accept": ""}
    response = client.get(url, headers=headers)
    assert response.status_code == 200, f"unexpected status code: {response.status_code}"
    return parse(response.text)


def parse(text: str) -> dict[str, list[Metric]]:
    """Parse as `expfmt.TextParser` does under its legacy rules for names: one wrong line, and the
    whole scrape is lost.
    """
    families: dict[str, list[Metric]] = {}
    kinds: dict[str, str] = {}
    if not text.endswith("\n"):
        raise ValueError("unexpected end of input stream")
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            if name in kinds or name in families:
                raise ValueError(f"second TYPE line for metric name {name!r}, or TYPE reported after samples")
            kinds[name] = kind
            continue
        if line.startswith("#") or not line.strip():
            continue
        match = _SAMPLE.fullmatch(line)
        if match is None:
            raise ValueError(f"text format parsing error in {line!r}")
        name = match[1]
        for suffix in _SUFFIXES:
            if name.removesuffix(suffix) != name and kinds.get(name.removesuffix(suffix)) in ("histogram", "summary"):
                name = name.removesuffix(suffix)
        labels = tuple((key, re.sub(r"\\.", _unescape, value)) for key, value in re.findall(_LABEL, match[2] or ""))
        if len(dict(labels)) != len(labels):
            raise ValueError(f"duplicate label names for metric {name!r}")
        families.setdefault(name, []).append(Metric(labels, float(match[5]), int(match[6] or 0)))
    return families


def _unescape(match: re.Match[str]) -> str:
    return _ESCAPES[match[0]]


def read(families: dict[str, list[Metric]], known: Endpoint = Endpoint()) -> Endpoint:
    """`core-metrics-extractor`: take what is there, and keep the rest as it was known."""
    errors: list[str] = []
    found = known
    if (queued := _newest(families, QUEUED, errors)) is not None:
        found = replace(found, waiting_queue_size=int(queued.value))
    if (running := _newest(families, RUNNING, errors)) is not None:
        found = replace(found, running_requests_size=int(running.value))
    if (kv_usage := _newest(families, KV_USAGE, errors)) is not None:
        found = replace(found, kv_cache_usage_percent=float(kv_usage.value))
    if not families.get(LORA):
        errors.append(f'metric family "{LORA}" not found')
    else:
        # each set of labels is a series, whose value is the time: the latest counts
        found = _with_adapters(found, max(families[LORA], key=lambda metric: metric.value), errors)
    cache = _newest(families, CACHE, errors)
    for name, value in () if cache is None else cache.labels:
        if name == "block_size":
            found = replace(found, cache_block_size=_atoi(value, errors))
        if name == "num_gpu_blocks":
            found = replace(found, cache_num_blocks=_atoi(value, errors))
    return replace(found, errors=tuple(errors))


def read_legacy(families: dict[str, list[Metric]], known: Endpoint = Endpoint()) -> Endpoint:
    """Read as the picker of the inference extension before 1.5 did.

    Series without any adapter aren't looked at, and names aren't trimmed.
    """
    busy = [
        metric for metric in families.get(LORA, []) if any(value for name, value in metric.labels if name in _LISTS)
    ]
    if not busy:
        others = {name: metrics for name, metrics in families.items() if name != LORA}
        return replace(
            read({**others, LORA: [Metric((), 0.0)]}, known),
            active_models=known.active_models,
            waiting_models=known.waiting_models,
        )
    found = read({**families, LORA: busy}, known)
    labels = dict(max(busy, key=lambda metric: metric.value).labels)
    return replace(
        found,
        active_models=_split(labels, "running_lora_adapters"),
        waiting_models=_split(labels, "waiting_lora_adapters"),
    )


_LISTS = ("running_lora_adapters", "waiting_lora_adapters")


def _split(labels: dict[str, str], name: str) -> frozenset[str]:
    return frozenset(labels[name].split(",")) if labels.get(name) else frozenset()


def _newest(families: dict[str, list[Metric]], name: str, errors: list[str]) -> Metric | None:
    if not families.get(name):
        errors.append(f'metric family "{name}" not found')
        return None
    return max(families[name], key=lambda metric: metric.timestamp_ms)


def _with_adapters(found: Endpoint, metric: Metric, errors: list[str]) -> Endpoint:
    found = replace(found, active_models=frozenset(), waiting_models=frozenset())
    for name, value in metric.labels:
        names = frozenset(one.strip() for one in value.split(",") if one.strip())
        if name == "running_lora_adapters":
            found = replace(found, active_models=names)
        elif name == "waiting_lora_adapters":
            found = replace(found, waiting_models=names)
        elif name == "max_lora" and value:
            found = replace(found, max_active_models=_atoi(value, errors))
    return found


def _atoi(text: str, errors: list[str]) -> int:
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        errors.append(f'strconv.Atoi: parsing "{text}": invalid syntax')
        return 0
    return int(text)


def score_lora_affinity(endpoint: Endpoint, target_model: str) -> float:
    """`lora-affinity-scorer`."""
    if target_model in endpoint.active_models:
        return 1.0
    if len(endpoint.active_models) + len(endpoint.waiting_models) < endpoint.max_active_models:
        return 0.8
    return 0.6 if target_model in endpoint.waiting_models else 0.0


def score_queue(endpoints: Sequence[Endpoint]) -> list[float]:
    """`queue-scorer`: the shortest queue has 1, the longest 0."""
    sizes = [one.waiting_queue_size for one in endpoints]
    if max(sizes) == min(sizes):
        return [1.0] * len(sizes)
    return [(max(sizes) - size) / (max(sizes) - min(sizes)) for size in sizes]


def score_kv_cache(endpoint: Endpoint) -> float:
    """`kv-cache-utilization-scorer`."""
    return 1 - endpoint.kv_cache_usage_percent
