"""The only place that prints. Data goes to stdout, words to stderr."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TextIO

from loraserve import errors

if TYPE_CHECKING:
    from loraserve.contract.result import Result
    from loraserve.sdk import Progress

# A terminal obeys these; a model's text or another's name shouldn't command it.
_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "\N{REPLACEMENT CHARACTER}")

_STEPS: tuple[tuple[type[errors.LoraserveError], str], ...] = (
    # the first match decides: subclasses stand before their parents
    (errors.SchemaOutdated, "loraserve db upgrade"),
    (errors.GrantNotFound, "loraserve grant list NAME"),
    (errors.OperationNotFound, "loraserve operation list"),
    (errors.VersionNotFound, "loraserve adapter versions NAME"),
    (errors.AliasNotFound, "loraserve adapter show NAME"),
    (errors.AdapterNotFound, "loraserve adapter list"),
    (errors.ModelNotFound, "loraserve adapter list"),
    (errors.TenantNotFound, "loraserve tenant list"),
    (errors.KeyNotFound, "loraserve key list --tenant TENANT"),
    (errors.PreconditionFailed, "loraserve adapter show NAME"),
    (errors.NoChatTemplate, "loraserve run MODEL PROMPT --raw"),
    (errors.AdapterQuarantined, "loraserve adapter versions NAME"),
    (errors.AdapterOfAnotherBase, "loraserve adapter versions NAME"),
    (
        errors.AuthenticationError,
        "export LORASERVE_API_KEY=… (an admin makes one with: loraserve key create --tenant TENANT)",
    ),
    (errors.DatabaseUnavailable, "loraserve doctor"),
    (errors.Overloaded, "loraserve ps"),
    (errors.RateLimited, "loraserve ps"),
    (errors.ClientTimeout, "loraserve ps"),
    (errors.ConnectionFailed, "loraserve serve --model BASE (or: loraserve demo)"),
)
_NAMED = re.compile(r"(?:See|Run|Try): (loraserve .+?)\.?$")
_PLACES = re.compile(r"\b(NAME|DIR|MODEL|PROMPT|ALIAS|TENANT)\b")


STATE_STYLES: Mapping[str, str] = {
    **dict.fromkeys(("ready", "passed", "succeeded", "device", "ok"), "green"),
    **dict.fromkeys(("loading", "running", "pending", "degraded", "skipped", "not_possible", "warn"), "yellow"),
    **dict.fromkeys(("quarantined", "failed", "fail"), "bold red"),
}
"""Colors of states on a terminal, by the first word; NO_COLOR turns them off."""
NOTHING = "-"
"""Cell without a value."""
MAX_CELL = 40
"""Characters of a text in a table."""
MAX_PROBLEMS = 5
"""Problems of a refused adapter that people are shown, unless all are requested."""
_TOLD_WAIT_S = 0.3
"""Seconds from which a wait for another try is reported."""


class Format(StrEnum):
    HUMAN = "human"
    JSON = "json"
    QUIET = "quiet"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its title, and the attribute it shows or a function of the row.

    Attributes:
        is_state: whether its cells have the colors of `STATE_STYLES`.
        is_rare: whether a table leaves it out where no row has a value.
    """

    title: str
    value: str | Callable[[Any], object]
    is_state: bool = False
    is_rare: bool = False

    def of(self, row: object) -> str:
        return _shown(getattr(row, self.value) if isinstance(self.value, str) else self.value(row))


class Output:
    """Writes messages in one of the three formats.

    They are tables for people, JSON for programs, bare names for shell variables.
    """

    def __init__(self, format: Format, named: Mapping[str, str] | None = None) -> None:
        self.format = format
        self.max_problems: int | None = MAX_PROBLEMS
        """Problems of a refusal that people are shown; None: all."""
        self.how_to_see_all = "--format json shows them"
        self._named = named or {}

    def rows(self, rows: Iterable[Result], columns: Iterable[Column], *, name: str, empty: str) -> None:
        """Print a list: a table, a JSON array, or one `name` (an attribute) per line.

        `empty` is shown when there is none.
        """
        match self.format:
            case Format.JSON:
                self.json([row.model_dump(mode="json") for row in rows])
            case Format.QUIET:
                for row in rows:
                    _print(_shown(getattr(row, name)))
            case Format.HUMAN:
                shown = list(rows)
                columns = [one for one in columns if not one.is_rare or any(one.of(row) != NOTHING for row in shown)]
                if shown:
                    _table(
                        [column.title for column in columns],
                        [[column.of(row) for column in columns] for row in shown],
                        [column.is_state for column in columns],
                    )
                else:
                    self.note(empty)

    def one(self, row: Result, columns: Iterable[Column], *, name: str) -> None:
        """Print an object.

        Print title and value per line, a JSON object, or only its `name` (an attribute).
        """
        match self.format:
            case Format.JSON:
                self.json(row.model_dump(mode="json"))
            case Format.QUIET:
                _print(_shown(getattr(row, name)))
            case Format.HUMAN:
                shown = list(columns)
                _pairs([(column.title, column.of(row)) for column in shown], [column.is_state for column in shown])

    def records(self, records: list[dict[str, object]], *, name: str) -> None:
        """Print a list of plain records with the same keys.

        It is a table, a JSON array, or one `name` (a key) per line.
        """
        match self.format:
            case Format.JSON:
                self.json(records)
            case Format.QUIET:
                for record in records:
                    _print(_shown(record[name]))
            case Format.HUMAN:
                _table(
                    [key.upper() for key in records[0]],
                    [[_shown(value) for value in record.values()] for record in records],
                )

    def pairs(self, pairs: Mapping[str, object]) -> None:
        """Print title and value per line, for people."""
        _pairs([(title, _shown(value)) for title, value in pairs.items()])

    def json(self, value: object, *, is_line: bool = False) -> None:
        """JSON on stdout; with `is_line` on one line, for things that come one after another."""
        _print(json.dumps(value, ensure_ascii=False, indent=None if is_line else 2))

    def done(self, record: Mapping[str, object], words: str) -> None:
        """Something was done that leaves nothing to show: `words`, or `record` as JSON."""
        if self.format is Format.JSON:
            self.json(dict(record))
        else:
            self.note(words)

    def line(self, text: str) -> None:
        """Print a line of data."""
        _print(_safe(text, sys.stdout))

    def state_line(self, state: str, shown: str, rest: str) -> None:
        """Print a line of data that begins with a state, in its color on a terminal."""
        if not sys.stdout.isatty():
            _print(shown + rest)
            return
        from rich.console import Console
        from rich.text import Text

        line = Text(_safe(shown + rest, sys.stdout))
        line.stylize(STATE_STYLES.get(state, ""), 0, len(shown))
        Console(highlight=False).print(line, soft_wrap=True)

    def text(self, text: str) -> None:
        """Print data without a line's end, shown at once: a streamed token."""
        sys.stdout.write(_safe(text, sys.stdout))
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """Words for people; not when quiet."""
        if self.format is not Format.QUIET:
            _print(_safe(text, sys.stderr), file=sys.stderr)

    def wait(self, delay_s: float, error: errors.LoraserveError) -> None:
        """Show why the next try comes only after a while.

        Of a connection that fails, only a terminal shows it: an error follows if it stays so.
        """
        if delay_s >= _TOLD_WAIT_S and (error.status_code is not None or sys.stderr.isatty()):
            self.note(f"{error.message.rstrip('.')}: trying again in {delay_s:.2g} s.")

    def fail(self, error: errors.LoraserveError) -> None:
        """Print an error on stderr with the next command, as text or as one JSON object."""
        problems = list(error.problems) if isinstance(error, errors.AdapterRejected) else []
        step = next_step(error, self._named)
        # The server's word; of an error that never reached one it would be a guess.
        wait_s = getattr(error, "retry_after_s", None) if error.status_code is not None else None
        if self.format is Format.JSON:
            body = {
                "code": error.code,
                "message": error.message,
                "hint": error.hint,
                "problems": problems,
                "status_code": error.status_code,
                "request_id": error.request_id,
                "retry_after_s": wait_s,
                "next": step,
            }
            _print(json.dumps({"error": body}, ensure_ascii=False), file=sys.stderr)
            return
        lines = [f"error: {error.message}"]
        if problems != [error.message]:
            lines += self._some(problem for problem in problems if problem not in error.message)
        if error.hint:
            lines.append(f"  {error.hint}")
        if wait_s is not None:
            lines.append(f"try again: in {wait_s:g} s")
        if step and step not in str(error):
            lines.append(f"next: {step}")
        if error.request_id:
            lines.append(f"request: {error.request_id}")
        _print(_safe("\n".join(lines), sys.stderr), file=sys.stderr)

    def _some(self, problems: Iterable[str]) -> list[str]:
        """Format a line for each problem, as many as people read, and the number of the others."""
        lines = [f"  - {problem}" for problem in problems]
        shown = lines[: self.max_problems]
        num_more = len(lines) - len(shown)
        return [*shown, f"  and {num_more} more; {self.how_to_see_all}"] if num_more else shown

    @contextmanager
    def working(self, title: str) -> Iterator[None]:
        """Show on a terminal that the block works, and for how long.

        It is for work of the server that has no measure.
        """
        if self.format is not Format.HUMAN or not sys.stderr.isatty():
            yield
            return
        from rich import progress as bars
        from rich.console import Console

        parts = (bars.SpinnerColumn(), bars.TextColumn("{task.description}"), bars.TimeElapsedColumn())
        with bars.Progress(*parts, console=Console(stderr=True), transient=True) as bar:
            bar.add_task(_safe(title, sys.stderr), total=None)
            yield

    @contextmanager
    def progress(self, title: str, then: str | None = None) -> Iterator[Callable[[Progress], None] | None]:
        """Show a bar on stderr while the block runs; once all bytes are sent, `then`.

        Yield None, and show nothing, where no person looks at stderr.
        """
        if self.format is not Format.HUMAN or not sys.stderr.isatty():
            yield None
            return
        from rich import progress as bars
        from rich.console import Console

        parts = (
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.DownloadColumn(),
            bars.TransferSpeedColumn(),
        )
        with bars.Progress(*parts, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(title, total=None)

            def tell(progress: Progress) -> None:
                is_sent = then is not None and progress.sent_bytes == progress.total_bytes
                words = then if is_sent else title
                bar.update(task, description=words, completed=progress.sent_bytes, total=progress.total_bytes)

            yield tell

    @contextmanager
    def stages(self) -> Iterator[Callable[[str, int, int], None]]:
        """Yield a function to report (stage, steps done, steps in all).

        It shows a bar per stage on a terminal, else a line as each is done.
        """
        if self.format is not Format.HUMAN or not sys.stderr.isatty():
            yield lambda stage, done, total: self.note(f"{stage}: done") if done == total else None
            return
        from rich import progress as bars
        from rich.console import Console

        with bars.Progress(console=Console(stderr=True)) as bar:
            tasks: dict[str, bars.TaskID] = {}

            def tell(stage: str, done: int, total: int) -> None:
                if stage not in tasks:
                    tasks[stage] = bar.add_task(stage)
                bar.update(tasks[stage], completed=done, total=total)

            yield tell

    @contextmanager
    def frames(self) -> Iterator[Callable[[Callable[[], None]], None]]:
        """Yield a function that shows what a function prints, again and again.

        On a terminal it is shown in the place of the last time, cut to its size; in a pipe below
        it.
        """
        if self.format is not Format.HUMAN or not sys.stdout.isatty():
            yield lambda draw: draw()
            return
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        with Live(console=Console(), auto_refresh=False) as live:

            def show(draw: Callable[[], None]) -> None:
                frame = io.StringIO()
                with redirect_stdout(frame), redirect_stderr(frame):
                    draw()
                text = frame.getvalue().rstrip("\n").translate(_CONTROLS)
                live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)

            yield show

    @staticmethod
    def plain(text: str) -> None:
        """Print a line of data, whatever the format."""
        _print(text)


def _shown(value: object) -> str:
    """Format a cell's text: a dash for nothing, local time with its zone, lists with commas."""
    if value is None or value in ("", [], (), {}):
        return NOTHING
    match value:
        case bool():
            return "yes" if value else "no"
        case datetime():
            return value.astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
        case list() | tuple():
            return ", ".join(str(item) for item in value)
        case dict():
            return ", ".join(f"{key}={item}" for key, item in value.items())
        case _:
            return str(value)


def size(num_bytes: int) -> str:
    """Bytes for people: ``1.5 MiB``."""
    value, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{num_bytes} B" if unit == "B" else f"{value:.1f} {unit}"


def milliseconds(value_ms: float) -> str:
    """Milliseconds for people: ``1,260 ms``, ``12.6 ms``."""
    return f"{value_ms:,.0f} ms" if value_ms >= 99.95 else f"{value_ms:.3g} ms"


def first_line(text: str | None) -> str | None:
    """Cut a text to its first line, of `MAX_CELL` characters; None: there is none."""
    lines = (text or "").strip().splitlines()
    if not lines:
        return None
    is_whole = len(lines) == 1 and len(lines[0]) <= MAX_CELL
    return lines[0] if is_whole else f"{lines[0][: MAX_CELL - 2].rstrip()} …"


def _safe(text: str, file: TextIO) -> str:
    return text.translate(_CONTROLS) if file.isatty() else text


def _print(text: str, *, file: TextIO | None = None) -> None:
    print(text, file=file or sys.stdout)


def _style(text: str, *, is_state: bool) -> str:
    return STATE_STYLES.get(text.partition(":")[0], "") if is_state else ""


def _pairs(pairs: list[tuple[str, str]], are_states: Sequence[bool] = ()) -> None:
    width = max(len(title) for title, _ in pairs)
    for number, (title, value) in enumerate(pairs):
        shown = _safe(f"{title:<{width}}  {value}", sys.stdout)
        style = _style(value, is_state=bool(are_states) and are_states[number])
        if not style or not sys.stdout.isatty():
            _print(shown)
            continue
        from rich.console import Console
        from rich.text import Text

        line = Text(shown)
        line.stylize(style, width + 2)
        Console(highlight=False).print(line, soft_wrap=True)


def _table(titles: list[str], rows: list[list[str]], are_states: Sequence[bool] = ()) -> None:
    """Aligned columns. A terminal gets them as wide as it is, a pipe as wide as they are."""
    if not sys.stdout.isatty():
        widths = [max(len(cell) for cell in cells) for cells in zip(titles, *rows, strict=True)]
        for row in (titles, *rows):
            _print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, overflow="fold")
    states = are_states or [False] * len(titles)
    for row in rows:
        cells = zip(row, states, strict=True)
        table.add_row(*(Text(_safe(cell, sys.stdout), _style(cell, is_state=is_state)) for cell, is_state in cells))
    Console().print(table)


def next_step(error: errors.LoraserveError, named: Mapping[str, str] | None = None) -> str | None:
    """Choose the command to run next; None if no command helps.

    It is the error's own, else the one for its class.

    Args:
        named: what NAME, DIR and the like are in the command that failed; others stay as they are.
    """
    said = _NAMED.search(str(error))
    step = said[1] if said is not None else next((step for kind, step in _STEPS if isinstance(error, kind)), None)
    known = named or {}
    return None if step is None else _PLACES.sub(lambda place: shlex.quote(known.get(place[0], place[0])), step)
