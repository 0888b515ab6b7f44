"""Many clients at once before a pair of real servers: some hang up, the others get the single
server's answers, and nothing is held afterwards.

    with Servers(topology) as servers:
        part = servers.serve(crowd, known)     # Part: what became of each request
        servers.held()                         # what is still there

A crowd's prompts are as long as those of its pair, or between them; some begin with an earlier
one's first half.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from rig import watched_server
from rig.known import Known, Prompt, parts_at

from mixkv_demo import launch
from mixkv_demo.launch import Launch, Topology
from mixkv_demo.pair import BOS, PAIRS, SEP, SYMBOLS, request_body
from mixkv_demo.processes import Fleet, ServerDied
from mixkv_demo.servers import bring_up, silent, start, totals
from sglang_mixkv.tools.client import (
    REQUEST_TIMEOUT_S,
    Answer,
    NoAnswer,
    RequestFailed,
    generate,
)

SHARED = 0.4  # of the prompts begin as an earlier one does
PATIENCE_S = (0.05, 6.0)  # of a client that hangs up
BYTES = "plugin's bytes"

TIMEOUTS = {
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "1",
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "5",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "150",
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "150",
    # SGLang's servers close a connection that is idle for 5 s. Requests were seen that the router
    # could send to one side alone ("error sending request"); that this is why was not shown.
    "SGLANG_TIMEOUT_KEEP_ALIVE": "600",
}

SETTLED_S = 330.0
"""More than the last two together, for which prefill knows a room whose request never came."""


@dataclass(frozen=True)
class Crowd:
    """Requests, the same for the same seed. `at_once`: clients; `hang_up`: their share that
    does; others in another `turn`."""

    requests: int
    seed: int
    at_once: int = 16
    hang_up: float = 0.15
    turn: int = 0

    def prompts(self, pair: str) -> list[Prompt]:
        source, found, lengths = random.Random(self.seed), list[Prompt](), PAIRS[pair].lengths
        for _ in range(self.requests):
            length = source.randint(min(lengths), max(lengths))
            begin: Prompt = []
            if found and source.random() < SHARED:
                earlier = source.choice(found)[1:-1]
                begin = earlier[: len(earlier) // 2][:length]
            rest = source.sample([s for s in SYMBOLS if s not in begin], length - len(begin))
            found.append([BOS, *begin, *rest, SEP])
        return found

    def patience(self) -> list[float | None]:
        """How long each client waits, None: to the end."""
        source = random.Random(self.seed + 1 + 7919 * self.turn)
        return [
            source.uniform(*PATIENCE_S) if source.random() < self.hang_up else None
            for _ in range(self.requests)
        ]


class HungUp(Exception):
    """The client did not wait for the answer."""


class NotAsked(Exception):
    """The crowd had ended."""


def ask(url: str, prompt: Prompt, patience: float | None = None) -> Answer:
    """As `demo.pair.ask`, by a client that closes its connection when its patience ends."""
    try:
        return generate(url, request_body(prompt), patience or REQUEST_TIMEOUT_S)
    except NoAnswer as error:
        if patience is None:
            raise
        raise HungUp from error


# ---------------------------------------------------------------- the pair


@dataclass
class Part:
    """What became of the requests of one crowd. `answers`: right or a tie, beside the single
    server's."""

    crowd: Crowd
    ended: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    answers: list[tuple[Answer, Answer]] = field(default_factory=list)

    def note(self, prompt: Prompt, result: Answer | Exception, known: Known) -> None:
        if isinstance(result, HungUp):
            self.ended["hung up"] += 1
        elif isinstance(result, NotAsked):
            self.ended["not asked"] += 1
        elif isinstance(result, Exception):
            self.ended["failed"] += 1
            self.reasons[str(result)[:1500]] += 1
        else:
            own = known.answer(prompt)
            self.answers.append((result, own))
            if result.tokens == own.tokens:
                self.ended["right"] += 1
            elif known.is_tie(prompt, result):
                self.ended["tie"] += 1
            else:
                self.ended["wrong"] += 1
                at = parts_at(own.tokens, result.tokens)
                said = f"{own.tokens[at:]}, not {result.tokens[at:]}"
                self.reasons[f"wrong from token {at} on: {prompt}: {said}"] += 1


class Servers:
    """A prefill and a decode server behind the router, each of which can be killed and started
    again on its ports."""

    def __init__(self, topology: Topology, pair: str = "mla", trace: bool = False) -> None:
        self._topology, self._pair, self._starts = topology, pair, 1
        self._ranks = launch.ranks(topology.prefill) + launch.ranks(topology.decode)
        self._trace = {watched_server.TRACE_ENV: "1"} if trace else {}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.fleet = stack.enter_context(Fleet())
            self._states = self.fleet.folder("states")
            prefill, decode, port = launch.prefill_and_decode(self._pair, self._topology)
            self._launches = {one.name: self._watched(one) for one in (prefill, decode)}
            router = launch.router(prefill, decode, port)
            processes = bring_up(self.fleet, [*self._launches.values(), router], silent)
            self._running = dict(zip([*self._launches, router.name], processes, strict=True))
            self.url = router.url
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.__exit__(*exc)

    def _watched(self, server: Launch) -> Launch:
        words = list(server.argv)
        start_at = words.index("-m")
        words[start_at : start_at + 2] = [watched_server.__file__]
        env = {**server.env, **TIMEOUTS, **self._trace}
        env[watched_server.STATE_DIR_ENV] = str(self._states)
        return replace(server, argv=tuple(words), env=env)

    def serve(
        self, crowd: Crowd, known: Known, until: tuple[int, Callable[[], None]] | None = None
    ) -> Part:
        """All requests of a crowd. `until`: after so many answers that is done, and nobody asks
        any more."""
        part, prompts = Part(crowd), crowd.prompts(self._pair)
        known.learn(prompts)
        over = threading.Event()

        def one(prompt: Prompt, patience: float | None) -> Answer | Exception:
            if over.is_set():
                return NotAsked()
            try:
                return ask(self.url, prompt, patience)
            except (HungUp, RequestFailed) as error:
                return error

        got = []
        with ThreadPoolExecutor(crowd.at_once) as pool:
            for number, result in enumerate(pool.map(one, prompts, crowd.patience())):
                got.append(result)
                if until is not None and number == until[0]:
                    over.set()
                    until[1]()
        for prompt, result in zip(prompts, got, strict=True):
            part.note(prompt, result, known)
        return part

    # -- kill and restart

    def kill(self, side: str) -> None:
        self.fleet.signal(self._running.pop(side), signal.SIGKILL)
        for path in self._states.glob("*.json"):
            if not Path("/proc", path.stem).exists():
                path.unlink()

    def restart(self, side: str) -> None:
        self._starts += 1
        again = replace(self._launches[side], name=f"{side}-{self._starts}")
        self._running[side] = start(self.fleet, [again])[0]
        self._wait_until_served()

    def _wait_until_served(self) -> None:
        """The router has to see that the server is back."""
        deadline = time.monotonic() + SETTLED_S
        while True:
            try:
                ask(self.url, Crowd(1, 0).prompts(self._pair)[0])
            except RequestFailed:
                if time.monotonic() > deadline:
                    raise
                time.sleep(1)
            else:
                return

    # -- what is held

    def rooms(self) -> Counter[str]:
        """What the draft channel's rooms were, over all ranks since their start: by state, and cold
        ones by reason."""
        found: Counter[str] = Counter()
        for (name, *labels), number in totals([*self._launches.values()]).items():
            if name == "rooms_total":
                found.update(dict.fromkeys({labels[0], "_".join(labels)}, int(number)))
        return found

    def fails(self) -> Counter[str]:
        """What prefill told readers, since its start."""
        found: Counter[str] = Counter()
        for state in self._states_of_ranks().values():
            found.update(state["fails"])
        return found

    def memory(self) -> dict[str, dict[str, int]]:
        """What each rank's process has; with `trace` BYTES, Python memory of the plugin's."""
        found = dict[str, dict[str, int]]()
        for path in sorted(self._states.glob("*.json")):
            of = Path("/proc", path.stem)
            pages = int((of / "statm").read_text().split()[1])
            found[path.stem] = {
                "MiB": pages * os.sysconf("SC_PAGE_SIZE") >> 20,
                "threads": len(os.listdir(of / "task")),
                "descriptors": len(os.listdir(of / "fd")),
            }
        for pid, state in self._asked().items() if self._trace else ():
            found[pid][BYTES] = state["bytes"]
        return found

    def _asked(self) -> dict[str, Any]:
        """Each rank's state once it has measured."""
        now, deadline = str(time.time()), time.monotonic() + SETTLED_S
        (self._states / watched_server.ASKED).write_text(now)
        while True:
            states = self._states_of_ranks()
            if all(state.get("asked") == now for state in states.values()):
                return states
            assert time.monotonic() < deadline, "a rank does not say what it holds"
            time.sleep(watched_server.EVERY_S)

    def held(self, limit_s: float = SETTLED_S) -> list[str]:
        """What ranks still hold though nobody asks for anything; a server that ended, too."""
        deadline, now = time.monotonic() + limit_s, time.time()
        while True:
            try:
                self.fleet.check()
            except ServerDied as error:
                return [str(error)]
            states = self._states_of_ranks()
            fresh = sum(s["at"] > now + 1 for s in states.values()) == self._ranks
            found = [f"rank {pid}: {left}" for pid, s in states.items() for left in s["left"]]
            found += [
                f"rank {pid}: a request is open" for pid, s in states.items() if not s["idle"]
            ]
            if (fresh and not found) or time.monotonic() > deadline:
                return found if fresh else [*found, "a rank does not say what it holds"]
            time.sleep(watched_server.EVERY_S)

    def _states_of_ranks(self) -> dict[str, Any]:
        return {p.stem: json.loads(p.read_text()) for p in self._states.glob("*.json")}
