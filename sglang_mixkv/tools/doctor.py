"""``python -m sglang_mixkv doctor``: what is installed here, and does it work. For issues.

Exit status: 0 when nothing is wrong, 1 otherwise, 2 for unusable arguments.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from sglang_mixkv import config
from sglang_mixkv.channel import planes
from sglang_mixkv.refusals import BACKENDS
from sglang_mixkv.tools import doctor_checks as checks
from sglang_mixkv.tools import doctor_child as child
from sglang_mixkv.tools import doctor_rdma as rdma
from sglang_mixkv.tools.doctor_checks import Finding
from sglang_mixkv.tools.doctor_child import READ, ReadFailed, Wire

SCHEMA = 1
SECTION = "data plane"


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 16:
        text = f"expected a port from 0 (any that is free) to 65535, got {text!r}"
        raise argparse.ArgumentTypeError(text)
    return int(text)


def _address(text: str) -> tuple[str, int]:
    found = re.fullmatch(r"(?:\[(.+)\]|([^:]+)):(\d+)", text)
    if not found or int(found[3]) >= 1 << 16:
        raise argparse.ArgumentTypeError(
            f"expected HOST:PORT, as in 10.0.0.1:18515 or [fd00::1]:18515, got {text!r}; PORT "
            "is the one that the other host's --listen names"
        )
    return found[1] or found[2], int(found[3])


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        """With the nearest option, where one is unknown."""
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            word = unknown.split()[0].partition("=")[0]
            message += config.nearest(word, self._option_string_actions)
        super().error(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m sglang_mixkv doctor",
        description="Check this host: versions, plugin, seams in SGLang, configuration, libraries, "
        "and reads over the drafter's data plane, by default between two processes here. Between "
        "two hosts: --listen on prefill's, --peer on decode's.",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--listen", metavar="PORT", type=_port, help="wait for one --peer, 10 minutes"
    )
    where.add_argument("--peer", metavar="HOST:PORT", type=_address, help="read from a --listen")
    parser.add_argument(
        "--backend", "--disaggregation-transfer-backend", choices=BACKENDS,
        help="the servers' transfer backend, which decides the data plane (default: mooncake, or "
        "nixl where that alone is installed)",
    )  # fmt: skip
    parser.add_argument(
        rdma.FLAG, metavar="DEVICES", type=rdma.names_of, default=[],
        help="the RDMA devices of the servers, as on their launch lines (default: SGLang's choice)",
    )  # fmt: skip
    parser.add_argument(
        "--selftest", action="store_true",
        help="only compare SGLang's functions with what the plugin relies on",
    )  # fmt: skip
    parser.add_argument(
        "--no-transfer", action="store_true", help="leave the reads out, and what they would use"
    )
    parser.add_argument("--no-seams", action="store_true", help="do not import SGLang")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    config.add_flags(parser)
    return parser


def findings(args: argparse.Namespace) -> Iterator[Finding]:
    """All checks, the quick ones first."""
    if args.selftest:
        yield from checks.seams()
        return
    yield from checks.versions()
    yield from checks.entry_point()
    yield from checks.configuration(args)
    yield from checks.environment()
    yield from checks.libraries()
    yield from rdma.findings(args.disaggregation_ib_device)
    if not args.no_seams:
        yield from checks.seams()
    if not args.no_transfer:
        yield from data_plane(args)


def data_plane(args: argparse.Namespace) -> Iterator[Finding]:
    """Reads from a peer, by a peer, or between two processes here."""
    only_nixl = checks.version_of(*checks.MOONCAKE) == "none" != checks.version_of("nixl")
    backend = args.backend or ("nixl" if only_nixl else "mooncake")
    try:
        settings = config.resolve(args)
        plane = planes.choose(backend, settings.data_plane)
        yield Finding(SECTION, "chosen", f"{plane.name}: {plane.why}")
        wire = Wire(backend, ",".join(args.disaggregation_ib_device), settings)
        found = child.result(wire, args.listen, args.peer)
    except (ReadFailed, OSError, ValueError) as error:
        yield Finding(SECTION, "read", "failed", str(error))
        return
    yield Finding(SECTION, "memory", found["memory"])
    yield rdma.transport(plane.name, found["used"])
    if args.listen is not None:
        wrong = "" if found["right"] == READ else "bytes arrived wrong; see the other side"
        yield Finding(SECTION, "read", f"{found['right']} of {READ} slots right", wrong)
    else:
        where = f"from {args.peer[0]}" if args.peer else "between two processes here"
        yield _rate(found, where)


def _rate(found: dict[str, Any], where: str) -> Finding:
    size, seconds = found["bytes"], found["seconds"]
    value = f"{size >> 20} MiB {where} in {1000 * seconds:.1f} ms, {size / seconds / 1e6:,.0f} MB/s"
    wrong = [f"byte {byte} of slot {slot}" for slot, byte in found["wrong"].items()]
    problem = f"{', '.join(wrong)} arrived wrong" if wrong else ""
    return Finding(SECTION, "read", value, problem)


def text(found: Iterable[Finding]) -> str:
    """The report: aligned lines, problems marked, a last line with the verdict."""
    found = list(found)
    sections = max(len(one.section) for one in found)
    names = max(len(one.name) for one in found)
    lines, section = [], ""
    for one in found:
        mark = "!!" if one.problem else "  "
        title = "" if one.section == section else one.section
        section = one.section
        lines.append(f"{mark} {title:<{sections}}  {one.name:<{names}}  {one.value}".rstrip())
        lines += [f"      {one.problem}"] * bool(one.problem)
    wrong = sum(bool(one.problem) for one in found)
    verdict = "nothing is wrong" if not wrong else f"{wrong} problem{'s' * (wrong > 1)}, marked !!"
    return "\n".join([*lines, "", verdict])


def main(argv: list[str]) -> int:
    """Check, print, and return the exit status."""
    args = _parser().parse_args(argv)
    found = list(findings(args))
    wrong = any(finding.problem for finding in found)
    if args.json:
        report = {"schema": SCHEMA, "ok": not wrong, "findings": found}
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        print(text(found))
    return int(wrong)
