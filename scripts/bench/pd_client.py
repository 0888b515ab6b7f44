"""SGLang's bench_serving, with a line on standard output for each finished reply.

bench_serving keeps nothing of a reply's ``meta_info`` but the accept length. The rest of what
SGLang reports there (drafts, accepted drafts, their histogram) is picked up where bench_serving
parses the replies; what it sends, measures and writes is its own. Its options are unchanged.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

MARK = "mixkv-reply "
KEPT = (
    "prompt_tokens",
    "completion_tokens",
    "spec_verify_ct",
    "spec_num_proposed_drafts",
    "spec_num_correct_drafts",
    "spec_correct_drafts_histogram",
)


def finished(reply: dict[str, Any]) -> str | None:
    """The line for the last piece of a streamed reply; None for the others."""
    info = reply.get("meta_info") or {}
    if not info.get("finish_reason"):
        return None
    return MARK + json.dumps({name: info.get(name) for name in KEPT})


def parse(line: str) -> dict[str, Any] | None:
    """A reply from a line of output; None for bench_serving's own lines."""
    return json.loads(line.removeprefix(MARK)) if line.startswith(MARK) else None


def main() -> None:
    from sglang.benchmark import serving

    loads = serving.orjson.loads

    def recording(data: bytes) -> Any:
        reply = loads(data)
        if line := finished(reply):
            print(line, flush=True)
        return reply

    serving.orjson = SimpleNamespace(loads=recording)
    serving.cli_main()


if __name__ == "__main__":
    main()
