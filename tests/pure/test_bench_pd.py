"""bench_pd.py's arithmetic, files and tables; nothing is started."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path[:0] = [str(SCRIPTS), str(SCRIPTS / "bench")]

import bench_pd  # noqa: E402
import pd_client  # noqa: E402
import pd_demo  # noqa: E402
import pd_figures  # noqa: E402
import pd_report  # noqa: E402
from pd_run import BenchFailed, Runner  # noqa: E402
from rich.console import Console  # noqa: E402

from mixkv_demo import pair  # noqa: E402
from sglang_mixkv.tools import simulated  # noqa: E402

METRICS = """\
# TYPE sglang:per_stage_req_latency_seconds histogram
sglang:per_stage_req_latency_seconds_sum{{stage="prefill_transfer_kv_cache",rank="0"}} {0}
sglang:per_stage_req_latency_seconds_count{{stage="prefill_transfer_kv_cache",rank="0"}} {1}
sglang:per_stage_req_latency_seconds_sum{{stage="prefill_forward",rank="0"}} 77
sglang:per_stage_req_latency_seconds_count{{stage="prefill_forward",rank="0"}} 7
"""


def reply(tokens: int, histogram: list[int]) -> dict[str, Any]:
    """The ``meta_info`` of a request with three drafts a round."""
    return {
        "completion_tokens": tokens,
        "spec_verify_ct": sum(histogram),
        "spec_num_proposed_drafts": 3 * sum(histogram),
        "spec_num_correct_drafts": sum(i * rounds for i, rounds in enumerate(histogram)),
        "spec_correct_drafts_histogram": histogram,
    }


PLAIN = dict.fromkeys(pd_client.KEPT) | {"completion_tokens": 5}


def result(**changed: Any) -> dict[str, Any]:
    """A line of bench_serving."""
    latencies = {f"{s}_{n}_ms": 100.0 for n in pd_figures.LATENCIES for s in pd_figures.STATISTICS}
    made = {
        "completed": 2, "errors": ["", ""], "duration": 2.0, "request_throughput": 1.0,
        "input_throughput": 10.0, "output_throughput": 20.0, "generated_texts": ["ba", "be"],
    }  # fmt: skip
    return {**latencies, **made, **changed}


def row(label: str, replies: list[dict[str, Any]], **changed: Any) -> dict[str, Any]:
    figures = pd_figures.figures(result(**changed), replies, None, None)
    return {"label": label, "workload": {"prompts": 2}, "figures": figures, "machine": {}}


def test_acceptance_is_summed_over_requests() -> None:
    """Not averaged: the long request counts for more."""
    found = pd_figures.acceptance([reply(10, [0, 0, 1, 2]), reply(4, [3, 1])])
    assert found == {
        "verify_rounds": 7,
        "drafts": 21,
        "accepted": 9,
        "accept_rate": pytest.approx(9 / 21),
        "accept_length": pytest.approx(2.0),
        "by_position": pytest.approx([4 / 7, 3 / 7, 2 / 7]),
    }


def test_positions_that_no_draft_was_right_at_count_as_zero() -> None:
    assert pd_figures.acceptance([reply(5, [3, 1])])["by_position"] == [0.25, 0.0, 0.0]


def test_without_speculation_there_is_no_acceptance() -> None:
    assert set(pd_figures.acceptance([PLAIN, PLAIN]).values()) == {None}


@pytest.mark.parametrize("prefix", ["sglang:", "sglang_"], ids=["server", "router"])
def test_transfer_counts_what_happened_in_between(prefix: str) -> None:
    metrics = METRICS.replace("sglang:", prefix)
    before, after = metrics.format(1.0, 10), metrics.format(1.5, 20)
    assert pd_figures.transfer(before, after, ttft_ms=200.0) == {
        "transfer_ms": pytest.approx(50.0),
        "transfer_share": pytest.approx(0.25),
    }


@pytest.mark.parametrize(("before", "after"), [(None, None), (METRICS.format(1, 3),) * 2])
def test_transfer_nobody_reported(before: str | None, after: str | None) -> None:
    assert set(pd_figures.transfer(before, after, 200.0).values()) == {None}


def test_failed_requests_are_counted() -> None:
    assert row("x", [], errors=["", "HTTP 500"])["figures"]["failed"] == 1


def test_the_last_run_of_a_label_counts(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    assert pd_figures.load(path) == []
    for number, label in enumerate("aba"):
        pd_figures.append(path, {"label": label, "number": number})
    assert [(r["label"], r["number"]) for r in pd_figures.load(path)] == [("a", 2), ("b", 1)]


GOOD = reply(10, [0, 0, 1, 2])


@pytest.mark.parametrize(
    ("mixkv", "good"),
    [
        (row("P2->D1 mixkv", [GOOD]), True),
        (row("P2->D1 mixkv", [reply(10, [0, 1, 1, 2])]), False),
        (row("P2->D1 mixkv", [GOOD], generated_texts=["ba", "bi"]), False),
        (row("P2->D1 mixkv", [GOOD], errors=["", "HTTP 500"]), False),
        (row("P2->D1 mixkv", [PLAIN]), False),
    ],
    ids=["equal", "accepts-less", "other-output", "failed-request", "no-speculation"],
)
def test_verdict(mixkv: dict[str, Any], good: bool) -> None:
    assert pd_figures.verdict(mixkv, row("P1->D1 stock", [GOOD]))[0] is good


def test_table_markdown_and_plot(tmp_path: Path) -> None:
    rows = [row("P2->D1 none", [PLAIN]), row("P2->D1 mixkv", [GOOD], generated_texts=["x"])]
    written = pd_report.markdown(rows)
    for text in ("3.333", "1.00 1.00 0.67", "100 / 100 / 100", "NO"):
        assert text in written
    assert len({line.count("|") for line in written.splitlines()}) == 1
    other = [*rows, row("P1->D2 mixkv", [GOOD])]
    assert [(name, len(group)) for name, group in pd_report.groups(other)] == [
        ("P2->D1", 2), ("P1->D2", 1),
    ]  # fmt: skip
    assert pd_report.markdown(other).count("|---|") == 2
    pytest.importorskip("matplotlib")
    pd_report.draw(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_reply_lines_go_through_unchanged() -> None:
    info = {**GOOD, "prompt_tokens": 4, "finish_reason": {"type": "length"}}
    line = pd_client.finished({"text": "ba", "meta_info": info})
    assert line is not None
    assert pd_client.parse(line + "\n") == {**GOOD, "prompt_tokens": 4}
    assert pd_client.finished({"text": "b", "meta_info": {"finish_reason": None}}) is None
    assert pd_client.parse("Starting warmup with 1 sequences...\n") is None


def test_dataset_is_the_copy_task(tmp_path: Path) -> None:
    """With the shipped tokenizer: its ids are the demo's, its completion as long as the answer."""
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path / "prompts.jsonl"
    pd_demo.write_dataset(path, "mla", 9)
    encode = tokenizers.Tokenizer.from_file(str(pair.model_path("mla") / "tokenizer.json")).encode
    turns = [json.loads(line)["conversations"] for line in path.read_text().splitlines()]
    assert [encode(user["content"]).ids for user, _ in turns] == pair.prompts(9)
    lengths = [len(encode(answer["content"]).ids) for _, answer in turns]
    assert lengths == [len(prompt) - 1 for prompt in pair.prompts(9)]
    assert pair.prompts(9)[:8] == pair.prompts()


TP1, TP2 = ("--tp", "1"), ("--tp", "2")
DP2 = (*TP2, "--dp", "2", "--enable-dp-attention")


def test_deployments_have_a_baseline_once() -> None:
    found = pd_demo.deployments(TP2, TP1, ["none", "mixkv"])
    assert list(found) == ["P1->D1 stock", "P2->D1 none", "P2->D1 mixkv"]
    assert [t.speculative for t in found.values()] == [True, False, True]
    assert found["P2->D1 mixkv"].mixkv_decode == ("--enable-mixkv",)
    assert found["P2->D1 none"].mixkv_prefill == ()
    assert all("--enable-metrics" in t.prefill for t in found.values())
    assert list(pd_demo.deployments(TP1, TP1, ["stock"])) == ["P1->D1 stock"]
    assert list(pd_demo.deployments(TP1, DP2, ["mixkv"], ["P1->D1 stock"])) == ["P1->D1 mixkv"]


@pytest.mark.parametrize(
    "argv",
    [[], ["--router", "http://r"], ["--demo", "--report"], ["--demo", "--variants", "none,best"]],
)
def test_command_lines_that_are_refused(argv: list[str]) -> None:
    with pytest.raises(SystemExit):
        bench_pd.parse(argv)


def test_options_behind_the_dashes_are_bench_servings() -> None:
    further = ["--dataset-name", "random-ids", "--num-prompts", "7"]
    options = bench_pd.parse(["--router", "http://r", "--label", "x", "--", *further])
    assert options.further == further
    assert options.num_prompts == 16


FAKE = """\
import json, sys
print("Starting warmup", flush=True)
if "fail" in sys.argv: sys.exit("no server")
for tokens in (1, 10):
    print("mixkv-reply " + json.dumps(REPLY | {"completion_tokens": tokens}), flush=True)
open(sys.argv[sys.argv.index("--output-file") + 1], "a").write(json.dumps(RESULT) + "\\n")
"""


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """With a stand-in for bench_serving, which reports the warm-up as well."""
    script = tmp_path / "fake.py"
    script.write_text(f"REPLY, RESULT = {GOOD!r}, {result()!r}\n{FAKE}")
    monkeypatch.setattr(pd_client, "__file__", str(script))
    return Runner(tmp_path / "out", {"prompts": 1, "max_concurrency": 1}, Console(quiet=True))


def test_a_run_becomes_a_row_without_the_warm_up(runner: Runner) -> None:
    runner.run("a", "http://127.0.0.1:1", [], "http://127.0.0.1:1/metrics")
    (found,) = runner.rows
    assert (found["label"], found["workload"]) == ("a", runner.workload)
    assert found["figures"]["verify_rounds"] == 3
    assert found["figures"]["transfer_share"] is None
    assert found["machine"]["cores"] > 0


def test_a_failed_run_says_so_and_leaves_no_row(runner: Runner) -> None:
    with pytest.raises(BenchFailed, match=r"status 1(.|\n)*no server"):
        runner.run("a", "http://127.0.0.1:1", ["fail"], "http://127.0.0.1:1/metrics")
    assert runner.rows == []


def test_servers_that_make_their_acceptance_up_are_not_measured(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = {"env_vars": {simulated.VARIABLE: "3"}}
    monkeypatch.setattr(simulated, "server_info", lambda url: [info])
    with pytest.raises(BenchFailed, match="makes its accept length up"):
        runner.run("a", "http://127.0.0.1:1", [], "http://127.0.0.1:1/metrics")
    assert runner.rows == []


def test_report_again(runner: Runner, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`--report` makes the files anew from what was kept, and sends nothing."""
    runner.run("a", "http://127.0.0.1:1", [], "http://127.0.0.1:1/metrics")
    assert bench_pd.main(["--report", "--into", str(runner.folder)]) == 0
    assert "3.333" in (runner.folder / "table.md").read_text()
    assert bench_pd.main(["--report", "--into", str(tmp_path / "empty")]) == 0
    assert "no runs in" in capsys.readouterr().out
