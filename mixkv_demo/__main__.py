"""The demo: run a small trained pair in SGLang's engine, in three deployments.

    single   one server: the reference
    stock    prefill + decode behind SGLang's router, without the plugin
    mixkv    the same with --enable-mixkv on both sides

The demo needs no GPU, no download and no training. ``report.DISCLAIMER`` explains the figures.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console

from mixkv_demo import one_gpu, report
from mixkv_demo.client import Answer, NoAnswer
from mixkv_demo.launch import DEVICES, Topology
from mixkv_demo.pair import DRAFTERS, PAIRS, TARGETS, pair_name, prompts
from mixkv_demo.processes import Fleet, ServerDied
from mixkv_demo.progress import StartDisplay
from mixkv_demo.serve import serve
from mixkv_demo.servers import Deployment, Progress, disaggregated, single
from sglang_mixkv.__main__ import run
from sglang_mixkv.tools.client import RequestFailed

RUNS = ("single", "stock", "mixkv")
ENABLE = ("--enable-mixkv",)
BACKENDS = ("mooncake", "nixl")

Builder = Callable[[Fleet, Progress], Deployment]


def _runs(text: str) -> tuple[str, ...]:
    """Parse --runs; return the names in the order of RUNS."""
    names = text.split(",")
    if unknown := set(names) - set(RUNS):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
    if RUNS[0] not in names:
        raise argparse.ArgumentTypeError("'single' is required: the others are compared with it")
    return tuple(name for name in RUNS if name in names)


def _flags(text: str) -> tuple[str, ...]:
    return tuple(shlex.split(text))


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m mixkv_demo", description=__doc__, epilog=report.DISCLAIMER,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--prefill", type=_flags, default=("--tp", "2"), metavar="FLAGS",
        help='flags of the prefill server (default "--tp 2")')  # fmt: skip
    add("--decode", type=_flags, default=("--tp", "1"), metavar="FLAGS",
        help='flags of the decode server (default "--tp 1"); '
        'for example "--tp 2 --attn-dp-size 2"')  # fmt: skip
    add("--runs", type=_runs, default=RUNS, help="comma-separated (default single,stock,mixkv)")
    add("--pair", choices=TARGETS, default=TARGETS[0], help="the target (default mla)")
    add("--drafter", choices=DRAFTERS, default=DRAFTERS[0],
        help="the drafter (default eagle3, the only one for the gqa target)")  # fmt: skip
    add("--backend", choices=BACKENDS, default=BACKENDS[0],
        help="SGLang's transfer backend (default mooncake)")  # fmt: skip
    add("--device", choices=DEVICES, default=DEVICES[0],
        help="the servers' device (default cpu); on cuda, --base-gpu-id in --decode "
        "chooses decode's GPUs")  # fmt: skip
    add("--mixkv-args", type=_flags, default=(), metavar="FLAGS",
        help="more plugin flags, for both sides of the mixkv run")  # fmt: skip
    add("--repeat", type=int, default=1, metavar="N", choices=range(1, 10),
        help="send all prompts N times and show the last round (default 1); from the second "
        "round on, prefixes come from the caches")  # fmt: skip
    add("--serve", choices=RUNS, metavar="RUN",
        help="start one deployment, print one line of JSON when it is ready, and run until "
        "standard input ends")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write the figures to this file")
    add("--keep-logs", type=Path, metavar="DIR", help="keep the servers' logs in this folder")
    options = parser.parse_args(argv)
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.parent}")
    if pair_name(options.pair, options.drafter) not in PAIRS:
        parser.error(f"--drafter: the {options.pair} target has no {options.drafter} drafter")
    return options


def _builder(name: str, options: argparse.Namespace) -> Builder:
    """Return a function that starts the servers of one run."""
    pair = pair_name(options.pair, options.drafter)
    if name == "single":
        return lambda fleet, progress: single(fleet, pair, (), progress, options.device)
    plugin = (*ENABLE, *options.mixkv_args) if name == "mixkv" else ()
    topology = Topology(
        options.prefill, options.decode, plugin, plugin, backend=options.backend,
        device=options.device,
    )  # fmt: skip
    return lambda fleet, progress: disaggregated(fleet, pair, topology, progress)


def _version(package: str) -> str | None:
    """Return a package's version; None if the package, such as a transport, is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


class Demo:
    """The requested runs, made one after another, since two cores serve only one deployment."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self._options = options
        self._console = console
        self._reference: list[Answer | None] = []
        self._failed: list[str] = []
        self.runs: list[report.Run] = []

    def run(self, name: str) -> None:
        """Start the servers of one run, send all prompts, and stop the servers."""
        self._console.rule(f"[bold]{name}")
        keep = self._options.keep_logs
        with Fleet(keep / name if keep else None) as fleet:
            with StartDisplay(self._console) as display:
                deployment = _builder(name, self._options)(fleet, display.update)
            self.runs.append(self._measure(name, deployment))

    def _measure(self, name: str, deployment: Deployment) -> report.Run:
        """Send all prompts. Draft bytes are those of the last round only."""
        for _ in range(self._options.repeat):
            before = deployment.draft_bytes()
            answers = self._ask_all(name, deployment)
        if name == "single":
            self._reference = answers
        after = deployment.draft_bytes()
        draft = after.since(before) if after and before else after
        return report.summarise(name, answers, self._reference, draft)

    def _ask_all(self, name: str, deployment: Deployment) -> list[Answer | None]:
        """Return the answers to all prompts. If one prompt times out, send no more prompts."""
        asked = prompts(pair=pair_name(self._options.pair, self._options.drafter))
        answers: list[Answer | None] = []
        with suppress(NoAnswer):
            for prompt in asked:
                answers.append(self._ask(name, deployment, prompt))
        return [*answers, *[None] * (len(asked) - len(answers))]

    def _ask(self, name: str, deployment: Deployment, prompt: list[int]) -> Answer | None:
        """Send one prompt, print a line about it, and return its answer; None if it failed."""
        label = f"  {len(prompt) - 2:>3} symbols:"
        try:
            answer = deployment.ask(prompt)
        except RequestFailed as error:
            self._failed.append(f"{name}: {error}")
            self._console.print(f"{label} failed: {error}", style="red", markup=False)
            if isinstance(error, NoAnswer):
                raise
            return None
        restored = f", {answer.host_tokens} from the host cache" if answer.host_tokens else ""
        self._console.print(
            f"{label} {len(answer.tokens)} tokens in {answer.verify_rounds} verify rounds, "
            f"{answer.seconds:.1f} s{restored}"
        )
        return answer

    def conclude(self) -> int:
        """Print the table and the verdict, write the JSON file, and return the exit status."""
        options = self._options
        title = f"prefill {shlex.join(options.prefill)} -> decode {shlex.join(options.decode)}"
        title += f", {options.pair} target, {options.drafter} drafter, {options.backend}"
        self._console.print(report.table(self.runs, title))
        self._console.print(report.DISCLAIMER, style="italic")
        if options.json:
            report.write_json(options.json, self.runs, self._context())
        found = report.shortcomings(self.runs)
        for text in found:
            self._console.print(text, style="red")
        return 1 if found else 0

    def _context(self) -> dict[str, object]:
        """Return the measured flags and versions, and the failed requests."""
        names = ("prefill", "decode", "backend", "device", "mixkv_args", "pair", "drafter")
        packages = (
            "sglang", "sglang-mixkv", "sglang-router", "mooncake-transfer-engine-non-cuda", "nixl",
        )  # fmt: skip
        return {
            "topology": {name: getattr(self._options, name) for name in names},
            "versions": {package: _version(package) for package in packages},
            "failed_requests": self._failed,
        }


def _serve(options: argparse.Namespace, console: Console) -> int:
    """Run one deployment until standard input ends."""
    with Fleet(options.keep_logs) as fleet:
        with StartDisplay(console) as display:
            deployment = _builder(options.serve, options)(fleet, display.update)
        serve(deployment)
    return 0


def _compare(options: argparse.Namespace, console: Console) -> int:
    """Make all requested runs, and return the exit status."""
    demo = Demo(options, console)
    for name in options.runs:
        demo.run(name)
    return demo.conclude()


def main(argv: list[str] | None = None) -> int:
    """Run the demo. Return 0 if all outputs are identical (unless requests fail in the stock run),
    and mixkv's accept length is close to the single server's."""
    options = parse(argv)
    console = Console(highlight=False, stderr=options.serve is not None)
    if options.device == "cuda":
        if not (cards := one_gpu.cards()):
            console.print("no GPU: nvidia-smi or CUDA_VISIBLE_DEVICES lists none", style="red")
            return 1
        for reason in one_gpu.setup(cards).reasons:
            console.print(reason)
    try:
        return (_serve if options.serve else _compare)(options, console)
    except (ServerDied, TimeoutError) as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted: all servers have been stopped")
        return 130


if __name__ == "__main__":
    sys.exit(run(main))
