"""What the state machines report, and where an operator sees it."""

from __future__ import annotations

import ast
import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sglang_mixkv import kinds, series
from sglang_mixkv.channel.slots import SlotPool
from sglang_mixkv.channel.times import Times
from sglang_mixkv.decode import events as ev
from sglang_mixkv.decode.breaker import STRIKES, Breaker
from sglang_mixkv.decode.worker import ReceiveHandle
from sglang_mixkv.engine.notes import Notes
from sglang_mixkv.engine.requests import Began, Requests
from sglang_mixkv.errors import CODES, MixKVError
from sglang_mixkv.series import DECODE, FAMILIES, PREFILL, Family, Values, of_side

PACKAGE = Path(series.__file__).parent
DOCS = PACKAGE.parent / "docs"
PAGE, DOCUMENT = (DOCS / "troubleshooting.md").read_text(), (DOCS / "metrics.md").read_text()
KIND = re.compile(r"[a-z_]+")

# Who takes a kind, and which of its arguments that is.
TAKES = {"Note": 0, "_note": 0, "_go_cold": 1, "_fail": 1, "_fail_parts": 1, "_refuse": 2}


def texts(node: ast.AST) -> set[str]:
    """The words in an expression."""
    found = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
    return {text for text in found if isinstance(text, str) and KIND.fullmatch(text)}


def given(side: str, function: str) -> set[str]:
    """Words that the code of one side hands to this function as a kind."""
    found: set[str] = set()
    for path in (PACKAGE / side).glob("*.py"):
        for call in (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)):
            name = ast.unparse(call.func).rpartition(".")[2]
            if name == function and len(call.args) > TAKES[name]:
                found |= texts(call.args[TAKES[name]])
    return found


def set_to(side: str, *names: str) -> set[str]:
    """Words that end up in variables or attributes of these names."""
    found: set[str] = set()
    for path in (PACKAGE / side).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            targets = getattr(node, "targets", [])
            written = {ast.unparse(t).rpartition(".")[2] for t in targets}
            pairs = [t for t in targets if isinstance(t, ast.Tuple)]
            written |= {ast.unparse(e).rpartition(".")[2] for t in pairs for e in t.elts}
            if written & set(names):
                found |= texts(node.value)
    return found


def refusals() -> set[str]:
    """Codes that prefill's state machine refuses an OPEN with."""
    found: set[str] = set()
    for path in (PACKAGE / PREFILL).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
                found |= texts(node.value.elts[0])
    return found


def reasons() -> set[str]:
    """Why a room is cold, by the code of decode."""
    codes = set_to(DECODE, "PREFILL_CODES", "code")
    found = given(DECODE, "_go_cold") | set_to(DECODE, "cold", "reason")
    return (found | {f"prefill_{code}" for code in codes}) - {"prefill_"}


def test_every_reason_of_the_code_is_a_label_and_the_other_way_round() -> None:
    assert reasons() == set(series.COLD) - {series.OTHER}


def test_every_note_of_decode_has_a_place() -> None:
    notes = (given(DECODE, "_note") | given(DECODE, "Note")) - {"cold_"}
    notes |= {state.value for state in ev.State}
    notes |= {f"cold_{reason}" for reason in reasons() - {"broken"}}  # its machine is gone
    assert notes == set(kinds.DECODE)


def test_every_note_of_prefill_has_a_place() -> None:
    codes = given(PREFILL, "_fail") | given(PREFILL, "_fail_parts") | given(PREFILL, "_refuse")
    codes |= refusals() | set_to(PREFILL, "why")
    assert codes == set(series.FAILS)
    notes = given(PREFILL, "_note") | given(PREFILL, "Note")
    assert notes | codes == set(kinds.PREFILL)


@pytest.mark.parametrize("side", kinds.OF_SIDE)
def test_every_kind_is_seen(side: str) -> None:
    """A series, or a room that is counted at its end; and a log line says all that helps."""
    families = set(of_side(side))
    for what, kind in kinds.OF_SIDE[side].items():
        assert kind.family is None or kind.family in families
        at_the_end = what in ("warm", "cold", "failed", "closed", "not_cleared")
        assert kind.family is not None or at_the_end or what.startswith("cold_")
        assert bool(kind.happened) == bool(kind.remedy)
        assert kind.code in CODES
        named = kind.family is not None and "prefill" in kind.family.labels
        if kind.family is not None and not named and kind.family.labels:
            assert kind.values in kind.family.values


def test_the_troubleshooting_page_has_a_remedy_for_every_reason() -> None:
    lines = [line for line in PAGE.splitlines() if line.startswith("| `")]
    listed = [reason for line in lines for reason in re.findall("`([a-z_]+)`", line.split("|")[1])]
    assert Counter(listed) == Counter(set(series.COLD) - {series.OTHER})


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_document_has_every_series(family: Family) -> None:
    (line,) = (x for x in DOCUMENT.splitlines() if x.startswith(f"| `{family.name}` |"))
    labels = ", ".join(f"`{label}`" for label in family.labels)
    cells = [f"`{family.name}`", ", ".join(family.sides), labels, family.help]
    assert line == f"| {' | '.join(cells)} |"


# ---------------------------------------------------------------- series


def test_names_are_one_familys_and_follow_prometheus() -> None:
    names = [family.name for family in FAMILIES]
    assert len(names) == len(set(names))
    for family in FAMILIES:
        assert all(len(values) == len(family.labels) for values in family.values)
        assert re.fullmatch(r"sglang:mixkv_[a-z_]+", family.name)


def test_few_series_exist_from_the_start() -> None:
    for side in (PREFILL, DECODE):
        assert sum(len(family.values) for family in of_side(side)) <= 48
    assert list(of_side("null")) == []


class Recorded:
    """In the place of prometheus_client."""

    def __init__(self) -> None:
        self.found: Counter[tuple[str, Values]] = Counter()

    def add(self, family: Family, values: Values = (), amount: float = 1) -> None:
        assert len(values) == len(family.labels)
        self.found[family.name.removeprefix("sglang:mixkv_"), values] += amount

    def set(self, family: Family, values: Values, value: float) -> None:
        self.found[family.name.removeprefix("sglang:mixkv_"), values] = int(value)


def notes(side: str = DECODE) -> tuple[Notes, Counter[tuple[str, Values]]]:
    recorded = Recorded()
    return Notes(side, "", recorded), recorded.found


def ended(
    one: Notes, state: ev.State | None, reason: str = "", closed: str = "", prefill: str = "a:1"
) -> ReceiveHandle:
    handle = ReceiveHandle([], 1, None, prefill)
    handle.state, handle.reason = state, reason
    one.ended(handle, closed)
    one.ticked()
    return handle


@pytest.mark.parametrize(
    ("state", "reason", "closed", "expected"),
    [
        (ev.State.WARM, "", "", ("warm", "")),
        (ev.State.COLD, "deadline", "", ("cold", "deadline")),
        (ev.State.COLD, "of a later release", "", ("cold", "other")),
        (ev.State.COLD, "prefill_aborted", "failed on decode", ("closed", "")),
        (ev.State.WARM, "", "aborted on decode", ("closed", "")),
        (None, "", "", ("closed", "")),
        (ev.State.FAILED, "RuntimeError('a')", "failed on decode", ("failed", "")),
    ],
)
def test_a_room_is_counted_once_at_its_end(
    state: ev.State | None, reason: str, closed: str, expected: Values
) -> None:
    """A client that hangs up makes no request cold."""
    one, found = notes()
    ended(one, state, reason, closed)
    assert found == {("rooms_total", expected): 1, ("prefill_rooms_total", ("a:1", *expected)): 1}
    assert expected in series.ROOMS.values


def test_rooms_of_a_channel_that_has_ended_are_counted() -> None:
    """By the scheduler's thread, with what the channel's had left."""
    one, found = notes()
    one.ticked = lambda: None  # type: ignore[method-assign]
    ended(one, ev.State.WARM)
    assert found == {}
    ended(one, ev.State.COLD, "broken")
    rooms = {values: n for (name, values), n in found.items() if name == "rooms_total"}
    assert rooms == {("warm", ""): 1, ("cold", "broken"): 1}


def test_prefill_addresses_are_bounded() -> None:
    one, found = notes()
    for number in range(series.MAX_PREFILLS + 5):
        ended(one, ev.State.WARM, prefill=f"host:{number}")
    ended(one, ev.State.WARM, prefill="host:0")
    shown = {values[0] for name, values in found if name == "prefill_rooms_total"}
    assert len(shown) == series.MAX_PREFILLS + 1
    assert found["prefill_rooms_total", ("other", "warm", "")] == 5
    assert found["prefill_rooms_total", ("host:0", "warm", "")] == 2


def test_a_note_is_counted_each_time_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    one, found = notes()
    one.name_of = {b"peer": "a:1"}.get  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            one(ev.Note("breaker_opened", b"peer", "its KV did not come"))
            one(ev.Note("cold_deadline", b"peer", "its KV did not come"))
            one(ev.Note("doubled", b"peer"))
    assert found["breaker_opened_total", ("a:1",)] == 3
    assert found["messages_dropped_total", ()] == 3
    assert one.stats.snapshot()["channel_cold_deadline"] == 3
    _, line = caplog.messages
    for part in ("[MIXKV-PAIR-06]", "prefill a:1", "did not come in time", "output right", "Look"):
        assert part in line


def test_a_new_kind_costs_no_more_than_its_series() -> None:
    one, found = notes()
    one(ev.Note("of_a_later_release", b"peer"))
    assert one.stats.snapshot() == {"channel_of_a_later_release": 1}
    assert found == {}


def test_prefill_counts_what_it_refuses_and_misses() -> None:
    one, found = notes(PREFILL)
    for what in ("unopened", "early", "expired", "slow", "restarted"):
        one(ev.Note(what))
    one.moved(100, 0.5)
    assert found == {
        ("unopened_rooms_total", ()): 1,
        ("unrequested_rooms_total", ()): 1,
        ("expired_slots_total", ()): 1,
        ("fails_sent_total", ("slow",)): 1,
        ("fails_sent_total", ("restarted",)): 1,
        ("sent_bytes_total", ("draft",)): 100,
        ("copy_seconds_total", ()): 0.5,
    }


def test_a_refusal_is_counted_under_its_reason() -> None:
    one, found = notes()
    one.refused(MixKVError("MIXKV-PAIR-01", "stock"))
    assert found == {("peers_refused_total", ("no_plugin",)): 1}


def test_gauges_follow_slots_and_breakers() -> None:
    one, found = notes()
    one.slots, one.breaker = SlotPool(4, Times()), Breaker()
    names = {b"one": "a:1", b"two": "b:2", b"gone": ""}
    one.name_of = names.__getitem__
    for address in ("a:1", "b:2"):
        ended(one, ev.State.WARM, prefill=address)
    one.slots.take("reader", 0.0)
    for peer in (b"one", b"gone"):
        for strike in range(STRIKES):
            one.breaker.record_failure(peer, strike, 0.0)
    look(one)
    assert (found["slots", ()], found["slots_used", ()]) == (4, 1)
    assert (found["breaker_open", ("a:1",)], found["breaker_open", ("b:2",)]) == (1, 0)
    one.breaker.record_success(b"one")
    look(one)
    assert found["breaker_open", ("a:1",)] == 0
    assert ("breaker_open", ("other",)) not in found


def look(one: Notes) -> None:
    one._looked = -1e9
    one.ticked()


# ---------------------------------------------------------------- finished requests


WARM = ("a:1", "warm", "")


class Req:
    """What is read of SGLang's."""

    def __init__(self, rid: str) -> None:
        self.rid, self.spec_correct_drafts_histogram = rid, list[int]()
        self.done = False

    def finished(self) -> bool:
        return self.done


def begun(one: Notes, request: Any, state: ev.State = ev.State.WARM, prefill: str = "a:1") -> None:
    handle = ReceiveHandle([], 1, None, prefill)
    handle.request, handle.state = request, state
    handle.reason = "deadline" if state is ev.State.COLD else ""
    one.ended(handle, "")


def test_accept_length_by_state_and_position() -> None:
    one, found = notes()
    warm, cold = Req("warm"), Req("cold")
    begun(one, warm)
    begun(one, cold, ev.State.COLD)
    look(one)
    warm.spec_correct_drafts_histogram += [1, 2, 3]
    cold.spec_correct_drafts_histogram += [4, 1]
    look(one)
    assert found["finished_requests_total", WARM] == 0
    warm.done = cold.done = True
    look(one)
    look(one)
    assert found["finished_requests_total", WARM] == 1
    assert found["verify_rounds_total", WARM] == 6
    assert found["accepted_tokens_total", WARM] == 6 + 2 + 6
    drafts = [found["accepted_drafts_total", ("warm", str(position))] for position in (1, 2, 3)]
    assert drafts == [5, 3, 0]
    assert found["accepted_tokens_total", ("a:1", "cold", "deadline")] == 5 + 1
    assert len(one.requests) == 0


def test_finished_requests_of_many_prefills_share_the_rooms_labels() -> None:
    one, found = notes()
    for number in range(series.MAX_PREFILLS + 3):
        request = Req(str(number))
        begun(one, request, prefill=f"host:{number}")
        request.spec_correct_drafts_histogram += [0, 1]
        request.done = True
    look(one)
    shown = {values[0] for name, values in found if name == "verify_rounds_total"}
    assert len(shown) == series.MAX_PREFILLS + 1
    assert found["finished_requests_total", ("other", "warm", "")] == 3


def test_a_server_whose_warm_requests_accept_less_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In a gauge, which exists from the first verdict on, and once in the log."""
    one, found = notes()
    finished(one, 720, [0, 0, 9], "a:1", "b:2")
    assert found["draft_suspect", ("a:1", "past")] == 0
    assert {values for name, values in found if name == "draft_suspect"} == {
        ("a:1", "past"), ("b:2", "past")
    }  # fmt: skip
    with caplog.at_level(logging.WARNING):
        finished(one, 200, [9, 1], "a:1")
    assert found["draft_suspect", ("a:1", "past")] == 1
    assert found["draft_suspect", ("b:2", "past")] == 0
    (line,) = caplog.messages
    for part in ("[MIXKV-PAIR-08]", "prefill a:1", "a fifth less", "where 3.00 are", "accept`"):
        assert part in line
    finished(one, 400, [0, 0, 9], "a:1")
    assert found["draft_suspect", ("a:1", "past")] == 0
    finished(one, 200, [9, 1], "a:1")
    assert found["draft_suspect", ("a:1", "past")] == 1
    assert len(caplog.messages) == 1


def test_what_is_no_servers_own_is_not_judged(caplog: pytest.LogCaptureFixture) -> None:
    """Requests of further servers, without a verify round, or retracted."""
    one, found = notes()
    one._prefills = {f"host:{n}" for n in range(series.MAX_PREFILLS)}
    finished(one, 9, [0, 9], "beyond:1")
    finished(one, 9, [], "host:1")
    retracted = Req("again")
    for _ in range(2):
        begun(one, retracted, prefill="host:1")
    retracted.spec_correct_drafts_histogram += [9]
    retracted.done = True
    look(one)
    assert found["finished_requests_total", ("host:1", "retracted", "")] == 1
    assert one._health._servers == {}
    assert caplog.messages == []


def finished(one: Notes, number: int, histogram: list[int], *prefills: str) -> None:
    for prefill in prefills:
        for each in range(number):
            request = Req(f"{prefill}-{each}")
            begun(one, request, prefill=prefill)
            request.spec_correct_drafts_histogram += histogram
            request.done = True
            look(one)


def test_a_request_is_not_kept_alive_and_counts_when_it_is_gone() -> None:
    counted: list[tuple[Began, list[int]]] = []
    requests = Requests(lambda began, histogram: counted.append((began, histogram)))
    request = Req("a")
    requests.begin(request, "a:1", WARM[1:])
    request.spec_correct_drafts_histogram += [0, 7]
    requests.settle()
    assert counted == []
    del request
    requests.settle()
    assert counted == [(WARM, [0, 7])]


def test_a_retracted_request_is_neither_warm_nor_cold() -> None:
    """Resumed from SGLang's backup, or prefilled again."""
    counted: list[Began] = []
    requests = Requests(lambda began, histogram: counted.append(began))
    resumed, again, plain = Req("resumed"), Req("again"), Req("plain")
    for request in (resumed, again, plain):
        requests.begin(request, "a:1", WARM[1:])
    requests.retract(resumed)
    requests.begin(again, "b:2", ("cold", "lost"))
    for request in (resumed, again, plain):
        request.done = True
    requests.settle()
    assert counted == [("a:1", "retracted", "")] * 2 + [WARM]


def test_a_retracted_request_of_which_nothing_is_known_is_not_counted() -> None:
    counted: list[Began] = []
    requests = Requests(lambda began, histogram: counted.append(began))
    requests.retract(Req("stranger"))
    requests.settle()
    assert counted == []
    assert len(requests) == 0


def test_a_release_without_the_histogram_has_no_accept_lengths() -> None:
    one, found = notes()
    request = Req("a")
    del request.spec_correct_drafts_histogram
    begun(one, request)
    assert len(one.requests) == 0
    request.done = True
    look(one)
    assert found["finished_requests_total", WARM] == 0
    assert found["rooms_total", ("warm", "")] == 1


def test_trouble_in_the_books_never_reaches_the_channels_thread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, _ = notes()
    request = Req("a")
    request.finished = lambda: 1 / 0  # type: ignore[assignment, return-value]
    begun(one, request)
    look(one)
    assert "MIXKV-SELF-01" in caplog.text
    one.ticked()
