"""How the distributions are built, and what their metadata say.

Three are built from this tree. `pyproject.toml` is the whole of it, as a checkout, an image or a
Git address is installed. The index has it in two wheels that share no file, so that neither breaks
the other (`make dist`): `distributions/client`, the SDK and the command line without the server's
libraries, and `distributions/server`, which is all the rest, is called loraserve, and needs that
client. Both name the command, since `pipx install` and `uv tool install` give a program only the
commands of the distribution that they were asked for.

An editable installation has links too, by which type checkers find its packages: `dev-mode-exact`
installs an import hook, and no type checker runs that. Yet the root can't be on `sys.path` instead:
`tests` and `benchmarks` would be everybody's, and `kernels` a namespace package, by whose name
libraries look for Hugging Face's. So it has `.editable/` on its path as well: a folder of links to
the packages, and of nothing else.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

from hatchling.builders.config import BuilderConfig
from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.builders.wheel import WheelBuilder
from hatchling.metadata.plugin.interface import MetadataHookInterface

ROOT = Path(__file__).resolve().parent
CLIENT, SERVER = "client", "server"
CLIENT_FILES = (
    "loraserve/__init__.py",
    "loraserve/adapter_folder.py",
    "loraserve/cli/",
    "loraserve/contract/",
    "loraserve/errors.py",
    "loraserve/hub.py",
    "loraserve/limits.py",
    "loraserve/py.typed",
    "loraserve/sdk/",
    "loraserve/tokenizer_identity.py",
)
"""The client's part: these files, and those in these folders."""

CLIENT_LIBRARIES = ("google-re2", "httpx2", "platformdirs", "pydantic", "rich", "typer")
CLIENT_EXTRAS = ("hub", "mlflow", "openai")
PROJECT_URL = "LORASERVE_PROJECT_URL"
"""Variable with the address of the repository that a release is built from, such as
``https://github.com/ORG/loraserve``: the release workflow sets it to its own.
"""

_FIELDS = ("requires-python", "license", "authors", "keywords", "classifiers", "scripts")
_LINK = re.compile(r"(?P<before>\]\()(?!https?://|#|mailto:)(?P<path>[^)\s]+)")


class Wheel(BuildHookInterface[BuilderConfig]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Choose a part's files, or put a path file for `.editable/` into an editable wheel."""
        part = self.config.get("part")
        if part is not None:
            build_data["force_include"].update(files_of(part))
            return
        if version != "editable":
            return
        try:
            path_file = link(Path(self.root), self.build_config.packages)
        except OSError as exc:
            # A file system without links, or one that can't be written: the import hook works there
            # all the same.
            self.app.display_warning(f"type checkers won't find this installation's packages: {exc}")
            return
        build_data["force_include_editable"][str(path_file)] = path_file.name


class Metadata(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        """Set the fields that two distributions share, or that only a release knows.

        Raises:
            ValueError: `PROJECT_URL` isn't the address of a page.
        """
        part, version = self.config.get("part"), version_of(ROOT)
        url = os.environ.get(PROJECT_URL, "").rstrip("/")
        if url and not url.startswith("https://"):
            raise ValueError(f"{PROJECT_URL} is {url!r}; expected an address such as https://github.com/ORG/loraserve")
        folder = Path(self.root) if part == CLIENT else ROOT
        text = (folder / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": with_absolute_links(text, url, version)}
        metadata["urls"] = urls_of(url, version)
        if part is None:
            return
        whole = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        metadata.update({name: whole[name] for name in _FIELDS})
        extras = whole["optional-dependencies"]
        if part == CLIENT:
            metadata["dependencies"] = [one for one in whole["dependencies"] if name_of(one) in CLIENT_LIBRARIES]
            metadata["optional-dependencies"] = {name: extras[name] for name in CLIENT_EXTRAS}
        else:
            metadata["description"] = whole["description"]
            metadata["dependencies"] = [f"loraserve-client=={version}", *whole["dependencies"]]
            metadata["optional-dependencies"] = {name: extras[name] for name in extras if name != "dev"}


def files_of(part: str) -> dict[str, str]:
    """Return the part's files, and their places in its wheel."""
    whole = WheelBuilder(str(ROOT))
    return {
        file.path: file.distribution_path
        for file in whole.recurse_included_files()
        if is_clients(Path(file.distribution_path).as_posix()) == (part == CLIENT)
    }


def is_clients(path: str) -> bool:
    """Return whether the wheel's file is in the client's part."""
    return any(path.startswith(one) if one.endswith("/") else path == one for one in CLIENT_FILES)


def name_of(requirement: str) -> str:
    """Return the distribution that a requirement names."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    return "" if found is None else found[0]


def version_of(root: Path) -> str:
    """Read the version of this tree."""
    text = (root / "loraserve" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise ValueError("loraserve/__init__.py has no __version__")
    return found[1]


def urls_of(url: str, version: str) -> dict[str, str]:
    """Return the pages that the metadata name; none without the project's address."""
    if not url:
        return {}
    return {
        "Homepage": url,
        "Documentation": f"{url}/blob/v{version}/docs/index.md",
        "Changelog": f"{url}/blob/v{version}/CHANGELOG.md",
        "Source": url,
        "Issues": f"{url}/issues",
    }


def with_absolute_links(text: str, url: str, version: str) -> str:
    """Let Markdown's links to files of the tree work on another site: that of an index.

    Without the project's address they stay as they are.
    """
    if not url:
        return text

    def absolute(found: re.Match[str]) -> str:
        path = found["path"]
        kind = "raw" if path.partition("#")[0].endswith((".png", ".svg")) else "blob"
        return f"{found['before']}{url}/{kind}/v{version}/{path}"

    return _LINK.sub(absolute, text)


def link(root: Path, packages: list[str]) -> Path:
    """Make `root/.editable`, where each package is a link, and return its path file.

    The path file is in the folder and names it.
    """
    folder = root / ".editable"
    folder.mkdir(exist_ok=True)
    targets = {Path(package).name: os.path.join("..", package) for package in packages}
    for path in folder.iterdir():
        if path.is_symlink() and targets.get(path.name) != os.readlink(path):
            path.unlink()
    for name, target in targets.items():
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(target, target_is_directory=True)
    path_file = folder / "loraserve.pth"
    path_file.write_text(f"{folder}\n", encoding="utf-8")
    return path_file
