"""Many clients at once before a pair of real servers: some hang up, the others get the single
server's answers, and nothing is held afterwards.

    with Servers(topology) as servers:
        servers.serve(crowd, known, part)      # Part: what became of each request
        servers.held()                         # what is still there

A crowd's prompts are as long as those of its pair, or between them; some begin with an earlier
one's first half.
"""

from __future__ import annotations

import json
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
from rig.known import Known, Prompt

from mixkv_demo import launch
from mixkv_demo.launch import Launch, Topology
from mixkv_demo.pair import BOS, PAIRS, SEP, SYMBOLS, ask
from mixkv_demo.processes import Fleet, ServerDied
from mixkv_demo.servers import bring_up, silent, start, totals
from sglang_mixkv.tools.client import REQUEST_TIMEOUT_S, Answer, NoAnswer, RequestFailed

SHARED = 0.4  # of the prompts begin as an earlier one does
PATIENCE_S = (0.05, 6.0)  # of a client that hangs up

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


# ---------------------------------------------------------------- the pair


@dataclass
class Part:
    """What became of the requests of crowds. `answers`: right or a tie, beside the single
    server's; `wrong`: other answers, and why requests failed whose client waited."""

    hung_up: int = 0
    failed: int = 0
    answers: list[tuple[Answer, Answer]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def note(self, prompt: Prompt, got: Answer | RequestFailed, hung_up: bool, of: Known) -> None:
        if isinstance(got, RequestFailed):
            hung_up = hung_up and isinstance(got, NoAnswer)
            self.hung_up += hung_up
            self.failed += not hung_up
            self.wrong += [] if hung_up else [f"failed: {got!s:.1500}"]
            return
        own = of.answer(prompt)
        self.answers.append((got, own))
        if got.tokens != own.tokens and not of.is_tie(prompt, got):
            self.wrong.append(f"{prompt}: {own.tokens}, not {got.tokens}")


class Servers:
    """A prefill and a decode server behind the router, each of which can be killed and started
    again on its ports."""

    def __init__(self, topology: Topology, pair: str = "mla") -> None:
        self._topology, self._pair, self._starts = topology, pair, 1
        self._ranks = launch.ranks(topology.prefill) + launch.ranks(topology.decode)

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
        env = {**server.env, **TIMEOUTS, watched_server.STATE_DIR_ENV: str(self._states)}
        return replace(server, argv=tuple(words), env=env)

    def serve(
        self,
        crowd: Crowd,
        known: Known,
        part: Part,
        until: tuple[int, Callable[[], None]] | None = None,
    ) -> None:
        """All requests of a crowd. `until`: after so many answers that is done, and nobody asks
        any more."""
        prompts, patience = crowd.prompts(self._pair), crowd.patience()
        known.learn(prompts)
        over = threading.Event()

        def one(prompt: Prompt, seconds: float | None) -> Answer | RequestFailed | None:
            if over.is_set():
                return None
            try:
                return ask(self.url, prompt, seconds or REQUEST_TIMEOUT_S)
            except RequestFailed as error:
                return error

        with ThreadPoolExecutor(crowd.at_once) as pool:
            for number, got in enumerate(pool.map(one, prompts, patience)):
                if got is not None:
                    part.note(prompts[number], got, patience[number] is not None, known)
                if until is not None and number == until[0]:
                    over.set()
                    until[1]()

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

    def held(self) -> list[str]:
        """What ranks still hold though nobody asks for anything; a server that ended, too."""
        deadline, now = time.monotonic() + SETTLED_S, time.time()
        while True:
            try:
                self.fleet.check()
            except ServerDied as error:
                return [str(error)]
            states = {p.stem: json.loads(p.read_text()) for p in self._states.glob("*.json")}
            fresh = sum(s["at"] > now + 1 for s in states.values()) == self._ranks
            found = [f"rank {pid}: {left}" for pid, s in states.items() for left in s["left"]]
            found += [
                f"rank {pid}: a request is open" for pid, s in states.items() if not s["idle"]
            ]
            if (fresh and not found) or time.monotonic() > deadline:
                return found if fresh else [*found, "a rank does not say what it holds"]
            time.sleep(watched_server.EVERY_S)
