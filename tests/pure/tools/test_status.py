"""The `status` command: its tables of servers and pairs, and the problems that it reports.

The tests' metrics pages have the series that a rank of that side has from its start.
"""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path

import pytest
from rig.process.answers import serving, silent

from sglang_mixkv import series
from sglang_mixkv.config import API_KEY_ENV
from sglang_mixkv.tools import status
from sglang_mixkv.tools.client import RequestFailed, session
from sglang_mixkv.tools.status import MetricPages, page_url, read

ONE, TWO = "10.0.0.1:8998", "10.0.0.2:8998"
TOOLS = Path(__file__).parents[3] / "docs" / "tools.md"


def line(name: str, value: float, prefix: str = series.PREFIX, **labels: object) -> str:
    labels = {"engine_type": "decode", "tp_rank": 0, **labels}
    inner = ",".join(f'{name}="{text}"' for name, text in labels.items())
    return f"{prefix}{name}{{{inner}}} {value}\n"


def page(side: str = "decode", ranks: int = 1) -> str:
    """Return the metrics of a server that has served nothing."""
    return "".join(
        line(one.name, 64 * (one.name == "slots"), engine_type=side, tp_rank=rank,
             **dict(zip(one.labels, values, strict=True)))
        for one in series.SERIES if side in one.sides for values in one.initial_labels
        for rank in range(ranks)
    )  # fmt: skip


def rooms(tp_rank: int = 0, prefill: str = ONE, **counts: int) -> str:
    """Return a decode rank's counts of rooms: warm ones, and cold ones by reason."""
    return "".join(
        line("prefill_rooms_total", count, prefill=prefill, tp_rank=tp_rank,
             state="warm" if reason == "warm" else "cold",
             reason="" if reason == "warm" else reason)
        for reason, count in counts.items()
    )  # fmt: skip


def drafts(state: str, rounds: int, tokens: int, reason: str = "") -> str:
    at = {"prefill": ONE, "state": state, "reason": reason}
    return line("verify_rounds_total", rounds, **at) + line("accepted_tokens_total", tokens, **at)


def waits(name: str = "wait_seconds", tp_rank: int = 0, **counts: int) -> str:
    """Return a rank's histogram. `counts`: numbers of requests by upper bound, such as `ms5`."""
    total, lines = 0, ""
    for bound in (1, 2, 5, 10, 20, 50, 10_000):
        total += counts.get(f"ms{bound}", 0)
        lines += line(f"{name}_bucket", total, tp_rank=tp_rank, le=bound / 1000)
    return lines + line(f"{name}_bucket", total + counts.get("more", 0), tp_rank=tp_rank, le="+Inf")


def look(**pages: str) -> MetricPages:
    found = [read(f"http://{name.replace('_', '-')}:30000/metrics", t) for name, t in pages.items()]
    return {name: one for some in found for name, one in some.items()}


def status_of(text: str, before: str | None = None) -> status.Status:
    return status.status(look(server=text), {}, None if before is None else look(server=before))


def words(text: str, before: str | None = None) -> list[str]:
    return [f"{one.where} {one.what} {one.remedy}" for one in status_of(text, before).wrong]


# ---------------------------------------------------------------- tables


def test_the_documented_output_is_the_real_one() -> None:
    served = page() + rooms(warm=817) + drafts("warm", 8089, 26815)
    served += waits(ms1=700, ms5=109, ms20=8)
    sent = page("prefill", 2) + waits("ready_seconds", ms5=2400, ms10=51).replace(
        "decode", "prefill"
    )
    found = status.status(look(prefill_0=sent, decode_0=served), {})
    shown = TOOLS.read_text().replace("decode-0:30001", "decode-0:30000")
    assert f"```text\n{found.text()}\n```" in shown


def test_accept_lengths_of_warm_and_cold_drafters() -> None:
    cold = drafts("cold", 60, 60, "lost") + drafts("cold", 40, 60, "read")
    found = status_of(rooms(warm=90, lost=6, read=4) + drafts("warm", 900, 3600) + cold)
    assert re.search(r"90.0% +4.00 +1.20 +-\n", found.text())


def test_the_rank_with_the_most_cold_rooms_counts() -> None:
    (pair,) = status_of(rooms(0, warm=100, lost=0) + rooms(1, warm=90, lost=10)).pairs
    assert (pair.warm_share, pair.rooms) == (0.9, {"warm": 90, "lost": 10})


@pytest.mark.parametrize(
    ("text", "p50", "p99"),
    [
        (page(), None, None),
        (waits(ms10=100), 0.01, 0.01),  # the bucket's upper bound
        (waits(ms1=50, ms2=50), 0.001, 0.002),
        (waits(ms1=98, more=2), 0.001, 10.0),
        (waits(ms1=100) + waits(tp_rank=1, ms1=90, ms50=10), 0.001, 0.05),  # the slowest rank
        (waits() + waits(tp_rank=1, ms2=1), 0.002, 0.002),
    ],
)
def test_percentiles_of_waiting_times(text: str, p50: float | None, p99: float | None) -> None:
    (found,) = status_of(text).servers
    assert (found.p50, found.p99) == (p50, p99)
    (later,) = status_of(text + rooms(warm=1), text).servers
    assert (later.p50, later.p99) == (None, None), "no request has waited since the first page"


def test_counters_between_two_pages() -> None:
    """With an earlier page, counters are differences and gauges are current values.

    The counters of a server that was restarted in between start at zero.
    """
    first, now = rooms(warm=1, lost=99), rooms(warm=9, lost=99)
    assert words(now)
    found = status_of(now, first)
    assert (found.wrong, found.pairs[0].rooms["warm"]) == ([], 8)
    assert status_of(first, now).pairs[0].rooms == {"warm": 1, "lost": 99}
    full = line("slots", 64) + line("slots_used", 64)
    assert len(words(full, full)) == 1


def test_a_page_of_several_servers() -> None:
    """A page of several servers, as of a router or of Prometheus, is split by its labels."""
    where = ("http://decode-0:1", "decode-1:1")
    for label in ("worker_addr", "instance"):
        text = "".join(line("slots", 60, "sglang_mixkv_", **{label: at}) for at in where)
        found = status_of(text + "smg_requests_total 5\n").servers
        assert [(s.name, s.slots) for s in found] == [("decode-0:1", 60), ("decode-1:1", 60)]


# ---------------------------------------------------------------- problems


def test_cold_drafters_by_reason() -> None:
    """A cold reason is reported, with a remedy, if it affects one request in a hundred or more."""
    for reason in series.ColdReason:
        (found,) = words(rooms(warm=90, **{reason: 10}))
        assert f"server:30000, prefill {ONE} 10 of 100 requests started cold ({reason})" in found
        assert re.search(r"\): [^ ].* [A-Z]", found)
        assert words(rooms(warm=9900, **{reason: 90})) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (line("peers_refused_total", 3, reason="facts"), r"3 requests failed.*\(facts\)"),
        (line("rooms_total", 2, state="failed", reason=""), "2 requests failed: .*MIXKV-SELF-01"),
        ("".join(line("rooms_total", 2 + tp, state="failed", dp_rank=dp, tp_rank=tp)
                 for dp in range(2) for tp in range(2)), "6 requests failed"),
        (line("unopened_rooms_total", 4, engine_type="prefill"), "4 times .*--enable-mixkv"),
        (line("expired_slots_total", 5, engine_type="prefill"), "5 times a slot was not"),
        (line("weights_total", 2, state="different"), "2 times its weights .*one weight_version"),
        (line("slots", 64) + line("slots_used", 64), "all slots .*--mixkv-staging-mb"),
        ("sglang:num_running_reqs 1\n", "no series of the plugin"),
    ],
)  # fmt: skip
def test_each_problem_of_a_page_is_reported(text: str, expected: str) -> None:
    """Each problem is reported once, although several TP ranks count the same requests."""
    (found,) = words(text)
    assert re.search(expected, found)
    assert words(re.sub(r" [1-5]\n|64\n$", " 0\n", text) + page()) == []


def test_copies_by_torch_on_one_rank_are_reported() -> None:
    ranks = [line("gpu_kernels", used, tp_rank=used) for used in (0, 1)]
    (found,) = words(page(ranks=2) + "".join(ranks))
    assert re.search("torch copies draft KV on a GPU.*MIXKV-START-07", found)
    assert words(page() + ranks[1]) == []


# ---------------------------------------------------------------- the command


SERVED = {
    "/decode/metrics": (page() + rooms(warm=8)).encode(),
    "/cold/metrics": (page() + rooms(prefill=TWO, lost=1)).encode(),
    "/html/metrics": b"<html>",
    "/bell/metrics": (page() + rooms(prefill="h:1\x1b[2J", lost=1)).encode(),
}


def test_the_exit_status_and_output_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """The exit status is 0 without problems, 1 with some, and 2 if a page cannot be read.

    `--json` prints the figures for scripts. Each unreadable page is explained in a sentence.
    """

    def answer(path: str) -> tuple[int, bytes]:
        return (200 if path in SERVED else 404), SERVED.get(path, b"")

    with serving(answer) as address:
        url = f"http://{address}"
        assert status.main([f"{url}/decode", "--seconds=1"]) == 0
        assert capsys.readouterr().out.endswith("nothing is wrong\n")
        assert status.main([f"{url}/cold", "--json"]) == 1
        found = json.loads(capsys.readouterr().out)
        assert [one["role"] for one in found["servers"]] == ["decode"]
        assert found["pairs"][0]["rooms"] == {"lost": 1}
        assert set(found["wrong"][0]) == {"where", "what", "remedy"}
        assert status.main([f"{url}/bell"]) == 1
        assert "h:1?[2J" in (text := capsys.readouterr().out), "control characters must be replaced"
        assert text.replace("\n", "").isprintable()
        assert str(RequestFailed("a\x1b[2J")) == "a?[2J"
        urls = ["http://127.0.0.1:9", f"{url}/none", f"{url}/html", "http://", "http://[::1"]
        urls += [f"http://user:hush@{address}/401", f"{url}/404?token=hush"]
        urls += ["http://127.0.0.1:9/a?token=hush", "http://user:hush@/a", "http://user:hush@[::1"]
        assert status.main([f"{url}/decode", *urls]) == 2
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "http://127.0.0.1:9/metrics: HTTPConnection(host='127.0.0.1', port=9): Failed to establish",
        "Start it with --enable-metrics. For a router, give its servers or its /engine_metrics",
        "/html/metrics is not a metrics page",
        "from http://***@127", "/404?***:", "from http://[::1/metrics: Failed to parse",
        "from http:/metrics: Invalid URL 'http:/metrics': No host supplied", ONE,
    ):  # fmt: skip
        assert words in text
    assert "nothing is wrong" not in text
    assert "hush" not in text
    with pytest.raises(SystemExit):
        status.main(["http://a", "--seconds", "0"])
    assert len(capsys.readouterr().err) < 1000


def test_urls_and_addresses_are_completed() -> None:
    assert page_url("host:30000") == page_url("http://host:30000/") == "http://host:30000/metrics"
    for whole in ("https://host/proxy/metrics", "http://host/federate?match[]=a"):
        assert page_url(whole) == whole
    assert page_url("host/base/") == "http://host/base/metrics"


def test_invalid_numbers_and_api_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [status_of(line("slots", value)).servers[0].slots for value in (math.nan, math.inf)] == [
        0, 0,
    ]  # fmt: skip
    monkeypatch.setenv(API_KEY_ENV, "key\n")
    assert session().headers["Authorization"] == "Bearer key"
    for odd in ("two\nlines", "clé"):
        monkeypatch.setenv(API_KEY_ENV, odd)
        with pytest.raises(RequestFailed, match="characters that a key must not have") as refused:
            session()
        assert odd not in str(refused.value)


@pytest.mark.parametrize("count", [1, 20])
def test_slow_pages_time_out_together(count: int) -> None:
    """Pages that arrive slowly time out together, however many they are."""
    begin, head = time.monotonic(), b"HTTP/1.1 200 OK\r\n\r\n"
    with silent(head, drip=b"# x\n") as address:
        urls = [f"http://{address}/metrics?{number}" for number in range(count)]
        pages, unread = status.look(urls, timeout=0.4)
    assert pages == {}
    assert len(unread) == 1, "the URLs differ only in their hidden queries"
    assert all("did not end within 1 s" in why for why in unread.values())
    assert time.monotonic() - begin < 6


def test_a_page_without_an_answer_or_an_end_times_out() -> None:
    begin, head = time.monotonic(), b"HTTP/1.1 200 OK\r\n\r\n"
    with silent() as address, silent(head) as other:
        pages, unread = status.look([address, other], timeout=1)
    assert pages == {}
    assert {*unread.values()} == {
        f"no answer from http://{one}/metrics within 1 s" for one in (address, other)
    }
    assert time.monotonic() - begin < 3
