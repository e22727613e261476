"""Kustomizations, built by kustomize's own rules: what it refuses isn't there.

`kustomize build` runs a root's resources depth first. It refuses a root that contains a root on the
way to it (a cycle), a file outside of its root, the same resource twice, and a patch or an image
that meets nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .test_deploy import ran, tool

yaml = pytest.importorskip("yaml")

DEPLOY = Path(__file__).resolve().parent.parent.parent / "deploy" / "kubernetes"
ROOTS = sorted(path.parent for path in DEPLOY.rglob("kustomization.yaml"))
FIELDS = {"apiVersion", "kind", "namespace", "resources", "images", "patches"}
Resources = dict[tuple[str, str, str], dict[str, Any]]


class BuildError(Exception):
    """Kustomize would refuse this."""


def build(root: Path, on_the_way: tuple[Path, ...] = ()) -> Resources:
    """Return a root's resources by API group, kind and name."""
    root = root.resolve()
    for other in on_the_way:
        if other == root or other.is_relative_to(root):
            raise BuildError(f"cycle detected: {root} contains {other}, which needs it")
    kustomization = yaml.safe_load((root / "kustomization.yaml").read_text())
    if unknown := kustomization.keys() - FIELDS:
        raise BuildError(f"{root}: this test doesn't know {unknown}")
    found: Resources = {}
    for entry in kustomization["resources"]:
        path = (root / entry).resolve()
        if path.is_dir():
            built = build(path, (*on_the_way, root))
        else:
            if not path.is_relative_to(root):
                raise BuildError(f"{path} isn't in or below {root}")
            documents = [document for document in yaml.safe_load_all(path.read_text()) if document]
            built = {key(document): document for document in documents}
            if len(built) < len(documents):
                raise BuildError(f"{path} has a resource twice")
        if twice := built.keys() & found.keys():
            raise BuildError(f"{twice} come twice")
        found |= built
    for patch in kustomization.get("patches", ()):
        apply(patch, found)
    for image in kustomization.get("images", ()):
        if not any(image["name"] == used.partition(":")[0] for one in found.values() for used in images(one)):
            raise BuildError(f"no container has the image {image['name']}")
    return found


def key(document: dict[str, Any]) -> tuple[str, str, str]:
    group, _, _ = document["apiVersion"].rpartition("/")
    return group, document["kind"], document["metadata"]["name"]


def apply(patch: dict[str, Any], resources: Resources) -> None:
    """Apply a patch's operations, of which `add` to an object is known."""
    target = patch["target"]
    met = [one for (_, kind, name), one in resources.items() if (kind, name) == (target["kind"], target["name"])]
    if not met:
        raise BuildError(f"a patch meets nothing: {target}")
    for operation in yaml.safe_load(patch["patch"]):
        assert operation["op"] == "add"
        *parents, last = operation["path"].strip("/").split("/")
        for one in met:
            for parent in parents:
                one = one[parent]
            one[last] = operation["value"]


def images(value: Any) -> list[str]:
    if isinstance(value, list):
        return [image for item in value for image in images(item)]
    if not isinstance(value, dict):
        return []
    own = [value["image"]] if isinstance(value.get("image"), str) else []
    return own + [image for item in value.values() for image in images(item)]


@pytest.mark.parametrize("root", ROOTS, ids=lambda path: path.name)
def test_kustomization_builds(root: Path) -> None:
    resources = build(root)
    assert ("apps", "StatefulSet", "loraserve") in resources
    assert all(isinstance(value, str) for value in resources["", "ConfigMap", "loraserve"]["data"].values())


@pytest.mark.parametrize("root", ROOTS, ids=lambda path: path.name)
def test_kubectl_builds_same_resources(root: Path) -> None:
    """Kustomize itself, where kubectl is there: the rules above are those that it has."""
    text = ran(tool("kubectl"), "kustomize", root)
    found = {key(document): document for document in yaml.safe_load_all(text) if document}
    assert found.keys() == build(root).keys()
    assert all(one["metadata"].get("namespace", "loraserve") == "loraserve" for one in found.values())
    image = found["apps", "StatefulSet", "loraserve"]["spec"]["template"]["spec"]["containers"][0]["image"]
    assert image == "loraserve:cpu"


def test_gateway_switches_router_metrics_on() -> None:
    assert build(DEPLOY / "gateway")["", "ConfigMap", "loraserve"]["data"]["LORASERVE_ROUTER_METRICS"] == "true"
    assert "LORASERVE_ROUTER_METRICS" not in build(DEPLOY)["", "ConfigMap", "loraserve"]["data"]


def test_root_below_own_resource_is_refused(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "kustomization.yaml").write_text("resources: []")
    (tmp_path / "below" / "kustomization.yaml").write_text("resources: ['..']")
    with pytest.raises(BuildError, match="cycle detected"):
        build(tmp_path / "below")
