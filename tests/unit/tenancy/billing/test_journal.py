"""The journal of usage: what was written is read again, whatever the process died of."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from loraserve import faults
from loraserve.tenancy.billing.journal import Amounts, Entry, Journal, UsageKey, orphaned_journals

ACME = UsageKey("acme", 500_000, "", "sql", 3, "")
GLOBEX = UsageKey("globex", 500_000, "acme", 'a "name" with\nlines', 1, "EUR 0.5 0.05 1.5")


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(tmp_path / "usage")
    yield journal
    journal.close()


def abandon(journal: Journal) -> None:
    """The process is gone: its lock is."""
    journal.close()
    # the fixture closes it again
    journal._fd = os.open(os.devnull, os.O_RDONLY)


def read(folder: Path) -> list[Entry]:
    found = list(orphaned_journals(folder))
    entries = [entry for one in found for entry in one.entries()]
    for one in found:
        one.close()
    return entries


def test_appended_entries_survive_process_end(journal: Journal, tmp_path: Path) -> None:
    journal.append({ACME: Amounts(1, 10, 4, 7)})
    journal.append({ACME: Amounts(0, 0, 0, 2), GLOBEX: Amounts(1, 3, 0, 1, 9)})
    abandon(journal)
    assert read(tmp_path / "usage") == [
        Entry(1, ((ACME, Amounts(1, 10, 4, 7)),)),
        Entry(2, ((ACME, Amounts(0, 0, 0, 2)), (GLOBEX, Amounts(1, 3, 0, 1, 9)))),
    ]


def test_line_of_earlier_release_is_read_completely(journal: Journal, tmp_path: Path) -> None:
    """It has none of the amounts that were added since: they are 0."""
    body = msgspec.json.encode([1, [[ACME, [1, 10, 4, 7, 2]]]])
    os.write(journal._fd, b"%08x %b\n" % (zlib.crc32(body), body))
    abandon(journal)
    (entry,) = read(tmp_path / "usage")
    assert entry.amounts == ((ACME, Amounts(1, 10, 4, 7, 2, 0, 0)),)
    assert Amounts(1, 2, 3, 4, 5, 6, 7) + Amounts(1, 1, 1, 1, 1, 1, 1) == Amounts(2, 3, 4, 5, 6, 7, 8)


def test_journal_of_living_process_is_not_taken_over(journal: Journal, tmp_path: Path) -> None:
    journal.append({ACME: Amounts(1)})
    assert list(orphaned_journals(tmp_path / "usage")) == []


def test_journal_being_counted_is_not_counted_twice(journal: Journal, tmp_path: Path) -> None:
    abandon(journal)
    (held,) = orphaned_journals(tmp_path / "usage")
    assert list(orphaned_journals(tmp_path / "usage")) == []
    held.close()


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_truncated_line_is_no_entry(journal: Journal, tmp_path: Path, cut: int) -> None:
    journal.append({ACME: Amounts(1)})
    journal.append({ACME: Amounts(2)})
    os.ftruncate(journal._fd, journal.num_bytes - cut)
    abandon(journal)
    assert read(tmp_path / "usage") == [Entry(1, ((ACME, Amounts(1)),))]


def test_altered_line_is_no_entry(journal: Journal, tmp_path: Path) -> None:
    journal.append({ACME: Amounts(1)})
    (path,) = (tmp_path / "usage").iterdir()
    abandon(journal)
    path.write_bytes(path.read_bytes().replace(b"[1,0", b"[9,0"))
    assert read(tmp_path / "usage") == []


def test_half_failed_write_hides_no_later_entry(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal.append({ACME: Amounts(1)})
    with faults.arm("usage.after_write", "ENOSPC"), pytest.raises(OSError, match="space") as failure:
        journal.append({ACME: Amounts(2)})
    assert failure.value.errno == errno.ENOSPC
    journal.append({ACME: Amounts(4)})
    abandon(journal)
    # numbers go on: the second is in memory, and counted under its own
    assert read(tmp_path / "usage") == [Entry(1, ((ACME, Amounts(1)),)), Entry(3, ((ACME, Amounts(4)),))]


def test_compacted_journal_keeps_sums_and_continues(journal: Journal, tmp_path: Path) -> None:
    for _ in range(5):
        journal.append({ACME: Amounts(1)})
    before = journal.num_bytes
    journal.compact([(3, {ACME: Amounts(3)}), (5, {ACME: Amounts(2)})])
    assert journal.num_bytes < before
    journal.append({GLOBEX: Amounts(1)})
    abandon(journal)
    assert read(tmp_path / "usage") == [
        Entry(3, ((ACME, Amounts(3)),)),
        Entry(5, ((ACME, Amounts(2)),)),
        Entry(6, ((GLOBEX, Amounts(1)),)),
    ]


def test_cleared_journal_continues_entry_numbers(journal: Journal, tmp_path: Path) -> None:
    journal.append({ACME: Amounts(1)})
    journal.clear()
    journal.append({ACME: Amounts(2)})
    abandon(journal)
    assert read(tmp_path / "usage") == [Entry(2, ((ACME, Amounts(2)),))]
