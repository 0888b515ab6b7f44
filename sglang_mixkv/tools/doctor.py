"""``python -m sglang_mixkv doctor``: what is installed here, and does it work. For issues.

Exit status: 0 when nothing is wrong, 1 otherwise, 2 for unusable arguments.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any

import msgspec

from sglang_mixkv import config
from sglang_mixkv.tools import doctor_checks as checks
from sglang_mixkv.tools import doctor_child as child
from sglang_mixkv.tools import doctor_diff as diff
from sglang_mixkv.tools import doctor_memory as memory
from sglang_mixkv.tools import doctor_rdma as rdma
from sglang_mixkv.tools import doctor_transfer as transfer
from sglang_mixkv.tools.doctor_checks import Finding

SCHEMA = 1


def _because(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """For argparse, which hides what a ValueError says."""

    def value(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return value


def _port(text: str) -> int:
    if not transfer.is_port(text):
        raise ValueError(f"expected a port from 0 (any that is free) to 65535, got {text!r}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_mixkv doctor",
        description="Check this host: versions, plugin, seams in SGLang, configuration, "
        "libraries, and a small real transfer; by default between two processes here. "
        "Between two hosts: --listen on one, --peer on the other.",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--listen", metavar="PORT", type=_because(_port), help="wait for one --peer, 10 minutes"
    )
    where.add_argument(
        "--peer", metavar="HOST:PORT", type=_because(transfer.split_address),
        help="send to a --listen",
    )  # fmt: skip
    parser.add_argument(
        "--backend", choices=memory.MEMORIES,
        help="SGLang's transfer backend to try (default: each that is installed; between two "
        "hosts mooncake)",
    )  # fmt: skip
    parser.add_argument(
        rdma.FLAG, metavar="DEVICES", type=_because(rdma.names_of), default=[],
        help="the RDMA devices of the servers, as on their launch lines (default: SGLang's choice)",
    )  # fmt: skip
    parser.add_argument(
        "--against", metavar="FOLDER",
        help="only compare the SGLang in this folder (pip install --no-deps --target FOLDER "
        "sglang==...) with its release, or with the newest that is supported; and its files with "
        "the installed SGLang's",
    )  # fmt: skip
    parser.add_argument(
        "--diff", action="store_true", help="with --against: print the files' unified diff instead"
    )
    parser.add_argument(
        "--no-transfer", action="store_true", help="leave the transfer out, and what it would use"
    )
    parser.add_argument("--no-seams", action="store_true", help="do not import SGLang")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    config.add_flags(parser)
    return parser


def findings(args: argparse.Namespace) -> Iterator[Finding]:
    """All checks, the quick ones first."""
    if args.against:
        yield from checks.seams(args.against)
        yield from diff.findings(args.against)
        return
    yield from checks.versions()
    yield from checks.entry_point()
    yield from checks.configuration(args)
    yield from checks.environment(flags=args)
    yield from checks.libraries()
    names, tries = args.disaggregation_ib_device, not args.no_transfer
    seen = rdma.look(names) if tries else rdma.Seen(rdma.devices(), ())
    over_mooncake = tries and "mooncake" in _backends(args)
    yield from rdma.findings(seen, names, over_mooncake=over_mooncake)
    if not args.no_seams:
        yield from checks.seams()
    if not args.no_transfer:
        for backend in _backends(args):
            yield from transfer_findings(args, transfer.Wire(backend, seen.way(), names))


def _backends(args: argparse.Namespace) -> list[str]:
    """The transfer backends to try."""
    if args.backend is not None:
        return [args.backend]
    both = args.listen is None and args.peer is None and checks.version_of("nixl") != "none"
    if both and checks.version_of(*checks.MOONCAKE) == "none":
        return ["nixl"]
    return ["mooncake", "nixl"] if both else ["mooncake"]


def transfer_findings(args: argparse.Namespace, wire: transfer.Wire) -> Iterator[Finding]:
    """The real transfer: to a peer, from a peer, or between two processes here."""
    section = f"transfer over {wire.way if wire.backend == 'mooncake' else memory.nixl_name()}"
    try:
        if args.listen is not None:
            right, asked = child.run_listener(args.listen, wire), len(transfer.SIZES)
            wrong = "" if right == asked else "bytes arrived wrong; see the other side"
            yield Finding(section, "received", f"{right} of {asked} blocks right", wrong)
            return
        blocks = (
            child.run_sender(args.peer[0], args.peer[1], wire)
            if args.peer
            else child.loopback(wire)
        )
    except (memory.TransferFailed, OSError, ValueError) as error:
        yield Finding(section, "failed", "-", str(error))
        return
    to = f"to {args.peer[0]}" if args.peer else "between two processes here"
    yield from (_block(section, to, block) for block in blocks)


def _block(section: str, to: str, block: dict[str, Any]) -> Finding:
    size, seconds, wrong = block["bytes"], block["seconds"], block["first_wrong"]
    name = f"{size >> 10:,} KiB {to}"
    value = f"{1000 * seconds:.1f} ms, {size / seconds / 1e6:,.0f} MB/s"
    return Finding(section, name, value, "" if wrong < 0 else f"byte {wrong} arrived wrong")


def text(found: Iterable[Finding]) -> str:
    """The report: sections of aligned lines, problems marked, a last line with the verdict."""
    found = list(found)
    lines: list[str] = []
    for section, members in groupby(found, key=lambda finding: finding.section):
        lines += [*_section(section, list(members)), ""]
    wrong = sum(bool(finding.problem) for finding in found)
    verdict = "nothing is wrong" if not wrong else f"{wrong} problem{'s' * (wrong > 1)}, marked !!"
    return "\n".join([*lines, verdict])


def _section(name: str, members: list[Finding]) -> Iterator[str]:
    width = max(len(member.name) for member in members)
    yield name
    for member in members:
        mark = "!!" if member.problem else "  "
        yield f"{mark} {member.name:<{width}}  {member.value}".rstrip()
        if member.problem:
            yield f"      {member.problem}"


def main(argv: list[str]) -> int:
    """Check, print, and say by the exit status whether something is wrong."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.diff:
        if not args.against:
            parser.error("--diff needs --against FOLDER")
        sys.stdout.write(diff.whole(args.against))
        return 0
    found = list(findings(args))
    wrong = any(finding.problem for finding in found)
    if args.json:
        report = {"schema": SCHEMA, "ok": not wrong, "findings": found}
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        print(text(found))
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
