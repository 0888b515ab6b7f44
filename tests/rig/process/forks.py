"""Run code in a forked process, where it can change global state and start threads."""

from __future__ import annotations

import ctypes
import functools
import multiprocessing as mp
import os
import signal
import traceback
from collections.abc import Callable
from typing import Any

STRETCH = float(os.environ.get("MIXKV_STRETCH", "1"))
"""Factor for time limits on slow machines."""
LIMIT_S = 120 * STRETCH
PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Make the kernel end this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def in_fork(what: Callable[[], Any], on_error: Callable[[BaseException], Any] = repr) -> Any:
    """Call the function in a fork. Return its result, or the result of `on_error`, which is called
    in the fork with the exception."""
    context = mp.get_context("fork")
    here, there = context.Pipe()

    def body() -> None:
        die_with_parent()
        try:
            found = what()
        except BaseException as error:
            found = on_error(error)
        there.send(found)
        os._exit(0)

    process = context.Process(target=body)
    process.start()
    there.close()
    try:
        return here.recv() if here.poll(LIMIT_S) else "no answer"
    except EOFError:
        return "the process died"
    finally:
        process.kill()
        process.join()


def in_own_process(test: Any) -> Any:
    """Run a test in a fork."""

    @functools.wraps(test)
    def forked(*args: Any, **kwargs: Any) -> None:
        failure = in_fork(lambda: test(*args, **kwargs), lambda _: traceback.format_exc())
        assert failure is None, failure

    return forked
