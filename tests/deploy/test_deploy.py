"""The files of deploy/ are well formed; flags, variables, routes, metrics and times in them are
true.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from loraserve.api import monitoring, server
from loraserve.api.metrics import engine_tables
from loraserve.cli.main import app
from loraserve.limits import LIMITS
from loraserve.settings import ENV_PREFIX, Settings

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parent.parent.parent
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
UNIT = (DEPLOY / "systemd" / "loraserve.service").read_text()
NGINX = (DEPLOY / "nginx" / "loraserve.conf").read_text()
CADDY = (DEPLOY / "caddy" / "Caddyfile").read_text()
MANIFESTS = {
    document["kind"] + "/" + document["metadata"]["name"]: document
    for path in sorted((DEPLOY / "kubernetes" / "server").glob("*.yaml"))
    if path.name != "kustomization.yaml"
    for document in yaml.safe_load_all(path.read_text())
}
POD = MANIFESTS["StatefulSet/loraserve"]["spec"]["template"]["spec"]
CONTAINER = POD["containers"][0]
SLACK_S = 10.0
"""For the engine's end and what is written last."""


def variables() -> Iterator[tuple[str, str, str]]:
    """Where, name and value of every variable of ours in these files."""
    for name, value in re.findall(rf"({ENV_PREFIX}\w+)=(\S+)", DOCKERFILE):
        yield "Dockerfile", name, value
    for name, value in COMPOSE["services"]["loraserve"]["environment"].items():
        yield "compose.yaml", name, value
    for name, value in MANIFESTS["ConfigMap/loraserve"]["data"].items():
        yield "config.yaml", name, value
    for name, value in re.findall(rf"({ENV_PREFIX}\w+)=(\S+)", UNIT):
        yield "loraserve.service", name, value


def commands() -> Iterator[tuple[str, list[str]]]:
    """Where, and words after ``loraserve``, of every command of ours in these files."""
    entry, command = (re.search(rf"^{word} (\[.*\])$", DOCKERFILE, re.M) for word in ("ENTRYPOINT", "CMD"))
    assert entry is not None
    assert command is not None
    assert yaml.safe_load(entry[1]) == ["loraserve"]
    yield "Dockerfile", yaml.safe_load(command[1])
    yield "compose.yaml", COMPOSE["services"]["loraserve"]["command"]
    yield "statefulset.yaml", CONTAINER["args"]
    found = re.search(r"^ExecStart=(.*)$", UNIT, re.M)
    assert found is not None
    yield "loraserve.service", shlex.split(found[1])[1:]
    said = re.search(r"loraserve (admin-key create [^>]*) >", (DEPLOY / "compose.yaml").read_text())
    assert said is not None
    yield "compose.yaml's head", shlex.split(said[1])


def test_every_command_is_parsed_by_the_command_line(subtests: Any) -> None:
    for where, words in commands():
        with subtests.test(where):
            command, rest = get_command(app), list(words)
            context = command.make_context("loraserve", rest, resilient_parsing=False)
            while hasattr(command, "resolve_command"):
                name, command, rest = command.resolve_command(
                    context, [*context._protected_args, *context.args] if context.args else rest
                )
                context = command.make_context(name, list(rest), parent=context)
            assert name in words


def test_each_variable_is_setting_with_valid_value(monkeypatch: pytest.MonkeyPatch, subtests: Any) -> None:
    found = [one for one in variables() if one[1].startswith(ENV_PREFIX)]
    assert len(found) >= 8
    for where, name, value in found:
        with subtests.test(f"{where} {name}"):
            # compose fills these in
            value = re.sub(r"\$\{[^}]*\}", "x" * 32, value)
            with monkeypatch.context() as patched:
                patched.setenv(name, value)
                settings = Settings.load(**({} if name == "LORASERVE_MODEL" else {"model": "m"}))
            assert getattr(settings, name.removeprefix(ENV_PREFIX).lower()) is not None


def test_service_name_sets_no_loraserve_variable() -> None:
    # Kubernetes would set LORASERVE_PORT=tcp://…, and LORASERVE_SERVICE_HOST, which is unknown
    assert POD["enableServiceLinks"] is False


def test_probes_request_routes_without_key() -> None:
    paths = {route.path for route in monitoring.router.routes}
    asked = {CONTAINER[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    found = re.search(r"HEALTHCHECK.*?http://127\.0\.0\.1:8000(/\w+)", DOCKERFILE, re.S)
    assert found is not None
    assert asked | {found[1]} == {"/readyz", "/livez"} <= paths
    assert CONTAINER["livenessProbe"]["httpGet"]["path"] == found[1] == "/livez"


def test_there_is_time_to_drain() -> None:
    needed = server._NOTICE_S + server._CLOSE_S + SLACK_S
    grace = float(MANIFESTS["ConfigMap/loraserve"]["data"]["LORASERVE_GRACE_S"])
    before = float(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    assert POD["terminationGracePeriodSeconds"] >= before + grace + needed
    stop = COMPOSE["services"]["loraserve"]["stop_grace_period"]
    assert float(stop.removesuffix("s")) >= 30 + needed
    timeout = re.search(r"^TimeoutStopSec=(\d+)$", UNIT, re.M)
    assert timeout is not None
    assert float(timeout[1]) >= 30 + needed
    assert all("30" in words for where, words in commands() if "--grace-s" in words)


def test_files_agree_with_each_other_and_with_limits() -> None:
    assert {f"--target {target}" for target in ("cpu", "cuda")} <= set(re.findall(r"--target \w+", DOCKERFILE))
    uid = int(re.search(r"^USER (\d+)", DOCKERFILE, re.M)[1])  # type: ignore[index]
    assert POD["securityContext"]["runAsUser"] == uid != 0
    for name in ("PodDisruptionBudget/loraserve", "Service/loraserve"):
        selector = MANIFESTS[name]["spec"]["selector"]
        labels = selector.get("matchLabels", selector)
        assert labels.items() <= MANIFESTS["StatefulSet/loraserve"]["spec"]["template"]["metadata"]["labels"].items()
    claims = {claim["metadata"]["name"] for claim in MANIFESTS["StatefulSet/loraserve"]["spec"]["volumeClaimTemplates"]}
    volumes = {volume["name"] for volume in POD["volumes"]} | claims
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} <= volumes
    metric = MANIFESTS["HorizontalPodAutoscaler/loraserve"]["spec"]["metrics"][0]["pods"]["metric"]["name"]
    assert metric in (DEPLOY.parent / "docs" / "metrics.md").read_text()
    assert any(metric in str(row) for row in engine_tables.STEPS)
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    for name in (line[1:] for line in ignored if line.startswith("!")):
        assert (ROOT / name).exists(), name
    listed = yaml.safe_load((DEPLOY / "kubernetes" / "server" / "kustomization.yaml").read_text())["resources"]
    there = {path.name for path in (DEPLOY / "kubernetes" / "server").glob("*.yaml")} - {"kustomization.yaml"}
    assert set(listed) == there
    assert f"client_max_body_size {LIMITS.max_upload_bytes >> 30}g;" in NGINX
    assert f"max_size {LIMITS.max_upload_bytes >> 30}GiB" in CADDY
    for reads, idles, config in (
        ("proxy_read_timeout", "keepalive_timeout", NGINX),
        ("response_header_timeout", "keepalive", CADDY),
    ):
        read, idle = (re.search(rf"\b{word} (\d+)s", config) for word in (reads, idles))
        assert read is not None
        assert idle is not None
        assert int(read[1]) > LIMITS.max_request_timeout_s
        assert int(idle[1]) < server._KEEP_ALIVE_S
    assert re.search(r"^ExecReload=/bin/kill -HUP \$MAINPID$", UNIT, re.M)
    assert re.search(r"^RestartPreventExitStatus=2$", UNIT, re.M)


def tool(name: str) -> str:
    path = shutil.which(name, path=f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin")
    if path is None:
        pytest.skip(f"{name} isn't installed")
    return path


def ran(*words: str | Path) -> str:
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_dockerfile_has_no_finding_of_hadolint() -> None:
    ran(tool("hadolint"), DEPLOY / "Dockerfile")


def test_kubernetes_schemas_accept_the_manifests() -> None:
    paths = [path for path in (DEPLOY / "kubernetes" / "server").glob("*.yaml") if path.name != "kustomization.yaml"]
    ran(tool("kubernetes-validate"), "--strict", *paths)


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    # the program isn't where the unit has it
    unit = tmp_path / "loraserve.service"
    unit.write_text(UNIT.replace("/opt/loraserve/bin/loraserve", "/bin/true"))
    assert "loraserve.service" not in ran(tool("systemd-analyze"), "verify", unit)


def test_prometheus_files_are_mounted_by_compose() -> None:
    service = COMPOSE["services"]["prometheus"]
    mounts = [mount.removesuffix(":ro").rpartition(":")[::2] for mount in service["volumes"]]
    inside = {target for _, target in mounts}
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    read = [f"/etc/prometheus/{name}" for name in config["rule_files"]]
    read += [job["authorization"]["credentials_file"] for job in config["scrape_configs"]]
    assert read
    assert set(read) <= inside
    files = [DEPLOY / source for source, _ in mounts if source.startswith("./") and not source.endswith(".key")]
    assert all(file.exists() for file in files)
