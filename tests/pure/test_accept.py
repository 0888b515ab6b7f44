"""The acceptance harness against a stub server: one BOS, the gate, the exit status."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from sglang_mixkv.tools import accept

BOS = 1


class Stub(BaseHTTPRequestHandler):
    """Tokenizes words by their length, `<s>` as BOS, 9 behind a chat; answers with the server's
    histogram."""

    def do_GET(self) -> None:
        info = getattr(self.server, "info", None)
        data = json.dumps(info).encode()
        self.send_response(404 if info is None or self.path != "/server_info" else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        reply = self.tokenize(body) if self.path == "/tokenize" else self.generate(body)
        data = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def tokenize(self, body: dict) -> dict:
        if "messages" in body:
            words = [len(m["content"]) for m in body["messages"]]
            return {"tokens": [BOS, *words, *[9] * body["add_generation_prompt"]]}
        words = body["prompt"].split()
        ids = [BOS if word == "<s>" else 10 + len(word) for word in words]
        return {"tokens": [BOS, *ids, *self.server.tail] if body["add_special_tokens"] else ids}

    def generate(self, body: dict) -> dict:
        self.server.asked.append(body["input_ids"])
        histogram = self.server.histogram
        rounds = sum(histogram)
        tokens = rounds + sum(i * n for i, n in enumerate(histogram))
        info = {"spec_verify_ct": rounds, "spec_correct_drafts_histogram": histogram}
        info["spec_num_proposed_drafts"] = rounds * getattr(self.server, "drafted", 0)
        fixed = getattr(self.server, "fixed", False)
        output = [7] + [100] * tokens if fixed else list(range(tokens))
        return {"output_ids": output, "meta_info": info}

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    made = HTTPServer(("127.0.0.1", 0), Stub)
    made.asked, made.histogram, made.tail = [], [0, 0, 0, 10], []
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def url(server: HTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def test_one_bos_whether_or_not_the_prompt_has_it(server: HTTPServer) -> None:
    assert accept.tokenize(url(server), "a bb") == [BOS, 11, 12]
    assert accept.tokenize(url(server), "<s> a bb") == [BOS, 11, 12]


def test_a_tokenizer_that_also_adds_a_token_behind(server: HTTPServer) -> None:
    server.tail = [2]
    assert accept.tokenize(url(server), "a bb") == [BOS, 11, 12, 2]
    assert accept.tokenize(url(server), "<s> a bb") == [BOS, 11, 12, 2]


def test_each_kind_of_prompt(server: HTTPServer, tmp_path: Path) -> None:
    """SPEED-Bench's rows have turns of a user, without the answers between them."""
    rows = [
        {"input_ids": [5, 6]},
        {"text": "ccc"},
        {"messages": [{"role": "system", "content": "dd"}, {"role": "user", "content": "eee"}]},
        {"category": "mixed", "turns": ["ffff", "and then"]},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("a bb\n\n" + "\n".join(map(json.dumps, rows)))
    ids = [accept.token_ids(url(server), prompt) for prompt in accept.read_prompts(path)]
    assert ids == [[BOS, 11, 12], [5, 6], [BOS, 13], [BOS, 2, 3, 9], [BOS, 4, 9]]


def run(server: HTTPServer, tmp_path: Path, pair: list[int], gate: str) -> tuple[int, dict]:
    prompts = tmp_path / "prompts"
    prompts.write_text('a bb\n{"input_ids": [5, 6]}\n\n{"text": "ccc"}\n')
    other = HTTPServer(("127.0.0.1", 0), Stub)
    other.asked, other.histogram = [], pair
    threading.Thread(target=other.serve_forever).start()
    try:
        code = accept.main(
            ["--single", url(server), "--pair", url(other), "--prompts", str(prompts),
             "--gate", gate, "--json", str(tmp_path / "out.json")]
        )  # fmt: skip
        assert other.asked == server.asked
    finally:
        other.shutdown()
        other.server_close()
    return code, json.loads((tmp_path / "out.json").read_text())


def test_within_the_gate(server: HTTPServer, tmp_path: Path) -> None:
    code, found = run(server, tmp_path, [0, 0, 1, 9], "0.05")
    assert code == 0
    assert found["single"]["accept_length"] == 4.0
    assert found["pair"]["by_position"] == [1.0, 1.0, 0.9]


def test_outside_the_gate(server: HTTPServer, tmp_path: Path) -> None:
    code, found = run(server, tmp_path, [9, 1, 0, 0], "0.05")
    assert code == 1
    assert not found["within_gate"]
    assert found["same_output"] == 0


def test_as_many_positions_as_were_drafted(server: HTTPServer, tmp_path: Path) -> None:
    server.histogram = [0, 0, 0, 0, 0, 10]
    _, found = run(server, tmp_path, [0, 5, 0, 0, 0, 5], "0.05")
    assert found["single"]["by_position"] == [1.0] * 5
    assert found["pair"]["by_position"] == [1.0, 0.5, 0.5, 0.5, 0.5]


def test_positions_of_a_block_that_no_round_got_right(server: HTTPServer, tmp_path: Path) -> None:
    server.drafted = 7
    _, found = run(server, tmp_path, [0, 5, 0, 5], "0.05")
    assert found["single"]["by_position"] == [1.0] * 3 + [0.0] * 4


def test_a_single_server_without_speculation(
    server: HTTPServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "p"
    prompts.write_text("a\n")
    server.histogram = []
    argv = ["--single", url(server), "--pair", url(server), "--prompts", str(prompts)]
    assert accept.main(argv) == 2
    assert "no speculative decoding" in capsys.readouterr().err


def variables(value: str) -> dict:
    return {"internal_states": [{"env_vars": {"SGLANG_SIMULATE_ACC_LEN": value}}]}


@pytest.mark.parametrize(
    ("state", "refused"),
    [({"info": variables("3.5")}, True), ({"info": {"decode": [variables("2")]}}, True),
     ({"fixed": True}, True), ({"info": variables("-1")}, False), ({"info": {}}, False)],
)  # fmt: skip
def test_an_accept_length_that_is_made_up_is_not_judged(
    server: HTTPServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], state: dict,
    refused: bool,
) -> None:  # fmt: skip
    """SGLANG_SIMULATE_ACC_LEN, by what a server or its router shows, or by its answers."""
    vars(server).update(state)
    prompts = tmp_path / "p"
    prompts.write_text("a\n")
    argv = ["--single", url(server), "--pair", url(server), "--prompts", str(prompts)]
    assert accept.main(argv) == (2 if refused else 0)
    assert ("makes its accept length up" in capsys.readouterr().err) == refused


def test_no_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "p"
    prompts.write_text("a\n")
    dead = "http://127.0.0.1:9"
    argv = ["--single", dead, "--pair", dead, "--prompts", str(prompts)]
    assert accept.main(argv) == 2
    assert capsys.readouterr().err
