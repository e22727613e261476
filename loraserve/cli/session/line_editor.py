"""Lines typed on a terminal: edited and remembered by readline, several in quotes as one text."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

QUOTES = '"""'
MAX_HISTORY = 1000
"""Lines that are kept, the latest ones."""
HISTORY_VARIABLE = "LORASERVE_HISTORY"


def history_path() -> Path | None:
    """Choose the file of earlier sessions' lines: LORASERVE_HISTORY, or the user's state folder.

    None where the variable is set to nothing: then no line is kept.
    """
    said = os.environ.get(HISTORY_VARIABLE)
    if said is not None:
        return Path(said) if said else None
    import platformdirs

    return platformdirs.user_state_path("loraserve") / "history"


class LineEditor:
    """Read what a person types.

    Args:
        words: returns how the word at the cursor may continue, given the line up to its end.
        history: file of the lines of earlier sessions, readable by its owner alone; None: none.
    """

    def __init__(self, words: Callable[[str], Sequence[str]], history: Path | None) -> None:
        self._words = words
        self._history = history
        # readline's prompt goes to stdout; where stdout is data, a prompt isn't
        self._readline = _readline() if sys.stdin.isatty() and sys.stdout.isatty() else None
        self._num_kept = 0 if self._readline is None else self._open(self._readline)

    def read(self, prompt: str) -> str:
        '''Read a line, or the lines between ``"""`` and ``"""``.

        Raises:
            EOFError: there is no more (Ctrl-D).
            KeyboardInterrupt: what was typed is given up (Ctrl-C).
        '''
        line = self._line(prompt)
        if not line.lstrip().startswith(QUOTES):
            return line
        lines = [line.lstrip().removeprefix(QUOTES)]
        while not lines[-1].rstrip().endswith(QUOTES):
            lines.append(self._line("... "))
        lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
        return "\n".join(lines).strip("\n")

    def close(self) -> None:
        """Keep the lines of this session. A disk that refuses them is no reason to fail."""
        readline = self._readline
        if readline is None or self._history is None:
            return
        num_new = readline.get_current_history_length() - self._num_kept
        with contextlib.suppress(OSError):
            self._history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self._history, os.O_CREAT | os.O_WRONLY, 0o600))
            readline.append_history_file(max(num_new, 0), str(self._history))

    def _line(self, prompt: str) -> str:
        if self._readline is not None:
            return input(prompt)
        sys.stderr.write(prompt)
        sys.stderr.flush()
        return input()

    def _open(self, readline: ModuleType) -> int:
        """Set readline up; return the number of lines of earlier sessions."""

        def complete(text: str, state: int) -> str | None:
            line = readline.get_line_buffer()[: readline.get_endidx()]
            found = [word for word in self._words(line) if word.startswith(text)]
            if len(found) == 1:
                found = [f"{found[0]} "]
            return found[state] if state < len(found) else None

        readline.set_auto_history(True)
        readline.set_history_length(MAX_HISTORY)
        readline.clear_history()
        if self._history is not None:
            with contextlib.suppress(OSError):
                readline.read_history_file(str(self._history))
        readline.set_completer_delims(" \t\n+*")
        readline.set_completer(complete)
        is_libedit = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")
        return int(readline.get_current_history_length())


def _readline() -> ModuleType | None:
    """Import readline; None where Python was built without it: lines are read all the same."""
    try:
        import readline
    except ImportError:
        return None
    return readline
