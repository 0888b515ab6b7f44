"""Load on a pair of real servers on CPU: many clients at once, some hang up, servers are killed.

Each round asks its requests in equal parts, 16, 32 and 48 at once (`--at-once`), and the same again
with other clients hanging up until `--minutes` have passed. `--kill` then kills and restarts decode
and prefill in the middle of a crowd each, of a third as many. Exit status 1: a wrong output; an
accept length that is 2 % off the single server's, or so short that it would not tell; a
request that failed though its client waited and no server was killed; more than one cold room in a
thousand, without those of requests that prefill aborted; anything of the plugin's held at the end,
or a request open; with `--memory`, more Python memory of the plugin's than after the first round.
What SGLang's own tables keep is counted beside it, as with `--stock`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from rig.crowd import BYTES, Crowd, Part, Servers  # noqa: E402
from rig.known import Known, known_answers  # noqa: E402

from mixkv_demo.launch import Topology  # noqa: E402
from mixkv_demo.pair import PAIRS  # noqa: E402
from sglang_mixkv.tools.client import accept_length  # noqa: E402

AT_ONCE = (16, 32, 48)
ENABLE = ("--enable-mixkv",)
Told = tuple[Counter[str], Counter[str]]
HUNG_UP = "aborted: aborted on prefill"  # a room of a request whose client has
WARM, COLD, ABORTED = "warm", "cold", "cold_prefill_aborted"
COLD_SHARE = 0.001
TELLS = 2.0
"""With a shorter accept length the drafter hardly knows these prompts: wrong draft KV would not
show."""
SLACK = 256 << 10  # bytes
BETWEEN_S = 10
"""For a round's last requests to end, and their counts to be written."""


@dataclass
class Round:
    """What was counted in one round. `rooms`: of the draft channel; `memory`: of each rank;
    `tables`: SGLang's; `fails`: why prefill refused rooms."""

    requests: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    accept_length: float = 0.0
    single: float = 0.0
    seconds: float = 0.0
    held: list[str] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)
    rooms: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    fails: Counter[str] = field(default_factory=Counter)
    memory: dict[str, dict[str, int]] = field(default_factory=dict)

    def add(self, parts: list[Part]) -> None:
        for part in parts:
            self.requests += part.crowd.requests
            self.ended.update(part.ended)
            self.reasons.update(part.reasons)
            self.seconds += part.seconds
        answers = [both for part in parts for both in part.answers]
        self.accept_length = accept_length([ours for ours, _ in answers])
        self.single = accept_length([single for _, single in answers])

    def is_right(self, stock: bool) -> bool:
        tells = self.single > TELLS
        near = tells and abs(self.accept_length - self.single) <= 0.02 * self.single
        aborted = min(self.rooms[ABORTED], self.fails[HUNG_UP])  # a closed room is told, too
        warm, cold = self.rooms[WARM], self.rooms[COLD] - aborted
        bad = self.ended["wrong"] or self.ended["failed"] or self.held
        return (near or stock) and cold <= COLD_SHARE * (warm + cold) and not bad


def crowds(requests: int, seed: int, at_once: Sequence[int]) -> list[Crowd]:
    return [Crowd(requests // len(at_once), seed * 10 + i, n) for i, n in enumerate(at_once)]


def one_round(
    servers: Servers, known: Known, asked: list[Crowd], minutes: float, last: bool
) -> Round:
    """What a hung up request leaves may stay for minutes (`Times.early_room`): looked at after the
    last."""
    found, before, begin = Round(), told(servers), time.monotonic()
    parts: list[Part] = []
    for crowd in again(asked):
        parts.append(servers.serve(crowd, known))
        if len(parts) >= len(asked) and time.monotonic() - begin >= 60 * minutes:
            break
    found.add(parts)
    if last:
        return ended(found, servers, before)
    servers.held(BETWEEN_S)
    return counted(found, servers, before)


def again(asked: list[Crowd]) -> Iterator[Crowd]:
    """Their requests, in turns without end."""
    return (replace(crowd, turn=turn) for turn in itertools.count() for crowd in asked)


def told(servers: Servers) -> Told:
    return servers.rooms(), servers.fails()


def ended(found: Round, servers: Servers, before: Told) -> Round:
    """With what is left of the round."""
    found.held, found.tables = servers.held(), servers.tables()
    return counted(found, servers, before)


def counted(found: Round, servers: Servers, before: Told) -> Round:
    rooms, fails = told(servers)
    found.rooms, found.fails = rooms - before[0], fails - before[1]
    found.memory = servers.memory()
    return found


def grown(first: Round, last: Round) -> list[str]:
    return [
        f"rank {pid}: the plugin's memory grew from {before} to {after} bytes"
        for pid, now in last.memory.items()
        if (after := now[BYTES]) > (before := first.memory[pid][BYTES]) + SLACK
    ]


def killed(
    servers: Servers, known: Known, side: str, requests: int, at_once: int, seed: int
) -> Round:
    """A server dies when a third of a crowd has its answers: the next crowd is served."""
    crowd = Crowd(requests // 3, seed, at_once, hang_up=0.0)
    lost = servers.serve(crowd, known, (crowd.requests // 3, lambda: servers.kill(side)))
    servers.restart(side)
    found, before = Round(), told(servers)
    found.add([servers.serve(Crowd(requests // 3, seed + 1, at_once), known)])
    found.ended["failed as their server was killed"] = lost.ended["failed"]
    found.ended["wrong"] += lost.ended["wrong"]
    return ended(found, servers, before)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pair", default="mla", choices=PAIRS)
    parser.add_argument("--prefill", default="--tp 2", help="flags of the prefill server")
    parser.add_argument("--decode", default="--tp 1", help="flags of the decode server")
    parser.add_argument("--backend", default="mooncake", choices=("mooncake", "nixl"))
    parser.add_argument("--requests", type=int, default=300, help="of one round")
    parser.add_argument("--at-once", type=int, nargs="+", default=AT_ONCE, help="clients")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=0.0, help="of one round, at least")
    parser.add_argument("--memory", action="store_true", help="trace what the plugin allocates")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kill", action="store_true", help="kill and restart each server as well")
    parser.add_argument("--stock", action="store_true", help="without the plugin")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    enable = () if options.stock else ENABLE
    topology = Topology(
        tuple(shlex.split(options.prefill)), tuple(shlex.split(options.decode)), enable, enable,
        backend=options.backend,
    )  # fmt: skip
    rounds: dict[str, Round] = {}
    with (
        known_answers(options.pair) as known,
        Servers(topology, options.pair, options.memory) as servers,
    ):
        for number in range(1, options.rounds + 1):
            asked = crowds(options.requests, options.seed + number, options.at_once)
            last = number == options.rounds
            done = one_round(servers, known, asked, options.minutes, last)
            if options.memory:
                done.held += grown(rounds.get("round 1", done), done)
            rounds[f"round {number}"] = done
            print(f"round {number}: {vars(done)}", file=sys.stderr, flush=True)
        for number, side in enumerate(("decode", "prefill") if options.kill else ()):
            seed = options.seed + 1000 * (number + 1)
            done = killed(servers, known, side, options.requests, options.at_once[0], seed)
            rounds[f"{side} killed"] = done
            print(f"{side} killed: {vars(done)}", file=sys.stderr, flush=True)
    print(table(rounds))
    if options.json:
        options.json.write_text(json.dumps({n: vars(r) for n, r in rounds.items()}, indent=1))
    return 0 if all(done.is_right(options.stock) for done in rounds.values()) else 1


def table(rounds: dict[str, Round]) -> str:
    head = (
        "| | requests | right | ties | wrong | hung up | failed | accept length | single "
        "| warm, cold rooms | held | in SGLang's tables |"
    )
    lines = [head, "|" + "---|" * 12]
    for name, r in rounds.items():
        counts = (r.ended[what] for what in ("right", "tie", "wrong", "hung up", "failed"))
        lengths = f"{r.accept_length:.3f} | {r.single:.3f}"
        cells = " | ".join(map(str, counts))
        lengths += f" | {r.rooms[WARM]}, {r.rooms[COLD]}"
        lines.append(
            f"| {name} | {r.requests} | {cells} | {lengths} | {len(r.held)} | {len(r.tables)} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
