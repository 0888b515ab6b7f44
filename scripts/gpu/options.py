"""The command line of the check."""

from __future__ import annotations

import argparse
import secrets
from pathlib import Path

from parts import PARTS

ROOT = Path(__file__).resolve().parents[2]
DESCRIPTION = """What an NVIDIA GPU shows of the plugin, part by part.

Each part runs in a process of its own and has a verdict: passed, failed, or lacks what the machine
has not got. Nothing is fetched. Without a GPU each part lacks one, names what else it lacks, and
runs in small on the CPU, in a model of a GPU's streams; that shows nothing of a GPU.

parts:
"""
EPILOG = """exit status: 0, 1 if a part failed, 2 for unusable arguments. PYTHON names the
interpreter (default python3).
"""

# By device: sizes that take minutes on a GPU, and seconds on the CPU.
SIZES = {"cuda": {"repeats": 9, "transfer_mb": 192}, "cpu": {"repeats": 1, "transfer_mb": 2}}


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


def address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, got {text!r}")
    return text


def parser() -> argparse.ArgumentParser:
    width = max(len(part.name) for part in PARTS)
    long = " and ".join(part.name for part in PARTS if part.is_long)
    listed = "".join(f"  {part.name:<{width}}  {part.about}\n" for part in PARTS)
    made = argparse.ArgumentParser(
        prog="scripts/gpu.sh", description=DESCRIPTION + listed, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    add = made.add_argument
    add("--what-is-there", action="store_true",
        help="print what this machine has and which parts can run, and run none")  # fmt: skip
    add("--json", type=Path, metavar="FILE", default=ROOT / "results" / "gpu.json",
        help="write the verdicts and all figures here (default results/gpu.json)")  # fmt: skip
    add("--wheels", type=folder, metavar="FOLDER", action="append", default=[],
        help="unpack the wheels in it for the time of the run, without what they require; a "
        "folder without wheels is put on the path; can be repeated")  # fmt: skip
    add("--only", type=names, metavar="PART[,PART]", help="run these parts alone (default all)")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto",
        help="where to run (default auto: cuda where there is a GPU)")  # fmt: skip
    add("--gpu", type=index, default=0, metavar="N", help="number of the GPU (default 0)")
    add("--peer-gpu", type=index, metavar="N",
        help="mooncake, nixl: GPU of the process that packs (default the same)")  # fmt: skip
    add("--listen", type=address, metavar="HOST:PORT",
        help="pack for a check on another host, until interrupted; HOST is this one's "
        "address")  # fmt: skip
    add("--peer", type=address, metavar="HOST:PORT",
        help="mooncake, nixl: read from that host's --listen")  # fmt: skip
    add("--limit-s", type=number, default=600, metavar="S",
        help="seconds of all parts together (default 600)")  # fmt: skip
    add("--part-limit-s", type=number, default=240, metavar="S",
        help=f"seconds of each part but {long} (default 240)")  # fmt: skip
    add("--seed", type=index, metavar="N", help="of all random data (default a new one, printed)")
    for name, text in (
        ("repeats", "rows, mooncake, nixl: samples of each figure"),
        ("transfer_mb", "mooncake, nixl: MiB of a request"),
    ):
        sizes = f"(default {SIZES['cuda'][name]}, on the CPU {SIZES['cpu'][name]})"
        add("--" + name.replace("_", "-"), type=number, metavar="N", help=f"{text} {sizes}")
    add("--delay-ms", type=float, default=50.0, metavar="MS",
        help="order: how late the other stream's work ends (default 50)")  # fmt: skip
    add("--here", help=argparse.SUPPRESS)  # run this part in this process
    return made


def parse(argv: list[str]) -> argparse.Namespace:
    options = parser().parse_args(argv)
    options.seed = secrets.randbits(31) if options.seed is None else options.seed
    if options.peer_gpu is None:
        options.peer_gpu = options.gpu
    return options


def settle(options: argparse.Namespace, device: str) -> None:
    """What depends on the machine."""
    options.device = device
    for name, size in SIZES[device].items():
        if getattr(options, name) is None:
            setattr(options, name, size)
