"""Show each failure at once: the report at the end never comes of a run that is killed."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Failures(config))


class _Failures:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write it where there is a terminal: a worker of pytest-xdist has none,
        and sends its reports to who has.
        """
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.ensure_newline()
            terminal.write_line(f"FAILED {report.nodeid} ({report.when})\n{report.longreprtext[-4000:]}", red=True)
