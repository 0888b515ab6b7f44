"""The command line of the check."""

from __future__ import annotations

import argparse
import secrets
from pathlib import Path

from parts import PARTS

ROOT = Path(__file__).resolve().parents[2]
DESCRIPTION = """What an NVIDIA GPU shows of the plugin, part by part.

Each part runs in a process of its own and has a verdict: passed, failed, or lacks what the machine
has not got. Nothing is fetched. Without a GPU, parts run on the CPU as far as they go, with small
sizes and the copy kernel in Triton's interpreter; that says nothing of a GPU.

parts:
"""
EPILOG = """exit status: 0, 1 if a part failed (with --strict also if it lacks something), 2 for
unusable arguments. PYTHON names the interpreter (default python3); it needs numpy and PyTorch.
"""

# By device: sizes that take minutes on a GPU, and seconds on the CPU.
SIZES = {
    "cuda": {"rounds": 3, "transfer_mb": 256, "repeats": 9},
    "cpu": {"rounds": 1, "transfer_mb": 4, "repeats": 3},
}


def names(text: str) -> list[str]:
    """The value of --only."""
    found, known = text.split(","), [part.name for part in PARTS]
    if unknown := [name for name in found if name not in known]:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)} (of {', '.join(known)})")
    return found


def folder(text: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text}")
    return path


def number(text: str, least: int = 1) -> int:
    """A whole number, at least that."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number from {least} on, got {text!r}")
    return int(text)


def index(text: str) -> int:
    """A number of a GPU, or a seed."""
    return number(text, 0)


def parser() -> argparse.ArgumentParser:
    width = max(len(part.name) for part in PARTS)
    listed = "".join(f"  {part.name:<{width}}  {part.about}\n" for part in PARTS)
    made = argparse.ArgumentParser(
        prog="scripts/gpu.sh", description=DESCRIPTION + listed, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    add = made.add_argument
    add("--json", type=Path, metavar="FILE", default=ROOT / "results" / "gpu.json",
        help="write the verdicts and all figures here (default results/gpu.json)")  # fmt: skip
    add("--table", type=Path, metavar="FILE", help="write Markdown tables for the docs here")
    add("--wheels", type=folder, metavar="FOLDER", action="append", default=[],
        help="install the wheels in it into a temporary environment (pip --no-index --no-deps); "
        "a folder without wheels is put on the path; can be repeated")  # fmt: skip
    add("--only", type=names, metavar="PART[,PART]", help="run these parts alone (default all)")
    add("--strict", action="store_true", help="count what a part lacks as a failure")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto",
        help="where to run (default auto: cuda where there is a GPU)")  # fmt: skip
    add("--gpu", type=index, default=0, metavar="N", help="number of the GPU (default 0)")
    add("--peer-gpu", type=index, metavar="N",
        help="number of the GPU that the transfers write to (default the last one)")  # fmt: skip
    add("--limit-s", type=number, default=600, metavar="S",
        help="seconds of all parts together (default 600)")  # fmt: skip
    add("--part-limit-s", type=number, default=240, metavar="S",
        help="seconds of each part but the demo (default 240)")  # fmt: skip
    add("--seed", type=index, metavar="N", help="of all random data (default a new one, printed)")
    _add_sizes(made)
    made.add_argument("--here", help=argparse.SUPPRESS)  # run this part in this process
    return made


def _add_sizes(made: argparse.ArgumentParser) -> None:
    add = made.add_argument_group("sizes").add_argument
    for name, text in (
        ("rounds", "kernels: times each width is tried"),
        ("repeats", "bandwidth, flashinfer: samples of each figure"),
        ("transfer_mb", "mooncake, nixl: MiB of one write"),
    ):
        normally, cut = SIZES["cuda"][name], SIZES["cpu"][name]
        add("--" + name.replace("_", "-"), type=number, metavar="N",
            help=f"{text} (default {normally}, on the CPU {cut})")  # fmt: skip
    add("--tokens", type=number, default=1 << 17, metavar="N",
        help="bandwidth, flashinfer: tokens at most (default 131072)")  # fmt: skip
    add("--share", type=float, default=0.8, metavar="X",
        help="bandwidth: of the device's own copy, least that passes (default 0.8)")  # fmt: skip
    add("--delay-ms", type=float, default=50.0, metavar="MS",
        help="order: how late the other stream's work ends (default 50)")  # fmt: skip
    add("--leave-mb", type=number, default=64, metavar="N",
        help="memory: MiB that are left (default 64)")  # fmt: skip
    add("--buffer-mb", type=number, default=256, metavar="N",
        help="memory: MiB of the pack buffer (default 256)")  # fmt: skip


def parse(argv: list[str]) -> argparse.Namespace:
    made = parser()
    options = made.parse_args(argv)
    if options.buffer_mb <= options.leave_mb:
        made.error("--buffer-mb has to be more than --leave-mb")
    options.seed = secrets.randbits(31) if options.seed is None else options.seed
    return options


def settle(options: argparse.Namespace, device: str, gpus: int) -> None:
    """What depends on the machine."""
    options.device = device
    if options.peer_gpu is None:
        options.peer_gpu = max(0, gpus - 1)
    for name, size in SIZES[device].items():
        if getattr(options, name) is None:
            setattr(options, name, size)
