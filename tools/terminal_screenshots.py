"""Draw sessions of the command line for docs/images: real ones, against the demo's base.

make terminal
"""

from __future__ import annotations

import io
import os
import re
import select
import shlex
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

from loraserve import Client
from loraserve.demo.demo_server import DemoServer, choose_port
from loraserve.demo.smollm.smollm_demo import smollm_demo

FOLDER = Path(__file__).resolve().parent.parent / "docs/images"
MAX_BYTES = 80_000
ROWS = 60
ANSWER_S = 120
PROMPT = "$ "
# A page must load nothing from another host: the reader's own font has to do.
TEMPLATE = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
# what a bar that is gone at the end leaves: its last line, which is then erased
_ERASED_LINE = re.compile(r"[^\n]*\n(?:\x1b\[\?25h)?\r\x1b\[1A\x1b\[2K")
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_OTHER_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-ln-z]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[=>])")


@dataclass(frozen=True, slots=True)
class Picture:
    """A session: commands one after another, and lines that are typed into the last one.

    Attributes:
        typed: lines, each once the prompt of the session is there again.
        before_typing: end of what is shown before the next line can be typed.
    """

    name: str
    title: str
    commands: tuple[str, ...]
    typed: tuple[str, ...] = ()
    before_typing: str = "> "
    num_columns: int = 100


PICTURES = (
    Picture(
        "run",
        "a session",
        ("loraserve run sql",),
        (
            "How many tickets have a price over 20?",
            "/clear",
            "/model json",
            "Anna from Paris ordered 3 lamps at 20 euros each.",
            "/clear",
            "/model french",
            "Where is the red car?",
            "/set temperatur 0",
            "/set temperature 0",
            "/bye",
        ),
    ),
    Picture(
        "adapters",
        "adapters, versions, traffic",
        (
            "loraserve adapter list",
            "loraserve adapter push ./new-sql --name sql --no-promote",
            "loraserve adapter alias sql live --split 1=3,2=1",
            "loraserve adapter traffic sql",
        ),
        num_columns=110,
    ),
    Picture(
        "plan",
        "what fits",
        ("loraserve plan --model SmolLM2-135M-Instruct.Q4_1.gguf --memory-budget 8GiB --ranks 8 --count 1000",),
    ),
    Picture(
        "doctor",
        "is all well?",
        ("loraserve doctor --model SmolLM2-135M-Instruct.Q4_1.gguf --memory-budget 512MiB --max-model-len 4096",),
        num_columns=120,
    ),
)


def on_terminal(words: list[str], picture: Picture, variables: Mapping[str, str], folder: Path) -> str:
    """Return what a command shows on a terminal of its own, where the picture's lines are typed."""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (ROWS, picture.num_columns))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "loraserve.cli.main", *words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=folder,
        env={**os.environ, **variables, "TERM": "xterm-256color", "COLUMNS": str(picture.num_columns)},
        start_new_session=True,
    )
    os.close(theirs)
    waiting = select.poll()
    waiting.register(ours, select.POLLIN)
    lines = list(picture.typed)
    shown, num_typed_after, deadline = "", 0, time.monotonic() + ANSWER_S
    try:
        while time.monotonic() < deadline:
            if waiting.poll(200):
                try:
                    part = os.read(ours, 65_536)
                except OSError:  # how Linux says that the other end is closed
                    break
                if not part:
                    break
                shown += part.decode(errors="replace")
                continue
            new = _OTHER_ESCAPES.sub("", shown[num_typed_after:])
            if lines and new.endswith(picture.before_typing):
                num_typed_after = len(shown)
                os.write(ours, f"{lines.pop(0)}\n".encode())
        else:
            raise SystemExit(f"{shlex.join(words)} doesn't end in {ANSWER_S} s; it showed: {shown!r}")
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    if lines:
        raise SystemExit(f"{shlex.join(words)} ended before {lines} could be typed; it showed: {shown!r}")
    return shown


def plain(shown: str, names: Mapping[str, str]) -> str:
    """Return what stays on the terminal: with its colors, without what was written over.

    Args:
        names: text of this machine, and what stands for it in the picture.
    """
    text = _OTHER_ESCAPES.sub("", _ERASED_LINE.sub("", shown.replace("\r\n", "\n")))
    # a line that was written again, such as a progress bar's, is its last state
    text = "\n".join(line.rsplit("\r", 1)[-1] for line in text.split("\n"))
    text = "\n".join(line for line in text.split("\n") if not line or _COLORS.sub("", line).strip())
    for name, other in names.items():
        text = text.replace(name, other)
    return text.strip("\n")


def draw(picture: Picture, sessions: list[tuple[str, str]]) -> str:
    """Return the picture of commands and what each showed, as SVG."""
    console = Console(
        record=True, width=picture.num_columns, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    for command, shown in sessions:
        console.print(Text(PROMPT, style="bold green") + Text(command, style="bold"))
        console.print(Text.from_ansi(shown))
    return console.export_svg(
        title=f"loraserve: {picture.title}",
        theme=SVG_EXPORT_THEME,
        code_format=TEMPLATE,
        unique_id=f"terminal-{picture.name}",
    )


def set_up(server: DemoServer) -> str:
    """Make a tenant with some of the demo's adapters; return a key of it."""
    with Client(server.url, api_key=server.admin_key) as admin:
        admin.tenants.create("acme")
        key: str = admin.keys.create("acme", name="pictures").key
    with Client(server.url, api_key=key) as client:
        for name in ("sql", "french", "json", "pirate"):
            client.adapters.push(server.model.adapters[name], name=name)
    return key


def ask(server: DemoServer, key: str) -> None:
    """Let each version of `sql` answer, as a split does."""
    with Client(server.url, api_key=key) as client:
        for user in range(24):
            client.chat.completions.create(
                model="sql",
                messages=[{"role": "user", "content": "How many tickets are open?"}],
                max_tokens=16,
                user=str(user),
            )


def take(picture: Picture, server: DemoServer, key: str, folder: Path) -> None:
    """Run the picture's commands and write it."""
    variables = {"LORASERVE_URL": server.url, "LORASERVE_API_KEY": key, "LORASERVE_HISTORY": ""}
    names = {str(server.data_dir): "~/.local/share/loraserve", str(folder): "~", server.url: "http://127.0.0.1:8000"}
    if picture.name == "doctor":
        variables |= {"LORASERVE_DATA_DIR": str(server.data_dir), "LORASERVE_API_KEY": server.admin_key}
    sessions = []
    for command in picture.commands:
        words = shlex.split(command)
        if words[1:3] == ["adapter", "traffic"]:
            ask(server, key)
        is_last = command == picture.commands[-1]
        shown = on_terminal(words[1:], picture if is_last else Picture("", "", ()), variables, folder)
        sessions.append((command, plain(shown, names)))
    path = FOLDER / f"terminal-{picture.name}.svg"
    path.write_text(draw(picture, sessions) + "\n", encoding="utf-8")
    num_bytes = path.stat().st_size
    print(f"{path.name}: {num_bytes / 1000:.0f} kB")
    assert num_bytes < MAX_BYTES, f"{path} has {num_bytes} bytes; at most {MAX_BYTES} belong into the tree"


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as data, tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = smollm_demo(print)
        (folder / model.base.name).symlink_to(model.base)
        (folder / "new-sql").symlink_to(model.adapters["json"])
        with DemoServer(Path(data), choose_port(0), model) as server:
            server.start()
            key = set_up(server)
            for picture in PICTURES:
                take(picture, server, key, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
