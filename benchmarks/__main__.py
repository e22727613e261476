"""`make bench ARGS='PART …'`: a part by its name, or our server and PEFT on the same work."""

from __future__ import annotations

import importlib
import signal
import sys

PARTS = (
    "registered",
    "churn",
    "trace",
    "metering",
    "fairness",
    "long_prompt",
    "structured",
    "swaps",
    "speculation",
    "token_costs",
    "cluster_tokens",
    "placement",
    "cluster",
    "console",
    "million",
    "peers",
    "quality",
)


def main(arguments: list[str]) -> None:
    # a run that is told to end still stops its servers and removes their data
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    is_named = bool(arguments) and arguments[0] in PARTS
    part, rest = (arguments[0], arguments[1:]) if is_named else ("run", arguments)
    importlib.import_module(f"benchmarks.{part}").main(rest)


if __name__ == "__main__":
    main(sys.argv[1:])
