"""The accept-length alerts in docs/alerts.yml detect a fall in time, and stay silent for healthy
servers.

promtool evaluates the rules every STEP over simulated prefill servers: the requests that end, their
verify rounds and their tokens. A request has one of four kinds of prompts, which are mixed or come
in runs, and up to 7 draft tokens per round. Answers have 200 tokens on average, and a few have
thousands. Traffic varies between day and night and comes in bursts. Decode restarts. Prompts become
harder and easier over hours.
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
LENGTH, FALL = 44 * HOUR, 36 * HOUR  # in steps: the simulation, and the time of a server's fall
LEFT = 20 * HOUR  # when the plugin is removed from servers whose accept length does not need it
HEALTHY, EACH = {True: 120, False: 16}, {True: 6, False: 1}  # healthy servers; servers per fall
GROUP = 4  # prefill servers per decode server
PER_HOUR = (5, 3600)
ACCEPTED = np.array(
    [0.60, 0.72, 0.86, 0.76]
)  # probability by kind of prompt that the next draft token is accepted
SHARES = (0.3, 0.3, 0.2, 0.2)
DRAFTS = np.arange(1, 8)
SUSPECT, BESIDE = "MixKVDraftSuspect past", "MixKVDraftSuspect others"
FELL, LOST = "MixKVWarmAcceptLengthFell", "MixKVPluginLost"
FALLS = {  # accept length before, after, requests per hour -> minutes until the alert
    (3.9, 1.0, 60): 80, (3.9, 1.0, 600): 40, (3.9, 1.0, 3600): 30,
    (3.0, 2.2, 1200): 130, (3.0, 2.2, 3600): 110,
}  # fmt: skip


def server(
    rng: Rng, per_hour: float, fall: tuple[float, float] | None = None, drift: float = 0.1
) -> tuple[Array, ...]:
    """Simulate a server, and return per step the requests that ended, their rounds and their
    tokens. `drift`: how much harder and easier prompts become at most. `fall`: the accept length
    before and after FALL."""
    steps = np.arange(LENGTH)
    day = 1 + rng.uniform(0, 0.8) * np.sin(2 * np.pi * (steps / HOUR / 24 + rng.uniform()))
    burst = np.where(rng.uniform(size=LENGTH) < 0.01, rng.uniform(3, 10, LENGTH), 1)
    requests = rng.poisson(per_hour / HOUR * day * burst)
    at, number = np.repeat(steps, requests), requests.sum()
    run, spread = rng.choice([1, 5, 20]), rng.uniform(0.8, 1.6)
    right = ACCEPTED[np.repeat(rng.choice(4, number // run + 1, p=SHARES), run)[:number]]
    right = rng.beta(12 * right, 12 * (1 - right))
    mean = 1 + (right[:, None] ** DRAFTS).sum(1)  # tokens per round
    answers = rng.lognormal(np.log(200) - spread**2 / 2, spread, number).clip(4, 20_000)
    rounds = (answers / mean).clip(1)
    tokens = rounds * mean + np.sqrt(rounds) * 1.5 * rng.standard_normal(number)
    period, phase = rng.uniform(12, 72), rng.uniform()
    tokens *= 1 + rng.uniform(0, drift) * np.sin(2 * np.pi * (at / HOUR / period + phase))
    if fall is not None:
        rounds *= tokens.sum() / rounds.sum() / fall[0]
        rounds[at >= FALL] *= fall[0] / fall[1]  # the answers' lengths do not change
    tokens = tokens.clip(rounds, rounds * 8)
    return requests, *(np.bincount(at, one, LENGTH) for one in (rounds, tokens))


def total(row: Array, restart: int = LENGTH) -> Array:
    """Return the values of a counter that restarts at that step."""
    found = np.concatenate([[0], row.cumsum()])
    found[restart:] -= found[restart] if restart < LENGTH else 0
    return found


def line(series: str, values: Array, **labels: str) -> dict[str, str]:
    at = ",".join(f'{name}="{value}"' for name, value in labels.items())
    shown = " ".join("_" if value < 0 else f"{value:.1f}" for value in values)
    return {"series": f"sglang:{series}_total{{{at}}}", "values": shown}


def page(rng: Rng, name: str, decode: str, counted: tuple[Array, ...]) -> Iterator[dict[str, str]]:
    """Yield the series of a model's only decode server, which may restart once. Its two TP ranks
    count the same requests."""
    restart = rng.integers(0, 2 * LENGTH)
    names = ("finished_requests", "verify_rounds", "accepted_tokens")
    at = {"state": "warm", "model_name": decode, "prefill": name, "instance": decode}
    for series, row in zip(names, counted, strict=True):
        for rank in "01":
            yield line(f"mixkv_{series}", total(row, restart), **at, tp_rank=rank)


def lost(decode: str, counted: tuple[Array, ...], when: int, new: bool) -> Iterator[dict[str, str]]:
    """Yield SGLang's own series of a decode server that runs without the plugin from step `when`
    on, as the same instance or as a `new` one."""
    names = ("num_requests", "spec_verify_calls", "generation_tokens")
    at, before = {"model_name": decode, "engine_type": "decode"}, np.arange(LENGTH + 1) < when
    yield line("mixkv_rooms", np.where(before, 1, -1), **at, instance="old", state="warm")
    for series, row in zip(names, counted, strict=True):
        found = total(row, when)
        if new:
            yield line(series, np.where(before, found, -1), **at, instance="old")
            yield line(series, np.where(before, -1, found), **at, instance="new")
        else:
            yield line(series, found, **at, instance="old")


def fired(names: str, alert: str, steps: int, number: int) -> dict[str, Any]:
    """Expect that the alert has fired for `number` of the matching servers by that step. `alert`:
    its name, and its label `against`, if any."""
    kind, _, against = alert.partition(" ")
    what = "prefill" if against else "model_name"
    of = f'alertname="{kind}",alertstate="firing",against="{against}",{what}=~"{names}"'
    of_each = f"count by ({what}) (count_over_time(ALERTS{{{of}}}[2d]))"
    samples = [{"labels": "{}", "value": number}] if number else []
    return {"expr": f"count({of_each})", "eval_time": f"{STEP * steps}m", "exp_samples": samples}


def check(folder: Path, series: list[dict[str, str]], expected: list[dict[str, Any]]) -> str:
    """Return promtool's error output, or "" if all expectations hold."""
    test = {"interval": f"{STEP}m", "input_series": series, "promql_expr_test": expected}
    rules = {"rule_files": [str(ROOT / "docs" / "alerts.yml")], "evaluation_interval": f"{STEP}m"}
    file = folder / "test.yml"
    file.write_text(json.dumps({**rules, "tests": [test]}))  # JSON is parsed faster than YAML
    command = ["promtool", "test", "rules", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    return (done.stdout + done.stderr) * bool(done.returncode)


def healthy(number: int) -> tuple[Rng, tuple[Array, ...]]:
    rng = np.random.default_rng([4, number])
    return rng, server(rng, np.exp(rng.uniform(*np.log(PER_HOUR))))


def falling(fall: tuple[float, float, int], number: int) -> tuple[Rng, str, tuple[Array, ...]]:
    before, after, per_hour = fall
    kind = f"{before}-{after}-{per_hour}"
    rng = np.random.default_rng([*map(ord, kind), number])
    return rng, kind, server(rng, per_hour, (before, after), drift=0.05)


needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool (scripts/optional.sh)"
)


@needs_promtool
def test_alerts_fire_for_falling_and_not_for_healthy_servers(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Each fall raises an alert in time, and none fires earlier or for a healthy server. A server
    that was wrong from the start is detected within two hours, by comparison with other prefill
    servers of the same decode server. --full simulates more servers."""
    is_full = request.config.getoption("--full")
    series, expected = list[dict[str, str]](), list[dict[str, Any]]()
    for number in range(HEALTHY[is_full]):
        rng, found = healthy(number)
        series += page(rng, f"healthy-{number}", f"of-{number // GROUP}", found)
    for number in range(GROUP):
        rng = np.random.default_rng([5, number])
        requests, rounds, tokens = server(rng, 200)
        wrong = requests, tokens if number == 1 else rounds, tokens
        series += page(rng, f"beside-{number}", "beside", wrong)
    for fall, minutes in FALLS.items():
        for number in range(EACH[is_full]):
            rng, kind, found = falling(fall, number)
            series += page(rng, f"{kind}-{number}", f"alone-{kind}-{number}", found)
        for names, alert in ((f"{kind}-.*", SUSPECT), (f"alone-{kind}-.*", FELL)):
            expected += [
                fired(names, alert, FALL, 0),
                fired(names, alert, FALL + minutes // STEP, EACH[is_full]),
            ]
    for names, alert in (("healthy-.*", SUSPECT), ("healthy-.*", BESIDE), ("of-.*", FELL)):
        expected.append(fired(names, alert, LENGTH, 0))
    expected += [fired("beside-1", BESIDE, 2 * HOUR, 1), fired("beside-.*", BESIDE, LENGTH, 1)]
    assert check(tmp_path, series, expected) == ""


@needs_promtool
def test_an_alert_fires_if_the_loss_of_the_plugin_costs_drafts(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """SGLang's own metrics show the lower accept length, whether the server is restarted or
    replaced."""
    is_full = request.config.getoption("--full")
    series, expected = list[dict[str, str]](), list[dict[str, Any]]()
    for number in range(HEALTHY[is_full]):
        series += lost(f"well-{number}", healthy(number)[1], LEFT, number % 2 == 0)
    for fall, minutes in FALLS.items():
        for number in range(EACH[is_full]):
            _, kind, found = falling(fall, number)
            series += lost(f"lost-{kind}-{number}", found, FALL, number % 2 == 0)
        expected += [
            fired(f"lost-{kind}-.*", LOST, FALL, 0),
            fired(f"lost-{kind}-.*", LOST, FALL + minutes // STEP, EACH[is_full]),
        ]
    expected.append(fired("well-.*", LOST, LENGTH, 0))
    assert check(tmp_path, series, expected) == ""
