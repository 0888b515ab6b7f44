"""The pictures of docs/metrics.md, from real servers beside a real Prometheus.

    python scripts/docs/health.py            # run them (5 minutes), keep the figures, draw
    python scripts/docs/health.py --draw     # draw again what was kept

Two prefill servers of the small pair, TP 2, take turns before a decode server, TP 1. `b` has no
drafter: its requests start cold. `a` drafts; after a while its draft KV is corrupted, later right
again. The alerts have minutes where docs/alerts.yml has hours.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "bench"))

import chart  # noqa: E402

from mixkv_demo.launch import HOST, Topology, run_by  # noqa: E402
from mixkv_demo.pair import BOS, SEP, SYMBOLS, ask  # noqa: E402
from mixkv_demo.processes import Fleet  # noqa: E402
from mixkv_demo.prometheus import Course, Prometheus  # noqa: E402
from mixkv_demo.servers import one_cold  # noqa: E402
from sglang_mixkv.tools.status import Status, status  # noqa: E402
from sglang_mixkv.tools.status_pages import look  # noqa: E402

FIGURES = ROOT / "docs" / "figures"
CORRUPTING = ROOT / "tests" / "e2e" / "corrupting.py"
FEW, PAST, AT_ONCE, AT_MOST = 64, 768, 8, 800  # requests
RATE, STEP_S = "30s", 5.0
ENABLE = ("--enable-mixkv",)
_RATE = "sum by (prefill, state) (rate(sglang:mixkv_{}_total[" + RATE + "]))"
LENGTH = f"{_RATE.format('accepted_tokens')} / ({_RATE.format('verify_rounds')} > 0)"
TIMEOUT_S = 30.0
SUSPECT = "MixKVDraftSuspect"
HURRIED = {
    "2h": "1m", "[1d]": "[10m]", "for: 10m": "for: 10s", "for: 5m": "for: 1s"
}  # fmt: skip
"""Times of the rules -> those here."""
SHOWN = (
    "prefill-a:30000", "prefill-b:30000", "decode-00:30001", "10.0.10.10:8998", "10.0.10.20:8998",
)  # fmt: skip
WIDEST = 9  # numbers on an axis
WORDS = {"corrupted": "a is corrupted", "found": "the alert fires", "mended": "right again"}


def crowd(seed: int) -> Iterator[list[int]]:
    source = random.Random(seed)
    while True:
        yield [BOS, *source.sample(SYMBOLS, source.randint(24, 40)), SEP]


class Story:
    def __init__(self, fleet: Fleet) -> None:
        self._wrong = fleet.folder("wrong") / "now"
        rules, text = fleet.folder("rules") / "alerts.yml", ROOT / "docs" / "alerts.yml"
        hurried = text.read_text()
        for theirs, ours in HURRIED.items():
            hurried = hurried.replace(theirs, ours)
        rules.write_text(hurried)
        env = {"TEST_CORRUPT_WHILE": str(self._wrong), "SGLANG_MIXKV_PATIENCE": "20"}
        topology = Topology(("--tp", "2"), ("--tp", "1"), ENABLE, ENABLE, env=env)
        made = one_cold(fleet, "mla", topology, partial(run_by, script=CORRUPTING))
        self.deployment = made.behind_a_router(made.warm, made.cold)
        self._a_alone = made.behind_a_router(made.warm)
        servers = [f"{HOST}:{one.port}" for one in self.deployment.servers]
        self.a, self.b = (f"{HOST}:{port}" for _, port in (made.warm, made.cold))
        self.names = dict(zip([*servers, self.a, self.b], SHOWN, strict=True))
        self.prometheus = Prometheus(fleet, servers, rules)
        self.prometheus.wait_for_scrape()
        self._prompts, self.begin = crowd(1), time.time()

    def send(self, number: int, to_both: bool = True) -> None:
        """So many requests, half of them to each prefill server, or all to `a`; until scraped."""
        to = self.deployment if to_both else self._a_alone
        with ThreadPoolExecutor(AT_ONCE) as pool:
            prompts = [next(self._prompts) for _ in range(number)]
            answers = pool.map(partial(ask, to.url), prompts)
            to.watch(lambda: [*answers])
        self.prometheus.wait_for_scrape()

    def corrupt(self, now: bool) -> None:
        if now:
            self._wrong.touch()
        else:
            self._wrong.unlink()

    def seconds(self) -> int:
        return round(time.time() - self.begin)

    def status(self) -> Status:
        urls = [server.url for server in self.deployment.servers]
        first = look(urls, TIMEOUT_S)
        time.sleep(1)
        return status(first, look(urls, TIMEOUT_S))

    def screen(self) -> str:
        """Its text, with addresses as wide as those of these servers."""
        text = self.status().text()
        for address, name in self.names.items():
            text = text.replace(address, name)
        return "\n".join(line.rstrip() for line in text.splitlines())

    def firing(self) -> dict[str, str]:
        """Alerts that fire: name -> summary."""
        return {
            rule["name"]: alert["annotations"]["summary"]
            for rule in self.prometheus.rules()
            for alert in rule.get("alerts", ()) if alert["state"] == "firing"
        }  # fmt: skip

    def courses(self) -> dict[str, list[tuple[float, float]]]:
        """Accept length by prefill server and state; seconds from begin."""
        names = {self.a: "a", self.b: "b"}
        return {
            f"{names[one.labels['prefill']]} {one.labels['state']}": self._since_begin(one)
            for one in self.prometheus.range(LENGTH, self.begin, STEP_S)
        }

    def _since_begin(self, course: Course) -> list[tuple[float, float]]:
        return [(round(at - self.begin), round(value, 3)) for at, value in course.values]


def record(story: Story) -> dict[str, Any]:
    """The whole story, and what was seen of it. `requests`: to `a`, until its alert fired."""
    marks = {}
    story.send(FEW)
    screen = story.screen()
    story.send(PAST, to_both=False)
    story.send(FEW)
    marks["corrupted"] = story.seconds()
    story.corrupt(True)
    sent = 0
    while SUSPECT not in (firing := story.firing()) and sent < AT_MOST:
        story.send(FEW)
        sent += FEW // 2
    marks["found"] = story.seconds()
    story.send(FEW)
    story.corrupt(False)
    marks["mended"] = story.seconds()
    story.send(PAST // 2, to_both=False)
    story.send(FEW)
    alert = firing.get(SUSPECT, "").partition(": ")[2].replace(story.a, "a")  # without the model
    return {
        "requests": sent, "alert": alert, "marks": marks, "courses": story.courses(),
        "screen": screen,
    }  # fmt: skip


# ---------------------------------------------------------------- the picture


def draw(found: dict[str, Any]) -> str:
    courses, marks = found["courses"], found["marks"]
    most = max(at for values in courses.values() for at, _ in values)
    step = next(s for s in (60, 120, 240) if most / s <= WIDEST)
    xs = [(float(at), f"{at // 60}") for at in range(0, int(most) + step, step)]
    lines = [
        chart.Line(words, courses[name], colour, dots=False)
        for name, words, colour in (
            ("a warm", "prefill a, warm", chart.BLUE),
            ("b cold", "prefill b, cold (no_drafter)", chart.ORANGE),
        )
    ]  # fmt: skip
    times = [(marks[name], words) for name, words in WORDS.items()]
    title = "Accept length by prefill server"
    return chart.svg([chart.Lines(title, "minutes", xs, (1, 2, 3, 4), lines, marks=times)])


def pictures(found: dict[str, Any]) -> dict[str, str]:
    """By name of the file."""
    return {"health": draw(found), "status": chart.screen(found["screen"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draw", action="store_true", help="what was kept; nothing is run")
    kept = FIGURES / "health.json"
    if not parser.parse_args().draw:
        with Fleet() as fleet:
            kept.write_text(json.dumps(record(Story(fleet)), indent=1) + "\n")
    for name, picture in pictures(json.loads(kept.read_text())).items():
        (FIGURES / f"{name}.svg").write_text(picture)


if __name__ == "__main__":
    main()
