"""Lets type checkers find the packages of an editable installation.

`dev-mode-exact` installs an import hook, and no type checker runs that. Yet the root can't be on
`sys.path` instead: `tests` and `benchmarks` would be everybody's, and `kernels` a namespace
package, by whose name libraries look for Hugging Face's. So an editable installation has
`.editable/` on its path as well: a folder of links to the packages, and of nothing else.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hatchling.builders.config import BuilderConfig
from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class LinksForTypeCheckers(BuildHookInterface[BuilderConfig]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Put a path file for `.editable/` into the editable wheel.

        Any other wheel stays as it is.
        """
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
