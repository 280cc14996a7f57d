"""For a machine that is slow or has other work beside the tests.

``MPIPLUS_TEST_PATIENCE`` is how many times as long as on an idle machine tests may take before they count as hanging: a
limit costs nothing where it ends nothing. ``MPIPLUS_TEST_RERUNS`` is how often what has failed is run again
(pytest-rerunfailures); what it said is printed at the end, since it may be a defect that shows rarely.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest

FACTOR = float(os.environ.get("MPIPLUS_TEST_PATIENCE", "1"))
#: How often a test that has failed is run again before it counts. Its first words are told all the same.
RERUNS = int(os.environ.get("MPIPLUS_TEST_RERUNS", "0"))


def patient(seconds: float) -> float:
    return seconds * FACTOR


def wait_until(is_so: Callable[[], object], seconds: float, told: object = "in vain", pause: float = 0.01) -> None:
    """It is so within these seconds, or an assertion fails with what is to be told, which may be a function."""
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until, told() if callable(told) else told
        time.sleep(pause)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Not by an option's environment variable, which ranks under mpiexec would inherit: one would run alone."""
    if RERUNS and not config.getoption("--with-mpi") and hasattr(config.option, "reruns"):
        config.option.reruns = RERUNS


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The time limits that tests set, and the one of those that set none."""
    usual = float(config.getoption("timeout", None) or config.getini("timeout") or 0)
    for item in items:
        mark = item.get_closest_marker("timeout")
        seconds = float(mark.args[0] if mark else usual)
        item.add_marker(pytest.mark.timeout(patient(seconds)), append=False)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for report in terminalreporter.getreports("rerun"):
        terminalreporter.section(f"failed, and run again: {report.nodeid}")
        terminalreporter.line(report.longreprtext[-6000:])
