"""Set-up of every test run: the option --full, a temporary folder for its files, and ports."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import socket
import sys
import tempfile

import pytest
from hypothesis import settings

from mixkv_demo import ports

BLOCKS = (9_000, 12_000, 17_100)
"""The first ports of blocks of 2,000, which neither Mooncake (from 15,000) nor SGLang's collectives
(from 22,000) use, nor programs that tests start (`mixkv_demo.ports`)."""
OWN_PORTS = pytest.StashKey[socket.socket]()
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
    config.stash[OWN_PORTS] = take_ports()
    # the duration of a drawn case depends more on the machine than on the code
    settings.register_profile("untimed", settings.default, deadline=None)
    settings.load_profile("untimed")


def take_ports() -> socket.socket:
    """Give this run a block of ports that no other run on this machine uses, if there is one left.
    The returned socket's name holds the block until this process and its forks end."""
    held = socket.socket(socket.AF_UNIX)
    for first in BLOCKS:
        with contextlib.suppress(OSError):
            held.bind(f"\0mixkv-tests-{first}")
            ports.candidates = ports.shuffled(range(first, first + 1_750))
            break
    return held


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[FAILED] = exitstatus == pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the temporary folder, unless tests failed and left files in it. Runs without a session
    (--help) end here too."""
    folder = config.stash[OF_THE_RUN]
    if not config.stash.get(FAILED, False) or not os.listdir(folder):
        shutil.rmtree(folder, ignore_errors=True)


def pytest_collection() -> None:
    gc.disable()  # it would take a quarter of the time of SGLang's imports


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


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
