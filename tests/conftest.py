"""Set-up of every test run: the option --full, and a temporary folder for its files."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile

import pytest
from hypothesis import settings

OF_THE_RUN = pytest.StashKey[str]()
FAILED = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    """Make a temporary folder, with a short name because of the limit for socket paths, in which
    SGLang leaves its sockets' files. Restore signal handlers, since a background job of a shell
    ignores Ctrl-C, and its children would too."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        if signal.getsignal(number) is signal.SIG_IGN:
            own = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if own else signal.SIG_DFL)
    config.stash[OF_THE_RUN] = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="mixkv-")
    tempfile.tempdir = None
    # the duration of a drawn case depends more on the machine than on the code
    settings.register_profile("untimed", settings.default, deadline=None)
    settings.load_profile("untimed")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[FAILED] = exitstatus == pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the temporary folder, unless tests failed and left files in it. Runs without a session
    (--help) end here too."""
    folder = config.stash[OF_THE_RUN]
    if not config.stash.get(FAILED, False) or not os.listdir(folder):
        shutil.rmtree(folder, ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the tests marked 'full' as well")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    skip = pytest.mark.skip(reason="long; needs --full")
    for item in items:
        if "full" in item.keywords:
            item.add_marker(skip)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a failure immediately, since a run of several hours may be interrupted before its
    summary."""
    if report.failed:
        print(f"\n{report.nodeid} ({report.when})\n{report.longreprtext}", file=sys.__stderr__)
