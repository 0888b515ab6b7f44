"""A test in a process of its own."""

from __future__ import annotations

import functools
import multiprocessing as mp
import os
import traceback
from typing import Any


def in_own_process(test: Any) -> Any:
    """Run a test in a fork, which may publish arguments and start threads as a rank does."""

    @functools.wraps(test)
    def forked(*args: Any, **kwargs: Any) -> None:
        context = mp.get_context("fork")
        here, there = context.Pipe()

        def body() -> None:
            try:
                test(*args, **kwargs)
                there.send("")
            except BaseException:
                there.send(traceback.format_exc())
            os._exit(0)

        process = context.Process(target=body)
        process.start()
        there.close()
        try:
            found = here.recv() if here.poll(120) else "no answer"
        except EOFError:
            found = "the process died"
        process.kill()
        process.join()
        assert not found, found

    return forked
