"""`make bench ARGS='PART …'`: a part by its name, or our server and PEFT on the same work."""

from __future__ import annotations

import sys

PARTS = ("registered", "churn", "trace")


def main(arguments: list[str]) -> None:
    part, rest = ("run", arguments) if not arguments or arguments[0] not in PARTS else (arguments[0], arguments[1:])
    if part == "registered":
        from benchmarks.registered import main as start
    elif part == "churn":
        from benchmarks.churn import main as start
    elif part == "trace":
        from benchmarks.trace import main as start
    else:
        from benchmarks.run import main as start
    start(rest)


if __name__ == "__main__":
    main(sys.argv[1:])
