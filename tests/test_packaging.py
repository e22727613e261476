"""The wheel holds everything that an installation needs, and nothing that would overwrite another's
package; neither does an editable installation, whose types are found too.
"""

from __future__ import annotations

import email
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

PROJECT_URL = "https://git.example.org/team/loraserve"
ROOT = Path(__file__).resolve().parent.parent
PARTS = ("client", "server")
PACKAGES = {"loraserve", "adapters_store", "loraserve_kernels", "loraserve_migrations"}


def build(folder: Path, out: Path, **variables: str) -> Path:
    """The wheel of the project in `folder`."""
    command = [sys.executable, "-P", "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | variables)
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("loraserve*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels of the client and of the server, as an index gets them."""
    return {
        part: build(ROOT / "distributions" / part, tmp_path_factory.mktemp(part), LORASERVE_PROJECT_URL=PROJECT_URL)
        for part in PARTS
    }


def files_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_string(archive.read(name).decode())


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


def test_client_and_server_share_no_file(wheel: Path, parts: dict[str, Path]) -> None:
    """Each keeps its modules when the other is removed, but not the command, which both name."""
    client, server = files_of(parts["client"]), files_of(parts["server"])
    assert client & server == set()
    assert client | server == files_of(wheel)
    assert {name.split("/")[0] for name in client} == {"loraserve"}


def test_server_needs_client_of_same_version(parts: dict[str, Path]) -> None:
    client, server = (metadata_of(parts[part]) for part in PARTS)
    assert (client["Name"], server["Name"]) == ("loraserve-client", "loraserve")
    assert f"loraserve-client=={client['Version']}" in server.get_all("Requires-Dist", [])
    assert client["Version"] == server["Version"]
    # pipx and uv give a program the commands of its own distribution, not those of what it needs
    for wheel in parts.values():
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
            assert "loraserve = loraserve.cli.main:main" in archive.read(name).decode()


def test_metadata_of_release_name_pages_absolutely(parts: dict[str, Path]) -> None:
    for wheel in parts.values():
        metadata = metadata_of(wheel)
        urls = dict(line.split(", ", 1) for line in metadata.get_all("Project-URL", []))
        assert urls.keys() == {"Homepage", "Documentation", "Changelog", "Source", "Issues"}
        assert all(url.startswith(PROJECT_URL) for url in urls.values())
        assert metadata["Keywords"]
        assert len(metadata.get_all("Classifier", [])) > 8
        targets = re.findall(r"\]\(([^)\s]+)", metadata.get_payload())
        assert len(targets) > 3
        assert [target for target in targets if not target.startswith(("https://", "#"))] == []
        # each is a file of this tree
        own = [target for target in targets if target.startswith(PROJECT_URL)]
        paths = [re.sub(r"^/(blob|raw)/v[^/]+/", "", target.removeprefix(PROJECT_URL)) for target in own]
        assert [path for path in paths if not (ROOT / path.partition("#")[0]).exists()] == []


def test_project_address_must_be_of_a_page(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="LORASERVE_PROJECT_URL is 'here'"):
        build(ROOT / "distributions" / "client", tmp_path, LORASERVE_PROJECT_URL="here")


CLIENT_COMMANDS = {
    "adapter",
    "audit",
    "grant",
    "key",
    "admin-key",
    "operation",
    "ps",
    "pull",
    "run",
    "tenant",
    "usage",
    "bench",
}


@pytest.fixture(scope="module")
def client_alone(parts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """A function that runs code where the client and its libraries are installed, and no others.

    The libraries are this environment's; those that the client doesn't need aren't found.
    """
    installed = tmp_path_factory.mktemp("client-alone")
    with zipfile.ZipFile(parts["client"]) as archive:
        archive.extractall(installed)
    needed = closure(
        line for line in metadata_of(parts["client"]).get_all("Requires-Dist", []) if "extra ==" not in line
    )
    top = {
        Path(str(file)).parts[0].partition(".")[0]
        for name in needed
        for file in importlib.metadata.files(name) or ()
        if not str(file).startswith("..") and ".dist-info" not in str(file)
    }
    guard = (
        "import sys\n"
        f"known = sys.stdlib_module_names | {top | {'loraserve'}!r}\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name[0] != '_' and name.partition('.')[0] not in known:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
    )
    paths = [str(installed), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]

    def run(code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-S", "-c", guard + code],
            capture_output=True,
            text=True,
            timeout=60,
            env={"PYTHONPATH": os.pathsep.join(paths), "PATH": os.environ["PATH"], "HOME": str(installed)},
            cwd=installed,
        )

    return run


def closure(requirements: Iterable[str]) -> set[str]:
    """The distributions that these need, with those that they need themselves."""
    found: set[str] = set()
    waiting = [Requirement(line) for line in requirements]
    while waiting:
        one = waiting.pop()
        if one.name in found or (one.marker is not None and not one.marker.evaluate({"extra": ""})):
            continue
        found.add(one.name)
        waiting += [Requirement(line) for line in importlib.metadata.requires(one.name) or ()]
    return found


def test_client_has_all_imported_modules(client_alone: Callable[[str], Any], parts: dict[str, Path]) -> None:
    names = sorted(
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in files_of(parts["client"])
        if name.endswith(".py")
    )
    done = client_alone(f"import importlib\nfor name in {names!r}:\n    importlib.import_module(name)\nprint('all')")
    assert done.stdout.strip() == "all", done.stderr


def command_line(*words: str) -> str:
    return f"sys.argv = {['loraserve', *words]!r}\nfrom loraserve.cli.main import main\nmain()"


def test_server_commands_name_missing_server(client_alone: Callable[[str], Any], subtests: pytest.Subtests) -> None:
    for words in (
        ["serve"],
        ["demo"],
        ["plan", "--model", "x"],
        ["doctor"],
        ["db", "upgrade"],
        ["backup", "x"],
        ["plan", "--help"],
    ):
        with subtests.test(" ".join(words)):
            done = client_alone(command_line(*words))
            assert done.returncode == 2
            assert done.stderr.splitlines()[:2] == [
                f"error: loraserve {words[0]} needs the server, and only loraserve's client is installed here.",
                "  Install the server beside it: pip install loraserve",
            ]


def test_client_commands_work_without_server(client_alone: Callable[[str], Any], subtests: pytest.Subtests) -> None:
    for command in sorted(CLIENT_COMMANDS):
        with subtests.test(command):
            done = client_alone(command_line(command, "--help"))
            assert (done.returncode, done.stderr) == (0, "")
    done = client_alone(command_line("adapter", "list", "--url", "http://127.0.0.1:1"))
    assert done.returncode == 1
    assert "127.0.0.1:1" in done.stderr


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
