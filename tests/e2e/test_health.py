"""A prefill server that sends wrong draft KV is found by decode, by its requests alone."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from mixkv_demo.launch import run_by
from mixkv_demo.pair import BOS, SEP, SYMBOLS, ask
from mixkv_demo.processes import Fleet
from mixkv_demo.servers import Deployment
from sglang_mixkv.decode.health import BATCH, PAST, WINDOW
from sglang_mixkv.tools import status

from .conftest import START_TIMEOUT, TP1, TP2, Case, pair_with
from .test_metrics import METRICS, at_rest, finished, page, series

pytestmark = [START_TIMEOUT, pytest.mark.full]

CORRUPTING = Path(__file__).with_name("corrupting.py")
LEARNT = BATCH * (WINDOW + PAST.fewest)
AT_ONCE, AT_MOST = 8, 200
SUSPECT = "draft_suspect", "past"


def crowd(seed: int) -> Iterator[list[int]]:
    source = random.Random(seed)
    while True:
        yield [BOS, *source.sample(SYMBOLS, source.randint(24, 40)), SEP]


def send(deployment: Deployment, prompts: Iterator[list[int]], number: int) -> str:
    """So many requests; decode's page once they are counted."""
    before = finished(page(deployment))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = pool.map(partial(ask, deployment.url), [next(prompts) for _ in range(number)])
        deployment.watch(lambda: [*answers])
    return at_rest(deployment, before + number)


def test_a_peer_whose_draft_kv_is_corrupted_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Case("suspect", (*TP2, *METRICS), (*TP1, *METRICS))
    case.skip_unserved()
    wrong, prompts = tmp_path / "wrong", crowd(1)
    with Fleet() as fleet:
        prefill = partial(run_by, script=CORRUPTING, env={"TEST_CORRUPT_WHILE": str(wrong)})
        deployment = pair_with(fleet, case.topology(), prefill=prefill)
        at_rest(deployment, 1)
        begin = time.monotonic()
        found = series(send(deployment, prompts, LEARNT + 4 * BATCH))
        print(f"{LEARNT + 4 * BATCH} requests in {time.monotonic() - begin:.0f} s")
        assert (SUSPECT in found, found[SUSPECT]) == (True, 0)
        wrong.touch()
        sent = 0
        while not found[SUSPECT] and sent < AT_MOST:
            found = series(send(deployment, prompts, BATCH))
            sent += BATCH
        print(f"found after {sent} requests")
        assert found[SUSPECT] == 1
        (log,) = (one.log.read_text() for one in fleet._servers if one.name == "decode")
        (line,) = [text for text in log.splitlines() if "MIXKV-PAIR-08" in text]
        assert "a fifth less than they did" in line
        urls = [server.url for server in deployment.servers]
        assert status.main([*urls, "--seconds", "0.1"]) == 1
        shown = capsys.readouterr().out
        assert "SUSPECT" in shown
        assert "MIXKV-PAIR-08" in shown
        print(shown)
        wrong.unlink()
        assert series(send(deployment, prompts, 2 * BATCH * WINDOW))[SUSPECT] == 0
        assert status.main([*urls, "--seconds", "0.1"]) == 0
