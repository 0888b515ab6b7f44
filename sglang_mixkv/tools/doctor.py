"""``python -m sglang_mixkv doctor``: what is installed here, and does it work. For issues.

Exit status: 0 when nothing is wrong, 1 otherwise, 2 for unusable arguments.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator

import msgspec

from sglang_mixkv import config
from sglang_mixkv.refusals import BACKENDS
from sglang_mixkv.tools import doctor_checks as checks
from sglang_mixkv.tools import waiting
from sglang_mixkv.tools.doctor_checks import Finding

SCHEMA = 2
SECTION = "data plane"


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        example = "10.0.0.1:18515 or [fd00::1]:18515"
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, as in {example}, got {text!r}")
    return host.strip("[]"), int(port)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_mixkv doctor",
        description="Check this host: versions, plugin, seams in SGLang, configuration, RDMA "
        "devices, and reads over the drafter's data plane, by default between two processes here. "
        "Between two hosts: --listen on prefill's, --peer on decode's.",
    )
    add = parser.add_argument
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--listen", metavar="PORT", type=int, help="wait for one --peer, 10 minutes")
    where.add_argument("--peer", metavar="HOST:PORT", type=_address, help="read from a --listen")
    add(
        "--disaggregation-transfer-backend", choices=BACKENDS, default=BACKENDS[0], dest="backend",
        help="the servers', which decides the data plane (default: %(default)s)",
    )  # fmt: skip
    add(
        checks.DEVICES_FLAG, metavar="DEVICES", default="", dest="devices",
        help="the servers' RDMA devices, as in mlx5_0,mlx5_1 (default: the transport's choice)",
    )  # fmt: skip
    add("--no-transfer", action="store_true", help="leave out the reads and what they would use")
    add("--no-seams", action="store_true", help="do not import SGLang")
    add("--json", action="store_true", help="print JSON instead of text")
    config.add_flags(parser)
    return parser


def findings(args: argparse.Namespace) -> Iterator[Finding]:
    """All checks, the quick ones first; without SGLang nothing else is worth a word."""
    yield from checks.versions()
    yield from checks.entry_point()
    if checks.version_of("sglang") == "none":
        return
    yield from checks.environment()
    yield from checks.rdma(args.devices)
    if not args.no_seams:
        with waiting("comparing SGLang's functions with those that the plugin relies on"):
            found = list(checks.seams())
        yield from found
    if not args.no_transfer:
        yield from data_plane(args)


def data_plane(args: argparse.Namespace) -> Iterator[Finding]:
    """Reads from a peer, by a peer, or between two processes here."""
    from sglang_mixkv.tools import doctor_read as reads  # numpy and zmq, which may be missing

    try:
        wire = reads.Wire(args.backend, args.devices, config.resolve(args))
        yield Finding(SECTION, "chosen", f"{wire.plane.name}: {wire.plane.why}")
        with waiting("reading slots of another process"):
            found = reads.result(wire, args.listen, args.peer)
    except (reads.ReadFailed, OSError, ValueError) as error:
        yield Finding(SECTION, "read", "failed", str(error))
        return
    yield Finding(SECTION, "memory", found.memory)
    yield checks.transport(wire.plane.name, found.used)
    value = f"{reads.READ - len(found.wrong)} of {reads.READ} slots right"
    if args.listen is None:
        where = f"from {args.peer[0]}" if args.peer else "between two processes here"
        rate = f"{found.bytes / found.seconds / 1e6:,.0f} MB/s"
        value = f"{found.bytes >> 20} MiB {where} in {1000 * found.seconds:.1f} ms, {rate}"
    problem = f"{', '.join(found.wrong)} arrived wrong" if found.wrong else ""
    yield Finding(SECTION, "read", value, problem)


def report(found: Iterable[Finding]) -> int:
    """Prints aligned lines as they are found, problems marked, and the verdict. Returns how many
    problems there are."""
    section, wrong = "", 0
    for one in found:
        title, section = "" if one.section == section else one.section, one.section
        mark = "!!" if one.problem else "  "
        print(f"{mark} {title:<13}  {one.name:<13}  {one.value}".rstrip(), flush=True)
        if one.problem:
            print(f"      {one.problem}")
            wrong += 1
    verdict = f"{wrong} problem{'s' * (wrong > 1)}, marked !!"
    print(f"\n{verdict if wrong else 'nothing is wrong'}")
    return wrong


def main(argv: list[str]) -> int:
    """Check, print, and return the exit status."""
    args = _parser().parse_args(argv)
    if not args.json:
        return int(report(findings(args)) > 0)
    found = list(findings(args))
    wrong = any(one.problem for one in found)
    answer = {"schema": SCHEMA, "ok": not wrong, "findings": found}
    print(msgspec.json.format(msgspec.json.encode(answer)).decode())
    return int(wrong)
