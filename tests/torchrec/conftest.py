"""Tests that need the real TorchRec, which no other environment has: elsewhere they are skipped.

Where it was installed for them (`make test-torchrec` says so by `STEPTIME_TORCHREC=required`) a skipped test would hide that
nothing was tested: there it fails.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import TypeVar

import pytest

Report = TypeVar("Report", pytest.CollectReport, pytest.TestReport)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A file that skips itself."""
    return _failed_if_skipped((yield))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that does."""
    return _failed_if_skipped((yield))


def _failed_if_skipped(report: Report) -> Report:
    if report.outcome == "skipped" and os.environ.get("STEPTIME_TORCHREC") == "required":
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid} was skipped where TorchRec is required: {report.longrepr}"
    return report
