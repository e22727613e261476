"""The Helm chart, rendered by Helm: what it makes equals the kustomizations, and each value has an
effect.
"""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loraserve import __version__
from loraserve.settings import ENV_PREFIX, Settings

from .test_deploy import ran, tool
from .test_gateway import SCHEMAS, kinds
from .test_kustomize import DEPLOY, Resources, build, key

yaml = pytest.importorskip("yaml")
jsonschema = pytest.importorskip("jsonschema")

CHART = DEPLOY.parent / "helm" / "loraserve"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
EVERYTHING = {"gateway": {"enabled": True}, "ingress": {"enabled": True}}
ALONE = {
    "replicas": 1,
    "autoscaling": {"enabled": False},
    "database": {"kind": "sqlite"},
    "store": {"url": ""},
    "secret": "",
}
CASES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "everything": EVERYTHING,
    "one pod with files": ALONE,
    "GPUs": {"gpu": {"count": 2, "runtimeClassName": "nvidia"}, "tolerations": [{"operator": "Exists"}]},
    "a base of the hub": {"model": {"path": "hf:ORG/NAME", "volume": {"claim": ""}}},
    "a base of a server of files": {"model": {"volume": {"source": {"nfs": {"server": "files", "path": "/models"}}}}},
    "another service of S3": {"store": {"endpoint": "http://minio:9000", "region": "here"}},
    "a database's own secret": {"database": {"urlFrom": {"secret": "pg-app", "key": "uri"}}},
    "three replicas": {"replicas": 3, "autoscaling": {"enabled": False}},
    "TLS": {"ingress": {"enabled": True, "className": "nginx", "tlsSecret": "tls", "annotations": {"a": "b"}}},
    "settings": {
        "settings": {"QUANTIZE": "int8", "CONSOLE": False, "MAX_NUM_SEQS": 16, "RESULT_CACHE_BYTES": 1073741824}
    },
}
BESIDE = {"app.kubernetes.io/instance", "app.kubernetes.io/version", "app.kubernetes.io/managed-by", "helm.sh/chart"}
"""Labels that Helm's resources have beside the kustomizations'."""


class Refused(Exception):
    """Helm refused the values."""


def template(values: dict[str, Any], folder: Path, release: str = "loraserve") -> str:
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    command = [tool("helm"), "template", release, str(CHART), "--namespace", "loraserve", "--values", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise Refused(done.stderr)
    return done.stdout


def rendered(values: dict[str, Any], folder: Path, release: str = "loraserve") -> Resources:
    documents = [one for one in yaml.safe_load_all(template(values, folder, release)) if one]
    found = {key(document): document for document in documents}
    assert len(found) == len(documents)
    return found


def plain(value: Any) -> Any:
    """The resource without what Helm's has beside a kustomization's."""
    if isinstance(value, list):
        return [plain(one) for one in value]
    if not isinstance(value, dict):
        return value
    kept = {name: plain(one) for name, one in value.items() if name not in BESIDE}
    kept.pop("imagePullPolicy", None)
    if "annotations" in kept:
        kept["annotations"].pop("checksum/config", None)
    # a map that held these alone
    return {name: one for name, one in kept.items() if not (name in ("annotations", "labels") and not one)}


def without_labels(resource: dict[str, Any]) -> dict[str, Any]:
    """The resource but the labels of its own, by which nothing selects it."""
    changed = copy.deepcopy(resource)
    changed["metadata"].pop("labels", None)
    changed["metadata"].pop("namespace", None)
    return changed


def same(one: Resources) -> dict[tuple[str, str, str], Any]:
    return {name: without_labels(plain(resource)) for name, resource in one.items() if name[1] != "Namespace"}


@pytest.mark.parametrize(("folder", "values"), [("server", {}), ("gateway", {"gateway": {"enabled": True}})])
def test_chart_equals_kustomization(folder: str, values: dict[str, Any], tmp_path: Path) -> None:
    wanted, found = same(build(DEPLOY / folder)), same(rendered(values, tmp_path))
    images = yaml.safe_load((DEPLOY / folder / "kustomization.yaml").read_text())["images"]
    names = {image["name"]: f"{image['newName']}:{image['newTag']}" for image in images} | {
        "loraserve": "loraserve:cpu"
    }
    for resource in wanted.values():
        for container in (
            resource["spec"].get("template", {}).get("spec", {}).get("containers", []) if "spec" in resource else []
        ):
            container["image"] = names[container["image"]]
    assert found.keys() == wanted.keys()
    for name, resource in wanted.items():
        assert found[name] == resource, name


@pytest.mark.parametrize("values", CASES.values(), ids=CASES.keys())
def test_schemas_accept_rendered_resources(values: dict[str, Any], tmp_path: Path) -> None:
    paths = []
    for (_, kind, name), document in rendered(values, tmp_path, "prod").items():
        full = f"{document['apiVersion']}/{kind}"
        if full in SCHEMAS:
            jsonschema.Draft202012Validator(kinds(SCHEMAS[full])).validate(document)
            continue
        paths.append(tmp_path / f"{kind}-{name}.yaml")
        paths[-1].write_text(yaml.safe_dump(document))
    ran(tool("kubernetes-validate"), "--strict", *paths)


@pytest.mark.parametrize("values", CASES.values(), ids=CASES.keys())
def test_lint_accepts_values(values: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    assert "0 chart(s) failed" in ran(tool("helm"), "lint", "--strict", CHART, "--values", file)


def leaves(values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(values, dict) and values:
        for name, value in values.items():
            yield from leaves(value, (*path, name))
    else:
        yield path, values


OTHERS: dict[tuple[str, ...], Any] = {
    ("image", "pullPolicy"): "Always",
    ("imagePullSecrets",): [{"name": "x"}],
    ("model", "volume", "source"): {"nfs": {"server": "x", "path": "/"}},
    ("database", "kind"): None,  # below
    ("database", "urlFrom", "key"): None,
    ("store", "endpoint"): "https://x",
    ("store", "url"): "s3://other/blobs",
    ("settings",): {"QUANTIZE": "int8"},
    ("replicas",): None,
    ("gpu", "resource"): None,
    ("tolerations",): [{"operator": "Exists"}],
    ("autoscaling", "maxReplicas"): 12,
    ("gateway", "enabled"): False,
    ("ingress", "enabled"): False,
}
"""Another value of those for which none can be made of the type; None: in a test of its own."""


def other(path: tuple[str, ...], value: Any) -> Any:
    if path in OTHERS:
        return OTHERS[path]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, list):
        return [*value, "NET_RAW"]
    return {"x": "y"}


def nested(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    for name in reversed(path):
        value = {name: value}
    return dict(value)


def merged(one: dict[str, Any], two: dict[str, Any]) -> dict[str, Any]:
    found = dict(one)
    for name, value in two.items():
        is_map = isinstance(value, dict) and isinstance(found.get(name), dict)
        found[name] = merged(found[name], value) if is_map else value
    return found


def test_each_value_changes_output(tmp_path: Path, subtests: pytest.Subtests) -> None:
    before = template(EVERYTHING, tmp_path)
    paths = list(leaves(VALUES))
    assert len(paths) > 40
    for path, value in paths:
        another = other(path, value)
        if path in OTHERS and another is None:
            continue
        with subtests.test(".".join(path)):
            assert template(merged(EVERYTHING, nested(path, another)), tmp_path) != before


def pod_of(resources: Resources, name: str = "loraserve") -> Any:
    return resources["apps", "StatefulSet", name]["spec"]["template"]["spec"]


def test_gpu_chooses_image_and_requests_devices(tmp_path: Path) -> None:
    values = {"gpu": {"count": 2, "resource": "amd.com/gpu", "runtimeClassName": "gpus"}}
    pod = pod_of(rendered(values, tmp_path))
    (container,) = pod["containers"]
    assert container["image"] == "loraserve:cuda"
    assert container["resources"]["limits"] == {"memory": "16Gi", "amd.com/gpu": "2"}
    assert container["resources"]["requests"]["amd.com/gpu"] == "2"
    assert pod["runtimeClassName"] == "gpus"


def test_single_pod_uses_own_volume(tmp_path: Path) -> None:
    resources = rendered(ALONE, tmp_path)
    assert ("autoscaling", "HorizontalPodAutoscaler", "loraserve") not in resources
    assert resources["apps", "StatefulSet", "loraserve"]["spec"]["replicas"] == 1
    data = resources["", "ConfigMap", "loraserve"]["data"]
    assert data.keys() == {"LORASERVE_MODEL", "LORASERVE_GRACE_S"}
    (container,) = pod_of(resources)["containers"]
    assert container["envFrom"] == [{"configMapRef": {"name": "loraserve"}}]


def test_database_url_is_read_from_own_secret(tmp_path: Path) -> None:
    (container,) = pod_of(rendered(CASES["a database's own secret"], tmp_path))["containers"]
    (variable,) = container["env"]
    assert variable["name"] == "LORASERVE_DATABASE_URL"
    assert variable["valueFrom"]["secretKeyRef"] == {"name": "pg-app", "key": "uri"}


def test_hub_base_needs_no_volume(tmp_path: Path) -> None:
    pod = pod_of(rendered(CASES["a base of the hub"], tmp_path))
    assert {volume["name"] for volume in pod["volumes"]} == {"tmp"}
    assert {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]} == {"/data", "/tmp"}


def test_releases_share_no_names(tmp_path: Path) -> None:
    one, two = (rendered(EVERYTHING, tmp_path, release) for release in ("blue", "green-loraserve"))
    assert {name for name in one if name[1] != "InferenceObjective"}.isdisjoint(two)
    assert ("apps", "StatefulSet", "blue-loraserve") in one
    assert ("apps", "StatefulSet", "green-loraserve") in two
    selectors = [
        resources["", "Service", name]["spec"]["selector"]
        for resources, name in ((one, "blue-loraserve"), (two, "green-loraserve"))
    ]
    assert selectors[0] != selectors[1]
    for resources, selector in zip((one, two), selectors, strict=True):
        (pods,) = (each for name, each in resources.items() if name[1] == "StatefulSet")
        assert selector.items() <= pods["spec"]["template"]["metadata"]["labels"].items()


def test_variables_are_settings_with_valid_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = merged(EVERYTHING, CASES["settings"])
    data = rendered(values, tmp_path)["", "ConfigMap", "loraserve"]["data"]
    for name, value in data.items():
        if name.startswith(ENV_PREFIX):
            monkeypatch.setenv(name, value)
    settings = Settings.load()
    assert (settings.model, settings.quantize, settings.console, settings.max_num_seqs) == (
        "/models/base",
        "int8",
        False,
        16,
    )
    assert settings.router_metrics


def test_pod_has_time_to_drain(tmp_path: Path) -> None:
    pod = pod_of(rendered({"graceSeconds": 100}, tmp_path))
    assert pod["terminationGracePeriodSeconds"] == 130


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"database": {"kind": "sqlite"}}, "database.kind is sqlite, which one replica alone can use"),
        ({"store": {"url": ""}}, "store.url is empty"),
        ({"autoscaling": {"minReplicas": 9}}, "autoscaling.minReplicas is 9, more than maxReplicas, which is 8"),
        ({"model": {"volume": {"claim": ""}}}, "there is no volume at /models"),
        ({"settings": {"MODEL": "x"}}, "settings.MODEL is set by a value of its own"),
        ({"settings": {"LORASERVE_QUANTIZE": "int8"}}, "settings.LORASERVE_QUANTIZE: name it without LORASERVE_"),
        ({"settings": {"TAGS": ["a"]}}, "TAGS"),
        ({"replica": 3}, "replica"),
        ({"replicas": 0}, "replicas"),
        ({"database": {"kind": "mysql"}}, "kind"),
        ({"secret": ""}, "database.kind is postgres, but no Secret has its URL"),
        ({"store": {"url": "file:///data"}}, "url"),
        ({"gpu": {"count": "two"}}, "count"),
        ({"gateway": {"class": "istio"}}, "class"),
    ],
)
def test_impossible_values_are_refused_by_name(values: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(Refused) as caught:
        template(values, tmp_path)
    assert words in str(caught.value)


def test_chart_matches_package_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["appVersion"], chart["version"]) == (__version__, __version__)


def test_schema_knows_each_value() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())

    def unknown(schema: dict[str, Any], values: dict[str, Any], path: str) -> Iterator[str]:
        assert set(schema.get("properties", values)) - {"global"} == set(values), path
        for name, value in values.items():
            below = schema.get("properties", {}).get(name, {})
            if isinstance(value, dict) and "properties" in below:
                yield from unknown(below, value, f"{path}.{name}")

    assert list(unknown(schema, VALUES, "")) == []
