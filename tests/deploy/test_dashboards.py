"""The board and the alerts ask for what a live server's /metrics has: a renamed metric, label or
value fails here.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import promql_parser as promql
import pytest
import yaml
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.parser import text_string_to_metric_families
from server_process import ADMIN_KEY, ServerProcess

from loraserve.api.metrics.counters import ServerMetrics
from loraserve.demo.pack import adapter_dirs

ROOT = Path(__file__).resolve().parents[2]
RULES_FILE = ROOT / "deploy" / "prometheus" / "rules.yaml"
RULES = [rule for group in yaml.safe_load(RULES_FILE.read_text())["groups"] for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
BOARD = json.loads((ROOT / "deploy" / "grafana" / "loraserve.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
PAGE = (ROOT / "docs" / "observability.md").read_text()

OF_THE_SCRAPE = frozenset({"job", "instance"})
"""Labels that Prometheus adds."""
OPEN_ENDED = frozenset({"route", "status", "reason", "instance", "job", "outcome"})
"""Labels whose values come with requests: a server that has just started lacks most."""


@dataclass
class Scrape:
    """What /metrics has: the label sets of each sample's name, and the labels of each family."""

    samples: dict[str, list[dict[str, str]]]
    labels: dict[str, set[str]]

    @classmethod
    def read(cls, text: str) -> Scrape:
        samples: dict[str, list[dict[str, str]]] = {}
        labels: dict[str, set[str]] = {}
        for family in text_string_to_metric_families(text):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels.setdefault(name, set())
            for sample in family.samples:
                samples.setdefault(sample.name, []).append(dict(sample.labels))
                labels.setdefault(sample.name, set()).update(sample.labels)
        # of those without a sample yet, which the text names alone
        for metric in vars(ServerMetrics()).values():
            if isinstance(metric, MetricWrapperBase):
                suffixes = ("_total",) if metric._type == "counter" else ("_bucket", "_sum", "_count", "")
                for suffix in suffixes:
                    if metric._name + suffix in labels or metric._name in labels:
                        labels.setdefault(metric._name + suffix, set()).update(metric._labelnames)
        return cls(samples, labels)


@pytest.fixture(scope="module")
def scrape(tmp_path_factory: pytest.TempPathFactory) -> Scrape:
    """A live server's, after a request for an adapter."""
    server = ServerProcess(tmp_path_factory.mktemp("boards") / "data")
    server.start()
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    try:
        with server.admin() as client:
            client.adapters.push(adapter_dirs()["sql"], name="sql")
        body = {"model": "sql", "prompt": "list the tickets", "max_tokens": 4}
        assert httpx2.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60).status_code == 200
        text = httpx2.get(f"{server.url}/metrics", headers=headers, timeout=10).text
    finally:
        server.stop()
    return Scrape.read(text)


def problems_of(expression: str, scrape: Scrape) -> list[str]:
    """What an expression asks for that a scrape doesn't have."""
    problems: list[str] = []
    known: set[str] = set(OF_THE_SCRAPE)
    grouped: set[str] = set()

    def visit(node: Any) -> None:
        if isinstance(node, promql.VectorSelector):
            known.update(check_selector(node.name or "", node.matchers.matchers, scrape, problems))
        elif isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            grouped.update(node.modifier.labels)
        elif isinstance(node, promql.BinaryExpr) and node.modifier is not None and node.modifier.matching is not None:
            grouped.update(node.modifier.matching.labels)

    try:
        promql.walk(promql.parse(expression), visit)
    except ValueError as error:
        return [f"not PromQL: {error}"]
    return problems + [f"no label {label}" for label in sorted(grouped - known)]


def check_selector(name: str, matchers: Sequence[Any], scrape: Scrape, problems: list[str]) -> set[str]:
    """Add what is wrong with a selector; return the labels of what it selects."""
    if name == "up" or name in RECORDED:
        return set(OF_THE_SCRAPE)
    if name not in scrape.labels:
        problems.append(f"no metric {name}")
        return set()
    labels = scrape.labels[name]
    problems += [f"{name} has no label {one.name}" for one in matchers if one.name not in labels | OF_THE_SCRAPE]
    closed = [one for one in matchers if one.name in labels - OPEN_ENDED]
    samples = scrape.samples.get(name, [])
    if closed and not any(all(fits(one, sample) for one in closed) for sample in samples):
        problems.append(f"no sample of {name} has {', '.join(f'{one.name}={one.value}' for one in closed)}")
    return labels


def fits(matcher: Any, sample: Mapping[str, str]) -> bool:
    value, wanted = sample.get(matcher.name, ""), matcher.value
    match matcher.op:
        case promql.MatchOp.Equal:
            return value == wanted
        case promql.MatchOp.NotEqual:
            return value != wanted
        case promql.MatchOp.Re:
            return re.fullmatch(wanted, value) is not None
    return re.fullmatch(wanted, value) is None


def expression_of(target: Mapping[str, Any]) -> str:
    """A panel's expression with values for the board's variables."""
    expression: str = target["expr"]
    expression = expression.replace("$__rate_interval", "5m").replace("$instance", ".*")
    assert "$" not in expression, "a variable that the board doesn't have"
    return expression


def test_each_rule_queries_existing_metrics(scrape: Scrape, subtests: pytest.Subtests) -> None:
    for rule in RULES:
        with subtests.test(rule.get("alert") or rule["record"]):
            assert problems_of(rule["expr"], scrape) == []


def test_each_panel_queries_existing_metrics(scrape: Scrape, subtests: pytest.Subtests) -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            with subtests.test(f"{panel['title']}: {target['legendFormat']}"):
                assert problems_of(expression_of(target), scrape) == []


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("rate(loraserve_requests_total[5m])", "no metric loraserve_requests_total"),
        ("loraserve_engine_restarts", "no metric loraserve_engine_restarts"),
        ('loraserve_kv_blocks{tier="used"}', "loraserve_kv_blocks has no label tier"),
        ('loraserve_kv_blocks{state="busy"}', "no sample of loraserve_kv_blocks has state=busy"),
        (
            'loraserve_adapter_lookups_total{tier=~"gpu|cpu"}',
            "no sample of loraserve_adapter_lookups_total has tier=gpu|cpu",
        ),
        (
            'loraserve_time_to_first_token_seconds_bucket{le="3.0"}',
            "no sample of loraserve_time_to_first_token_seconds_bucket has le=3.0",
        ),
        ("sum by (adapter) (loraserve_kv_blocks)", "no label adapter"),
        ("loraserve_kv_blocks / on (model) loraserve_servers", "no label model"),
        ("job:loraserve_absent:ratio_rate5m", "no metric job:loraserve_absent:ratio_rate5m"),
        ("sum(loraserve_kv_blocks", "not PromQL"),
    ],
)
def test_a_wrong_expression_is_found(scrape: Scrape, expression: str, problem: str) -> None:
    [found] = problems_of(expression, scrape)
    assert found.startswith(problem)


def test_objective_bound_matches_rules_and_page(scrape: Scrape) -> None:
    bounds = set(re.findall(r'le="([\d.]+)"', RULES_FILE.read_text()))
    assert bounds == {"2.5"}
    assert "2.5 s" in PAGE


def test_each_alert_is_tested_firing_and_silent() -> None:
    cases = yaml.safe_load(RULES_FILE.with_suffix("").with_suffix(".test.yaml").read_text())["tests"]
    tested = [case for one in cases for case in one["alert_rule_test"]]
    fires = sorted(case["alertname"] for case in tested if case.get("exp_alerts"))
    silent = sorted(case["alertname"] for case in tested if not case.get("exp_alerts"))
    assert fires == silent == sorted(ALERTS)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool isn't installed (Debian: prometheus)")
def test_promtool_accepts_rules_and_confirms_alerts() -> None:
    for command in (
        ["check", "rules", "rules.yaml"],
        ["check", "config", "--syntax-only", "prometheus.yml"],
        ["test", "rules", "rules.test.yaml"],
    ):
        done = subprocess.run(
            ["promtool", *command], cwd=RULES_FILE.parent, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_severity_and_page_section() -> None:
    headings = re.findall(r"^### (Loraserve\w+)$", PAGE, re.MULTILINE)
    assert headings == list(ALERTS)
    for name, rule in ALERTS.items():
        assert rule["labels"]["severity"] in ("page", "ticket"), name
        assert rule["annotations"].keys() == {"summary", "description", "runbook"}, name
        assert rule["annotations"]["runbook"] == f"docs/observability.md#{name.lower()}"


def test_configuration_scrapes_with_key_and_drops_unbounded_series() -> None:
    config = yaml.safe_load((RULES_FILE.parent / "prometheus.yml").read_text())
    [job] = config["scrape_configs"]
    assert job["job_name"] == "loraserve"
    assert job["authorization"].keys() == {"credentials_file"}
    assert config["rule_files"] == [RULES_FILE.name]
    [dropped] = job["metric_relabel_configs"]
    assert (dropped["action"], dropped["regex"]) == ("drop", "vllm:lora_requests_info")


def test_panels_have_unique_names_units_and_positions() -> None:
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not taken & cells, panel["title"]
        assert max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
    variables = {variable["name"] for variable in BOARD["templating"]["list"]}
    assert variables == {"datasource", "instance"}
    for panel in PANELS:
        assert panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["fieldConfig"]["defaults"]["unit"]


def test_legend_names_labels_kept_by_expression(subtests: pytest.Subtests) -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            kept: set[str] = set()

            def visit(node: Any, kept: set[str] = kept) -> None:
                if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
                    kept.update(node.modifier.labels)

            promql.walk(promql.parse(expression_of(target)), visit)
            with subtests.test(f"{panel['title']}: {target['legendFormat']}"):
                assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= kept
