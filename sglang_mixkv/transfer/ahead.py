"""One chunk's writes to one peer: they go on while the caller packs what comes next.

    pack 1 | pack 2  | pack 3      | settle ...... |
           | write 1 | write 2 ------ | write 3 -- |

When all is settled, with code 0, the chunk counts as written and nothing reads the pack buffer
any more. After another code a write may still go on, as with Mooncake's call that waits.
"""

from __future__ import annotations

from sglang_mixkv.core.plan import Blocks
from sglang_mixkv.transfer import direct
from sglang_mixkv.transfer.bounded import BoundedEngine, Started


class Ahead:
    """Made for one chunk, by the thread that writes it; `settle` must be its last call.

    With an engine other than BoundedEngine every write is waited for.
    """

    def __init__(self, engine: direct.Engine, session: str) -> None:
        self._engine, self._session = engine, session
        self._started: list[tuple[BoundedEngine, Started]] = []
        self._code = 0

    def write(self, blocks: Blocks, wait: bool) -> int:
        """Write these ranges, or, unless told to wait, begin to if that can be. Another code than
        0: something of this chunk is known to have failed, and nothing more is written."""
        if not self._code and (wait or not self._start(blocks)):
            most = direct.MAX_DESCRIPTORS if isinstance(self._engine, BoundedEngine) else 0
            self._code = direct.write(self._engine, self._session, blocks, most)
        return self._code

    def _start(self, blocks: Blocks) -> bool:
        engine = self._engine
        if not isinstance(engine, BoundedEngine):
            return False
        started = engine.start(self._session, *blocks.lists())
        if started is not None:
            self._started.append((engine, started))
        return started is not None

    def settle(self) -> int:
        """Wait for everything that was begun. 0, or the first code known that is not."""
        while self._started:
            engine, started = self._started.pop(0)
            code = engine.finish(started)
            self._code = self._code or code
        return self._code
