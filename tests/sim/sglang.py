"""SGLang's side: the ranks that a decode rank contacts, and the life of a request on each side.

The plugin's real `make_plan` computes the sources. The ranks of one side run in lockstep.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

from msgspec.structs import replace

from sglang_mixkv.channel.handshake import Row, StagingFacts, Target
from sglang_mixkv.channel.messages import PROTOCOL
from sglang_mixkv.decode import actions as dact
from sglang_mixkv.decode import plan as plans
from sglang_mixkv.decode.transfer import Source
from sglang_mixkv.draft.layout import DraftFacts, DraftLayout
from sglang_mixkv.draft.slot_format import SLOT_OVERHEAD
from tests.rig.channel.contacts import contacted
from tests.sim.decode import DecodeRank
from tests.sim.prefill import Sender
from tests.sim.spec import Server

if TYPE_CHECKING:
    from tests.sim.spec import Request
    from tests.sim.world import World


@lru_cache(1 << 12)
def layout_of(heads: int, tp: int, rank: int) -> DraftLayout:
    return DraftLayout(DraftFacts("A", "EAGLE3", heads, (1, 1), "bf16"), tp, rank)


@lru_cache(1 << 12)
def slot_bytes(heads: int, tp: int, tokens: int) -> int:
    layout = layout_of(heads, tp, 0)
    return SLOT_OVERHEAD + tokens * layout.facts.bytes_per_token(len(layout.heads))


@lru_cache(1 << 12)
def sources_of(heads: int, prefill: Server, decode: Server, rank: int) -> tuple[Source, ...]:
    """Return the sources that the plugin's `make_plan` computes."""
    rows = {("p", i): _row(heads, prefill, i) for i in range(prefill.tp)}
    infos = [{"rank_ip": "p", "rank_port": i} for i in contacted(prefill.tp, decode.tp, rank)]
    return plans.make_plan(infos, rows, _row(heads, decode, rank)).sources


def _row(heads: int, server: Server, rank: int) -> Row:
    size = slot_bytes(heads, server.tp, server.tokens)
    return Row(
        PROTOCOL, "", "", b"%8d" % rank, "p", rank, "", server.tp, rank, 0, (),
        "mooncake", Target(0, 1, layer_ids=False, even=True),
        draft=layout_of(heads, server.tp, rank),
        staging=StagingFacts("mooncake", b"", 0, size, server.slots), patience=server.patience,
    )  # fmt: skip


WAITING = 90.0  # seconds of SGLang's own time-out for the target; SGLang's default is 300 s


class Group:
    """The ranks of a server.

    `handles`: SGLang's sender or receiver on each rank, by request. `epoch`: a number that changes
    when the server is killed, so that its pending steps do not run after a restart.
    """

    def __init__(self, world: World, server: Server) -> None:
        self.world, self.clock, self.rng = world, world.clock, world.clock.rng
        self.server = server
        self.places = [world.places[server.number, rank] for rank in range(server.tp)]
        self.handles: dict[int, list] = {}
        self.epoch = 0

    @property
    def ranks(self) -> list:
        return [place.process for place in self.places]

    @property
    def is_alive(self) -> bool:
        return all(rank.alive for rank in self.ranks)

    def step(self, delay: float, call: Callable, *args: object) -> None:
        """Run a step once all ranks run, since SGLang's steps begin with an all-reduce."""
        self.clock.after(delay, self._step, self.epoch, call, args)

    def _step(self, epoch: int, call: Callable, args: tuple) -> None:
        if epoch != self.epoch:
            return
        for rank in self.ranks:
            if rank.stopped:
                rank.park("scheduler", self._step, (epoch, call, args))
                return
        call(*args)

    def _skew(self) -> float:
        return self.rng.random() * 0.001

    def waited(self, request: Request, what: str = "time-out") -> None:
        """Fail a request that waits too long, or for a dead server, unless its target arrived."""
        handles = self.handles.get(request.id)
        if not (handles and all(one.has_target for one in handles)):
            self.fail(request, what)

    def poll_on(self, request: Request, slowest: float) -> None:
        """Poll a request without an event: once before the last resort, and repeatedly after it."""
        if self.world.hangs:
            self.clock.after(slowest * self.rng.random(), self.step, 0.0, self.poll, request)
        self.clock.after(slowest + 0.05, self.poll_again, request)

    def poll_again(self, request: Request) -> None:
        """Poll again until all ranks have ended the request."""
        if request.id in self.handles:
            self.step(0.0, self._poll_again, request)

    def _poll_again(self, request: Request) -> None:
        if any(not one.polled_out for one in self.handles[request.id] if one.rank.alive):
            self.poll(request)
            self.clock.after(0.25, self.poll_again, request)

    def poll_all(self) -> None:
        """Poll all requests, after a rank's channel thread has ended."""
        for number in list(self.handles):
            self.poll_again(self.world.lives[number].request)

    def fail(self, request: Request, reason: str, by: str = "stock") -> None:
        self.step(0.0, self._end, request, reason, by)


class PrefillGroup(Group):
    """A prefill server. `_stream`: when the last of its queued forwards will end."""

    _stream = 0.0

    def arrive(self, request: Request) -> None:
        life = self.world.lives[request.id]
        if life.prefill_over:
            return
        self.handles[request.id] = [rank.begin(request) for rank in self.ranks]
        self.step(WAITING, self.waited, request)
        if request.optimistic or life.metadata == 0:
            self._first_chunk(request)

    def _first_chunk(self, request: Request) -> None:
        """Begin the first chunk, at the start of a page of the prefill pool."""
        page = self.server.page
        self._chunk(request, 0, min(request.first_token // page * page, request.prompt))

    def metadata(self, request: Request) -> None:
        """Handle a decode rank's metadata."""
        life = self.world.lives[request.id]
        assert life.metadata
        life.metadata -= 1
        if life.metadata or request.id not in self.handles or life.prefill_over:
            return
        if request.optimistic:
            self._try_target(request)
        else:
            self._first_chunk(request)

    def _chunk(self, request: Request, number: int, first: int) -> None:
        life, chunk = self.world.lives[request.id], request.chunks[number]
        if life.prefill_over:
            return
        last = number == len(request.chunks) - 1
        for sender in self.handles[request.id] if chunk.pending else ():
            sender.rank.add_chunk(sender, first, chunk.count, last, True)
        life.queued += max(0.0, self._stream - self.clock.now)
        self._stream = max(self._stream, self.clock.now) + chunk.seconds
        self.step(self._stream - self.clock.now, self._chunk_done, request, number, first)

    def _chunk_done(self, request: Request, number: int, first: int) -> None:
        life, chunk = self.world.lives[request.id], request.chunks[number]
        if life.prefill_over:  # a forward that was already launched still runs to its end
            for sender in self.handles[request.id] if chunk.pending else ():
                if not sender.given_back:
                    sender.rank.write(sender, first, chunk.count)
                sender.rank.written(sender)
            return
        last = number == len(request.chunks) - 1
        for sender in self.handles[request.id]:
            rank = sender.rank
            rank.write(sender, first, chunk.count)
            if chunk.pending:
                rank.later("event", self.rng.random() * 0.0004, rank.written, sender)
            else:
                rank.add_chunk(sender, first, chunk.count, last, False)
        if last:
            life.written = True
            self._try_target(request)
        else:
            self._chunk(request, number + 1, first + chunk.count)

    def _try_target(self, request: Request) -> None:
        life = self.world.lives[request.id]
        if not life.written or life.metadata != 0 or life.target_begun:
            return
        life.target_begun = True
        for sender in self.handles[request.id]:
            delay = request.target * (1 + 0.2 * self.rng.random())
            sender.rank.later(("target", request.id), delay, self._target, request, sender)

    def _target(self, request: Request, sender: Sender) -> None:
        if not sender.ended:
            sender.rank.target_sent(sender)
            self.world.groups[request.decode].target_part(request, sender.rank.place.rank)
            self.poll(request)

    def poll(self, request: Request) -> None:
        """Poll all ranks, since SGLang acts on the lowest of their states."""
        polled = [sender.poll() for sender in self.handles[request.id]]
        if all(polled):
            self.step(self._skew(), self._end, request, "")

    def _end(self, request: Request, reason: str, by: str = "stock") -> None:
        life = self.world.lives[request.id]
        if life.prefill_over:
            return
        life.prefill_over = True
        for sender in self.handles.get(request.id, ()):
            sender.rank.later("scheduler", self._skew(), sender.rank.end, sender, reason)


class DecodeGroup(Group):
    def arrive(self, request: Request) -> None:
        if self.world.lives[request.id].decode_over:
            return
        found = [self._sources(request, rank) for rank in self.ranks]
        if None in found:
            self._end(request, "no prefill server")
        else:
            self._open(request, found)

    def _contacted(self, request: Request, rank: DecodeRank) -> range:
        """Return the ranks of the prefill server that this rank contacts."""
        prefill = self.world.spec.servers[request.prefill]
        return contacted(prefill.tp, self.server.tp, rank.place.rank)

    def _sources(self, request: Request, rank: DecodeRank) -> list[Source] | None:
        """Return the sources with the instances in the rank's cache.

        Return None if the server is not in the cache and is dead.
        """
        group = self.world.groups[request.prefill]
        known, name = rank.known, request.name
        if (request.prefill, name) not in known:
            if not group.is_alive:
                return None
            known[request.prefill, name] = [one.instance + name for one in group.ranks]
        peers, indices = known[request.prefill, name], self._contacted(request, rank)
        rank.connect([peers[index] for index in indices])
        sources = sources_of(self.world.spec.heads, group.server, self.server, rank.place.rank)
        return [replace(source, peer=peers[indices[i]]) for i, source in enumerate(sources)]

    def _open(self, request: Request, found: list[list[Source]]) -> None:
        page, messages = self.server.page, 0
        end = -(-request.prompt // page) * page
        receivers = self.handles[request.id] = []
        for rank, sources in zip(self.ranks, found, strict=True):
            receiver = rank.open(request, tuple(sources), end)
            receivers.append(receiver)
            receiver.targets = set(self._contacted(request, rank))
            messages += len(receiver.targets)
        self.world.lives[request.id].metadata = messages
        self.step(WAITING, self.waited, request)
        group = self.world.groups[request.prefill]
        for _ in range(messages):
            group.step(0.0002 + self.rng.random() ** 2 * 0.003, group.metadata, request)

    def target_part(self, request: Request, index: int) -> None:
        """Handle one prefill rank's part of the target."""
        for receiver in self.handles.get(request.id, ()):
            if index in receiver.targets:
                receiver.targets.discard(index)
                if not receiver.targets:
                    rank, delay = receiver.rank, self.rng.random() * 0.002
                    rank.later(("target", request.id), delay, rank.target_arrived, receiver)

    def poll(self, request: Request) -> None:
        receivers = self.handles[request.id]
        for receiver in receivers:
            receiver.poll()
        if any(receiver.verdict is dact.State.FAILED for receiver in receivers):
            self.step(self._skew(), self._end, request, "rows could not be cleared", "drafter")
        elif all(receiver.done for receiver in receivers):
            self.step(self._skew(), self._end, request, "")

    def _end(self, request: Request, reason: str, by: str = "stock") -> None:
        life, rng = self.world.lives[request.id], self.rng
        if life.decode_over:
            return
        life.outcome, life.reason, life.by = "failed" if reason else "ok", reason, by
        life.ended = self.clock.now
        for receiver in self.handles.get(request.id, ()):
            if not reason:
                self.world.checks.rows(receiver.rank, receiver, receiver.verdict)
            receiver.rank.later("scheduler", self._skew(), receiver.rank.close, receiver, reason)
        both = request.abort is None or request.abort[2]
        if reason and ((both and rng.random() < 0.8) or by != "stock"):
            group = self.world.groups[request.prefill]
            self.clock.after(rng.random() * 0.02, group.fail, request, "decode aborted it")
