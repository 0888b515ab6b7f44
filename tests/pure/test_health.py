"""Draft KV that is wrong is found, and healthy traffic raises no alarm."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from sglang_mixkv.decode import health
from sglang_mixkv.decode.health import BATCH, FORGET_S, PAST, WINDOW, Finding, Health

LONGEST = 16  # accept length
LEARNT = BATCH * (WINDOW + PAST.fewest)  # requests before a first verdict
KINDS = ("mixed", "drifting", "bursts")

rng_type = np.random.Generator
Lengths = np.ndarray


def kinds_of_prompts(rng: rng_type, number: int, kind: str) -> Lengths:
    """Of each request one of four. They come one by one, in shares that change, or in runs."""
    shares = np.array([0.3, 0.3, 0.2, 0.2])
    if kind == "bursts":
        runs = rng.geometric(1 / 5, number)
        return np.repeat(rng.choice(4, number, p=shares), runs)[:number]
    at = np.arange(number)[:, None]
    swing = 0.25 if kind == "drifting" else 0
    weights = shares * (1 + swing * np.sin(at / 1000 + np.array([0, 1.5, 3, 4.5])))
    bounds = (weights / weights.sum(1, keepdims=True)).cumsum(1)
    return (rng.uniform(size=number)[:, None] > bounds).sum(1).clip(0, 3)


def traffic(seed: int, number: int, kind: str, mean: float = 3.2) -> Lengths:
    """Accept lengths of healthy requests: skewed and long-tailed within each kind of prompt, most
    of all those of short answers. Their standard deviation is half of their mean."""
    rng = np.random.default_rng(seed)
    typical = np.array([2.1, 3.0, 4.6, 3.4])[kinds_of_prompts(rng, number, kind)]
    rounds = rng.lognormal(3.5, 1.2, number).clip(1)
    spread = np.hypot(0.38, 0.6 / np.sqrt(rounds))
    drift = 0.04 * np.sin(np.arange(number) / 700) if kind == "drifting" else 0
    found = typical * np.exp(rng.normal(drift, spread))
    return (found * mean / found.mean()).clip(1, LONGEST)


def given(one: Health, lengths: Lengths, state: str = "warm", now: float = 0.0) -> list[Finding]:
    return [f for length in lengths for f in one.add("a:1", state, float(length), now)]


def verdicts(one: Health, now: float = 0) -> dict[str, bool]:
    return {against: suspect for _, against, suspect in one.verdicts(now)}


def delay(seed: int, kind: str, before: float, after: float) -> int | None:
    """Requests from the fall to the alarm; None without one among a thousand."""
    one, healthy = Health(), 1500
    lengths = traffic(seed, healthy + 1000, kind, before)
    assert given(one, lengths[:healthy]) == []
    for number, length in enumerate((lengths[healthy:] * after / before).clip(1), 1):
        if found := given(one, length[None]):
            assert [(f.prefill, f.against) for f in found] == [("a:1", "past")]
            return number
    return None


# ---------------------------------------------------------------- found


@pytest.mark.parametrize(("before", "after"), [(3.9, 1.0), (3.0, 2.2)])
@pytest.mark.parametrize("seed", range(8))
def test_a_fall_is_found_within_200_requests(seed: int, before: float, after: float) -> None:
    number = delay(seed, "mixed", before, after)
    assert number is not None
    assert number <= 200


@pytest.mark.parametrize("kind", KINDS)
def test_a_collapse_is_found_within_100_in_any_traffic(kind: str) -> None:
    delays = [delay(seed, kind, 3.9, 1.0) for seed in range(8)]
    assert max(number or 1000 for number in delays) <= 100


def test_every_third_request_that_collapses_is_enough() -> None:
    one, lengths = Health(), traffic(1, 1700, "mixed", 3.9)
    lengths[1500::3] = 1
    assert [f.against for f in given(one, lengths)] == ["past"]


def test_wrong_from_the_first_request_on_is_found_beside_cold_ones() -> None:
    """It has no other past: nearly no draft is right, as with zeros."""
    one, lengths = Health(), 1 + np.random.default_rng(1).exponential(0.05, 2000)
    assert given(one, lengths[: 16 * BATCH], "cold") == []
    (found,) = given(one, lengths[: LEARNT + BATCH])
    assert (found.against, verdicts(one)) == ("cold", {"past": False, "cold": True})
    given(one, traffic(1, 2 * BATCH * WINDOW, "mixed", 3.0))
    assert verdicts(one) == {"past": False, "cold": False}


def test_warm_requests_that_gain_a_little_are_no_suspects() -> None:
    one, lengths = Health(), 1 + np.random.default_rng(1).exponential(0.05, 5000)
    given(one, lengths[: 100 * BATCH], "cold")
    assert given(one, lengths * 1.07) == []
    assert verdicts(one) == {"past": False, "cold": False}


# ---------------------------------------------------------------- no alarm


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_healthy_traffic_raises_no_alarm(seed: int, kind: str) -> None:
    """20,000 requests, a hundredth of them cold."""
    one, lengths = Health(), traffic(seed, 20_000, kind)
    for part in np.split(lengths, 200):
        assert given(one, part) == []
        assert given(one, part[:1].clip(2) / 2, "cold") == []
    assert verdicts(one)["past"] is False


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_healthy_traffic_raises_no_alarm_in_two_million_requests(kind: str) -> None:
    assert [s for s in range(100) if given(Health(), traffic(s, 20_000, kind))] == []


def test_a_fall_that_is_sure_but_small_is_none() -> None:
    one = Health()
    assert given(one, np.tile([3.0, 3.2], 1000)) == []
    assert given(one, np.tile([2.5, 2.7], 1000)) == []


def test_a_deep_fall_that_could_be_chance_is_none() -> None:
    """Hard prompts, as many as fill the window; before them, such runs came now and then."""
    one = Health()
    runs = [np.full(64, 4.0 if number % 3 else 1.5) for number in range(32)]
    assert given(one, np.concatenate(runs)) == []
    assert given(one, np.full(BATCH * WINDOW, 1.5)) == []
    assert one._servers["a:1"].length == pytest.approx(1.5)


def test_few_requests_are_not_judged() -> None:
    one = Health()
    given(one, np.full(LEARNT - 1, 4.0))
    assert verdicts(one) == {}
    given(one, np.full(1, 4.0))
    assert verdicts(one) == {"past": False}
    given(one, np.full(16 * BATCH - 1, 1.5), "cold")
    assert verdicts(one) == {"past": False}
    one = Health()
    given(one, np.full(16 * BATCH, 1.5), "cold")
    given(one, np.full(LEARNT - 1, 1.5))
    assert verdicts(one) == {}


@pytest.mark.parametrize(("t", "is_found"), [(5.5, False), (9.0, True)])
def test_few_batches_say_less(t: float, is_found: bool) -> None:
    """5.5 standard errors are enough of many, not of 16."""
    one, spread = Health(), 0.1
    cold = np.repeat(np.exp(0.5 + spread * (-1.0) ** np.arange(16)), BATCH)
    error = spread * (16 / 15 / 16) ** 0.5
    warm = np.full(LEARNT + BATCH, 1.05 * np.exp(0.5 - t * error))
    assert given(one, cold, "cold") == []
    assert bool(given(one, warm)) == is_found


def test_what_a_server_slowly_comes_to_is_its_past() -> None:
    one = Health()
    lengths = traffic(1, 60_000, "mixed", 4.0) * np.linspace(1, 0.6, 60_000)
    assert given(one, lengths.clip(1)) == []


def test_servers_are_not_compared_with_each_other() -> None:
    one = Health()
    for length in traffic(1, 3000, "mixed"):
        assert one.add("a:1", "warm", float(length), 0.0) == []
        assert one.add("b:2", "warm", float(max(1, length / 2)), 0.0) == []


# ---------------------------------------------------------------- afterwards


def test_a_suspect_stays_one_until_its_accept_length_is_back() -> None:
    """What it does meanwhile is not its past."""
    one = Health()
    given(one, traffic(1, 1500, "mixed", 3.9))
    assert len(given(one, traffic(2, 5000, "mixed", 1.2))) == 1
    assert verdicts(one) == {"past": True}
    given(one, traffic(3, 2 * BATCH * WINDOW, "mixed", 3.9))
    assert verdicts(one) == {"past": False}
    assert len(given(one, traffic(4, 200, "mixed", 1.2))) == 1


def test_after_a_day_what_a_suspect_does_is_its_past() -> None:
    one = Health()
    given(one, traffic(1, 1500, "mixed", 3.9))
    assert given(one, traffic(2, 200, "mixed", 2.0), now=5.0)
    given(one, traffic(3, 10, "mixed", 2.0), now=5.0 + FORGET_S)
    assert verdicts(one) == {"past": True}
    assert given(one, traffic(4, 2000, "mixed", 2.0), now=6.0 + FORGET_S) == []
    assert verdicts(one) == {"past": False}


def test_memory_is_bounded() -> None:
    one = Health()
    for state in ("warm", "cold"):
        given(one, traffic(1, 10_000, "mixed"), state)
    assert len(pickle.dumps(one)) < 2000


def test_the_deviate_of_t_is_that_of_the_same_probability() -> None:
    stats = pytest.importorskip("scipy.stats")
    for freedom in (7, 31, 127):
        for t in (-3.0, 1.0, 4.0, 7.0):
            exact = stats.norm.isf(stats.t.sf(t, freedom))
            assert health.normal(t, freedom) == pytest.approx(exact, rel=0.01)


def test_a_suspect_that_gets_no_more_requests_is_none_a_day_later() -> None:
    one = Health()
    lengths = traffic(1, 1800, "mixed", 3.9)
    lengths[1500:] = 1
    assert [f.against for f in given(one, lengths)] == ["past"]
    assert verdicts(one) == {"past": True}
    later = FORGET_S + 1
    assert verdicts(one, later) == {"past": False}
    given(one, lengths[:1], now=later)
    assert verdicts(one, later) == {"past": False}
