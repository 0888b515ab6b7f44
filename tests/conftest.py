"""Set-up of every run: the option --full, and a folder in the temporary one for what the run
leaves."""

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
    """SGLang leaves the files that it names its sockets by. Names of sockets are short, so this
    folder's is. A shell's background job ignores Ctrl-C, as its children then would."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        if signal.getsignal(number) is signal.SIG_IGN:
            own = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if own else signal.SIG_DFL)
    config.stash[OF_THE_RUN] = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="mixkv-")
    tempfile.tempdir = None
    # what a drawn case takes says more of the machine than of the code
    settings.register_profile("untimed", settings.default, deadline=None)
    settings.load_profile("untimed")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[FAILED] = exitstatus == pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure(config: pytest.Config) -> None:
    """Keep what failed tests left, for people to look at. Runs without a session (--help) end
    here."""
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
    """Report a failure at once, since the summary of a run of hours may never come."""
    if report.failed:
        print(f"\n{report.nodeid} ({report.when})\n{report.longreprtext}", file=sys.__stderr__)
