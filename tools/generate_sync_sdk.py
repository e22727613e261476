"""Generate `loraserve/sdk/_sync` from `loraserve/sdk/_async`; with ``--check``,
fail unless it is current.

Every ``await`` and ``async`` goes, and each name of NAMES and each ``Async…`` or ``async_…`` name
gets its blocking counterpart, in docstrings too. ruff then formats the result, so that its lines
are as if written by hand.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SDK = Path(__file__).parents[1] / "loraserve" / "sdk"
SOURCE, TARGET = SDK / "_async", SDK / "_sync"
HEADER = "# Generated from loraserve/sdk/_async/{name} by `make sdk`: don't edit.\n"
RUFF = (str(Path(sys.executable).with_name("ruff")),)

PHRASES = {
    (
        "The async client, and the source of the blocking one: `_sync` is generated from these modules."
    ): "The blocking client.",
    "each call is awaited, under asyncio or trio": "each call blocks, and threads may share it",
    "Tasks may share it": "Threads may share it",
}
NAMES = {"aread": "read", "aclose": "close", "anext": "next", "aiter_bytes": "iter_bytes"} | {
    f"__a{name}__": f"__{name}__" for name in ("enter", "exit", "iter", "next")
}
PATTERNS = (
    (re.compile(r"\basync (def|with|for)\b"), r"\1"),
    (re.compile(r"\bawait "), ""),
    (re.compile(r"\bAsync([A-Z]\w*)"), r"\1"),
    (re.compile(r"\basync_(\w+)"), r"sync_\1"),
    (re.compile(r"\b_async\b"), "_sync"),
    (re.compile(rf"\b({'|'.join(NAMES)})\b"), lambda found: NAMES[found[1]]),
)


def to_sync(text: str) -> str:
    """Return the blocking counterpart of a module's text, not formatted yet."""
    for awaiting, blocking in PHRASES.items():
        words = r"\s+".join(map(re.escape, awaiting.split()))
        text = re.sub(words, blocking, text)
    for pattern, replacement in PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def generate() -> dict[Path, str]:
    """Return each generated file's path and text."""
    files = {}
    for source in sorted(SOURCE.glob("*.py")):
        target = TARGET / source.name
        text = HEADER.format(name=source.name) + to_sync(source.read_text())
        for arguments in (
            ("check", "--quiet", "--fix", "--unsafe-fixes", "--select", "F401,I,UP028"),
            ("format", "--quiet"),
        ):
            command = [*RUFF, *arguments, "--stdin-filename", str(target), "-"]
            text = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
        files[target] = text
    return files


def main() -> int:
    files = generate()
    stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    extra = [path for path in TARGET.glob("*.py") if path not in files]
    if "--check" in sys.argv[1:]:
        for path in (*stale, *extra):
            print(f"{path.relative_to(SDK.parents[1])} isn't what its source generates. Run: make sdk", file=sys.stderr)
        return 1 if stale or extra else 0
    TARGET.mkdir(exist_ok=True)
    for path in stale:
        path.write_text(files[path])
    for path in extra:
        path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
