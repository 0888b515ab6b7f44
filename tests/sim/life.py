"""What becomes of a request."""

from __future__ import annotations

from tests.sim.spec import Request


class Life:
    """What became of a request. `reason`: why it failed; `by`: who failed it."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.begun: float | None = None
        self.outcome = self.reason = self.by = ""
        self.finished: float | None = None
        self.prefill_over = self.prefill_begun = self.written = self.target_begun = False
        self.metadata: int | None = None  # SGLang's messages that are still to come, once sent

    @property
    def decode_over(self) -> bool:
        return bool(self.outcome)
