"""Documentation that stays true: pages in the site's navigation, links, charts, the tutorial."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from loraserve import errors
from loraserve.api.errors import status_of

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))


@pytest.fixture
def check_site(tools: None) -> ModuleType:
    return __import__("check_site")


def pages_of(nav: Any) -> list[str]:
    """Return the pages of a navigation, at any depth."""
    if isinstance(nav, str):
        return [nav]
    return [page for part in (nav.values() if isinstance(nav, dict) else nav) for page in pages_of(part)]


def anchors(text: str) -> set[str]:
    """Return a page's anchors: its own, and those that GitHub makes of headings."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    words = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    made = {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in words}
    return made | set(re.findall(r'<a (?:id|name)="([^"]+)"', text))


def test_every_page_is_in_the_navigation_once() -> None:
    found = pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(found) == sorted(path.name for path in DOCS.glob("*.md"))


def test_links_of_the_texts_lead_somewhere() -> None:
    lost = []
    for path in (*ROOT.glob("*.md"), *DOCS.glob("*.md")):
        for link in LINK.findall(CODE.sub("", FENCE.sub("", path.read_text()))):
            target, _, anchor = link.partition("#")
            if "://" in link:
                continue
            other = (path.parent / target).resolve() if target else path
            if not other.exists() or (anchor and anchor not in anchors(other.read_text())):
                lost.append(f"{path.name}: {link}")
    assert not lost


def test_architecture_names_existing_modules() -> None:
    sources = {"loraserve": ROOT / "loraserve", "adapters_store": ROOT / "adapters_store"}
    sources["kernels"] = ROOT / "kernels" / "loraserve_kernels"
    modules = {
        ".".join((package, *path.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__"): path
        for package, folder in sources.items()
        for path in folder.rglob("*.py")
    }

    def is_there(name: str) -> bool:
        """Check for a file, a module by the end of its dotted name, or a name in such a module."""
        if (ROOT / name).exists():
            return True
        parts = name.replace("/", ".").split(".")
        for num_parts in range(len(parts), 0, -1):
            owner, within = ".".join(parts[:num_parts]), parts[num_parts:]
            for module, path in modules.items():
                if f".{module}".endswith(f".{owner}"):
                    source = path.read_text()
                    if all(re.search(rf"\b{part}\b", source) for part in within):
                        return True
        return False

    _, flows = (ROOT / "ARCHITECTURE.md").read_text().split("## Main flows")
    names = set(re.findall(r"`([a-z_0-9]+(?:[./][A-Za-z_0-9]+)+)`", flows))
    assert len(names) > 90
    assert not [name for name in sorted(names) if not is_there(name)]


def test_site_needs_only_own_files() -> None:
    """A page that links out of docs/ is complete on GitHub, and broken on the site."""
    outside = [
        f"{path.name}: {link}"
        for path in DOCS.glob("*.md")
        for link in LINK.findall(FENCE.sub("", path.read_text()))
        if link.startswith("../")
    ]
    assert not outside, f"name the file without a link: {outside}"


def test_page_of_errors_has_each_code() -> None:
    text = (DOCS / "errors.md").read_text()
    kinds = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.LoraserveError)]
    statuses: dict[str, set[int]] = {}
    for kind in kinds:
        statuses.setdefault(kind.code, set()).add(status_of(kind("x")))
    assert not {code for code in statuses if f"`{code}`" not in text}
    rows = re.findall(r"^\| (`[^|]+`) \| ([\d, ]+) \|", text, re.MULTILINE)
    shown = {code: {int(one) for one in found.split(",")} for names, found in rows for code in CODE.findall(names)}
    assert len(shown) > 40
    assert {code: found for code, found in shown.items() if statuses[code.strip("`")] != found} == {}


@pytest.mark.parametrize("page", ["errors.md", "formats.md", "migrating.md"])
def test_commands_of_page_exist(page: str) -> None:
    import typer.main

    from loraserve.cli.main import app

    texts = re.findall(r"`(loraserve [a-z][^`]*)`|^\$ (loraserve [^#\n]*)", (DOCS / page).read_text(), re.MULTILINE)
    lines = [part.strip() for one in texts for part in "".join(one).split("&&") if "…" not in part]
    assert len(lines) > 2
    for line in lines:
        command: Any = typer.main.get_command(app)
        _, *words = shlex.split(line.replace("\\|", "|"))
        context = command.context_class(command)
        while hasattr(command, "resolve_command"):
            _, command, words = command.resolve_command(context, words)
            context = command.context_class(command, context)
        try:
            command.make_context("it", words, parent=context)
        except typer.BadParameter as error:
            # some name the command alone
            if type(error).__name__ != "MissingParameter":
                pytest.fail(f"{line}: {error}")


def test_charts_match_newest_results(tools: None) -> None:
    charts = __import__("charts")
    for name, text in charts.charts().items():
        assert (DOCS / "charts" / name).read_text() == text, "draw them again: python tools/charts.py"
        assert len(text) < 10_000


def test_terminal_pictures_show_existing_commands(tools: None, subtests: Any) -> None:
    import typer.main

    from loraserve.cli.main import app

    shown = "".join(path.read_text() for path in DOCS.glob("*.md"))
    for picture in __import__("terminal_screenshots").PICTURES:
        for line in picture.commands:
            with subtests.test(line):
                command: Any = typer.main.get_command(app)
                _, *words = shlex.split(line)
                context = command.context_class(command)
                while hasattr(command, "resolve_command"):
                    _, command, words = command.resolve_command(context, words)
                    context = command.context_class(command, context)
                # a flag that is gone, or one that is missing, is refused here
                command.make_context("it", words, parent=context)
        with subtests.test(picture.name):
            text = (DOCS / "images" / f"terminal-{picture.name}.svg").read_text()
            assert "://" not in re.sub(
                r"http://(www\.w3\.org/2000/svg|127\.0\.0\.1:\d+)|https://www\.textualize\.io", "", text
            )
            assert f"images/terminal-{picture.name}.svg" in shown


def test_checker_finds_broken_documents(check_site: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<h1 id="top"></h1><a href="b.html">x</a><a href="#top">x</a><a href="b.html#no">x</a>'
        '<a href="../out.html">x</a><a href="gone.html">x</a><a href="https://example.org/x">x</a>'
        '<script src="https://example.org/x.js"></script>'
    )
    (tmp_path / "b.html").write_text("<p></p>")
    (tmp_path.parent / "out.html").write_text("")
    assert check_site.problems(tmp_path) == [
        "a.html: loads https://example.org/x.js from another host",
        "a.html: b.html#no has no such anchor",
        "a.html: ../out.html leads nowhere",
        "a.html: gone.html leads nowhere",
    ]
    assert check_site.problems(tmp_path / "empty")


def test_site_is_built_without_a_warning(check_site: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("zensical")
    shutil.copyfile(ROOT / "mkdocs.yml", tmp_path / "mkdocs.yml")
    shutil.copytree(DOCS, tmp_path / "docs")
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert check_site.problems(tmp_path / "site") == []
    assert (tmp_path / "site" / "index.html").is_file()
