"""Load on a pair of real servers on CPU: many clients at once, some hang up, servers are killed.

Each round asks its requests in equal parts, 16, 32 and 48 at once (`--at-once`), and the same again
with other clients hanging up until `--minutes` have passed. `--kill` then kills and restarts decode
and prefill in the middle of a crowd each, of a third as many. Exit status 1: a wrong output; an
accept length that is 2 % off the single server's, or so short that it would not tell; a
request that failed though its client waited and no server was killed; more than one cold room in a
thousand, without those of requests that prefill aborted; anything of the plugin's held at the end,
or a request open; with `--memory`, more Python memory of the plugin's than after the first round.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from rig.crowd import BYTES, Crowd, Part, Servers
from rig.known import Known, known_answers

from mixkv_demo.launch import Topology
from mixkv_demo.pair import PAIRS
from sglang_mixkv.tools.client import accept_length

ENABLE = ("--enable-mixkv",)
HUNG_UP = "aborted: aborted on prefill"  # a room of a request whose client has
WARM, COLD, ABORTED = "warm", "cold", "cold_prefill_aborted"
COLD_SHARE, NEAR = 0.001, 0.02
TELLS = 2.0
"""With a shorter accept length the drafter hardly knows these prompts: wrong draft KV would not
show."""
SLACK = 256 << 10  # bytes
BETWEEN_S = 10
"""For a round's last requests to end, and their counts to be written."""
COUNTS = ("right", "tie", "wrong", "hung up", "failed")


@dataclass
class Round:
    """What was counted in one. `rooms`: of the draft channel; `fails`: why prefill refused rooms;
    `memory`: of each rank."""

    requests: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    accept_length: float = 0.0
    single: float = 0.0
    held: list[str] = field(default_factory=list)
    rooms: Counter[str] = field(default_factory=Counter)
    fails: Counter[str] = field(default_factory=Counter)
    memory: dict[str, dict[str, int]] = field(default_factory=dict)

    def is_right(self) -> bool:
        near = abs(self.accept_length - self.single) <= NEAR * self.single and self.single > TELLS
        aborted = min(self.rooms[ABORTED], self.fails[HUNG_UP])  # a closed room is told, too
        warm, cold = self.rooms[WARM], self.rooms[COLD] - aborted
        bad = self.ended["wrong"] or self.ended["failed"] or self.held
        return near and cold <= COLD_SHARE * (warm + cold) and not bad

    def row(self, name: str) -> str:
        cells = [name, self.requests, *(self.ended[what] for what in COUNTS)]
        cells += [f"{self.accept_length:.3f}", f"{self.single:.3f}"]
        cells += [f"{self.rooms[WARM]}, {self.rooms[COLD]}", len(self.held)]
        return f"| {' | '.join(map(str, cells))} |"


def count(servers: Servers, parts: Callable[[], list[Part]], last: bool) -> Round:
    """A round of these. What a request that was hung up leaves may stay for minutes
    (`Times.early_room`), so it is looked at after the last."""
    rooms, fails, asked = servers.rooms(), servers.fails(), parts()
    found = Round(sum(part.crowd.requests for part in asked))
    for part in asked:
        found.ended.update(part.ended)
        found.reasons.update(part.reasons)
    answers = zip(*(both for part in asked for both in part.answers), strict=True)
    found.accept_length, found.single = map(accept_length, map(list, answers))
    held = servers.held() if last else servers.held(BETWEEN_S)
    found.held = held if last else []
    found.rooms, found.fails = servers.rooms() - rooms, servers.fails() - fails
    found.memory = servers.memory()
    return found


def crowds(
    servers: Servers, known: Known, requests: int, seed: int, at_once: Sequence[int], minutes: float
) -> list[Part]:
    """The requests of one round, and again, with others hanging up, as long as there is time."""
    each = requests // len(at_once)
    asked = [Crowd(each, seed * 10 + i, n) for i, n in enumerate(at_once)]
    parts, begin = list[Part](), time.monotonic()
    for turn in itertools.count():
        parts += [servers.serve(replace(crowd, turn=turn), known) for crowd in asked]
        if time.monotonic() - begin >= 60 * minutes:
            return parts
    raise AssertionError


def killed(
    servers: Servers, known: Known, side: str, requests: int, at_once: int, seed: int
) -> Round:
    """A server dies when a third of a crowd has its answers: the next crowd is served."""
    crowd = Crowd(requests, seed, at_once, hang_up=0.0)
    lost = servers.serve(crowd, known, (requests // 3, lambda: servers.kill(side)))
    servers.restart(side)
    again = replace(crowd, seed=seed + 1, hang_up=Crowd.hang_up)
    found = count(servers, lambda: [servers.serve(again, known)], last=True)
    found.ended["failed as their server was killed"] = lost.ended["failed"]
    found.ended["wrong"] += lost.ended["wrong"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pair", default="mla", choices=PAIRS)
    parser.add_argument("--prefill", default="--tp 2", help="flags of the prefill server")
    parser.add_argument("--decode", default="--tp 1", help="flags of the decode server")
    parser.add_argument("--backend", default="mooncake", choices=("mooncake", "nixl"))
    parser.add_argument("--requests", type=int, default=300, help="of one round")
    parser.add_argument("--at-once", type=int, nargs="+", default=(16, 32, 48), help="clients")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=0.0, help="of one round, at least")
    parser.add_argument("--memory", action="store_true", help="trace what the plugin allocates")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kill", action="store_true", help="kill and restart each server as well")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    sides = (tuple(shlex.split(flags)) for flags in (options.prefill, options.decode))
    topology = Topology(*sides, ENABLE, ENABLE, backend=options.backend)
    rounds: dict[str, Round] = {}

    def note(name: str, done: Round) -> None:
        rounds[name] = done
        print(f"{name}: {vars(done)}", file=sys.stderr, flush=True)

    with (
        known_answers(options.pair) as known,
        Servers(topology, options.pair, options.memory) as servers,
    ):
        for number in range(1, options.rounds + 1):
            asked = options.requests, options.seed + number, options.at_once, options.minutes
            done = count(
                servers, lambda asked=asked: crowds(servers, known, *asked),
                last=number == options.rounds,
            )  # fmt: skip
            first = rounds.get("round 1", done)
            for pid, now in done.memory.items() if options.memory else ():
                if now[BYTES] > first.memory[pid][BYTES] + SLACK:
                    done.held.append(f"rank {pid}: the plugin's memory grew to {now[BYTES]} bytes")
            note(f"round {number}", done)
        for number, side in enumerate(("decode", "prefill") if options.kill else ()):
            of = options.requests // 3, options.at_once[0], options.seed + 1000 * (number + 1)
            note(f"{side} killed", killed(servers, known, side, *of))
    print(
        f"| | requests | {' | '.join(COUNTS)} | accept length | single | warm, cold rooms | held |"
    )
    print("|" + "---|" * (len(COUNTS) + 6))
    print("\n".join(one.row(name) for name, one in rounds.items()))
    if options.json:
        options.json.write_text(json.dumps({n: vars(r) for n, r in rounds.items()}, indent=1))
    return 0 if all(done.is_right() for done in rounds.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
