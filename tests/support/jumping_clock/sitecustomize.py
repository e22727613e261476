"""For programs that find this folder on PYTHONPATH: the time of day is as many seconds ahead as the
file JUMPING_CLOCK says.

Clocks that only ever go on, which is what waiting and forgetting should go by, are left as they
are.
"""

from __future__ import annotations

import datetime
import os
import time
from pathlib import Path
from typing import Any

_file = Path(os.environ["JUMPING_CLOCK"])
_time, _time_ns, _datetime = time.time, time.time_ns, datetime.datetime


def _ahead_s() -> float:
    return float(_file.read_text() or 0)


class _AnyDatetime(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, _datetime)


class _JumpingDatetime(_datetime, metaclass=_AnyDatetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Any:
        return _datetime.now(tz) + datetime.timedelta(seconds=_ahead_s())

    @classmethod
    def utcnow(cls) -> Any:
        return _datetime.now(datetime.UTC).replace(tzinfo=None) + datetime.timedelta(seconds=_ahead_s())


time.time = lambda: _time() + _ahead_s()
time.time_ns = lambda: _time_ns() + int(_ahead_s() * 1e9)
datetime.datetime = _JumpingDatetime  # type: ignore[misc]
