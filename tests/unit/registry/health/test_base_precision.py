"""What rounding costs the served base: measured once, kept for all servers, and warned of."""

from __future__ import annotations

import logging
import math

import msgspec
import pytest

from loraserve.base_advice import better_choice, is_low
from loraserve.db.session import Database, utc_now
from loraserve.errors import EngineError, EngineUnavailable
from loraserve.registry.health.base_precision import BasePrecisions
from loraserve.types import BasePrecision, BaseSpec

GOOD = BasePrecision(256, 0.95, 0.006, 3.0, 3.004)
BAD = BasePrecision(256, 0.64, 0.46, 3.0, 3.4)


class Engine:
    """Measures what it is told to find, and counts."""

    def __init__(self, found: BasePrecision | str, base: BaseSpec | None) -> None:
        self.found, self.base, self.num_asked = found, base, 0

    async def measure(self) -> BasePrecision | str:
        self.num_asked += 1
        return self.found

    def spec(self) -> BaseSpec:
        if self.base is None:
            raise EngineUnavailable("The base isn't loaded yet.")
        return self.base


def of(database: Database, engine: Engine) -> BasePrecisions:
    return BasePrecisions(database, engine.spec, engine.measure, clock=utc_now)


@pytest.mark.postgres
async def test_base_is_measured_once_for_all_servers(database: Database, small_base: BaseSpec) -> None:
    first, later = Engine(GOOD, small_base), Engine(BAD, small_base)
    here, there = of(database, first), of(database, later)
    assert here.current is None
    await here.look()
    await here.look()
    await there.look()
    assert (first.num_asked, later.num_asked, here.num_measured, there.num_measured) == (1, 0, 1, 0)
    for one in (here, there):
        assert one.current is not None
        assert one.current.measured is not None
        assert one.current.measured.precision == GOOD
        assert one.current.advice == ""


async def test_other_arithmetic_is_measured_anew(database: Database, small_base: BaseSpec) -> None:
    engine = Engine(GOOD, small_base)
    precisions = of(database, engine)
    await precisions.look()
    engine.base, engine.found = msgspec.structs.replace(small_base, quantization="int4", arithmetic="w4a8-row"), BAD
    assert precisions.current is None
    await precisions.look()
    assert precisions.current is not None
    assert precisions.current.measured is not None
    assert (precisions.current.measured.precision, engine.num_asked) == (BAD, 2)
    assert precisions.current.advice == "--quantize int8"


async def test_low_precision_warning_names_better_setting(
    database: Database, small_base: BaseSpec, caplog: pytest.LogCaptureFixture
) -> None:
    base = msgspec.structs.replace(small_base, quantization="int8", arithmetic="w8a8-row")
    with caplog.at_level(logging.WARNING):
        await of(database, Engine(GOOD, base)).look()
        assert caplog.text == ""
        await of(database, Engine(BAD, msgspec.structs.replace(base, device="cuda"))).look()
    assert "64.0 % of positions, 0.46 nats" in caplog.text
    assert "--activation-dtype float" in caplog.text


async def test_missing_base_is_examined_again_later(database: Database, small_base: BaseSpec) -> None:
    engine = Engine("the base is served in float32: nothing is rounded", None)
    precisions = of(database, engine)
    await precisions.look()
    assert (precisions.current, engine.num_asked) == (None, 0)
    engine.base = small_base
    await precisions.look()
    await precisions.look()
    assert precisions.current is not None
    assert (precisions.current.measured, precisions.current.note) == (None, engine.found)
    assert engine.num_asked == 1


async def test_failing_measurement_ends_after_three_attempts(database: Database, small_base: BaseSpec) -> None:
    class Failing(Engine):
        async def measure(self) -> BasePrecision | str:
            await super().measure()
            raise EngineError("a layer's output isn't finite")

    engine = Failing("", small_base)
    precisions = of(database, engine)
    for _ in range(2):
        with pytest.raises(EngineError):
            await precisions.look()
    assert precisions.current is None
    for _ in range(3):
        await precisions.look()
    assert engine.num_asked == 3
    assert precisions.current is not None
    assert precisions.current.note == "its measurement failed 3 times; the last time: a layer's output isn't finite"


@pytest.mark.parametrize(
    ("quantization", "arithmetic", "expected"),
    [
        ("int4", "w4a8-row+w8a8-row", "--quantize int8"),
        ("nf4", "w4a16", "--quantize int8"),
        ("int8", "w8a8-row", "--activation-dtype float"),
        ("int8", "w8a16", "--quantize none"),
        ("fp8", "w8a16", "--quantize none"),
    ],
)
def test_better_choice_is_never_the_same(quantization: str, arithmetic: str, expected: str) -> None:
    assert better_choice(quantization, arithmetic) == expected


def test_bounds_are_of_agreement_and_divergence() -> None:
    assert not is_low(0.92, 0.02)
    assert is_low(0.919, 0.001)
    assert is_low(0.99, 0.021)
    assert is_low(math.nan, 0.0)
