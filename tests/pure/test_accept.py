"""The acceptance harness against stub servers: one BOS, the gate, the exit status."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sglang_mixkv.config import API_KEY_ENV
from sglang_mixkv.tools import accept, pages
from sglang_mixkv.tools.accept_figures import EARLY, FEWEST, Asked, Comparison, Verdict
from sglang_mixkv.tools.accept_prompts import BadPrompts, read_prompts, token_ids, tokenize
from sglang_mixkv.tools.client import Answer, Events, RequestFailed

BOS = 1
SENT = 'sglang:mixkv_sent_bytes_total{component="draft"}'
WAIT = 'sglang:per_stage_req_latency_seconds_%s{stage="prefill_transfer_kv_cache"}'


class Stub(BaseHTTPRequestHandler):
    """Tokenizes words by their length, `<s>` as BOS, 9 behind a chat; answers with the server's
    histogram, in two events."""

    def do_GET(self) -> None:
        if self.path == "/metrics":
            number = self.server.pages = self.server.pages + 1
            page = (
                f"{SENT} {number << 20}\n{WAIT % 'sum'} {number}\n{WAIT % 'count'} {4 * number}\n"
            )
            if self.server.rooms:
                page += self.server.rooms.pop(0)
            self.answer(page.encode())
        elif self.path == "/server_info" and self.server.info is not None:
            self.answer(json.dumps(self.server.info).encode())
        else:
            self.answer(b"", 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.key and self.headers["Authorization"] != f"Bearer {self.server.key}":
            self.answer(b"Unauthorized", 401)
        elif self.path == "/tokenize":
            self.answer(json.dumps(self.tokenize(body)).encode())
        elif body["input_ids"] in self.server.refused:
            self.answer(b"no room", 503)
        else:
            assert body["stream"]
            self.answer(b"".join(self.events(body)))

    def answer(self, data: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def tokenize(self, body: dict) -> dict:
        if "messages" in body:
            assert "add_generation_prompt" not in body  # some chat formats refuse it
            words = [len(m["content"]) for m in body["messages"]]
            return {"tokens": [BOS, *words, *[9] * (1 + len(body.get("tools", ())))]}
        words = body["prompt"].split()
        ids = [BOS if word == "<s>" else 10 + len(word) for word in words]
        return {"tokens": [BOS, *ids, *self.server.tail] if body["add_special_tokens"] else ids}

    def events(self, body: dict) -> Iterator[bytes]:
        number = len(self.server.asked)
        self.server.asked.append(body["input_ids"])
        histogram = self.server.histogram
        if self.server.broken_rank is not None and number % 2 == self.server.broken_rank:
            histogram = [10, 0, 0, 0]
        rounds = sum(histogram)
        tokens = rounds + sum(i * n for i, n in enumerate(histogram)) or 3
        output = [7] + [100] * tokens if self.server.fixed else list(range(tokens))
        output[self.server.other_from :] = [5] * len(output[self.server.other_from :])
        info = {
            "spec_verify_ct": rounds, "spec_correct_drafts_histogram": histogram,
            "spec_num_proposed_drafts": rounds * self.server.drafted, "dp_rank": number % 2,
        }  # fmt: skip
        for begin, end in ((0, 1), (1, 2), (2, len(output))):
            own = output[begin if self.server.new_only else 0 : end]
            reason = {"type": "stop"} if end == len(output) else None
            about = {**info, "completion_tokens": end, "finish_reason": reason}
            event = {"output_ids": own, "meta_info": about}
            yield b"data: " + json.dumps(event).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    def log_message(self, *_: object) -> None:
        pass


class StubServer(ThreadingHTTPServer):
    """What it was asked, and how it answers."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Stub)
        self.asked, self.histogram, self.tail, self.refused = [], [0, 0, 0, 10], [], []
        self.drafted = self.pages = 0
        self.rooms: list[str] = []  # of the pages to come
        self.info = self.key = self.broken_rank = None
        self.fixed = self.new_only = False
        self.other_from = 10**6

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@pytest.fixture
def servers() -> Iterator[tuple[StubServer, StubServer]]:
    """The single server, the pair."""
    made = StubServer(), StubServer()
    threads = [threading.Thread(target=one.serve_forever) for one in made]
    for thread in threads:
        thread.start()
    yield made
    for one, thread in zip(made, threads, strict=True):
        one.shutdown()
        thread.join()
        one.server_close()


def test_one_bos_whether_or_not_the_prompt_has_it(servers: tuple) -> None:
    server, _ = servers
    for server.tail in ([], [2]):  # a tokenizer may add a token behind, too
        for text in ("a bb", "<s> a bb"):
            assert tokenize(server.url, text) == [BOS, 11, 12, *server.tail]


def test_each_kind_of_prompt(servers: tuple, tmp_path: Path) -> None:
    """SPEED-Bench's rows have turns of a user, without the answers between them."""
    rows = [
        {"input_ids": [5, 6]},
        {"text": "ccc"},
        {"messages": [{"role": "system", "content": "dd"}, {"role": "user", "content": "eee"}],
         "tools": [{}]},
        {"category": "mixed", "turns": ["ffff\u2028and", "and then"]},
    ]  # fmt: skip
    path = tmp_path / "prompts.jsonl"
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text("a bb\n\n" + lines, encoding="utf-8")
    ids = [token_ids(servers[0].url, prompt) for prompt in read_prompts(path)]
    assert ids == [[BOS, 11, 12], [5, 6], [BOS, 13], [BOS, 2, 3, 9, 9], [BOS, 8, 9]]


@pytest.mark.parametrize(
    ("text", "why"),
    [("{no json", "line 1"), ('a\n{"prompt": "b"}', "line 2: expected input_ids"),
     ("\n", "no prompts")],
)  # fmt: skip
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "prompts"
    path.write_text(text)
    with pytest.raises(BadPrompts, match=why):
        read_prompts(path)


def run(servers: tuple, tmp_path: Path, *flags: str, prompts: int = 2 * FEWEST) -> tuple[int, dict]:
    """The exit status, and the figures where there are some."""
    single, pair = servers
    rows = [{"input_ids": [5, n]} for n in range(prompts)]
    path, out = tmp_path / "prompts", tmp_path / "out.json"
    path.write_text("\n".join(map(json.dumps, rows)))
    out.unlink(missing_ok=True)
    argv = [f"--single={single.url}/", f"--pair={pair.url}/", f"--prompts={path}"]
    code = accept.main([*argv, f"--json={out}", *flags])
    text = out.read_text() if out.exists() else ""
    return code, json.loads(text) if text else {}


def test_within_the_gate(servers: tuple, tmp_path: Path) -> None:
    single, pair = servers
    pair.histogram, pair.new_only = [0, 0, 1, 9], True
    code, found = run(servers, tmp_path)
    assert code == 0
    assert found["single"]["accept_length"] == 4.0
    assert found["pair"]["by_position"] == [1.0, 1.0, 0.9]
    assert pair.asked == single.asked
    assert found["ratio"] == pytest.approx(39 / 40)
    assert found["each"][0]["differs_at"] == 39  # it is shorter
    assert 0 < found["each"][0]["pair"]["first_token_s"] < 60
    assert run(servers, tmp_path, "--gate=0.02")[0] == 1
    code, again = run(servers, tmp_path, "--at-once=4")
    assert (code, again["ratio"]) == (0, found["ratio"])


def test_outside_the_gate(
    servers: tuple, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers[1].histogram = [9, 1, 0, 0]
    code, found = run(servers, tmp_path)
    assert (code, found["verdict"]) == (1, "below")
    assert found["same_output"] == 0
    assert "OUTSIDE the gate of 5%" in capsys.readouterr().out.splitlines()[-1]


def test_one_dp_rank_is_broken(
    servers: tuple, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over all ranks it is within a wide gate."""
    servers[1].broken_rank = 1
    code, found = run(servers, tmp_path, "--gate=0.7")
    assert code == 1
    assert found["by_dp_rank"] == {"0": 1.0, "1": 0.25}
    assert "decode's DP rank 1: 25.0%, between 25.0% and 25.0% by 8 prompts, OUTSIDE" in (
        capsys.readouterr().out
    )


def test_the_output_is_another(
    servers: tuple, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A target whose KV is wrong repeats itself, which drafts well."""
    servers[1].other_from = EARLY
    assert run(servers, tmp_path)[0] == 0
    servers[1].other_from = EARLY - 1
    code, found = run(servers, tmp_path)
    assert (code, found["verdict"]) == (1, "other output")
    assert "OTHER OUTPUT" in capsys.readouterr().out


def test_too_few_prompts(
    servers: tuple, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(servers, tmp_path, prompts=FEWEST - 1)[0] == 2
    assert f"send some {2 * FEWEST}" in capsys.readouterr().out  # on each of two DP ranks


def answer(right: int, rounds: int, dp_rank: int | None = None, first: int = 0) -> Answer:
    """Of one right draft in so many of the rounds; `first`: its first token."""
    tokens = (first, *range(1, right + rounds))
    return Answer(tokens, rounds, (rounds - right, right), 0.0, dp_rank=dp_rank)


def test_a_loss_that_could_be_chance_is_not_judged() -> None:
    """Half of the prompts lose a tenth, half win one."""
    lost = [Asked((9,), answer(10, 20), answer(n, 20)) for n in (7, 13)]
    few = Comparison(lost * 4, 0.02)
    assert few.verdict is Verdict.UNDECIDED
    decided = Comparison(lost * few.would_decide, 0.02)  # twice as many, to be on the safe side
    assert decided.verdict is Verdict.WITHIN
    assert Comparison(lost * (few.would_decide // 8), 0.02).verdict is Verdict.UNDECIDED


def test_garbage_on_one_dp_rank_is_seen() -> None:
    """It repeats itself, which drafts well; over all ranks few outputs differ."""
    asked = [
        Asked((9,), answer(10, 20), answer(12, 20, dp_rank=n % 8, first=n % 8 == 7))
        for n in range(64)
    ]
    compared = Comparison(asked, 0.05)
    assert not compared.differs
    assert compared.verdict is Verdict.OTHER_OUTPUT
    assert Comparison([a for a in asked if a.pair.dp_rank != 7], 0.05).verdict is Verdict.WITHIN


def test_a_dp_rank_with_few_prompts_leaves_it_open() -> None:
    """Also one whose answers had no verify round."""
    ranks = [0] * 99 + [1] * (FEWEST - 1)
    asked = [Asked((9,), answer(10, 20), answer(10, 20, dp_rank=rank)) for rank in ranks]
    compared = Comparison([*asked, Asked((9,), answer(0, 0), answer(0, 0, dp_rank=2))], 0.05)
    assert compared.is_within
    assert compared.verdict is Verdict.UNDECIDED
    assert [*compared.table()][-2] == "decode's DP rank 2: nothing to compare, of 1 prompts"


def test_chance_differs_now_and_then() -> None:
    """One in ten within eight tokens is what ties may do."""
    for differ, number in ((3, 32), (11, 32), (200, 3000), (400, 3000)):
        asked = [
            Asked((9,), answer(10, 20), answer(10, 20, first=n < differ)) for n in range(number)
        ]
        verdict = Verdict.OTHER_OUTPUT if differ in (11, 400) else Verdict.WITHIN
        assert Comparison(asked, 0.05).verdict is verdict


@pytest.mark.parametrize(
    ("single", "pair", "why"),
    [([30, 1], [30, 1], "its own drafter drafts nothing"),
     ([0, 0, 0, 10], [10, 0, 0, 0, 0, 1], "Give both the same speculative flags"),
     ([0, 0, 0, 10], [0, 0, 0, 0, 0, 10], "Give both the same speculative flags")],
)  # fmt: skip
def test_a_single_server_that_is_no_yardstick(
    servers: tuple, tmp_path: Path, capsys: pytest.CaptureFixture[str], single: list[int],
    pair: list[int], why: str,
) -> None:  # fmt: skip
    for server, histogram in zip(servers, (single, pair), strict=True):
        server.histogram, server.drafted = histogram, len(histogram) - 1
    code, found = run(servers, tmp_path)
    assert (code, found["verdict"]) == (2, "undecided")
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--gate=5", "--gate=nan", "--timeout=0", "--at-once=0"])
def test_a_flag_out_of_range(servers: tuple, tmp_path: Path, flag: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(servers, tmp_path, flag)
    assert stopped.value.code == 2


def test_as_many_positions_as_were_drafted(servers: tuple, tmp_path: Path) -> None:
    single, pair = servers
    single.histogram, pair.histogram = [0, 0, 0, 0, 0, 10], [0, 5, 0, 0, 0, 5]
    _, found = run(servers, tmp_path)
    assert found["single"]["by_position"] == [1.0] * 5
    assert found["pair"]["by_position"] == [1.0, 0.5, 0.5, 0.5, 0.5]
    single.histogram, single.drafted = [0, 0, 0, 10], 7  # a block that no round got right
    _, found = run(servers, tmp_path)
    assert found["single"]["by_position"] == [1.0] * 3 + [0.0] * 3


@pytest.mark.parametrize("which", [0, 1])
def test_a_server_without_speculation(
    servers: tuple, tmp_path: Path, capsys: pytest.CaptureFixture[str], which: int
) -> None:
    servers[which].histogram = []
    assert run(servers, tmp_path)[0] == 2
    assert f"{servers[which].url} reports no speculative decoding" in capsys.readouterr().err


def variables(value: str) -> dict:
    return {"internal_states": [{"env_vars": {"SGLANG_SIMULATE_ACC_LEN": value}}]}


@pytest.mark.parametrize(
    ("state", "refused"),
    [({"info": variables("3.5")}, True), ({"info": {"decode": [variables("2")]}}, True),
     ({"fixed": True}, True), ({"info": variables("-1")}, False), ({"info": {}}, False)],
)  # fmt: skip
def test_an_accept_length_that_is_made_up_is_not_judged(
    servers: tuple, tmp_path: Path, capsys: pytest.CaptureFixture[str], state: dict, refused: bool
) -> None:
    """SGLANG_SIMULATE_ACC_LEN, by what a server or its router shows, or by its answers."""
    for server in servers:
        vars(server).update(state)
    assert run(servers, tmp_path)[0] == (2 if refused else 0)
    assert ("makes its accept length up" in capsys.readouterr().err) == refused


def test_a_request_that_fails_is_counted(
    servers: tuple, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others' figures are told all the same."""
    servers[1].refused = [[5, 3]]
    code, found = run(servers, tmp_path)
    assert (code, found["prompts"], len(found["failed"])) == (2, 2 * FEWEST - 1, 1)
    said = capsys.readouterr()
    assert "1 of 16 prompts failed, the first: HTTP 503" in said.err
    assert "pair to single: 100.0%" in said.out
    assert found["verdict"] == "undecided"
    servers[1].histogram = [9, 1, 0, 0]
    assert run(servers, tmp_path)[0] == 1  # a loss stays one


def test_servers_with_a_key(
    servers: tuple, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for server in servers:
        server.key = "secret"
    assert run(servers, tmp_path)[0] == 2
    assert "HTTP 401" in capsys.readouterr().err
    monkeypatch.setenv(API_KEY_ENV, "secret")
    assert run(servers, tmp_path)[0] == 0


def test_what_went_over_the_wire(
    servers: tuple, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = f"{servers[1].url}/metrics"
    code, found = run(servers, tmp_path, "--metrics", page)
    assert (code, found["sent_bytes"]) == (0, {"draft": 1 << 20})
    assert found["transfer_s"] == 0.25
    assert "transfer: 250.0 ms per request" in capsys.readouterr().out
    assert run(servers, tmp_path, "--metrics", f"{page}s")[0] == 2
    assert "--enable-metrics" in capsys.readouterr().err


def rooms(name: str, **counts: int) -> str:
    """Of one rank: `warm`, and cold by reason."""
    tp, dp = name.split()
    labels = f'tp_rank="{tp}",dp_rank="{dp}",engine_type="decode"'
    lines = []
    for reason, count in counts.items():
        state = f'state="{reason}",reason=""'
        if reason not in ("warm", "closed"):
            state = f'state="cold",reason="{reason}"'
        lines.append(f"sglang:mixkv_rooms_total{{{labels},{state}}} {count}.0\n")
    return "".join(lines)


def test_a_request_is_warm_only_where_no_rank_says_cold() -> None:
    first = rooms("0 0", warm=10, lost=0, closed=7) + rooms("1 0", warm=8, lost=2)
    other = rooms("0 1", warm=5, read=1) + rooms("1 1", warm=6, read=0)
    found = pages.read([first + other, rooms("0 0", warm=4, lost=0)]).rooms
    assert found.counts == {"warm": 8 + 5 + 4, "lost": 2, "read": 1}
    assert found.warm_share == 17 / 20
    assert pages.read(["# nothing\n"]).rooms.warm_share is None


def test_only_the_rooms_of_the_run_count() -> None:
    before = pages.read([rooms("0 0", warm=10, lost=2)])
    after = pages.read([rooms("0 0", warm=14, lost=2, read=1)])
    assert (after - before).rooms.counts == {"warm": 4, "read": 1}
    restarted = pages.read([rooms("0 0", warm=1)])
    assert (restarted - before).rooms.counts == {}


def test_the_warm_share_of_a_run(
    servers: tuple, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers[1].rooms = [rooms("0 0", warm=3, lost=1), rooms("0 0", warm=10, lost=2)]
    _, found = run(servers, tmp_path, "--metrics", f"{servers[1].url}/metrics")
    assert (found["warm_share"], found["rooms"]) == (7 / 8, {"warm": 7, "lost": 1})
    assert "drafters: 87.5% of 8 warm; cold: lost 1" in capsys.readouterr().out


# ---------------------------------------------------------------- a recorded baseline


def against(pair: StubServer, baseline: Path, *flags: str) -> tuple[int, dict]:
    out = baseline.with_name("again.json")
    argv = [f"--baseline={baseline}", f"--pair={pair.url}", f"--json={out}", *flags]
    code = accept.main(argv)
    return code, json.loads(out.read_text() or "{}") if out.exists() else {}


def test_a_baseline_stands_for_the_single_server(servers: tuple, tmp_path: Path) -> None:
    """The same prompts and figures, and the single server is not asked."""
    single, pair = servers
    code, first = run(servers, tmp_path, "--max-new-tokens=64")
    (tmp_path / "out.json").rename(tmp_path / "base.json")
    asked = [*single.asked]
    code, again = against(pair, tmp_path / "base.json", "--at-once=4")
    assert code == 0
    assert single.asked == asked
    assert sorted(pair.asked) == sorted(2 * asked)
    assert again["max_new_tokens"] == 64
    assert again["single"] == first["single"]
    assert again["same_output"] == first["same_output"] == 2 * FEWEST
    pair.histogram = [9, 1, 0, 0]
    assert against(pair, tmp_path / "base.json")[0] == 1
    code, third = against(pair, tmp_path / "again.json")  # which has the baseline's answers
    assert (code, third["single"]) == (1, first["single"])


def test_a_baseline_that_is_made_up_is_not_judged(
    servers: tuple, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers[0].fixed = True
    run(servers, tmp_path)
    (tmp_path / "out.json").rename(tmp_path / "base.json")
    capsys.readouterr()
    assert against(servers[1], tmp_path / "base.json")[0] == 2
    assert "base.json makes its accept length up" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    ["", "no json", "[]", '{"max_new_tokens": 8, "each": []}', '{"each": [{"prompt_tokens": 3}]}',
     '{"max_new_tokens": 8, "each": [{"input_ids": ["a"], "single": {}}]}'],
)  # fmt: skip
def test_a_file_that_is_no_baseline(
    servers: tuple, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (tmp_path / "base.json").write_text(text)
    assert against(servers[1], tmp_path / "base.json") == (2, {})
    assert "Record it again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--baseline b --prompts p", "are the baseline's"),
        ("--baseline b --max-new-tokens 9", "are the baseline's"),
        ("--baseline b --single http://a", "not allowed with"),
        ("--single http://a", "--single needs --prompts"),
        ("", "one of the arguments --single --baseline is required"),
    ],
)
def test_flags_that_do_not_go_together(
    capsys: pytest.CaptureFixture[str], flags: str, why: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        accept.main(["--pair", "http://b", *flags.split()])
    assert stopped.value.code == 2
    assert why in capsys.readouterr().err


def test_the_help_has_every_default() -> None:
    help_text = " ".join(accept.parser().format_help().split())
    for default in ("128", "1", "180.0", "0.05"):
        assert f"(default {default})" in help_text


@pytest.mark.parametrize("side", ["single", "pair"])
def test_a_server_that_is_not_there_in_a_sentence(
    servers: tuple, tmp_path: Path, capsys: pytest.CaptureFixture[str], side: str
) -> None:
    argv = {f"--{n}": s.url for n, s in zip(("single", "pair"), servers, strict=True)}
    argv[f"--{side}"] = "http://127.0.0.1:9"
    (tmp_path / "prompts").write_text("a bb\n")
    words = [word for pair in argv.items() for word in pair]
    assert accept.main([*words, "--prompts", str(tmp_path / "prompts")]) == 2
    text = capsys.readouterr().err
    assert "no answer from http://127.0.0.1:9/" in text
    assert "nothing listens there" in text
    assert "HTTPConnectionPool" not in text


@pytest.mark.parametrize("prompts", ["a\n", None])
def test_nothing_to_ask(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], prompts: str | None
) -> None:
    """No server, no file: neither is a lost accept length."""
    path, dead = tmp_path / "prompts", "http://127.0.0.1:9"
    if prompts:
        path.write_text(prompts)
    assert accept.main(["--single", dead, "--pair", dead, "--prompts", str(path)]) == 2
    assert capsys.readouterr().err


def event(completed: int, reason: str = "", number: int = 0) -> bytes:
    """Of so many tokens, `number` of which it has."""
    info = {"completion_tokens": completed, "finish_reason": reason and {"type": reason}}
    about = {"output_ids": [*range(number or completed)], "meta_info": info}
    return b"data: " + json.dumps(about).encode()


@pytest.mark.parametrize(
    ("lines", "why"),
    [([b"data: [DONE]"], "it sent no event"), ([b'data: {"error": "no room"}'], "no room"),
     ([b'{"error": "no key"}'], "no key"),  # as SGLang's small router passes it on
     ([b"data: <html>"], "sent b' <html>'"), ([b"data: [1]"], "expected SGLang's meta_info"),
     ([event(2), b'data: {"error": "no room"}'], "no room"),
     ([event(1), event(2)], "broke off after 2 tokens"),
     ([event(1), event(4, "stop", number=2)], "broke off after 3 tokens")],
)  # fmt: skip
def test_a_stream_without_an_answer(lines: list[bytes], why: str) -> None:
    events = Events("http://server")
    with pytest.raises(RequestFailed, match=why):
        [*map(events.add, lines), events.reply()]
