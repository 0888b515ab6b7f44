"""Generates a schedule from a seed.

A scene combines requests and faults that independent draws would rarely bring together.
"""

from __future__ import annotations

import random
from dataclasses import replace

from tests.sim import faults
from tests.sim.faults import KINDS, STOPS, Fault, Occasion
from tests.sim.spec import Chunk, Request, Server, Spec, Where

SCENES = (
    *("any",) * 24, "dead_plane", "probe", "stopped", "stopped", "dead_readers", "dead_readers",
    "unopened", "reuse", "waiting", "waiting", "crowded", "ended", "ended", "restart", "hung",
    "hung", "gone", "liar", "numbers", "batches", "aborted", "spoiled", "spoiled",
    "suspended", "forward", "stranger", "restored",
)  # fmt: skip
LARGE = 0.02  # share of clusters with up to 16 ranks per server, which run ten times as long
PATIENCE = (1.0,) * 8 + (2.0, 3.0, 0.5, 0.3, 0.1)
DRAWN = [kind for kind, often in KINDS.items() for _ in range(often)]
NAMES = (b"",) * 6 + (b"other:8998",)


class Draw:
    def __init__(self, seed: int, scene: str = "") -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.large = self.rng.random() < LARGE
        self.scene = self.rng.choice(SCENES)
        self.scene = scene or self.scene
        self.stop = faults.Suspend if self.scene == "suspended" else faults.Stop
        self.scene = "stopped" if self.scene == "suspended" else self.scene
        self.late_prefill = self.rng.random() < 0.5
        self.busy = self.rng.randint(1, 3)  # number of requests on the server that dies
        self.servers: list[Server] = []
        self.requests: list[Request] = []

    def spec(self) -> Spec:
        rng, most = self.rng, 16 if self.large else 4
        base = 3 if rng.random() < 0.15 else 1
        sizes = [base * 2**i for i in range(5) if base * 2**i <= most] + [1]
        heads = rng.choice([1, *(n * base for n in (1, 2, 4, 8, 16) if n * base <= 16)])
        self._add_servers(sizes, most)
        self._add_requests()
        drawn = self._faults_of_scene()
        for _ in range(rng.choice((0, 1, 1, 2, 3) if self.scene == "any" else (0, 0, 0, 0, 1))):
            drawn.append(self._fault())
        if rng.random() < (0.03 if self.scene == "any" else 0.3):
            self._add_late(drawn)
        return Spec(
            self.seed, heads, tuple(self.servers), tuple(self.requests), tuple(drawn),
            rng.random() < 0.4, self._copying(), rng.randint(1, 3), rng.choice((0.0, 0.3, 0.8)),
        )  # fmt: skip

    def _copying(self) -> float:
        if self.scene == "batches":
            return 0.02
        return self.rng.choice((0.0005, 0.001) if self.large else (0.001, 0.004, 0.02))

    def _add_servers(self, sizes: list[int], most: int) -> None:
        rng, scene = self.rng, self.scene
        two = rng.random() < (0.7 if self.large else 0.3)
        prefills = rng.randint(1, 3) if self.large and two else 1 + (two and rng.random() < 0.4)
        decodes = rng.randint(1, 3) if self.large else 1 + two
        if scene in ("stopped", "dead_readers"):
            prefills, decodes = 1 if scene == "dead_readers" else prefills, max(2, decodes)
        elif scene in ("waiting", "crowded", "forward"):
            prefills, decodes = 1 if scene == "forward" else 2, 1
        sides = ["prefill"] * prefills + ["decode"] * decodes
        for number, side in enumerate(sides):
            few = [size for size in sizes if self.large or size * sides.count(side) <= most]
            tp = rng.choice(few or [1])
            slots = rng.choice((4, 8, 16, 16, 32) if self.large else (2, 3, 4, 8, 8, 16))
            match scene:
                case "stopped":
                    slots = rng.choice((2, 8, 8))
                case "waiting" | "crowded":
                    tp, slots = 1, 8 if side == "prefill" else 2
                case "forward":
                    tp, slots = 1, 8 if side == "prefill" else rng.choice((2, 4))
                case "dead_readers":
                    dead = sizes[0] * rng.choice((2, 4, 8, 8, 16)) // (1 + sizes[0] // 3)
                    tp, slots = 1 if side == "prefill" else dead if number == 1 else tp, 8
                    slots = rng.choice((8, 8, 16)) if side == "prefill" else slots
            tokens, page = rng.randint(2, 6), rng.choice((1, 1, 2, 4, 8))
            patience, device = rng.choice(PATIENCE), rng.random() < 0.25
            tokens = 2 if scene in ("batches", "forward") else tokens
            device = device or scene == "batches"
            server = Server(number, side, tp, slots, tokens, page, patience, device)
            self.servers.append(server)

    # -- requests

    def _add_requests(self) -> None:
        rng, arrival = self.rng, 0.0
        many = rng.randint(5, 8)
        count = {"dead_plane": many + 1, "probe": many + 1, "waiting": many, "ended": 3}
        count |= {"dead_readers": many - 2, "crowded": many, "aborted": many, "forward": many}
        usual = rng.randint(5, 20) if self.large else rng.randint(1, 4)
        for number in range(count.get(self.scene, usual)):
            self.requests.append(self._request(number, arrival))
            arrival += rng.choice((0.0, 0.005, 0.1, 0.5)) * rng.random()
            if self.scene == "dead_plane":
                arrival += rng.choice((0.2, 1.0, 1.0, 2.5))
            if self.scene == "crowded" and number > 1:
                arrival += 0.3
            if self.scene == "probe":
                arrival += 0.1 if number < 3 else rng.choice((0.3, 0.8, 1.2))
            if self.scene == "stopped" and number == 0:
                arrival += rng.uniform(55, 75)

    def _request(self, number: int, arrival: float) -> Request:
        rng, servers = self.rng, self.servers
        chance = {"reuse": 0.7, "ended": 1.0, "stopped": 0.0}.get(self.scene, 0.1)
        former = self.requests[-1] if number and rng.random() < chance else None
        prefill = former.prefill if former else self._server_of("prefill", number)
        decode = former.decode if former else self._server_of("decode", number)
        page = servers[decode].page
        prompt = rng.randint(1, 40 if rng.random() < 0.2 else 16)
        if self.scene in ("dead_readers", "waiting", "crowded", "batches", "forward"):
            prompt = rng.randint(16, 40)
        first = rng.choice((0, 0, 0, rng.randint(0, prompt // page))) * page
        start = min(first // servers[prefill].page * servers[prefill].page, prompt)
        late = self.scene == "ended" and self.late_prefill  # decode aborts the first two
        name, odd = 1000 + number, 0.4 if self.scene == "numbers" else 0.02
        if self.scene != "stopped" and rng.random() < odd:  # a number that no message can encode
            name = rng.choice((-name, (1 << 64) + name))
        return Request(
            number, former.number if former else name, prefill, decode, arrival, prompt,
            first, self._chunks(prompt - start, servers[prefill].page),
            prefill_delay=rng.uniform(0.1, 0.5) * (3 - number % 2) if late else self._delay(0.01),
            decode_delay=0.0 if former else self._delay(0.01),
            optimistic=rng.random() < 0.3, target=self._target(),
            forward=self._forward(number),
            abort=self._abort(number), after=former.id if former else -1, name=self._name(former),
        )  # fmt: skip

    def _forward(self, number: int) -> float:
        """Return for how many seconds an earlier forward still writes to decode's pages."""
        if self.scene == "forward":  # the first request holds the rank's slots
            return 0.0 if number else self.rng.uniform(0.3, 3.0)
        return self.rng.choice((0, 0, self.rng.random() * 0.05))

    def _name(self, former: Request | None) -> bytes:
        return former.name if former else self.rng.choice(NAMES)

    def _server_of(self, side: str, number: int) -> int:
        """Pick a server. Some scenes give the first requests a server that a fault then hits."""
        of_side = [server for server in self.servers if server.side == side]
        server = self.rng.choice(of_side)
        if self.scene == "stopped" and side == "decode":
            server = of_side[min(number, 1)]
        if self.scene == "dead_readers" and side == "decode":  # the first server dies
            server = of_side[number >= self.busy]
        if self.scene == "probe":
            server = of_side[0]
        if self.scene in ("waiting", "crowded"):
            server = of_side[number > 1 and len(of_side) > 1]
        return server.number

    def _chunks(self, count: int, page: int) -> tuple[Chunk, ...]:
        rng, sizes, found = self.rng, [], []
        while count > page and rng.random() < 0.5:
            sizes.append(rng.randint(1, max(1, count // page - 1)) * page)
            count -= sizes[-1]
        if count or not sizes:
            sizes.append(count)
        for size in sizes:
            long = rng.random() < (0.7 if self.scene in ("reuse", "ended", "aborted") else 0.2)
            seconds = rng.choice((0.001, 0.01, 0.02, 0.3 if long else 0.005)) * rng.random()
            if self.scene == "probe" and len(self.requests) > 3 and rng.random() < 0.3:
                seconds += rng.choice((1.5, 2.5, 4.0))
            pending = rng.random() < (0.9 if self.scene == "aborted" else 0.4)
            found.append(Chunk(size, bool(size) and pending, seconds))
        if sizes[-1] and rng.random() < 0.1:
            found.append(Chunk(0, False, 0.001))
        return tuple(found)

    def _delay(self, usual: float, rarely: float = 0.3, at_most: float = 3) -> float:
        chance = self.rng.random()
        return self.rng.random() * (
            usual if chance < 0.85 else rarely if chance < 0.96 else at_most
        )

    def _target(self) -> float:
        match self.scene:
            case "stopped":
                return self.rng.choice((0.01, 0.5, 70, 85))
            case "waiting":
                return self.rng.uniform(60, 75)
        return self._delay(0.03, 1.0, 75)

    def _abort(self, number: int) -> tuple[str, float, bool] | None:
        rng, reuse = self.rng, self.scene == "reuse"
        if self.scene == "ended":
            when = 0.005 + rng.choice((0.05, 0.3)) * rng.random()
            return ("decode", when, rng.random() < 0.2) if number < 2 else None
        if self.scene == "aborted":
            return "prefill", 0.002 + 0.1 * rng.random(), rng.random() < 0.5
        if rng.random() > (0.5 if reuse else 0.8 if self.scene == "batches" else 0.12):
            return None
        when = rng.choice((0.005, 0.02, 0.1, 1.5)) * rng.random()
        return rng.choice(("prefill", "decode")), when, rng.random() < (0.4 if reuse else 0.8)

    def _add_late(self, drawn: list[Fault]) -> None:
        """Add a copy of the last request, long after all other requests and faults."""
        end = max([f.time + f.seconds for f in drawn] + [r.arrival for r in self.requests])
        end += 170 * max(PATIENCE)
        late = replace(
            self.requests[-1], id=len(self.requests), number=2000, arrival=end, after=-1,
            abort=None, late=True, target=0.01, prefill_delay=0.0, decode_delay=0.0,
        )  # fmt: skip
        self.requests.append(late)

    # -- faults

    def _faults_of_scene(self) -> list[Fault]:
        rng, first = self.rng, self.requests[0]
        rank, prefill = self._rank(first.decode), self._rank(first.prefill)
        match self.scene:
            case "dead_plane" if rng.random() < 0.3:
                return [faults.Kill(rng.random() * 3, prefill, rng.random() * 0.3)]
            case "dead_plane":
                return [faults.Reads(0.0, rank, 20.0, None, rng.choice(("hang", "fail")), 1000)]
            case "restart":  # a read may return bytes of the new instance
                slow = faults.Reads(0.0, rank, 0.0, prefill, "slow", 3)
                return [slow, faults.Kill(rng.random() * 0.05, prefill, 0.3 * rng.random())]
            case "waiting":
                stuck = rng.uniform(*rng.choice(((5, 25), (20, 30), (55, 68))))
                other = (first.prefill + 1, 0)
                found = [faults.Reads(0.0, rank, stuck, prefill, "stuck", 2)]
                found.append(faults.Reads(0.0, rank, 80.0, other, "slow", 4))
                return found + [faults.Slow(0.0, rank, 3.0, other)] * rng.randint(0, 1)
            case "crowded":
                stuck = rng.uniform(5, 30)
                return [faults.Reads(0.0, rank, stuck, prefill, "stuck", rng.randint(1, 3))]
            case "stopped":
                seconds = self.requests[-1].arrival + rng.uniform(-0.02, 0.05)
                where, mode = rng.choice((rank, rank, prefill)), rng.choice(STOPS)
                return [self.stop(rng.random() * 0.03, where, seconds, None, mode)]
            case "dead_readers":
                kind, mode = rng.choice(
                    ((faults.Kill, ""), (faults.Kill, "power"), (faults.Stop, ""))
                )
                ranks = range(self.servers[rank[0]].tp if kind is faults.Stop else 1)
                when = self.requests[self.busy - 1].arrival + 0.02 * rng.random()
                return [kind(when, (rank[0], r), 90.0, None, mode) for r in ranks]
            case "reuse" | "ended" if rng.random() < 0.8:
                kind = rng.choice((faults.Slow, faults.Break, faults.Cut))
                when = 0.0 if kind is faults.Slow else rng.random() * 0.02
                return [kind(when, rank, rng.uniform(0.5, 3.0), prefill)]
            case "probe":
                return [faults.Reads(0.0, rank, 60.0, None, "fail", rng.randint(3, 6))]
            case "hung":
                what = rng.choice(
                    ("", "StartRead", "Send", "StartCopies", "StartCopies", "Verdict")
                )
                where = rng.choice((rank, rank, prefill))
                seconds = rng.uniform(*rng.choice(((0.5, 5), (8, 12), (15, 61))))
                if rng.random() < 0.2:
                    return [faults.Broken(rng.random() * 0.1, where)]
                return [faults.Hang(rng.random() * 0.02, where, seconds, None, what)]
            case "stranger":
                when, mode = first.arrival, rng.choice(("", "gone", "spy"))
                return [faults.Stranger(when, prefill, 0.5, None, mode, 100)]
            case "restored":
                when = first.arrival + rng.random() * rng.choice((0.01, 0.1, 1.0))
                return [faults.Restore(when, rng.choice((rank, prefill)))]
            case "spoiled":
                return [faults.Reads(0.0, rank, 20.0, prefill, "wrong", rng.randint(1, 4))]
            case "gone":
                when = first.arrival + rng.random() * 0.1
                name = first.name.decode()
                return [
                    kind(when, rank, 0.0, prefill, name)
                    for kind in rng.choice(
                        ((faults.Drop,), (faults.Relink,), (faults.Drop, faults.Relink))
                    )
                ]
            case "liar":
                when = first.arrival + rng.random() * 0.02
                return [faults.Lies(when, prefill, 0.3, rank, "", rng.randint(3, 20))]
            case "unopened":
                cut = faults.Cut(0.0, rank, rng.uniform(0.5, 4), prefill)
                other = self._rank(first.prefill)
                return [cut, faults.Stop(rng.uniform(0.1, 1), other, rng.uniform(0.5, 4))]
        return []

    def _rank(self, server: int) -> Where:
        return server, self.rng.randrange(self.servers[server].tp)

    def _fault(self) -> Fault:
        """Draw a fault at any time, or shortly after the arrival of a request."""
        rng = self.rng
        request = rng.choice(self.requests)
        time = rng.random() * (self.requests[-1].arrival + 0.1)
        if rng.random() < 0.7:
            time = request.arrival + rng.random() * rng.choice((0.01, 0.05, 0.5))
        decode, prefill = self._rank(request.decode), self._rank(request.prefill)
        one, name = rng.choice((decode, prefill)), request.name.decode()
        return rng.choice(DRAWN).draw(Occasion(rng, time, prefill, decode, one, name))
