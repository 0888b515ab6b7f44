"""How often MixKVDraftSuspect of docs/alerts.yml is wrong, and how long it takes to be right.

The rule's formula runs in numpy over thousands of resampled servers, and promtool has to say the
same of a few of them. Each series is a prefill server at a decode server, looked at every STEP:
requests that end, their verify rounds and tokens, drawn in a row from a pool of requests. A request
has one of four kinds of prompt, which come mixed or in runs, and up to 7 drafts a round; answers
are of 200 tokens on average, a few of thousands. Traffic has days, nights, bursts and silences,
decode restarts, and prompts become harder and easier over hours.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

ROOT = Path(__file__).parents[2]
Array = np.ndarray[Any, np.dtype[Any]]

STEP = 5  # minutes
HOUR = 60 // STEP
WINDOW, PAST, FOR = 2 * HOUR, 24 * HOUR, 10 // STEP  # of the rule, in steps
LENGTH = 44 * HOUR
FALL = 36 * HOUR  # when a server falls that does
FALLS = ((3.9, 1.0), (3.0, 2.2))
DRAFTS = 7
GROUP = 4  # prefill servers of a decode server
ACCEPTED = np.array([0.60, 0.72, 0.86, 0.76])  # by kind of prompt: the next draft is right
SHARES = np.array([0.3, 0.3, 0.2, 0.2])
POOLS = ((0.8, 1), (1.2, 1), (1.2, 20), (1.6, 5))
"""Spread of the answers' lengths, and how many prompts of a kind come in a row."""
PER_HOUR = (5, 3600)


@dataclass(frozen=True)
class Counted:
    """Of each step: requests that ended, their rounds and their tokens. A row is a server."""

    requests: Array
    rounds: Array
    tokens: Array

    def __iter__(self) -> Iterator[Array]:
        yield from (self.requests, self.rounds, self.tokens)


@cache
def pool(spread: float, run: int, size: int = 1_000_000) -> tuple[Array, Array]:
    """Sums over so many requests in a row: rounds and tokens."""
    rng = np.random.default_rng([int(10 * spread), run])
    kinds = rng.choice(4, size // run + size // 10, p=SHARES)
    kinds = np.repeat(kinds, rng.geometric(1 / run, kinds.size))[:size]
    alpha = rng.beta(12 * ACCEPTED[kinds], 12 * (1 - ACCEPTED[kinds])).astype(np.float32)
    reached = alpha[:, None] ** np.arange(1, DRAFTS + 1, dtype=np.float32)  # P(as many are right)
    mean = 1 + reached.sum(1)
    second = (reached * (2 * np.arange(1, DRAFTS + 1) - 1)).sum(1)
    variance = np.maximum(second - (mean - 1) ** 2, 0)
    answers = rng.lognormal(np.log(200) - spread**2 / 2, spread, size).clip(4, 20_000)
    rounds = (answers / mean).clip(1)
    tokens = rounds * mean + np.sqrt(rounds * variance) * rng.standard_normal(size)
    tokens = tokens.clip(rounds, rounds * (DRAFTS + 1))
    return tuple(np.concatenate([[0], np.cumsum(one, dtype=float)]) for one in (rounds, tokens))


def traffic(rng: np.random.Generator, rows: int, per_hour: float | None) -> Array:
    """Requests that end in each step."""
    low, high = np.log(PER_HOUR)
    rate = np.exp(rng.uniform(low, high, (rows, 1))) if per_hour is None else per_hour
    hours = np.arange(LENGTH) / HOUR
    day = 1 + rng.uniform(0, 0.8, (rows, 1)) * np.sin(
        2 * np.pi * (hours + rng.uniform(0, 24, (rows, 1))) / 24
    )
    burst = np.where(rng.uniform(size=day.shape) < 0.01, rng.uniform(3, 10, day.shape), 1)
    begin = rng.integers(0, 5 * LENGTH, (rows, 1))  # of a silence, which one in five has
    silent = (np.arange(LENGTH) >= begin) & (np.arange(LENGTH) < begin + 4 * HOUR)
    return rng.poisson(rate / HOUR * day * burst) * ~silent


def servers(
    seed: int,
    rows: int,
    per_hour: float | None = None,
    drift: float = 0.1,
    fall: tuple[float, float] | None = None,
) -> Counted:
    """`drift`: how much harder and easier prompts become, at most. `fall`: of the accept length."""
    rng = np.random.default_rng(seed)
    requests = traffic(rng, rows, per_hour)
    end = requests.cumsum(1)
    begin = end - requests
    rounds, tokens = np.empty(end.shape), np.empty(end.shape)
    for number, (spread, run) in enumerate(POOLS):
        mine = slice(number, None, len(POOLS))
        sums = pool(spread, run)
        first = rng.integers(0, sums[0].size - 1, (len(end[mine]), 1))
        for found, total in zip((rounds, tokens), sums, strict=True):
            wraps, last = total[-1], total.size - 1
            to, since = first + end[mine], first + begin[mine]
            found[mine] = total[to % last] - total[since % last]
            found[mine] += wraps * (to // last - since // last)
    hours = np.arange(LENGTH) / HOUR
    period, phase = rng.uniform(12, 72, (rows, 1)), rng.uniform(size=(rows, 1))
    harder = rng.uniform(0, drift, (rows, 1)) * np.sin(2 * np.pi * (hours / period + phase))
    tokens = np.maximum(tokens * (1 + harder), rounds)
    if fall is not None:
        before, after = fall
        rounds *= tokens.sum(1, keepdims=True) / rounds.sum(1, keepdims=True) / before
        rounds[:, FALL:] *= before / after  # the answers are as long as before
        rounds = np.minimum(rounds, tokens)
    return Counted(requests.astype(float), rounds, tokens)


def counters(rng: np.random.Generator, counted: Counted) -> Counted:
    """What decode shows, which restarts now and then; what ends in that step is not counted."""
    restarts = rng.uniform(size=counted.requests.shape) < 1 / (24 * HOUR)
    last = np.maximum.accumulate(np.where(restarts, np.arange(LENGTH), -1), axis=1)
    sums = []
    for one in counted:
        total = np.where(restarts, 0, one).cumsum(1)
        gone = np.take_along_axis(total, last.clip(0), 1) * (last >= 0)
        sums.append(total - gone)
    return Counted(*sums)


# ---------------------------------------------------------------- the rule


def increase(counter: Array) -> Array:
    """Over WINDOW, as Prometheus has it: a value below the last one began at 0."""
    steps = np.diff(counter, axis=1, prepend=0)
    steps = np.where(steps < 0, counter, steps)
    total = np.pad(steps.cumsum(1), ((0, 0), (WINDOW, 0)))
    return total[:, WINDOW:] - total[:, :-WINDOW]


def past(recorded: Array) -> Array:
    """avg_over_time(recorded[1d] offset 2h)."""
    total = np.pad(recorded.cumsum(1), ((0, 0), (PAST + WINDOW + 1, 0)))
    end = np.arange(LENGTH) + PAST + 1
    number = np.minimum(np.arange(LENGTH) - WINDOW + 1, PAST + 1).clip(1)
    return (total[:, end] - total[:, end - PAST - 1]) / number


def fires(holds: Array) -> Array:
    """Where it has held for FOR."""
    padded = np.pad(holds, ((0, 0), (FOR, 0)))
    return np.logical_and.reduce([padded[:, i : i + LENGTH] for i in range(FOR + 1)])


def falls(base: float, length: Array, expected: Array, now: Array, then: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        return fires(length / expected < base - 2.5 * np.sqrt(1 / now + 1 / then))


def against_past(shown: Counted) -> Array:
    requests, rounds, tokens = map(increase, shown)
    with np.errstate(divide="ignore", invalid="ignore"):
        length, expected = tokens / rounds, past(tokens) / past(rounds)
    return falls(0.85, length, expected, requests, past(requests))


def against_others(shown: Counted) -> Array:
    """GROUP servers of one decode server, one after the other."""
    requests, rounds, tokens = map(increase, shown)
    others = [
        np.repeat(one.reshape(-1, GROUP, LENGTH).sum(1), GROUP, axis=0) - one
        for one in (requests, rounds, tokens)
    ]
    with np.errstate(divide="ignore", invalid="ignore"):
        length, expected = tokens / rounds, others[2] / others[1]
    return falls(0.5, length, expected, requests, others[0])


# ---------------------------------------------------------------- how often, how soon


def shown(seed: int, rows: int, **kinds: Any) -> Counted:
    return counters(np.random.default_rng([seed, 1]), servers(seed, rows, **kinds))


def test_healthy_servers_fire_nothing() -> None:
    """10,000 of them for 44 hours, with up to 10 % harder and easier prompts: one in 2,500 may."""
    alone = others = 0
    for seed in range(5):
        found = shown(seed, 2000)
        alone += against_past(found).any(1).sum()
        others += against_others(found).any(1).sum()
    print(f"false alarms of 10,000 servers: {alone} against their past, {others} against others")
    assert alone <= 4
    assert others == 0


def delays(per_hour: float, fall: tuple[float, float]) -> Array:
    """Minutes from the fall to the alarm; infinite for those that are not found in 8 hours."""
    found = against_past(shown(7, 400, per_hour=per_hour, drift=0.05, fall=fall))
    early, late = found[:, :FALL].any(1), found[:, FALL:]
    assert early.sum() <= 1
    return np.where(late.any(1), late.argmax(1) * float(STEP), np.inf)


@pytest.mark.parametrize(
    ("fall", "per_hour", "found", "median"),
    [
        ((3.9, 1.0), 20, 0.5, 180), ((3.9, 1.0), 60, 0.99, 60), ((3.9, 1.0), 600, 0.99, 30),
        ((3.9, 1.0), 3600, 0.99, 25),
        ((3.0, 2.2), 600, 0.7, 150), ((3.0, 2.2), 1200, 0.9, 120), ((3.0, 2.2), 3600, 0.99, 100),
    ],
)  # fmt: skip
def test_a_fall_is_found(
    fall: tuple[float, float], per_hour: float, found: float, median: float
) -> None:
    """`found`: at least this share; half of all within `median` minutes."""
    took = delays(per_hour, fall)
    share, half, most = np.isfinite(took).mean(), *np.quantile(took, (0.5, 0.95), method="higher")
    print(f"{fall}, {per_hour} an hour: {share:.1%} found, half in {half}, 95 % in {most} minutes")
    assert share >= found
    assert half <= median


def test_what_was_wrong_from_the_start_is_found_beside_others() -> None:
    """One in four, at 200 requests an hour."""
    found = servers(3, 400, per_hour=200)
    wrong = np.arange(400) % GROUP == 1
    found.rounds[wrong] = found.tokens[wrong]
    suspect = against_others(counters(np.random.default_rng(3), found))
    half, most = np.quantile(suspect[wrong].argmax(1) * STEP, (0.5, 0.95), method="higher")
    print(f"against others: half in {half}, 95 % in {most} minutes")
    assert suspect[wrong].any(1).all()
    assert half <= 120
    assert not suspect[~wrong].any()


# ---------------------------------------------------------------- the shipped rule is this formula


def page(found: Counted) -> Iterator[dict[str, str]]:
    """Decode servers of GROUP prefill servers each. Two TP ranks count the same requests."""
    names = ("finished_requests", "verify_rounds", "accepted_tokens")
    for name, rows in zip(names, found, strict=True):
        for number, row in enumerate(rows):
            values = " ".join(f"{value:.6f}" for value in np.concatenate([[0], row]))
            at = f'state="warm",model_name="m",prefill="p{number}",instance="d{number // GROUP}"'
            for rank in range(2):
                labels = f'{at},tp_rank="{rank}"'
                yield {"series": f"sglang:mixkv_{name}_total{{{labels}}}", "values": values}


def verdicts(firing: Array, against: str) -> Iterator[dict[str, Any]]:
    """What promtool is to find: of each server silence until a step before its first alarm, which
    fires two steps later; or silence to the end."""
    alarm = f'ALERTS{{alertname="MixKVDraftSuspect",alertstate="firing",against="{against}"'
    for number, row in enumerate(firing):
        mine = f'{alarm},prefill="p{number}"}}'
        first = int(row.argmax()) if row.any() else LENGTH
        silent = f"count by (prefill) (count_over_time({mine}[2d]))"
        yield {"expr": silent, "eval_time": f"{STEP * (first - 1)}m", "exp_samples": []}
        if first < LENGTH:
            one = {"labels": f'{{prefill="p{number}"}}', "value": 1}
            at = f"{STEP * (first + 2)}m"
            yield {"expr": f"count by (prefill) ({mine})", "eval_time": at, "exp_samples": [one]}


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool (scripts/prometheus.sh)"
)
def test_promtool_finds_the_same_servers(tmp_path: Path) -> None:
    """Some that fall, some that are wrong from the start, and none that are healthy."""
    kinds = [(fall, rate) for fall in (None, *FALLS) for rate in (60, 200, 600, 1800)]
    parts = [shown(n, 1, per_hour=rate, fall=fall) for n, (fall, rate) in enumerate(kinds)]
    for seed, rate in enumerate((150, 900)):
        wrong = servers(seed, GROUP, per_hour=rate)
        wrong.rounds[1] = wrong.tokens[1]
        parts.append(counters(np.random.default_rng(seed), wrong))
    found = Counted(*map(np.concatenate, zip(*parts, strict=True)))
    past, others = against_past(found), against_others(found)
    for firing in (past, others):
        assert 2 <= firing.any(1).sum() <= len(firing) - 3, "both kinds have to be there"
    test = {
        "interval": f"{STEP}m", "input_series": [*page(found)],
        "promql_expr_test": [*verdicts(past, "past"), *verdicts(others, "others")],
    }  # fmt: skip
    rules = {"rule_files": [str(ROOT / "docs" / "alerts.yml")], "evaluation_interval": f"{STEP}m"}
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump({**rules, "tests": [test]}))
    command = ["promtool", "test", "rules", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
