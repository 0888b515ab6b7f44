"""How often MixKVDraftSuspect of docs/alerts.yml is wrong, and how long it takes to be right.

promtool runs the shipped rule over simulated prefill servers, looked at every STEP: requests that
end, their verify rounds and tokens. A request has one of four kinds of prompt, which come mixed or
in runs, and up to 7 drafts a round; answers are of 200 tokens on average, a few of thousands.
Traffic has days, nights and bursts, decode restarts, and prompts become harder and easier over
hours.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .pages import ROOT

Array = np.ndarray[Any, np.dtype[Any]]
Rng = np.random.Generator

STEP = 5  # minutes
HOUR = 60 // STEP
LENGTH, FALL = 44 * HOUR, 36 * HOUR  # in steps; when a server falls that does
HEALTHY, EACH = {True: 120, False: 16}, {True: 6, False: 1}  # servers; those of each fall
GROUP = 4  # servers of one decode server
PER_HOUR = (5, 3600)
ACCEPTED = np.array([0.60, 0.72, 0.86, 0.76])  # by kind of prompt: the next draft is right
SHARES = (0.3, 0.3, 0.2, 0.2)
DRAFTS = np.arange(1, 8)
FALLS = {  # from, to, requests an hour -> found within so many minutes
    (3.9, 1.0, 60): 120, (3.9, 1.0, 600): 40, (3.9, 1.0, 3600): 30,
    (3.0, 2.2, 1200): 180, (3.0, 2.2, 3600): 120,
}  # fmt: skip


def server(
    rng: Rng, per_hour: float, fall: tuple[float, float] | None = None, drift: float = 0.1
) -> tuple[Array, ...]:
    """Of each step: requests that ended, their rounds and their tokens. `drift`: how much harder
    and easier prompts become, at most. `fall`: of the accept length."""
    steps = np.arange(LENGTH)
    day = 1 + rng.uniform(0, 0.8) * np.sin(2 * np.pi * (steps / HOUR / 24 + rng.uniform()))
    burst = np.where(rng.uniform(size=LENGTH) < 0.01, rng.uniform(3, 10, LENGTH), 1)
    requests = rng.poisson(per_hour / HOUR * day * burst)
    at, number = np.repeat(steps, requests), requests.sum()
    run, spread = rng.choice([1, 5, 20]), rng.uniform(0.8, 1.6)
    right = ACCEPTED[np.repeat(rng.choice(4, number // run + 1, p=SHARES), run)[:number]]
    right = rng.beta(12 * right, 12 * (1 - right))
    mean = 1 + (right[:, None] ** DRAFTS).sum(1)  # tokens of a round
    answers = rng.lognormal(np.log(200) - spread**2 / 2, spread, number).clip(4, 20_000)
    rounds = (answers / mean).clip(1)
    tokens = rounds * mean + np.sqrt(rounds) * 1.5 * rng.standard_normal(number)
    period, phase = rng.uniform(12, 72), rng.uniform()
    tokens *= 1 + rng.uniform(0, drift) * np.sin(2 * np.pi * (at / HOUR / period + phase))
    if fall is not None:
        rounds *= tokens.sum() / rounds.sum() / fall[0]
        rounds[at >= FALL] *= fall[0] / fall[1]  # the answers are as long as before
    tokens = tokens.clip(rounds, rounds * 8)
    return requests, *(np.bincount(at, one, LENGTH) for one in (rounds, tokens))


def page(rng: Rng, name: str, decode: str, counted: tuple[Array, ...]) -> Iterator[dict[str, str]]:
    """As decode shows it, which may restart once. Two TP ranks count the same requests."""
    restart = rng.integers(0, 2 * LENGTH)
    names = ("finished_requests", "verify_rounds", "accepted_tokens")
    for series, row in zip(names, counted, strict=True):
        total = np.concatenate([[0], row.cumsum()])
        total[restart:] -= total[restart] if restart < LENGTH else 0
        values = " ".join(f"{value:.1f}" for value in total)
        at = f'state="warm",model_name="m",prefill="{name}",instance="{decode}"'
        for rank in range(2):
            yield {"series": f'sglang:mixkv_{series}_total{{{at},tp_rank="{rank}"}}',
                   "values": values}  # fmt: skip


def fired(names: str, against: str, steps: int, number: int) -> dict[str, Any]:
    """So many servers with such names have fired by then."""
    alert = f'ALERTS{{alertname="MixKVDraftSuspect",alertstate="firing",against="{against}"'
    of_each = f'count by (prefill) (count_over_time({alert},prefill=~"{names}"}}[2d]))'
    samples = [{"labels": "{}", "value": number}] if number else []
    return {"expr": f"count({of_each})", "eval_time": f"{STEP * steps}m", "exp_samples": samples}


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool (scripts/prometheus.sh)"
)
def test_servers_that_fall_fire_and_healthy_ones_do_not(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Nor does the alarm come before the fall. What was wrong from the start is found beside the
    others of its decode server, within two hours. `--full` has more servers of each kind."""
    is_full = request.config.getoption("--full")
    series, expected = list[dict[str, str]](), list[dict[str, Any]]()
    for number in range(HEALTHY[is_full]):
        rng = np.random.default_rng([4, number])
        per_hour = np.exp(rng.uniform(*np.log(PER_HOUR)))
        found = server(rng, per_hour)
        series += page(rng, f"healthy-{number}", f"of-{number // GROUP}", found)
    for number in range(GROUP):
        rng = np.random.default_rng([5, number])
        requests, rounds, tokens = server(rng, 200)
        wrong = requests, tokens if number == 1 else rounds, tokens
        series += page(rng, f"beside-{number}", "beside", wrong)
    for (before, after, per_hour), minutes in FALLS.items():
        kind = f"{before}-{after}-{per_hour}"
        for number in range(EACH[is_full]):
            rng = np.random.default_rng([*map(ord, kind), number])
            found = server(rng, per_hour, (before, after), drift=0.05)
            series += page(rng, f"{kind}-{number}", f"alone-{kind}-{number}", found)
        expected += [
            fired(f"{kind}-.*", "past", FALL, 0),
            fired(f"{kind}-.*", "past", FALL + minutes // STEP, EACH[is_full]),
        ]
    expected += [fired("healthy-.*", against, LENGTH, 0) for against in ("past", "others")]
    expected += [fired("beside-1", "others", 2 * HOUR, 1), fired("beside-.*", "others", LENGTH, 1)]
    test = {"interval": f"{STEP}m", "input_series": series, "promql_expr_test": expected}
    rules = {"rule_files": [str(ROOT / "docs" / "alerts.yml")], "evaluation_interval": f"{STEP}m"}
    file = tmp_path / "test.yml"
    file.write_text(json.dumps({**rules, "tests": [test]}))  # which YAML's parser reads faster
    command = ["promtool", "test", "rules", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
