"""The wheel holds everything that an installation needs, and nothing that would overwrite another's
package; neither does an editable installation, whose types are found too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"loraserve", "adapters_store", "loraserve_kernels", "loraserve_migrations"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("loraserve-*.whl")
    return wheel


@pytest.fixture(scope="module")
def names(wheel: Path) -> frozenset[str]:
    with zipfile.ZipFile(wheel) as archive:
        return frozenset(archive.namelist())


def run_installed(wheel: Path, code: str) -> str:
    """What `code` prints where the wheel is installed and this checkout isn't."""
    installed = wheel.parent / "installed"
    if not installed.exists():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(installed)
    # Without site (-S) the checkout's editable hook isn't loaded; the libraries are named by their
    # path instead.
    paths = [str(installed), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "PATH": os.environ["PATH"], "HOME": str(wheel.parent)}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env=variables,
        cwd=wheel.parent,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_wheel_contains_only_project_packages(names: frozenset[str]) -> None:
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == PACKAGES


def test_no_package_is_called_kernels_or_migrations(names: frozenset[str]) -> None:
    assert not {name for name in names if name.startswith(("kernels/", "migrations/", "tests/", "benchmarks/"))}


def test_wheel_exports_types(names: frozenset[str]) -> None:
    assert {f"{package}/py.typed" for package in PACKAGES} <= names


def test_wheel_contains_every_module_of_checkout(names: frozenset[str]) -> None:
    roots = (ROOT, ROOT, ROOT / "kernels", ROOT / "migrations")
    packages = ("loraserve", "adapters_store", "loraserve_kernels", "loraserve_migrations")
    expected = {
        path.relative_to(root).as_posix()
        for root, package in zip(roots, packages, strict=True)
        for path in (root / package).rglob("*.py")
    }
    assert expected <= names


def test_installed_wheel_finds_console_files(wheel: Path, names: frozenset[str]) -> None:
    static = ROOT / "loraserve" / "api" / "console" / "static"
    expected = {path.relative_to(ROOT).as_posix() for path in static.rglob("*") if path.is_file()}
    assert len(expected) > 20
    assert expected <= names
    code = "from loraserve.api.console.pages import STATIC; print(STATIC, len([*STATIC.rglob('*.js')]))"
    folder, count = run_installed(wheel, code).split()
    assert folder.startswith(str(wheel.parent))
    assert int(count) == len([*static.rglob("*.js")])


def test_installed_wheel_finds_migrations(wheel: Path) -> None:
    code = "from loraserve.db import migrate; import loraserve; print(migrate.head(), loraserve.__file__)"
    head, file = run_installed(wheel, code).split()
    assert head
    assert file.startswith(str(wheel.parent))


def test_installed_wheel_finds_demo_pack(wheel: Path) -> None:
    code = "from loraserve.demo.pack import pack_files; print(*pack_files(), sep='\\n')"
    files = [Path(line) for line in run_installed(wheel, code).splitlines()]
    assert {file.name for file in files} >= {"model.safetensors", "adapter_model.safetensors", "CARD.md"}
    assert all(file.is_relative_to(wheel.parent) for file in files)


def test_installed_wheel_finds_adapters_of_demo(wheel: Path) -> None:
    code = "from loraserve.demo.smollm.smollm_demo import adapter_files; print(*adapter_files(), sep='\\n')"
    files = [Path(line) for line in run_installed(wheel, code).splitlines()]
    assert {file.name for file in files} >= {"adapter_config.json", "adapter_model.safetensors", "card.json"}
    assert all(file.is_relative_to(wheel.parent) for file in files)


def test_installed_package_imports_no_torch(wheel: Path) -> None:
    code = "import sys, loraserve; from loraserve import Client; print('torch' in sys.modules, loraserve.__file__)"
    assert run_installed(wheel, code).startswith("False ")


def test_wheel_puts_the_command_on_the_path(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "loraserve = loraserve.cli.main:main" in archive.read(name).decode()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads: an installation may write into the folder that it installs."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copyfile(ROOT / name, copy / name)
    for path in ROOT.glob("*.py"):
        shutil.copyfile(path, copy / path.name)
    for name in ("loraserve", "adapters_store", "kernels", "migrations"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("tests", "benchmarks", "examples"):
        (copy / name).mkdir()
        (copy / name / "__init__.py").touch()
    return copy


@pytest.fixture(scope="module")
def editable_python(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment where `checkout` is installed as by `pip install -e`, with
    this environment's libraries.
    """
    folder = tmp_path_factory.mktemp("editable")
    build = "import sys; from hatchling.build import build_editable; print(build_editable(sys.argv[1]))"
    for command, cwd in (
        ([sys.executable, "-P", "-c", build, str(folder)], checkout),
        ([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], folder),
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd)
        assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("loraserve-*.whl")
    (site_packages,) = (folder / "venv").glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site_packages)
    # Path files in a folder that a path file names aren't read: this environment's own installation
    # stays unseen.
    (site_packages / "libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    return folder / "venv" / "bin" / "python"


def importable(python: Path, names: set[str], checkout: Path, cwd: Path) -> set[str]:
    """Return those of `names` that `python`, run in the folder `cwd`, finds in `checkout`.

    A library may have a `tests` of its own.
    """
    code = (
        "import json, sys; from importlib.util import find_spec\n"
        "specs = {name: find_spec(name) for name in sys.argv[1:]}\n"
        "print(json.dumps({name: list(spec.submodule_search_locations or [spec.origin]) "
        "for name, spec in specs.items() if spec}))"
    )
    done = subprocess.run(
        [python, "-c", code, *names],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=cwd,
        env={"PATH": os.environ["PATH"]},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return {name for name, places in found.items() if any(Path(place).is_relative_to(checkout) for place in places)}


@pytest.mark.campaign
def test_type_checker_finds_types_of_editable_installation(editable_python: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from loraserve import Client\n"
        "import adapters_store, loraserve.sdk, loraserve_kernels, loraserve_migrations\n"
        'reveal_type(Client("http://127.0.0.1:1", api_key="sk").models.list())\n'
        'loraserve.sdk.Client("http://127.0.0.1:1", api_key=1)\n'
    )
    variables = {name: value for name, value in os.environ.items() if name not in ("MYPYPATH", "PYTHONPATH")}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "mypy", "--strict", "--python-executable", editable_python, "program.py"],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        env=variables,
    )
    assert done.stdout.splitlines() == [
        'program.py:3: note: Revealed type is "list[loraserve.contract.server.Model]"',
        'program.py:4: error: Argument "api_key" to "Client" has incompatible type "int"; '
        'expected "str | None"  [arg-type]',
        "Found 1 error in 1 file (checked 1 source file)",
    ], done.stderr


def test_editable_installation_makes_no_extra_module_importable(
    checkout: Path, editable_python: Path, tmp_path: Path
) -> None:
    others = {"kernels", "migrations", "tests", "benchmarks", "examples", "hatch_build"}
    assert importable(editable_python, PACKAGES | others, checkout, tmp_path) == PACKAGES


def test_editable_installation_works_without_links(checkout: Path, editable_python: Path, tmp_path: Path) -> None:
    (checkout / ".editable").rename(tmp_path / "links")
    try:
        assert importable(editable_python, PACKAGES, checkout, tmp_path) == PACKAGES
    finally:
        (tmp_path / "links").rename(checkout / ".editable")


def test_sdist_of_installed_checkout_holds_packages_without_links(
    checkout: Path, editable_python: Path, tmp_path: Path
) -> None:
    assert (checkout / ".editable" / "loraserve").is_symlink()
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path), str(checkout)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (sdist,) = tmp_path.glob("loraserve-*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert not {name for name in names if name.startswith(".editable")}
    typed = {"loraserve", "adapters_store", "kernels/loraserve_kernels", "migrations/loraserve_migrations"}
    assert {f"{package}/py.typed" for package in typed} | {"hatch_build.py"} <= names
