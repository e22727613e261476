"""Results of versions' evaluations on files of data, and promotion by them.

The server runs no evaluation: a client sends what it measured.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from loraserve.db.models import Adapter, EvaluationRow
from loraserve.db.paging import Page, check_limit, decode_cursor, make_page, wrong_cursor
from loraserve.db.session import Clock, Database
from loraserve.errors import InvalidRequest, NotBetter, NotEvaluated
from loraserve.limits import LIMITS
from loraserve.registry.changes import record_change
from loraserve.registry.records import EvaluationRecord
from loraserve.registry.repository import AdapterRepository, evaluation_of
from loraserve.registry.served_base import ServedBase
from loraserve.types import TenantId

METRIC_PATTERN = r"[a-z][a-z0-9_.-]{0,62}"
MAX_DATA_NAME_LENGTH = 255
MAX_LINES = 2_147_483_647
"""Maximum of the database column."""
MAX_SETTING_LENGTH = 256

_METRIC = re.compile(METRIC_PATTERN, re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NUM_DIGITS = 12


@dataclass(frozen=True, slots=True)
class MeasuredEvaluation:
    """Result of an evaluation as a client sends it."""

    data_sha256: str
    data_name: str
    num_lines: int
    metrics: Mapping[str, float]
    base_metrics: Mapping[str, float]
    settings: Mapping[str, str]

    def __post_init__(self) -> None:
        """Check the texts and the numbers.

        Raises:
            InvalidRequest: a name isn't valid, a value isn't finite, or there are too many of them.
                The message doesn't repeat a text.
        """
        if not _SHA256.fullmatch(self.data_sha256):
            raise InvalidRequest("The digest of the data should be 64 hexadecimal digits.", param="sha256")
        if not 1 <= len(self.data_name) <= MAX_DATA_NAME_LENGTH or not _is_plain(self.data_name):
            raise InvalidRequest(
                f"data_name should be text of 1 to {MAX_DATA_NAME_LENGTH} characters, in one line.", param="data_name"
            )
        if not 1 <= self.num_lines <= MAX_LINES:
            raise InvalidRequest(f"num_lines should be between 1 and {MAX_LINES}.", param="num_lines")
        if not self.metrics:
            raise InvalidRequest(
                "metrics is empty.", param="metrics", hint='Send values by name: {"exact_match": 0.5}.'
            )
        _check_metrics(self.metrics, "metrics")
        _check_metrics(self.base_metrics, "base_metrics")
        if len(self.settings) > LIMITS.max_evaluation_settings:
            raise InvalidRequest(
                f"There are {len(self.settings)} settings; at most {LIMITS.max_evaluation_settings} are allowed.",
                param="settings",
            )
        for key, value in self.settings.items():
            if not _METRIC.fullmatch(key):
                raise InvalidRequest(f"A setting's name should match {METRIC_PATTERN}.", param="settings")
            if len(value) > MAX_SETTING_LENGTH or not _is_plain(value):
                raise InvalidRequest(
                    f"A setting should be text of at most {MAX_SETTING_LENGTH} characters, in one line.",
                    param=f"settings.{key}",
                )


class Evaluations:
    """Evaluations of all tenants' versions.

    A result is durable, and has its audit row, when the call returns.

    Args:
        served_base: base on which versions are evaluated, once it is loaded.
    """

    def __init__(self, database: Database, served_base: ServedBase, *, clock: Clock) -> None:
        self._database = database
        self._served_base = served_base
        self._clock = clock

    async def put(
        self, tenant: TenantId, name: str, number: int, measured: MeasuredEvaluation, *, actor: str
    ) -> tuple[EvaluationRecord, bool]:
        """Keep the result in the place of the version's earlier one on the same data.

        Return it, and whether there was none. Beyond `LIMITS.max_evaluations_per_version`, the
        oldest results of the version go.

        Raises:
            AdapterNotFound, VersionNotFound
            AdapterOfAnotherBase: this server can't have evaluated the version.
            EngineUnavailable: the base isn't loaded yet.
        """
        now = self._clock()
        async with self._database.write() as session:
            repository = AdapterRepository(session, tenant)
            adapter = await repository.adapter(name, is_locking=True)
            version = await repository.version(adapter, number)
            base = self._served_base.spec
            self._served_base.check(adapter.name, number, version.base_digest, version.checks)
            rows = await repository.evaluations(adapter, number)
            row = next((one for one in rows if one.data_sha256 == measured.data_sha256), None)
            is_new = row is None
            if row is None:
                row = EvaluationRow(adapter_id=adapter.id, version=number, data_sha256=measured.data_sha256)
                for oldest in rows[LIMITS.max_evaluations_per_version - 1 :]:
                    await session.delete(oldest)
                session.add(row)
            row.data_name, row.num_lines = measured.data_name, measured.num_lines
            row.metrics, row.base_metrics = dict(measured.metrics), dict(measured.base_metrics)
            row.settings = dict(measured.settings)
            row.base_digest, row.arithmetic = base.digest, base.arithmetic
            row.created_at, row.created_by = now, actor
            repository.touch(adapter, now)
            record_change(
                session,
                repository,
                "version.evaluate",
                f"{adapter.name}@{number}",
                actor=actor,
                now=now,
                data_sha256=measured.data_sha256,
                num_lines=measured.num_lines,
            )
            return evaluation_of(row), is_new

    async def list(
        self, tenant: TenantId, name: str, number: int, *, limit: int = 50, cursor: str | None = None
    ) -> Page[EvaluationRecord]:
        """List a page of the version's evaluations, newest first.

        Raises:
            AdapterNotFound, VersionNotFound
            InvalidRequest: the cursor isn't one of this list.
        """
        after = decode_cursor(cursor)
        check_limit(limit)
        before = None if after is None else _read_position(after)
        async with self._database.read() as session:
            repository = AdapterRepository(session, tenant)
            adapter = await repository.adapter(name)
            await repository.version(adapter, number)
            records = [evaluation_of(row) for row in await repository.evaluations(adapter, number)]
        left = [record for record in records if before is None or _position(record) < before]
        return make_page(left, limit, _write_position, lambda record: record)


async def check_better(
    repository: AdapterRepository, adapter: Adapter, alias: str, current: Sequence[int], number: int, metric: str
) -> None:
    """Check that the version is better than each of the `current` ones.

    It is, if on the data that both were evaluated on in the same manner, `metric` is higher at
    least once and lower never.

    Raises:
        InvalidRequest: no metric can have this name.
        NotEvaluated: a version lacks an evaluation that can be compared.
        NotBetter: the version isn't better.
    """
    if not _METRIC.fullmatch(metric):
        raise InvalidRequest(f"if_better should be a metric's name, which matches {METRIC_PATTERN}.", param="if_better")
    new = await _by_data(repository, adapter, number)
    for other in current:
        old = await _by_data(repository, adapter, other)
        numbers = ",".join(map(str, sorted((other, number))))
        hint = f"Try: loraserve adapter eval {adapter.name}@{numbers} DATA.jsonl"
        for one, evaluations in ((number, new), (other, old)):
            if not any(metric in record.metrics for record in evaluations.values()):
                raise NotEvaluated(
                    f"{adapter.name}@{one} has no evaluation with {metric}{_found(evaluations.values())}.", hint=hint
                )
        pairs = [(new[data], old[data]) for data in new if data in old]
        pairs = [pair for pair in pairs if all(metric in record.metrics for record in pair)]
        if not pairs:
            raise NotEvaluated(
                f"{adapter.name}@{number} and {adapter.name}@{other} have no evaluation with {metric} on the same "
                f"data: {number} has {_data(new.values(), metric)}, {other} has {_data(old.values(), metric)}.",
                hint=hint,
            )
        alike = [pair for pair in pairs if _conditions(pair[0]) == _conditions(pair[1])]
        if not alike:
            raise NotEvaluated(
                f"{adapter.name}@{number} and {adapter.name}@{other} were evaluated on {_shown(pairs[0][0])} under "
                f"other conditions: {_differences(*pairs[0])}.",
                hint=hint,
            )
        values = [(mine.metrics[metric], theirs.metrics[metric], mine) for mine, theirs in alike]
        lower = [value for value in values if value[0] < value[1]]
        if lower or all(mine == theirs for mine, theirs, _ in values):
            mine, theirs, record = (lower or values)[0]
            raise NotBetter(
                f"{adapter.name}@{number} isn't better than {adapter.name}@{other}, to which {alias} points: {metric} "
                f"on {_shown(record)} is {mine:.6g}, and {theirs:.6g} for version {other}. The alias wasn't moved.",
                hint="To move it all the same, leave out the condition.",
            )


async def _by_data(repository: AdapterRepository, adapter: Adapter, number: int) -> dict[str, EvaluationRecord]:
    rows = await repository.evaluations(adapter, number)
    return {row.data_sha256: evaluation_of(row) for row in rows}


def _conditions(record: EvaluationRecord) -> dict[str, object]:
    """Collect what two evaluations on the same data must have in common to be compared."""
    return {
        **{f"setting {key}": value for key, value in record.settings.items()},
        "lines": record.num_lines,
        "base": record.base_digest[:_NUM_DIGITS],
        "arithmetic": record.arithmetic or "unknown",
    }


def _differences(mine: EvaluationRecord, theirs: EvaluationRecord) -> str:
    """Format the conditions that differ: ``setting max_tokens 64 and 256``."""
    one, other = _conditions(mine), _conditions(theirs)
    names = [name for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)]
    return ", ".join(f"{name} {one.get(name, 'none')} and {other.get(name, 'none')}" for name in names)


def _found(evaluations: Iterable[EvaluationRecord]) -> str:
    """Format the metrics that there are in place of the one that is missing."""
    names = sorted({name for record in evaluations for name in record.metrics})
    return f"; it has {', '.join(names)}" if names else ""


def _data(evaluations: Iterable[EvaluationRecord], metric: str) -> str:
    return ", ".join(_shown(record) for record in evaluations if metric in record.metrics)


def _shown(record: EvaluationRecord) -> str:
    return f"{record.data_name} (sha256:{record.data_sha256[:_NUM_DIGITS]})"


def _check_metrics(metrics: Mapping[str, float], param: str) -> None:
    if len(metrics) > LIMITS.max_evaluation_metrics:
        raise InvalidRequest(
            f"There are {len(metrics)} metrics; at most {LIMITS.max_evaluation_metrics} are allowed.", param=param
        )
    for name, value in metrics.items():
        if not _METRIC.fullmatch(name):
            raise InvalidRequest(f"A metric's name should match {METRIC_PATTERN}.", param=param)
        if not math.isfinite(value):
            raise InvalidRequest("A metric should be a finite number.", param=f"{param}.{name}")


def _is_plain(text: str) -> bool:
    return not any(unicodedata.category(letter) in ("Cc", "Cs") for letter in text)


def _position(record: EvaluationRecord) -> tuple[int, str]:
    """Compute the record's place in the list: microseconds since 1970, and the data's digest."""
    at = record.created_at
    return int(at.timestamp()) * 1_000_000 + at.microsecond, record.data_sha256


def _write_position(record: EvaluationRecord) -> str:
    at, data = _position(record)
    return f"{at} {data}"


def _read_position(text: str) -> tuple[int, str]:
    at, _, data = text.partition(" ")
    if not (at.isascii() and at.isdigit() and len(at) <= 18 and _SHA256.fullmatch(data)):
        raise wrong_cursor()
    return int(at), data
