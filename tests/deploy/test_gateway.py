"""The manifests for the Gateway API's inference extension fit their schemas, the server, and each
other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import endpoint_picker
import pytest
from fastapi.routing import iter_route_contexts

from loraserve.api import monitoring, openai
from loraserve.api.monitoring import ROUTER_METRICS
from loraserve.limits import LIMITS
from loraserve.settings import ENV_PREFIX, Settings

from .test_deploy import MANIFESTS as SERVERS
from .test_deploy import ran, tool

yaml = pytest.importorskip("yaml")
jsonschema = pytest.importorskip("jsonschema")

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent.parent / "deploy" / "kubernetes" / "gateway"
DOCS = HERE.parent.parent / "docs"
SCHEMAS: dict[str, Any] = json.loads((HERE / "schemas" / "gateway.json").read_text())["kinds"]
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
MANIFESTS: dict[str, Any] = {
    f"{document['kind']}/{document['metadata']['name']}": document
    for name in KUSTOMIZATION["resources"]
    if name != "../server"
    for document in yaml.safe_load_all((FOLDER / name).read_text())
}
POOL = MANIFESTS["InferencePool/loraserve"]
PICKER = MANIFESTS["Deployment/loraserve-epp"]["spec"]["template"]
PLUGINS = yaml.safe_load(MANIFESTS["ConfigMap/loraserve-epp"]["data"]["plugins.yaml"])


def strict(schema: Any) -> Any:
    """The schema without room for fields that it doesn't know, as `kubectl` validates strictly."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {key: strict(value) for key, value in schema.items()}
    if (
        isinstance(schema.get("properties"), dict)
        and schema.get("type") == "object"
        and "additionalProperties" not in schema
    ):
        changed["additionalProperties"] = False
    return changed


def kinds(schema: dict[str, Any]) -> dict[str, Any]:
    changed = strict(schema)
    # Kubernetes itself checks metadata
    changed["properties"]["metadata"] = {"type": "object"}
    return dict(changed)


def custom() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    for name, document in MANIFESTS.items():
        kind = f"{document['apiVersion']}/{document['kind']}"
        if kind in SCHEMAS:
            yield name, document, kinds(SCHEMAS[kind])


def test_each_custom_resource_matches_schema(subtests: Any) -> None:
    found = list(custom())
    assert len(found) == 6
    for name, document, schema in found:
        with subtests.test(name):
            jsonschema.Draft202012Validator(schema).validate(document)


def test_nonexistent_field_fails_validation() -> None:
    document = json.loads(json.dumps(POOL))
    document["spec"]["targetPort"] = 8000
    with pytest.raises(jsonschema.ValidationError, match="targetPort"):
        jsonschema.validate(document, kinds(SCHEMAS["inference.networking.k8s.io/v1/InferencePool"]))


def test_kubernetes_schemas_accept_builtin_resources(tmp_path: Path) -> None:
    known = {name for name, _, _ in custom()}
    paths = []
    for name, document in MANIFESTS.items():
        if name not in known:
            paths.append(tmp_path / f"{name.replace('/', '-')}.yaml")
            paths[-1].write_text(yaml.safe_dump(document))
    assert len(paths) == 6
    ran(tool("kubernetes-validate"), "--strict", *paths)


def test_pool_selects_servers_and_names_picker() -> None:
    labels = SERVERS["StatefulSet/loraserve"]["spec"]["template"]["metadata"]["labels"]
    assert POOL["spec"]["selector"]["matchLabels"].items() <= labels.items()
    container = SERVERS["StatefulSet/loraserve"]["spec"]["template"]["spec"]["containers"][0]
    ports = {port["containerPort"] for port in container["ports"]}
    assert {port["number"] for port in POOL["spec"]["targetPorts"]} <= ports
    picker = POOL["spec"]["endpointPickerRef"]
    service = MANIFESTS[f"Service/{picker['name']}"]
    assert picker["port"]["number"] in {port["port"] for port in service["spec"]["ports"]}
    assert service["spec"]["selector"].items() <= PICKER["metadata"]["labels"].items()
    for name in ("interactive", "batch"):
        assert MANIFESTS[f"InferenceObjective/{name}"]["spec"]["poolRef"]["name"] == POOL["metadata"]["name"]
    arguments = PICKER["spec"]["containers"][0]["args"]
    assert arguments[arguments.index("--pool-name") + 1] == POOL["metadata"]["name"]
    assert arguments[arguments.index("--pool-namespace") + 1] == KUSTOMIZATION["namespace"]
    account = PICKER["spec"]["serviceAccountName"]
    assert [one["name"] for one in MANIFESTS["RoleBinding/loraserve-epp"]["subjects"]] == [account]
    assert MANIFESTS["RoleBinding/loraserve-epp"]["roleRef"]["name"] in {
        document["metadata"]["name"] for document in MANIFESTS.values() if document["kind"] == "Role"
    }


def test_picker_scrapes_route_served_without_key() -> None:
    parameters = {plugin["type"]: plugin.get("parameters", {}) for plugin in PLUGINS["plugins"]}
    (route,) = monitoring.router_metrics_router.routes
    assert parameters["metrics-data-source"]["path"] == route.path
    (patch,) = KUSTOMIZATION["patches"]
    assert patch["target"]["name"] in SERVERS["ConfigMap/loraserve"]["metadata"]["name"]
    (operation,) = yaml.safe_load(patch["patch"])
    name = operation["path"].rpartition("/")[2].removeprefix(ENV_PREFIX).lower()
    assert getattr(Settings.load(model="m", **{name: operation["value"]}), name) is True
    names = {endpoint_picker.QUEUED, endpoint_picker.RUNNING, endpoint_picker.KV_USAGE, endpoint_picker.LORA}
    assert names | {endpoint_picker.CACHE} == set(ROUTER_METRICS)


def test_plugins_are_declared_and_affinity_weighs_most() -> None:
    declared = {plugin.get("name", plugin["type"]) for plugin in PLUGINS["plugins"]}
    (profile,) = PLUGINS["schedulingProfiles"]
    used = {plugin["pluginRef"]: plugin.get("weight", 0) for plugin in profile["plugins"]}
    sources = PLUGINS["dataLayer"]["sources"]
    extractors = {extractor["pluginRef"] for source in sources for extractor in source["extractors"]}
    assert used.keys() | extractors | {source["pluginRef"] for source in sources} == declared
    assert max(used, key=lambda name: used[name]) == "lora-affinity-scorer"


def test_gateway_routes_exist_on_server_and_exclude_metrics() -> None:
    known = {context.path for context in iter_route_contexts(openai.router.routes)}
    gateway = MANIFESTS["Gateway/loraserve"]["metadata"]["name"]
    for name in ("loraserve-inference", "loraserve-management"):
        route = MANIFESTS[f"HTTPRoute/{name}"]["spec"]
        assert [parent["name"] for parent in route["parentRefs"]] == [gateway]
        for rule in route["rules"]:
            assert float(re.fullmatch(r"(\d+)s", rule["timeouts"]["request"])[1]) > LIMITS.max_request_timeout_s  # type: ignore[index]
            for match in rule["matches"]:
                assert not "/metrics/router".startswith(match["path"]["value"])
                if match["path"]["type"] == "Exact":
                    assert match["path"]["value"] in known
    (rule,) = MANIFESTS["HTTPRoute/loraserve-inference"]["spec"]["rules"]
    assert [backend["kind"] for backend in rule["backendRefs"]] == ["InferencePool"]
    (rule,) = MANIFESTS["HTTPRoute/loraserve-management"]["spec"]["rules"]
    assert [backend["name"] for backend in rule["backendRefs"]] == [SERVERS["Service/loraserve"]["metadata"]["name"]]


def test_versions_match_documentation_page() -> None:
    page = (DOCS / "kubernetes.md").read_text()
    (image,) = KUSTOMIZATION["images"]
    assert image["name"] == PICKER["spec"]["containers"][0]["image"]
    assert image["newTag"] in page
    for kind in SCHEMAS:
        assert kind.rpartition("/")[2] in page
