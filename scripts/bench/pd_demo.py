"""The demo's servers for bench_pd.py: small trained pair, CPU, one deployment at a time."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import pd_figures
from pd_run import Runner
from rich.console import Console

import mixkv_cpu
from mixkv_demo import pair
from mixkv_demo.launch import Topology, local_env
from mixkv_demo.processes import Fleet
from mixkv_demo.progress import StartDisplay
from mixkv_demo.servers import disaggregated

VARIANTS = ("none", "stock", "mixkv")
BASELINE = "P1->D1 stock"
"""Equal sizes: SGLang moves the drafter's KV right by itself."""

Flags = tuple[str, ...]


def attention_tp(flags: Sequence[str]) -> int:
    """``--tp`` divided by ``--dp``."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--tp", "--tp-size", "--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--dp", "--dp-size", "--data-parallel-size", type=int, default=1)
    known, _ = parser.parse_known_args(list(flags))
    return int(known.tp // known.dp)


def servers(prefill: Flags, decode: Flags, variant: str) -> Topology:
    """The servers of one variant, with SGLang's metrics switched on."""
    plugin = ("--enable-mixkv",) if variant == "mixkv" else ()
    sides = [(*flags, "--enable-metrics") for flags in (prefill, decode)]
    return Topology(*sides, plugin, plugin, speculative=variant != "none")


def deployments(
    prefill: Flags, decode: Flags, variants: Sequence[str], known: Sequence[str] = ()
) -> dict[str, Topology]:
    """What to run, by label: the baseline, unless its figures are known, then the variants."""
    name = f"P{attention_tp(prefill)}->D{attention_tp(decode)}"
    asked = {f"{name} {variant}": servers(prefill, decode, variant) for variant in variants}
    if BASELINE in asked or BASELINE in known:
        return asked
    return {BASELINE: servers(("--tp", "1"), ("--tp", "1"), "stock"), **asked}


def write_dataset(path: Path, name: str, count: int) -> list[str]:
    """The copy task's prompts as bench_serving's `custom` dataset, and the options that use it.

    The tokenizer adds <bos> and <sep> to both turns; as many tokens are asked for as the right
    answer has.
    """
    folder = pair.model_path(name)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    words = {token: word for word, token in vocabulary.items()}
    with path.open("w") as file:
        for prompt in pair.prompts(count, name):
            symbols = [words[token] for token in prompt[1:-1]]
            turns = [{"content": " ".join(symbols)}, {"content": " ".join(symbols[1:])}]
            file.write(json.dumps({"conversations": turns}) + "\n")
    return ["--dataset-name", "custom", "--dataset-path", str(path), "--model", str(folder)]


def run(options: argparse.Namespace, runner: Runner, console: Console) -> list[str]:
    """Start each deployment, send the prompts, stop it; the labels in order."""
    known = [row["label"] for row in runner.rows if row["workload"] == runner.workload]
    plan = deployments(options.prefill, options.decode, options.variants, known)
    further = write_dataset(runner.folder / "prompts.jsonl", options.pair, options.num_prompts)
    env = {**local_env(), **mixkv_cpu.launch_env()}
    for label, topology in plan.items():
        console.rule(f"[bold]{label}")
        with Fleet() as fleet:
            with StartDisplay(console) as display:
                deployment = disaggregated(fleet, options.pair, topology, display.update)
            url = deployment.url
            metrics = f"{deployment.prefill}/metrics"
            runner.run(label, url, [*further, *options.further], metrics, env, deployment.watch)
    return list(plan)


def verdicts(runner: Runner, labels: Sequence[str]) -> list[tuple[bool, str]]:
    """Each mixkv run against the baseline."""
    rows = {row["label"]: row for row in runner.rows}
    return [
        pd_figures.verdict(rows[label], rows[BASELINE])
        for label in labels
        if label.endswith(" mixkv")
    ]
