"""Servers on one screen: recorded pages of a real pair, and what can be wrong with one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from rig.answers import serving

from sglang_mixkv import series
from sglang_mixkv.tools import status
from sglang_mixkv.tools.status_pages import Look, page_url

PAGES = Path(__file__).with_name("pages")
DECODE, PREFILL, STOCK = (
    (PAGES / f"{name}.txt").read_text() for name in ("decode", "prefill", "stock")
)
"""Of the small pair, 2 -> 1, and of a single server."""
ONE, TWO = "10.0.0.1:8998", "10.0.0.2:8998"
TOOLS = Path(__file__).parents[2] / "docs" / "tools.md"


def look(*pages: str, name: str = "server-{}:30000") -> Look:
    found = Look()
    for number, text in enumerate(pages):
        found.read(f"http://{name.format(number)}/metrics", text)
    return found


def status_of(*pages: str) -> status.Status:
    return status.status(look(*pages))


def words(*pages: str) -> list[str]:
    return [f"{one.where} {one.what} {one.remedy}" for one in status_of(*pages).wrong]


def line(name: str, value: float, **labels: object) -> str:
    labels = {"engine_type": "decode", "tp_rank": 0, **labels}
    inner = ",".join(f'{name}="{text}"' for name, text in labels.items())
    return f"sglang:mixkv_{name}{{{inner}}} {value}\n"


def rooms(tp_rank: int = 0, prefill: str = ONE, **counts: int) -> str:
    """Of a decode rank: `warm`, and cold by reason."""
    return "".join(
        line("prefill_rooms_total", count, prefill=prefill, tp_rank=tp_rank,
             state="warm" if reason == "warm" else "cold",
             reason="" if reason == "warm" else reason)
        for reason, count in counts.items()
    )  # fmt: skip


def drafts(state: str, rounds: int, tokens: int, reason: str = "") -> str:
    at = {"prefill": ONE, "state": state, "reason": reason}
    return line("verify_rounds_total", rounds, **at) + line("accepted_tokens_total", tokens, **at)


# ---------------------------------------------------------------- the screen


def test_a_real_pair_is_what_the_page_shows() -> None:
    now = Look()
    now.read("http://prefill-0:30000/metrics", PREFILL)
    now.read("http://decode-0:30001/metrics", DECODE)
    found = status.status(now)
    assert f"```text\n{found.text()}\n```" in TOOLS.read_text()
    (pair,) = found.pairs
    assert (pair.prefill, pair.warm_share) == (ONE, 1.0)
    assert pair.accept_lengths == {"warm": 26815 / 8089, "cold": None, "retracted": None}
    shape = [(server.role, server.ranks, server.slots) for server in found.servers]
    assert shape == [("prefill", 2, 64), ("decode", 1, 64)]


def test_accept_lengths_of_cold_drafters_stand_beside_warm_ones() -> None:
    cold = drafts("cold", 60, 60, "lost") + drafts("cold", 40, 60, "read")
    found = status_of(rooms(warm=90, lost=6, read=4) + drafts("warm", 900, 3600) + cold)
    assert re.search(r"90.0% +4.00 +1.20 +-\n", found.text())


def test_of_the_ranks_the_one_with_most_colds_counts() -> None:
    (pair,) = status_of(rooms(0, warm=100, lost=0) + rooms(1, warm=90, lost=10)).pairs
    assert (pair.warm_share, pair.rooms) == (0.9, {"warm": 90, "lost": 10})


def test_what_happens_between_two_looks() -> None:
    """Of a server that was restarted between them all that it counts."""
    first, now = look(rooms(warm=1, lost=99)), look(rooms(warm=9, lost=99))
    assert status.status(now).wrong
    found = status.status(now, first)
    assert (found.wrong, found.pairs[0].rooms["warm"]) == ([], 8)
    assert status.status(first, now).pairs[0].rooms == {"warm": 1, "lost": 99}
    gauge = look(line("breaker_open", 1, prefill=ONE))
    assert len(status.status(gauge, gauge).wrong) == 1


@pytest.mark.parametrize(
    "label", ['worker_addr="http://decode-{}:30000"', 'instance="decode-{}:30000"']
)
def test_a_page_of_several_servers(label: str) -> None:
    """A router's, and Prometheus' own."""
    labels = f'{label},engine_type="decode",tp_rank="0"'
    text = "".join(
        f"sglang_mixkv_slots{{{labels.format(number)}}} 6{number}\n" for number in range(2)
    )
    found = status_of(text + "smg_requests_total 5\n").servers
    assert [(s.name, s.slots) for s in found] == [("decode-0:30000", 60), ("decode-1:30000", 61)]


# ---------------------------------------------------------------- what is wrong


@pytest.mark.parametrize("reason", [reason for reason in series.COLD if reason != series.OTHER])
def test_cold_drafters_by_reason(reason: str) -> None:
    """In words, with a remedy; fewer than one in a hundred are none."""
    (found,) = words(rooms(warm=90, **{reason: 10}))
    assert f"server-0:30000, prefill {ONE} 10 of 100 requests started cold ({reason}): " in found
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
        (line("breaker_open", 1, prefill=ONE), f"{ONE} three requests in a row .*network"),
    ],
)
def test_what_an_operator_is_told(page: str, expected: str) -> None:
    (found,) = words(page)
    assert re.search(expected, found)
    assert words(re.sub(r" [1-5]\n|64\n$", " 0\n", page)) == []


def test_pages_without_the_plugins_series() -> None:
    for page, expected in ((STOCK, "no series of the plugin"), ("go 5\n", "no series of SGLang")):
        (found,) = words(page)
        assert expected in found
    assert "no plugin" in status_of(STOCK).text()
    assert words() == []


def test_tp_ranks_count_the_same_requests() -> None:
    page = "".join(
        line("rooms_total", 2 + tp, state="failed", reason="", dp_rank=dp, tp_rank=tp)
        for dp in range(2) for tp in range(2)
    )  # fmt: skip
    (found,) = words(page)
    assert "6 requests failed" in found


# ---------------------------------------------------------------- the command


SERVED = {
    "/decode": DECODE.encode(),
    "/cold": (DECODE + rooms(prefill=TWO, lost=1)).encode(),
    "/html": b"<html>",
}


@pytest.fixture
def url() -> Iterator[str]:
    with serving(lambda path: (200 if path in SERVED else 404, SERVED.get(path, b""))) as address:
        yield f"http://{address}"


def test_the_exit_status_and_figures_for_scripts(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status.main([f"{url}/decode"]) == 0
    assert capsys.readouterr().out.endswith("nothing is wrong\n")
    assert status.main([f"{url}/cold", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["servers"][0]["role"] == "decode"
    assert found["pairs"][0]["rooms"] == {"warm": 817}
    assert found["pairs"][0]["accept_lengths"]["warm"] == 26815 / 8089
    assert set(found["wrong"][0]) == {"where", "what", "remedy"}
    assert found["unread"] == {}


def test_pages_that_cannot_be_read(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In a sentence each; the others are shown all the same."""
    urls = ["http://127.0.0.1:9", f"{url}/none", f"{url}/html", "http://"]
    assert status.main([f"{url}/decode", *urls]) == 2
    text = " ".join(capsys.readouterr().out.split())
    assert "http://127.0.0.1:9/metrics: nothing listens there. Is the server up" in text
    assert re.search("HTTP 404 from .* Start it with --enable-metrics", text)
    assert "/html is no page of metrics" in text
    assert "that is no URL: expected http://HOST:PORT" in text
    assert ONE in text
    assert "nothing is wrong" not in text


def test_what_an_operator_types() -> None:
    assert page_url("host:30000") == page_url("http://host:30000/") == "http://host:30000/metrics"
    assert page_url("https://host/proxy/metrics") == "https://host/proxy/metrics"
