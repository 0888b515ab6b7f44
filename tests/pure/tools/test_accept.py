"""The `accept` command against stub servers: prompts, the gate, and the exit status."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE

import numpy as np
import pytest
from rig.channel.threads import wait_for
from rig.process.answers import serving

from sglang_mixkv.config import API_KEY_ENV
from sglang_mixkv.tools import accept
from sglang_mixkv.tools.accept import read_prompts, token_ids
from sglang_mixkv.tools.accept_figures import EARLY, FEWEST, Asked, Comparison, Decision, compare
from sglang_mixkv.tools.client import Answer, RequestFailed, read_stream

BOS, DEAD = 1, "http://127.0.0.1:9"
Capture = pytest.CaptureFixture[str]


@dataclass
class Stub:
    """A server that answers each prompt with its histogram, in three events.

    It tokenizes words by their length, and adds a 9 at the end of a chat. `asked`: the prompts that
    it has answered.
    """

    url: str = ""
    asked: list = field(default_factory=list)
    histogram: list = field(default_factory=lambda: [0, 0, 0, 10])
    refused: list = field(default_factory=list)
    drafted: int = 0
    key: str | None = None
    broken_rank: int | None = None
    broken: list = field(default_factory=lambda: [10, 0, 0, 0])
    new_only: bool = False
    other_from: int = 10**6
    away: dict = field(default_factory=dict)

    def answer(self, path: str, body: dict, authorization: str) -> tuple[int, bytes]:
        if self.key and authorization != f"Bearer {self.key}":
            return 401, b"Unauthorized"
        if path == "/tokenize":
            return 200, json.dumps({"tokens": self.tokens(body)}).encode()
        if body["input_ids"] in self.refused:
            return 503, b"no room"
        if status := self.away.pop(body["input_ids"][-1], 0):
            return status, b"no worker"
        lines = [*map(json.dumps, self.events(body)), "[DONE]"]
        return 200, "".join(f"data: {line}\n\n" for line in lines).encode()

    def tokens(self, body: dict) -> list[int]:
        if "messages" in body:
            assert "add_generation_prompt" not in body  # some chat formats reject it
            words = [len(m["content"]) for m in body["messages"]]
            return [BOS, *words, *[9] * (1 + len(body.get("tools", ())))]
        return [BOS, *(10 + len(word) for word in body["prompt"].split())]

    def events(self, body: dict) -> Iterator[dict]:
        number = len(self.asked)
        self.asked.append(body["input_ids"])
        histogram = self.broken if number % 2 == self.broken_rank else self.histogram
        rounds = sum(histogram)
        tokens = rounds + sum(i * n for i, n in enumerate(histogram)) or 3
        output = list(range(tokens))
        output[self.other_from :] = [5] * len(output[self.other_from :])
        info = {
            "spec_verify_ct": rounds, "spec_correct_drafts_histogram": histogram,
            "spec_num_proposed_drafts": rounds * self.drafted, "dp_rank": number % 2,
        }  # fmt: skip
        for begin, end in ((0, 1), (1, 2), (2, len(output))):
            own = output[begin if self.new_only else 0 : end]
            reason = {"type": "stop"} if end == len(output) else None
            about = {**info, "completion_tokens": end, "finish_reason": reason}
            yield {"output_ids": own, "meta_info": about}


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Stub, Stub]]:
    """Yield stubs in place of the single server and of the pair."""
    monkeypatch.setattr(accept, "PAUSE_S", 0.01)
    made = Stub(), Stub()
    with serving(made[0].answer) as single, serving(made[1].answer) as pair:
        made[0].url, made[1].url = f"http://{single}", f"http://{pair}"
        yield made


def run(servers: tuple, tmp_path: Path, *flags: str, prompts: int = 2 * FEWEST) -> tuple[int, dict]:
    """Run `accept`. Return its exit status, and its figures if there are any."""
    single, pair = servers
    rows = [{"input_ids": [5, n]} for n in range(prompts)]
    path, out = tmp_path / "prompts", tmp_path / "out.json"
    path.write_text("\n".join(map(json.dumps, rows)))
    out.unlink(missing_ok=True)
    argv = [f"--single={single.url}/", f"--pair={pair.url}/", f"--prompts={path}"]
    code = accept.main([*argv, f"--json={out}", *flags])
    return code, json.loads(out.read_text() or "{}") if out.exists() else {}


# ---------------------------------------------------------------- prompts


def test_each_format_of_a_prompt(servers: tuple, tmp_path: Path) -> None:
    """Each format of a prompt is tokenized.

    A row of SPEED-Bench has a user's turns, without the answers in between.
    """
    rows = [
        {"input_ids": [5, 6]}, {"text": "ccc"},
        {"messages": [{"role": "system", "content": "dd"}, {"role": "user", "content": "eee"}],
         "tools": [{}]},
        {"category": "mixed", "turns": ["ffff\u2028and", "and then"]},
    ]  # fmt: skip
    path = tmp_path / "prompts.jsonl"
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text("a bb\n\n" + lines, encoding="utf-8-sig")  # as editors on Windows write it
    ids = [[*token_ids(servers[0].url, prompt)] for prompt in read_prompts(path)]
    assert ids == [[BOS, 11, 12], [5, 6], [BOS, 13], [BOS, 2, 3, 9, 9], [BOS, 8, 9]]


def test_an_invalid_prompt_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    for text, why in (
        (b"{no json", "line 1"), (b'a\n{"prompt": "b"}', "line 2: expected input_ids"),
        (b"\n", "no prompts"), (b"a\n\xff", "line 2: 'utf-8' codec can't"),
        (b'{"input_ids": 5}', r"line 1: Expected `array`, got `int` - at `\$.input_ids`"),
        (b'{"turns": {"a": 1}}', "line 1: .*turns"),
        (b'{"input_ids": "abc"}', "line 1: .*input_ids"),
    ):  # fmt: skip
        path.write_bytes(text)
        with pytest.raises(ValueError, match=why):
            read_prompts(path)


# ---------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    ("state", "flags", "verdict", "words"),
    [
        ({"histogram": [0, 0, 1, 9], "new_only": True}, ("--at-once=4",), "within",
         "pair to single: 97.5%"),
        ({"histogram": [0, 0, 1, 9]}, ("--gate=0.02",), "below", "OUTSIDE the gate of 2%"),
        # One DP rank is broken, but all ranks together are within a wide gate.
        ({"broken_rank": 1}, ("--gate=0.7",), "below",
         "decode's DP rank 1: 25.0%, between 25.0% and 25.0% by 8 prompts, OUTSIDE"),
        # A target with wrong KV repeats itself, which is easy to draft.
        ({"other_from": EARLY - 1}, (), "other output", "OTHER OUTPUT"),
        ({"other_from": EARLY}, (), "within", "within the gate"),
        # A loss is reported even if some prompts failed.
        ({"histogram": [9, 1, 0, 0], "refused": [[5, 3]]}, (), "below", "OUTSIDE the gate of 5%"),
        # A prompt for which a router has no server is sent again once.
        ({"away": {3: 502, 4: 503}}, (), "within", "outputs equal: 16 of 16"),
    ],
)  # fmt: skip
def test_the_verdict_on_a_pair(
    servers: tuple, tmp_path: Path, capsys: Capture, state: dict, flags: tuple, verdict: str,
    words: str,
) -> None:  # fmt: skip
    single, pair = servers
    vars(pair).update(state)
    code, found = run(servers, tmp_path, *flags)
    assert (code, found["verdict"]) == (int(verdict != "within"), verdict)
    assert words in capsys.readouterr().out
    assert found["single"]["accept_length"] == 4.0
    assert len(found["each"]) + len(found["failed"]) == 2 * FEWEST
    asked = {tuple(ids) for ids in single.asked if ids not in pair.refused}
    assert sorted(map(tuple, pair.asked)) == sorted(asked)


@pytest.mark.parametrize(
    ("single", "pair", "why"),
    [
        ({"histogram": [30, 1]}, {"histogram": [30, 1]}, "own drafter is of no use"),
        ({"drafted": 3}, {"drafted": 5}, "draft {3} and {5} tokens per round"),
        ({}, {"histogram": []}, "reports no speculative decoding"),
        ({}, {"broken_rank": 1, "broken": []}, "reports no speculative decoding"),
        ({"key": "other"}, {}, "HTTP 401"),
        ({"url": DEAD}, {}, "no answer from http://127.0.0.1:9/generate: HTTPConnection(host="),
        ({}, {"url": "nowhere"}, "no answer from nowhere/generate: Invalid URL"),
        ({}, {"refused": [[5, 3]]}, "1 of 16 prompts failed, the first: HTTP 503"),
    ],
)
def test_runs_without_a_verdict(
    servers: tuple, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch,
    single: dict, pair: dict, why: str,
) -> None:  # fmt: skip
    monkeypatch.setenv(API_KEY_ENV, "secret")
    for server, state in zip(servers, (single, pair), strict=True):
        vars(server).update({"key": "secret", **state})
    code, found = run(servers, tmp_path)
    assert (code, found.get("verdict", "undecided")) == (2, "undecided")
    assert why in capsys.readouterr().err


EVENT = {"output_ids": [5, 6], "meta_info": {
    "completion_tokens": 2, "finish_reason": {"type": "length"}, "spec_verify_ct": 1,
    "spec_correct_drafts_histogram": [0, 1]}}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *(("/tokenize", body) for body in
          (b"<html>", b"[1, 2]", b'{"count": 1}', b'{"tokens": [[1]]}', b"")),
        *(("/generate", b"data: " + body) for body in
          (b"<html>", b"[1]", b'{"choices": []}', b'{"text": "x"}')),
        *(("/generate", b"data: " + json.dumps(EVENT | {"meta_info": EVENT["meta_info"] | odd})
           .encode()) for odd in
          ({"completion_tokens": None}, {"finish_reason": "length"}, {"spec_verify_ct": "1"},
           {"spec_correct_drafts_histogram": {"a": 1}}, {"dp_rank": [0]})),
        ("/generate", b"<html>login</html>"),
    ],
)  # fmt: skip
def test_an_invalid_answer_is_an_error_with_its_url(
    tmp_path: Path, capsys: Capture, path: str, body: bytes
) -> None:
    def answer(where: str, *_: object) -> tuple[int, bytes]:
        return 200, body if where == path else b'{"tokens": [1]}'

    (tmp_path / "prompts").write_text("a\n")
    with serving(answer) as address:
        url = f"http://{address}"
        argv = [f"--single={url}", f"--pair={url}", f"--prompts={tmp_path / 'prompts'}"]
        assert accept.main(argv) == 2
    text = capsys.readouterr().err
    assert f"{url}{path}" in text
    assert len(text.splitlines()) == 1


def test_ctrl_c_ends_the_run_with_the_figures_so_far(tmp_path: Path) -> None:
    """Ctrl-C ends `accept` at once with the figures so far.

    Two prompts are in flight at that time, and others wait.
    """
    asked, held = [], threading.Event()

    def answer(path: str, body: dict, _: str) -> tuple[int, bytes]:
        asked.append(body)
        if len(asked) > 20:
            held.wait(20)
        return 200, b"data: " + json.dumps(EVENT).encode()

    (tmp_path / "prompts").write_text('{"input_ids": [1]}\n' * 40)
    with serving(answer) as address:
        url = f"http://{address}"
        command = [sys.executable, "-m", "sglang_mixkv", "accept", f"--single={url}", "--at-once=2",
                   f"--pair={url}", f"--prompts={tmp_path / 'prompts'}"]  # fmt: skip
        with subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True) as running:
            assert wait_for(lambda: len(asked) > 20)
            before, begin = len(asked), time.monotonic()
            running.send_signal(signal.SIGINT)
            out, err = running.communicate(timeout=20)
        assert time.monotonic() - begin < 2
        held.set()
    assert running.returncode == 130
    assert len(asked) - before < 3
    assert "pair to single: 100.0%" in out
    far, interrupted = err.splitlines()
    assert re.fullmatch(
        r"1 of 40 prompts, 0 failed, accept length 2.00 single, 2.00 pair, \d\.\d min left with "
        "--at-once 2", far,
    )  # fmt: skip
    assert interrupted.startswith("interrupted: 3")
    assert "Traceback" not in err


def test_a_terminal_shows_the_progress(servers: tuple, tmp_path: Path) -> None:
    """On a terminal, a line of progress is updated after each prompt and removed at the end."""
    single, pair = servers
    pair.histogram, pair.refused = [0, 0, 5, 5], [[5, 3]]
    (tmp_path / "prompts").write_text("".join(f'{{"input_ids": [5, {n}]}}\n' for n in range(5)))
    command = [sys.executable, "-m", "sglang_mixkv", "accept", f"--single={single.url}",
               f"--pair={pair.url}", f"--prompts={tmp_path / 'prompts'}"]  # fmt: skip
    master, slave = pty.openpty()
    done = subprocess.run(command, stdout=PIPE, stderr=slave, text=True)
    os.close(slave)
    with open(master, "rb", buffering=0) as screen:
        shown = screen.read(1 << 16).decode()
    line = r"\r%d of 5 prompts, %d failed, accept length 4\.00 single, 3\.50 pair, \d\.\d min left"
    lines = "".join(rf"{line}\x1b\[K" % counts for counts in ((1, 0), (2, 0), (3, 0), (4, 1)))
    assert re.match(lines + r"\r\x1b\[K1 of 5 prompts failed, the first: HTTP 503", shown)
    assert done.returncode == 2
    assert "pair to single: 87.5%" in done.stdout


def answer(right: int, rounds: int, dp_rank: int | None = None, first: int = 0) -> Answer:
    """Return an answer with `right` correct drafts in its rounds. `first`: its first token."""
    tokens = (first, *range(1, right + rounds))
    return Answer(tokens, rounds, (rounds - right, right), dp_rank=dp_rank)


def compared(pairs: list[Answer], gate: float = 0.05) -> Comparison:
    return compare([Asked((9,), answer(10, 20), pair) for pair in pairs], gate)


def test_a_loss_that_could_be_chance_is_undecided() -> None:
    """A loss that could be chance is undecided with few prompts, and within the gate with many.

    Half of the prompts lose a tenth, and the other half gain a tenth.
    """
    lost = [answer(7, 20), answer(13, 20)]
    few, many = compared(lost * 4, 0.02), compared(lost * 400, 0.02)
    assert (few.verdict, many.verdict) == (Decision.UNDECIDED, Decision.WITHIN)
    assert compared(lost[:1] * (FEWEST - 1)).words().endswith(f"send {2 * FEWEST - 2} or more")


def test_a_correct_pair_passes_with_different_prompts() -> None:
    """A correct pair is within the gate although accept lengths differ widely between prompts.

    Each prompt is compared with itself. Otherwise the confidence interval would be eight times as
    wide.
    """
    draw, asked = np.random.default_rng(7), []
    for length in np.linspace(1.5, 4, 64):
        sides = []
        for _ in range(2):
            right = draw.binomial(3, (length - 1) / 3, 80)
            tokens = tuple(range(int(right.sum()) + 80))
            counts = tuple(np.bincount(right).tolist())
            sides.append(Answer(tokens, 80, counts, dp_rank=None))
        asked.append(Asked((9,), *sides))
    found = compare(asked, 0.05)
    assert len({len(one.single.rounds_by_right_drafts) for one in asked}) > 1
    tokens = sum(len(one.single.tokens) for one in asked)
    assert found.single.accept_length == tokens / (64 * 80)
    low, high = found.interval or (0, 9)
    assert low < found.ratio < high < low + 0.06
    assert found.verdict is Decision.WITHIN


def test_wrong_output_of_one_dp_rank_is_noticed() -> None:
    """Wrong output of a single DP rank is noticed, although few outputs of all ranks differ.

    Wrong output repeats itself, which is easy to draft.
    """
    answers = [answer(12, 20, dp_rank=n % 8, first=n % 8 == 7) for n in range(64)]
    assert not compared(answers).differs
    assert compared(answers).verdict is Decision.OTHER_OUTPUT
    assert compared([a for a in answers if a.dp_rank != 7]).verdict is Decision.WITHIN


def test_a_dp_rank_with_few_prompts_is_undecided() -> None:
    """A DP rank with few prompts, or without a verify round, makes the comparison undecided."""
    ranks = [0] * 99 + [1] * (FEWEST - 1)
    found = compared([*(answer(10, 20, dp_rank=r) for r in ranks), answer(0, 0, dp_rank=2)])
    assert found.interval == (1, 1)
    assert found.verdict is Decision.UNDECIDED
    assert [*found.table()][-2] == "decode's DP rank 2: nothing to compare, of 1 prompts"


def test_a_loss_on_one_of_many_dp_ranks_may_be_chance() -> None:
    """A loss that would be outside the gate on its own may be chance on one of eight DP ranks.

    More ranks mean more chances of a false alarm, so each rank gets a wider interval.
    """
    lost = [*[answer(7, 20, dp_rank=3)] * 8, *[answer(10, 20, dp_rank=3)] * 3]
    others = [answer(10, 20, dp_rank=n % 8) for n in range(160) if n % 8 != 3]
    alone, among = compared(lost, 0.04), compared(lost + others, 0.04)
    assert (alone.verdict, among.verdict) == (Decision.BELOW, Decision.WITHIN)
    assert among.by_dp_rank[3].ratio == alone.ratio
    assert not among.by_dp_rank[3].is_below


def test_a_few_different_outputs_are_accepted() -> None:
    """Up to one output in ten may differ in its first tokens, because of ties in sampling."""
    for differ, number, other in ((3, 32, 0), (11, 32, 1), (200, 3000, 0), (400, 3000, 1)):
        found = compared([answer(10, 20, first=n < differ) for n in range(number)])
        assert found.verdict is (Decision.OTHER_OUTPUT if other else Decision.WITHIN)


# ---------------------------------------------------------------- a recorded baseline


def test_a_baseline_replaces_the_single_server(servers: tuple, tmp_path: Path) -> None:
    """A baseline replaces the single server, with the same prompts and figures.

    The output of a run against a baseline contains the baseline's answers, and is a baseline
    itself.
    """
    single, pair = servers
    base, again = tmp_path / "out.json", tmp_path / "again.json"
    _, first = run(servers, tmp_path, "--max-new-tokens=64")
    asked = [*single.asked]
    for right, histogram in ((True, [0, 0, 0, 10]), (False, [9, 1, 0, 0])):
        pair.histogram = histogram
        argv = [f"--baseline={base}", f"--pair={pair.url}", f"--json={again}", "--at-once=4"]
        assert accept.main(argv) == int(not right)
        found, base = json.loads(again.read_text()), again
        assert (found["max_new_tokens"], found["single"]) == (64, first["single"])
    assert single.asked == asked
    assert sorted(pair.asked) == sorted(3 * asked)


@pytest.mark.parametrize("text", ["no json", '{"max_new_tokens": 8, "each": []}'])
def test_an_invalid_baseline_is_an_error(tmp_path: Path, capsys: Capture, text: str) -> None:
    (tmp_path / "base.json").write_text(text)
    assert accept.main([f"--baseline={tmp_path / 'base.json'}", f"--pair={DEAD}"]) == 2
    assert "Record it again" in capsys.readouterr().err


# ---------------------------------------------------------------- flags, streams


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--baseline b --prompts p", "--baseline replaces"),
        ("--single http://a", "--single needs --prompts"),
        ("--baseline b --gate nan", "expected --gate from 0 to 1"),
        ("--baseline b --at-once 0", "of 1 or more"),
    ],
)
def test_incompatible_flags_are_rejected(capsys: Capture, flags: str, why: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        accept.main(["--pair", "http://b", *flags.split()])
    assert stopped.value.code == 2
    assert why in capsys.readouterr().err


def event(completed: int, reason: str = "", number: int = 0) -> bytes:
    """Return an event of a stream after `completed` tokens, of which it carries `number`."""
    info = {"completion_tokens": completed, "finish_reason": {"type": reason} if reason else None}
    about = {"output_ids": [*range(number or completed)], "meta_info": info}
    return b"data: " + json.dumps(about).encode()


@pytest.mark.parametrize(
    ("lines", "why"),
    [([b"data: [DONE]"], "it sent no event"), ([b'data: {"error": "no room"}'], "no room"),
     ([b'{"error": "no key"}'], "no key"),  # as SGLang's small router forwards it
     ([b"data: <html>"], "http://server sent b' <html>'"), ([b"data: [1]"], "Expected `object`"),
     ([event(2), b'data: {"error": "no room"}'], "no room"),
     ([event(1), event(2)], "broke off after 2 tokens"),
     ([event(1), event(4, "stop", number=2)], "broke off after 3 tokens"),
     ([event(1), event(2, "abort")], "the request was aborted: .*abort")],
)  # fmt: skip
def test_a_stream_without_an_answer_is_an_error(lines: list[bytes], why: str) -> None:
    with pytest.raises(RequestFailed, match=why):
        read_stream("http://server", lines)
