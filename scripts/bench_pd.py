#!/usr/bin/env python3
"""Serving figures of a prefill/decode pair: no speculation, stock speculation, mixkv.

    bench_pd.py --demo --prefill "--tp 2" --decode "--tp 1"       starts the small pair on CPU
    bench_pd.py --router URL --label mixkv -- --dataset-name ...  one run against a deployment
    bench_pd.py --report                                          the tables of all runs so far

SGLang's own bench_serving sends and measures; options behind `--` go to it unchanged. Each run
appends a line to runs.jsonl, and bench_serving one to bench_serving.jsonl; table.md and plot.png
show the last run of each label.

--demo runs P1->D1 with stock speculation first, unless its figures are there: sizes are equal, so
stock is right. It exits with 1 where mixkv's accept length or output differs from that.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent / "bench"))

import pd_demo
import pd_report
from pd_figures import Record
from pd_run import BenchFailed, Runner

from mixkv_demo.pair import PAIRS
from mixkv_demo.processes import ServerDied


def _flags(text: str) -> tuple[str, ...]:
    return tuple(shlex.split(text))


def _variants(text: str) -> list[str]:
    if unknown := set(text.split(",")) - set(pd_demo.VARIANTS):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
    return text.split(",")


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line; ``further`` is what goes to bench_serving."""
    end = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--demo", action="store_true", help="start the servers of the small pair")
    mode.add_argument("--router", metavar="URL", help="a deployment that runs already")
    mode.add_argument("--report", action="store_true", help="tables of runs.jsonl, nothing sent")
    add = parser.add_argument
    add("--into", type=Path, default=Path("results/pd"), metavar="DIR", help="default results/pd")
    add("--num-prompts", type=int, default=16, help="default 16")
    add("--max-concurrency", type=int, default=1, help="requests at once (default 1)")
    router = parser.add_argument_group("with --router")
    router.add_argument("--label", help="name of this run")
    router.add_argument("--metrics", metavar="URL", help="a page with the prefill servers' metrics "
                        "(default: ROUTER/engine_metrics)")  # fmt: skip
    demo = parser.add_argument_group("with --demo")
    for name, flags in (("--prefill", ("--tp", "2")), ("--decode", ("--tp", "1"))):
        demo.add_argument(name, type=_flags, default=flags, metavar="FLAGS",
                          help=f'default "{shlex.join(flags)}"')  # fmt: skip
    demo.add_argument("--variants", type=_variants, default=list(pd_demo.VARIANTS),
                      help="default none,stock,mixkv")  # fmt: skip
    demo.add_argument("--pair", choices=PAIRS, default="mla", help="which models (default mla)")
    options = parser.parse_args(argv[:end])
    if options.router and not options.label:
        parser.error("--router needs --label")
    options.further = argv[end + 1 :]
    return options


def workload(options: argparse.Namespace) -> Record:
    """What two runs have in common that can be compared."""
    return {
        "prompts": options.num_prompts,
        "max_concurrency": options.max_concurrency,
        "pair": options.pair if options.demo else None,
        "bench_serving": options.further,
    }


def report(runner: Runner, console: Console) -> None:
    """The table on the terminal and in table.md, and plot.png."""
    rows = runner.rows
    if not rows:
        console.print(f"no runs in {runner.folder}")
        return
    table = pd_report.markdown(rows)
    console.print(table, markup=False, soft_wrap=True)
    (runner.folder / "table.md").write_text(table)
    try:
        pd_report.draw(rows, runner.folder / "plot.png")
    except ModuleNotFoundError as error:
        console.print(f"no plot.png: {error} (pip install 'sglang-mixkv[bench]')", markup=False)


def measure(options: argparse.Namespace, runner: Runner, console: Console) -> int:
    """The runs asked for, their report, and the exit status."""
    labels: list[str] = []
    if options.demo:
        labels = pd_demo.run(options, runner, console)
    elif options.router:
        url = options.router.rstrip("/")
        metrics = options.metrics or f"{url}/engine_metrics"
        runner.run(options.label, url, options.further, metrics)
    report(runner, console)
    found = pd_demo.verdicts(runner, labels)
    for good, text in found:
        console.print(text, style="" if good else "red", markup=False)
    return 0 if all(good for good, _ in found) else 1


def main(argv: list[str]) -> int:
    options = parse(argv)
    console = Console(highlight=False)
    try:
        return measure(options, Runner(options.into, workload(options), console), console)
    except (BenchFailed, ServerDied, TimeoutError) as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted: what this command started is stopped")
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
