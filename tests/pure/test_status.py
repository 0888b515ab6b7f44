"""Servers on one screen: recorded pages of a real pair, and what can be wrong with one."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sglang_mixkv import series
from sglang_mixkv.tools import status
from sglang_mixkv.tools.status_look import Look, page_url, read
from sglang_mixkv.tools.status_wrong import wrong

PAGES = Path(__file__).with_name("pages")
DECODE, PREFILL, STOCK = (
    (PAGES / f"{name}.txt").read_text() for name in ("decode", "prefill", "stock")
)
"""Of the small pair, 2 -> 1, whose prefill server at last sent wrong draft KV; of a single one."""
HEALTHY = re.sub(r"(sglang:mixkv_draft_suspect.*) 1.0", r"\1 0.0", DECODE)
REMOTE = "10.0.0.1:8998"
TOOLS = Path(__file__).parents[2] / "docs" / "tools.md"


class Stub(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        pages = self.server.pages.get(self.path, [])
        text = pages.pop(0) if len(pages) > 1 else (pages or [""])[0]
        self.send_response(200 if pages else 404)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


class Servers(ThreadingHTTPServer):
    """Pages by path; of several the next one at each look, the last one for ever."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Stub)
        self.pages: dict[str, list[str]] = {}

    def url(self, path: str = "/metrics") -> str:
        return f"http://127.0.0.1:{self.server_address[1]}{path}"


@pytest.fixture
def server() -> Iterator[Servers]:
    made = Servers()
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def shown(
    server: Servers, capsys: pytest.CaptureFixture[str], *pages: str, flags: tuple[str, ...] = ()
) -> tuple[int, str]:
    """Exit status and what is printed, of one server with these pages."""
    server.pages["/metrics"] = [*pages]
    code = status.main([server.url(), "--seconds=0.01", *flags])
    return code, " ".join(capsys.readouterr().out.split())


def looked(*pages: str, at: float = 0.0) -> Look:
    found = Look(at)
    for number, text in enumerate(pages):
        read(found, f"http://server-{number}:30000/metrics", text)
    return found


def line(name: str, value: float, **labels: object) -> str:
    labels = {"engine_type": "decode", "tp_rank": 0, **labels}
    inner = ",".join(f'{name}="{text}"' for name, text in labels.items())
    return f"sglang:mixkv_{name}{{{inner}}} {value}\n"


def rooms(tp_rank: int = 0, prefill: str = REMOTE, **counts: int) -> str:
    """Of a decode rank: `warm`, and cold by reason."""
    return "".join(
        line("prefill_rooms_total", count, prefill=prefill, tp_rank=tp_rank,
             state="warm" if reason == "warm" else "cold",
             reason="" if reason == "warm" else reason)
        for reason, count in counts.items()
    )  # fmt: skip


def words(*pages: str) -> list[str]:
    now = looked(*pages)
    return [" ".join(one) for one in status.status(now, now).wrong]


# ---------------------------------------------------------------- the screen


def test_a_real_pair_whose_draft_kv_is_wrong(
    server: Servers, capsys: pytest.CaptureFixture[str]
) -> None:
    server.pages = {"/decode": [DECODE], "/prefill": [PREFILL]}
    urls = [server.url("/decode"), server.url("/prefill")]
    look = looked(DECODE, PREFILL)
    found = status.status(look, look)
    (pair,) = found.pairs
    assert (pair.prefill, pair.warm_share, pair.lost) == (REMOTE, 1.0, None)
    assert pair.drafts["warm"].length == pytest.approx(26815 / 8089)
    assert [(s.role, s.ranks, s.slots) for s in found.servers] == [
        ("decode", 1, 64),
        ("prefill", 2, 64),
    ]
    assert status.main([*urls, "--seconds=0.01"]) == 1
    text = capsys.readouterr().out
    assert re.search(rf"{REMOTE} +817 +100.0% +3.31 +- +- +- +SUSPECT", text)
    assert "[MIXKV-PAIR-08]" in text
    assert max(map(len, text.splitlines())) <= 110


def test_the_page_shows_that_pair() -> None:
    looks = [Look(at) for at in (1.0, 3.0)]
    for look in looks:
        read(look, "http://prefill-0:30000/metrics", PREFILL)
        read(look, "http://decode-0:30001/metrics", DECODE)
    assert f"```text\n{status.status(*looks).text()}\n```" in TOOLS.read_text()


def test_a_healthy_pair(server: Servers, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = shown(server, capsys, HEALTHY)
    assert code == 0
    assert text.endswith("nothing is wrong")


def test_bytes_a_second_are_those_between_two_looks() -> None:
    one = line("sent_bytes_total", 1e6, component="draft", engine_type="prefill")
    two = line("sent_bytes_total", 5e6, component="draft", engine_type="prefill")
    found = status.status(looked(one, at=1.0), looked(two, at=3.0))
    assert found.servers[0].moved == 2e6
    assert "2.0 MB/s sent" in found.text()
    restarted = status.status(looked(two, at=1.0), looked(one, at=3.0))
    assert restarted.servers[0].moved == 0.5e6
    assert status.status(looked(one), looked(one)).servers[0].moved is None


def test_figures_for_scripts(server: Servers, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = shown(server, capsys, DECODE, flags=("--json",))
    found = json.loads(text)
    assert code == 1
    assert found["servers"][0]["role"] == "decode"
    assert found["pairs"][0]["rooms"] == {"warm": 817}
    assert found["pairs"][0]["drafts"]["warm"]["rounds"] == 8089
    assert found["pairs"][0]["suspect"] == ["past"]
    assert set(found["wrong"][0]) == {"where", "what", "remedy"}
    assert found["unread"] == {}


def test_what_cold_drafters_cost() -> None:
    drafts = "".join(
        line(f"{name}_total", value, prefill=REMOTE, state=state, reason=reason)
        for state, reason, rounds, tokens in (
            ("warm", "", 900, 3600), ("cold", "lost", 60, 60), ("cold", "read", 40, 60)
        )
        for name, value in (("verify_rounds", rounds), ("accepted_tokens", tokens))
    )  # fmt: skip
    look = looked(rooms(warm=90, lost=6, read=4) + drafts)
    found = status.status(look, look)
    (pair,) = found.pairs
    assert pair.drafts["cold"].length == 1.2
    assert pair.lost == pytest.approx(1 - 3.72 / 4)
    assert re.search(r"90.0% +4.00 +1.20 +- +7.0%", found.text())


def test_what_a_server_costs_whose_drafters_are_all_cold() -> None:
    """It has no warm requests to be compared with; other servers' are named, and no others."""
    two = [("10.0.0.1:8998", "cold", 100, 110), ("10.0.0.2:8998", "warm", 100, 390)]
    page = rooms(prefill=two[0][0], no_drafter=50) + rooms(prefill=two[1][0], warm=50)
    page += "".join(
        line(f"{name}_total", value, prefill=at, state=state, reason="")
        for at, state, *values in two
        for name, value in zip(("verify_rounds", "accepted_tokens"), values, strict=True)
    )
    (found,) = words(page)
    assert "accept 1.10 tokens a round, warm ones of other prefill servers 3.90" in found
    alone = rooms(prefill=two[0][0], no_drafter=50)
    assert "tokens a round" not in words(alone, page.replace(two[0][0], "10.0.0.3:8998"))[0]
    mixed = page + line("verify_rounds_total", 9, prefill=two[0][0], state="warm", reason="")
    mixed += line("accepted_tokens_total", 36, prefill=two[0][0], state="warm", reason="")
    assert "tokens a round" not in words(mixed)[0]


def test_of_the_ranks_the_one_with_most_colds_counts() -> None:
    look = looked(rooms(0, warm=100, lost=0) + rooms(1, warm=90, lost=10))
    (pair,) = status.status(look, look).pairs
    assert (pair.warm_share, pair.rooms) == (0.9, {"warm": 90, "lost": 10})


def test_each_prefill_server_has_a_line() -> None:
    look = looked(rooms(warm=5) + rooms(prefill="10.0.0.2:8998", warm=3, lost=2))
    found = status.status(look, look)
    assert [(p.prefill, p.warm_share) for p in found.pairs] == [(REMOTE, 1), ("10.0.0.2:8998", 0.6)]


def test_new_counts_what_happens_between_the_looks() -> None:
    first, now = looked(rooms(warm=1, lost=99)), looked(rooms(warm=9, lost=99))
    assert status.status(first, now).wrong
    found = status.status(first, now, first)
    assert (found.wrong, found.pairs[0].rooms["warm"]) == ([], 8)
    gauge = looked(line("draft_suspect", 1, prefill=REMOTE, against="past"))
    assert len(status.status(gauge, gauge, gauge).wrong) == 1


def test_a_routers_page_has_several_servers() -> None:
    labels = 'worker_addr="http://decode-{}:30000",engine_type="decode",tp_rank="0"'
    text = "".join(
        f"sglang_mixkv_slots{{{labels.format(number)}}} 6{number}\n" for number in range(2)
    )
    look = looked(text + "smg_requests_total 5\n")
    found = status.status(look, look).servers
    assert [(s.name, s.slots) for s in found] == [("decode-0:30000", 60), ("decode-1:30000", 61)]


# ---------------------------------------------------------------- what is wrong


def test_a_server_without_the_plugin() -> None:
    (found,) = words(STOCK)
    assert found.startswith("server-0:30000 no series of the plugin Start it with --enable-mixkv")
    look = looked(STOCK)
    assert "no plugin" in status.status(look, look).text()


def test_a_page_that_is_not_sglangs() -> None:
    (found,) = words("go_goroutines 5\n")
    assert "no series of SGLang" in found


@pytest.mark.parametrize("reason", [reason for reason in series.COLD if reason != series.OTHER])
def test_cold_drafters_by_reason(reason: str) -> None:
    """In words, with a remedy; fewer than one in a hundred are none."""
    (found,) = words(rooms(warm=90, **{reason: 10}))
    assert f"server-0:30000, prefill {REMOTE} 10 of 100 requests started cold ({reason}): " in found
    assert re.search(r"\): [^ ].* [A-Z]", found)
    assert words(rooms(warm=9900, **{reason: 90})) == []


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        (line("peers_refused_total", 3, reason="facts"), r"3 requests failed .*\(facts\)"),
        (line("rooms_total", 2, state="failed", reason=""), "2 requests failed: .*MIXKV-SELF-01"),
        (line("unopened_rooms_total", 4, engine_type="prefill"), "4 times .*--enable-mixkv"),
        (line("expired_slots_total", 5, engine_type="prefill"), "5 times a slot that nobody"),
        (line("slots", 64) + line("slots_used", 64), "all slots .*--mixkv-staging-mb"),
        (line("breaker_open", 1, prefill=REMOTE), f"{REMOTE} three requests in a row .*network"),
        (line("draft_suspect", 1, prefill=REMOTE, against="cold"), "no more than its cold ones"),
    ],
)  # fmt: skip
def test_what_an_operator_is_told(page: str, expected: str) -> None:
    (found,) = words(page)
    assert re.search(expected, found)
    assert words(re.sub(r" [1-5]\n|64\n$", " 0\n", page)) == []


def test_tp_ranks_count_the_same_requests() -> None:
    page = "".join(
        line("rooms_total", 2 + tp, state="failed", reason="", dp_rank=dp, tp_rank=tp)
        for dp in range(2) for tp in range(2)
    )  # fmt: skip
    (found,) = words(page)
    assert "6 requests failed" in found


def test_nothing_is_wrong_without_pages() -> None:
    assert [*wrong(Look(0.0), [], [])] == []


# ---------------------------------------------------------------- pages


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("host:30000", "http://host:30000/metrics"),
        ("http://host:30000/", "http://host:30000/metrics"),
        ("https://host/proxy/metrics", "https://host/proxy/metrics"),
    ],
)
def test_what_an_operator_types(text: str, url: str) -> None:
    assert page_url(text) == url


def test_pages_that_cannot_be_read(server: Servers, capsys: pytest.CaptureFixture[str]) -> None:
    """In a sentence each; the others are shown all the same."""
    server.pages = {"/metrics": [HEALTHY], "/html": ["<html>"]}
    urls = ["http://127.0.0.1:9", server.url("/none"), server.url("/html"), "http://"]
    assert status.main([server.url(), *urls, "--seconds=0.01"]) == 2
    text = " ".join(capsys.readouterr().out.split())
    assert "http://127.0.0.1:9/metrics: nothing listens there. Is the server up" in text
    assert "HTTP 404 from" in text
    assert "/html is no page of metrics" in text
    assert "that is no URL: expected http://HOST:PORT" in text
    assert REMOTE in text
    assert "HTTPConnectionPool" not in text
    assert "nothing is wrong" not in text


# ---------------------------------------------------------------- watch


def test_watch_shows_it_again(
    server: Servers, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", pause)
    code, text = shown(server, capsys, HEALTHY, HEALTHY, DECODE, flags=("--watch",))
    assert (code, pauses) == (1, [0.01] * 3)
    assert "SUSPECT" in text


def test_watch_says_what_it_needs(
    server: Servers, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rich.live", None)
    assert status.main([server.url(), "--watch"]) == 2
    assert "pip install 'sglang-mixkv[watch]'" in capsys.readouterr().err
