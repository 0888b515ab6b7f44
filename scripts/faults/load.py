"""Load on a pair of real servers on CPU: many clients at once, some hang up, servers are killed.

Each round asks a third of its requests 16, 32 and 48 at once. A wrong output, a request that fails
though its client waited and no server was killed, or anything held at the end: exit status 1.
`--kill` then kills and restarts decode and prefill in the middle of a crowd each.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from rig.crowd import Crowd, Known, Part, Servers, known_answers  # noqa: E402

from mixkv_demo.launch import Topology  # noqa: E402
from sglang_mixkv.tools.client import accept_length  # noqa: E402

AT_ONCE = (16, 32, 48)
ENABLE = ("--enable-mixkv",)


@dataclass
class Round:
    """What was counted in one round. `rooms`: of the draft channel."""

    requests: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    accept_length: float = 0.0
    single: float = 0.0
    seconds: float = 0.0
    held: list[str] = field(default_factory=list)
    rooms: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, parts: list[Part]) -> None:
        for part in parts:
            self.requests += part.crowd.requests
            self.ended.update(part.ended)
            self.reasons.update(part.reasons)
            self.seconds += round(part.seconds, 1)
        answers = [both for part in parts for both in part.answers]
        self.accept_length = accept_length([ours for ours, _ in answers])
        self.single = accept_length([single for _, single in answers])

    @property
    def is_right(self) -> bool:
        near = abs(self.accept_length - self.single) <= 0.02 * self.single
        return near and not (self.ended["wrong"] or self.ended["failed"] or self.held)


def crowds(requests: int, seed: int) -> list[Crowd]:
    return [Crowd(requests // len(AT_ONCE), seed * 10 + i, n) for i, n in enumerate(AT_ONCE)]


def one_round(servers: Servers, known: Known, requests: int, seed: int) -> Round:
    found, before = Round(), servers.rooms()
    found.add([servers.serve(crowd, known) for crowd in crowds(requests, seed)])
    return ended(found, servers, before)


def ended(found: Round, servers: Servers, before: Counter[str]) -> Round:
    """With what is left of the round."""
    found.held, found.rooms = servers.held(), servers.rooms()
    found.rooms.subtract(before)
    return found


def killed(servers: Servers, known: Known, side: str, requests: int, seed: int) -> Round:
    """A server dies when a third of a crowd has its answers: the next crowd is served."""
    crowd = Crowd(requests // 3, seed, hang_up=0.0)
    lost = servers.serve(crowd, known, (crowd.requests // 3, lambda: servers.kill(side)))
    servers.restart(side)
    found, before = Round(), servers.rooms()
    found.add([servers.serve(Crowd(requests // 3, seed + 1), known)])
    found.ended["failed as their server was killed"] = lost.ended["failed"]
    found.ended["wrong"] += lost.ended["wrong"]
    return ended(found, servers, before)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prefill", default="--tp 2", help="flags of the prefill server")
    parser.add_argument("--decode", default="--tp 1", help="flags of the decode server")
    parser.add_argument("--backend", default="mooncake", choices=("mooncake", "nixl"))
    parser.add_argument("--requests", type=int, default=300, help="of one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kill", action="store_true", help="kill and restart each server as well")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    topology = Topology(
        tuple(shlex.split(options.prefill)), tuple(shlex.split(options.decode)), ENABLE, ENABLE,
        backend=options.backend,
    )  # fmt: skip
    rounds: dict[str, Round] = {}
    with known_answers() as known, Servers(topology) as servers:
        for number in range(1, options.rounds + 1):
            done = one_round(servers, known, options.requests, options.seed + number)
            rounds[f"round {number}"] = done
            print(f"round {number}: {vars(done)}", file=sys.stderr, flush=True)
        for number, side in enumerate(("decode", "prefill") if options.kill else ()):
            seed = options.seed + 1000 * (number + 1)
            done = killed(servers, known, side, options.requests, seed)
            rounds[f"{side} killed"] = done
            print(f"{side} killed: {vars(done)}", file=sys.stderr, flush=True)
    print(table(rounds))
    if options.json:
        options.json.write_text(json.dumps({n: vars(r) for n, r in rounds.items()}, indent=1))
    return 0 if all(done.is_right for done in rounds.values()) else 1


def table(rounds: dict[str, Round]) -> str:
    head = (
        "| | requests | right | ties | wrong | hung up | failed | accept length | single "
        "| warm, cold rooms | held |"
    )
    lines = [head, "|" + "---|" * 11]
    for name, r in rounds.items():
        counts = (r.ended[what] for what in ("right", "tie", "wrong", "hung up", "failed"))
        lengths = f"{r.accept_length:.3f} | {r.single:.3f}"
        cells = " | ".join(map(str, counts))
        lengths += f" | {r.rooms['channel_warm']}, {r.rooms['channel_cold']}"
        lines.append(f"| {name} | {r.requests} | {cells} | {lengths} | {len(r.held)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
