"""A schedule from a seed."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.sim.network import READ_FAULTS
from tests.sim.spec import Chunk, Fault, Request, Server, Spec, Where

SCENES = (
    ("any",) * 14
    + ("dead_plane", "stopped", "stopped", "dead_readers", "unopened", "reuse", "waiting")
    + ("waiting", "ended", "ended", "hostile")
)  # fmt: skip
PATIENCE = (1.0,) * 6 + (2.0, 3.0)  # not less, or what takes its time is cold without a fault
KINDS = (
    ("stop",) * 5 + ("kill",) * 4 + ("break",) * 3 + ("reads",) * 4
    + ("cut", "cut", "slow", "slow", "double", "double", "error", "hostile")
)  # fmt: skip


class Draw:
    """One drawing. `most`: ranks of a server."""

    def __init__(self, seed: int, large: bool) -> None:
        self.seed, self.large = seed, large
        self.rng = random.Random(seed * 2 + large)
        self.most = 16 if large else 4
        self.scene = self.rng.choice(SCENES)
        self.late_prefill = self.rng.random() < 0.5

    def spec(self) -> Spec:
        rng = self.rng
        base = 3 if rng.random() < 0.15 and self.most > 3 else 1
        sizes = [base * 2**i for i in range(5) if base * 2**i <= self.most] + [1]
        heads = rng.choice([1, *[n * base for n in (1, 2, 4, 8, 16) if n * base <= 16]])
        servers = self._servers(sizes)
        requests = self._requests(servers)
        faults = self._faults(servers, requests)
        if rng.random() < (0.03 if self.scene == "any" else 0.3):
            requests = self._late(requests, faults)
        return Spec(
            self.seed, heads, tuple(servers), tuple(requests), tuple(faults),
            rng.random() < 0.4, rng.choice((0.0005, 0.001) if self.large else (0.001, 0.004, 0.02)),
            rng.randint(1, 3), rng.choice((0.0, 0.3, 0.8)),
        )  # fmt: skip

    # -- servers

    def _servers(self, sizes: list[int]) -> list[Server]:
        rng = self.rng
        two = rng.random() < (0.7 if self.large else 0.3)
        prefills = rng.randint(1, 3) if self.large and two else 1 + (two and rng.random() < 0.4)
        decodes = rng.randint(1, 3) if self.large else 1 + two
        if self.scene in ("stopped", "dead_readers"):
            decodes = max(2, decodes)
        total = [prefills, decodes]
        if self.scene in ("waiting", "hostile"):
            total = [2, 1]
        if self.scene == "dead_readers":
            total = [1, decodes]
        servers = []
        for side, count in zip(("prefill", "decode"), total, strict=True):
            for _ in range(count):
                servers.append(self._server(len(servers), side, sizes, count))
        return servers

    def _server(self, number: int, side: str, sizes: list[int], count: int) -> Server:
        rng = self.rng
        tp = rng.choice([size for size in sizes if self.large or size * count <= self.most] or [1])
        slots = rng.choice((2, 3, 4, 8, 8, 16) if not self.large else (4, 8, 16, 16, 32))
        if self.scene in ("stopped", "dead_readers"):
            slots = rng.choice((2, 8, 8)) if self.scene == "stopped" else 8
        if self.scene == "waiting":
            tp, slots = 1, 2 + 6 * (side == "prefill")
        if self.scene == "hostile":
            tp = 1
        if self.scene == "dead_readers":
            most = max(size for size in sizes if size <= 4)
            tp = 1 if side == "prefill" else most if number == 1 else tp
        return Server(
            number, side, tp, slots, rng.randint(2, 6), rng.choice((1, 1, 2, 4, 8)),
            rng.choice(PATIENCE),
        )  # fmt: skip

    # -- requests

    def _requests(self, servers: list[Server]) -> list[Request]:
        rng = self.rng
        count = rng.randint(5, 20) if self.large else rng.randint(1, 4)
        if self.scene in ("dead_plane", "waiting"):
            count = rng.randint(5, 8)
        if self.scene == "ended":
            count = 3
        found: list[Request] = []
        arrival = 0.0
        for number in range(count):
            found.append(self._request(number, servers, arrival, found))
            arrival += rng.choice((0.0, 0.005, 0.1, 0.5)) * rng.random()
            if self.scene == "dead_plane":
                arrival += rng.choice((0.2, 1.0, 2.5))
            if self.scene == "stopped" and number == 0:
                arrival += rng.uniform(55, 75)
        return found

    def _request(
        self, number: int, servers: list[Server], arrival: float, earlier: list[Request]
    ) -> Request:
        rng = self.rng
        chance = {"reuse": 0.7, "ended": 1.0, "stopped": 0.0}.get(self.scene, 0.1)
        again = rng.random() < chance
        former = earlier[-1] if earlier and again else None
        prefill, decode = (
            (former.prefill, former.decode) if former else (self._server_of(servers, s, number)
            for s in ("prefill", "decode"))
        )  # fmt: skip
        page = servers[decode].page
        prompt = rng.randint(1, 40 if rng.random() < 0.2 else 16)
        if self.scene in ("dead_readers", "waiting"):
            prompt = rng.randint(16, 40)
        first = rng.choice((0, 0, 0, rng.randint(0, prompt // page))) * page
        start = min(first // servers[prefill].page * servers[prefill].page, prompt)
        return Request(
            number, former.number if former else 1000 + number, prefill, decode, arrival, prompt,
            first, self._chunks(prompt - start, servers[prefill].page),
            prefill_delay=self._prefill_delay(number),
            decode_delay=0.0 if former else self._delay(),
            optimistic=rng.random() < 0.3, target=self._target(),
            forward=rng.choice((0, 0, rng.random() * 0.05)),
            abort=self._abort(number),
            after=former.id if former else -1,
        )  # fmt: skip

    def _server_of(self, servers: list[Server], side: str, number: int) -> int:
        of_side = [server for server in servers if server.side == side]
        server = self.rng.choice(of_side)
        if self.scene in ("stopped", "dead_readers") and side == "decode":
            server = of_side[min(number, 1)]  # the first request is the dead reader's
        if self.scene == "waiting":
            server = of_side[number > 1 and len(of_side) > 1]
        return server.number

    def _chunks(self, count: int, page: int) -> tuple[Chunk, ...]:
        rng = self.rng
        found = []
        while count > page and rng.random() < 0.5:
            size = rng.randint(1, max(1, count // page - 1)) * page
            found.append(self._chunk(size))
            count -= size
        if count or not found:
            found.append(self._chunk(count))
        if found[-1].count and rng.random() < 0.1:
            found.append(Chunk(0, False, 0.001))
        return tuple(found)

    def _chunk(self, size: int) -> Chunk:
        long = self.rng.random() < (0.7 if self.scene in ("reuse", "ended") else 0.2)
        seconds = self.rng.choice((0.001, 0.01, 0.02, 0.3 if long else 0.005))
        return Chunk(size, bool(size) and self.rng.random() < 0.4, seconds * self.rng.random())

    def _delay(self) -> float:
        chance = self.rng.random()
        return self.rng.random() * (0.01 if chance < 0.85 else 0.3 if chance < 0.95 else 3)

    def _prefill_delay(self, number: int) -> float:
        if self.scene == "ended" and self.late_prefill:  # decode ends the first two before
            return self.rng.uniform(0.1, 0.5) * (3 - number % 2)
        return self._delay()

    def _target(self) -> float:
        if self.scene == "stopped":
            return self.rng.choice((0.01, 0.5, 70, 85))
        if self.scene == "waiting":
            return self.rng.uniform(60, 75)
        chance = self.rng.random()
        return self.rng.random() * (0.03 if chance < 0.85 else 1.0 if chance < 0.98 else 75)

    def _abort(self, number: int) -> tuple[str, float, bool] | None:
        if self.scene == "ended":
            when = 0.005 + self.rng.choice((0.05, 0.3)) * self.rng.random()
            return ("decode", when, self.rng.random() < 0.2) if number < 2 else None
        reuse = self.scene == "reuse"
        if self.rng.random() > (0.5 if reuse else 0.12):
            return None
        span = self.rng.choice((0.005, 0.02, 0.1, 1.5))
        side = self.rng.choice(("prefill", "decode"))
        return side, self.rng.random() * span, self.rng.random() < (0.4 if reuse else 0.8)

    def _late(self, requests: list[Request], faults: list[Fault]) -> list[Request]:
        """The last request again, long after all of it."""
        end = max([f.time + f.seconds for f in faults] + [r.arrival for r in requests])
        last, end = requests[-1], end + 170 * max(PATIENCE)
        late = replace(
            last, id=len(requests), number=2000, arrival=end, after=-1, abort=None,
            late=True, target=0.01, prefill_delay=0.0, decode_delay=0.0,
        )  # fmt: skip
        return [*requests, late]

    # -- faults

    def _faults(self, servers: list[Server], requests: list[Request]) -> list[Fault]:
        rng = self.rng
        found = self._faults_of_scene(servers, requests)
        count = rng.choice((0, 1, 1, 2, 3)) if self.scene == "any" else rng.choice((0, 0, 0, 1))
        end = max(request.arrival for request in requests)
        for _ in range(count):
            found.append(self._fault(servers, requests, rng.random() * (end + 0.1)))
        return found

    def _faults_of_scene(self, servers: list[Server], requests: list[Request]) -> list[Fault]:
        rng, first = self.rng, requests[0]
        rank = self._rank(servers[first.decode])
        match self.scene:
            case "dead_plane" if rng.random() < 0.3:
                return [Fault("kill", rng.random() * 3, (first.prefill, 0), rng.random() * 0.3)]
            case "dead_plane":
                mode = rng.choice(("hang", "fail"))
                return [Fault("reads", 0.0, rank, 20.0, None, mode, 1000)]
            case "waiting":
                stuck = rng.uniform(*rng.choice(((5, 25), (20, 30), (55, 68))))
                other = (first.prefill + 1, 0)
                found = [Fault("reads", 0.0, rank, stuck, (first.prefill, 0), "stuck", 2)]
                found.append(Fault("reads", 0.0, rank, 80.0, other, "slow", 4))
                if rng.random() < 0.5:
                    found.append(Fault("slow", 0.0, rank, 3.0, other))
                return found
            case "hostile":
                return [Fault("hostile", 0.0, (first.prefill, 0), 0.0, None, "", rng.randint(1, 3))]
            case "stopped":
                where = rng.choice((rank, rank, self._rank(servers[first.prefill])))
                seconds = max(r.arrival for r in requests) + rng.uniform(-0.02, 0.05)
                mode = rng.choice(("", "sampled", "emitted"))
                return [Fault("stop", rng.random() * 0.03, where, seconds, None, mode)]
            case "dead_readers":
                kind = rng.choice(("kill", "stop"))
                ranks = range(servers[rank[0]].tp if kind == "stop" else 1)
                return [Fault(kind, 0.01 * rng.random(), (rank[0], r), 90.0) for r in ranks]
            case "reuse" | "ended" if rng.random() < 0.8:
                kind = rng.choice(("slow", "break", "cut"))
                when = 0.0 if kind == "slow" else rng.random() * 0.02
                seconds = rng.uniform(0.5, 3.0) if kind != "break" else 0.0
                return [Fault(kind, when, rank, seconds, self._rank(servers[first.prefill]))]
            case "unopened":
                peer = self._rank(servers[first.prefill])
                cut = Fault("cut", 0.0, rank, rng.uniform(0.5, 4), peer)
                other = self._rank(servers[first.prefill])
                return [cut, Fault("stop", rng.uniform(0.1, 1), other, rng.uniform(0.5, 4))]
        return []

    def _rank(self, server: Server) -> Where:
        return server.number, self.rng.randrange(server.tp)

    def _fault(self, servers: list[Server], requests: list[Request], time: float) -> Fault:
        """At this time, or just after a request has come."""
        rng = self.rng
        request = rng.choice(requests)
        if rng.random() < 0.7:
            time = request.arrival + rng.random() * rng.choice((0.01, 0.05, 0.5))
        decode = self._rank(servers[request.decode])
        prefill = self._rank(servers[request.prefill])
        one = rng.choice((decode, prefill))
        kind = rng.choice(KINDS)
        match kind:
            case "stop":
                low, high = rng.choice(((0.005, 0.1), (0.5, 4.9), (5, 20), (55, 80)))
                mode = rng.choice(("", "", "sampled", "emitted"))
                return Fault(kind, time, one, rng.uniform(low, high), None, mode)
            case "kill":
                return Fault(kind, time, one, rng.choice((0, 0.5, 10)) * rng.random())
            case "break":
                mode = rng.choice(("", "silent"))
                return Fault(kind, time, decode, 0.0, prefill, mode)
            case "cut" | "slow":
                return Fault(kind, time, decode, rng.choice((0.1, 1, 8)) * rng.random(), prefill)
            case "double":
                return Fault(kind, time, decode, 0.0, prefill, "", rng.randint(1, 8))
            case "hostile":
                return Fault(kind, time, prefill, 0.0, None, "", rng.randint(1, 3))
            case "reads":
                mode = rng.choice(READ_FAULTS)
                return Fault(kind, time, decode, 0.0, prefill, mode, rng.randint(1, 3))
        mode, where = rng.choice((
            ("pack", prefill), ("unpack", decode), ("clear", decode), ("action", one),
        ))  # fmt: skip
        return Fault("error", time, where, 0.0, None, mode, 1)
