"""The tables of what works with what, against the rules that a server applies at its start.

Each span of a first cell is a launch line's part: flags, or a variable. Each release's rules, with
each transport, refuse it where the tables say so, and nowhere else.
"""

from __future__ import annotations

import re
import shlex
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import pytest

from mixkv_demo.pair import model_flags, model_path
from sglang_mixkv import refusals
from sglang_mixkv.engine.releases import RELEASES, Release, here
from sglang_mixkv.errors import MixKVError
from sglang_mixkv.tools.plan_line import parse, split
from sglang_mixkv.tools.plan_server import read

from ..e2e import staging_on_cpu
from ..e2e.conftest import CASES, Case
from ..e2e.test_hicache import HOST_CASES
from ..e2e.test_pairs import STAGED_CASES
from .pages import ROOT

DRAFTER = model_path("mla").parent / "drafter"
HOST_RECEIVE = "--disaggregation-decode-host-receive-threshold"
WORDS = {"engine", "ring", "reading", "refused"}
BY_TRANSPORT = {refusals.SINGLE_SERVER}  # no server of a pair
PAGE = (ROOT / "docs" / "compatibility.md").read_text()
SECTION = PAGE.partition("\n## What works with what\n")[2]


@dataclass(frozen=True)
class Cell:
    """What a table says of a part of a launch line, with one release and transport."""

    part: str
    version: str
    backend: str
    word: str

    @property
    def drafts(self) -> bool:
        return not self.part.endswith("no drafter")

    @property
    def words(self) -> list[str]:
        return shlex.split(self.part.removesuffix(", no drafter"))

    def release(self) -> Release:
        return next(release for release in RELEASES if release.version == self.version)

    def lines(self) -> list[tuple[str, str]]:
        """Of such a server of either side."""
        variables = [word for word in self.words if word.startswith("SGLANG_")]
        flags = [word for word in self.words if word not in variables]
        drafter = ["--speculative-algorithm", "EAGLE3"] if self.drafts else []
        transport = ["--disaggregation-transfer-backend", self.backend]
        both = [*drafter, *transport, *flags, "--enable-mixkv"]
        return [
            (role, shlex.join([*variables, "python", "--disaggregation-mode", role, *both]))
            for role in ("prefill", "decode")
        ]

    def servers(self) -> list[tuple[Namespace, dict[str, str]]]:
        """Their flags as SGLang's parser has them, and their variables."""
        found = [split(line) for _, line in self.lines()]
        try:
            servers = [(parse(flags), environ) for environ, flags in found]
        except MixKVError as error:
            pytest.skip(f"SGLang {here().version}: {error}")
        if HOST_RECEIVE not in self.words:  # SGLang's default differs by release
            for args, _ in servers:
                setattr(args, HOST_RECEIVE[2:].replace("-", "_"), self.release().no_host_receive)
        return servers

    def refused(self) -> list[list[str]]:
        rules = self.release().rules
        return [refusals.broken(rules, args, environ) for args, environ in self.servers()]


def rows(head: str) -> Iterator[list[str]]:
    """The cells of the table that starts so."""
    lines = SECTION.partition(f"\n| {head} | ")[2].partition("\n\n")[0].splitlines()
    for line in [f"| {head} | {lines[0]}", *lines[2:]]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


def parts(cell: str) -> list[str]:
    ending = ", no drafter" if cell.endswith(", no drafter") else ""
    return [span + ending for span in re.findall(r"`([^`]+)`", cell)]


def cells() -> Iterator[Cell]:
    head, *served = rows("with")
    for row in served:
        for part, (column, word) in product(parts(row[0]), zip(head[1:], row[1:], strict=True)):
            releases, _, backend = column.rpartition(", ")
            for version in releases.split(" and "):
                yield Cell(part, version, backend.lower(), word)
    for row in list(rows("refused"))[1:]:
        for part in parts(row[0]):
            for release in RELEASES:
                yield Cell(part, release.version, "mooncake", "refused")


CELLS = list(cells())


@pytest.mark.parametrize("cell", CELLS, ids=lambda c: f"{c.part} {c.version} {c.backend}")
def test_the_rules_do_what_the_tables_say(cell: Cell) -> None:
    assert cell.word in WORDS
    for reasons in cell.refused():
        assert bool(reasons) == (cell.word == "refused"), reasons


def test_every_release_with_its_transports_has_a_column() -> None:
    served = {(cell.version, cell.backend) for cell in CELLS if cell.word != "refused"}
    assert served == {(release.version, name) for release in RELEASES for name in refusals.BACKENDS}


def test_every_rule_has_a_row() -> None:
    rules = {rule for release in RELEASES for rule in release.rules}
    hit = {rule for cell in CELLS for args, _ in cell.servers() for rule in rules if rule[1](args)}
    assert rules - hit - BY_TRANSPORT == set()


def proven(cell: Cell, case: Case) -> bool:
    """Whether this case of the real engine has all of the cell's flags."""
    flags = {*case.prefill, *case.decode, *case.shared, *model_flags(case.pair)}
    if case in STAGED_CASES:
        flags |= {f"{name}={value}" for name, value in staging_on_cpu.ENV.items()}
    return set(cell.words) <= flags and case.backend == cell.backend


@pytest.mark.parametrize("cell", [c for c in CELLS if c.word == "engine"], ids=lambda c: c.part)
def test_what_ran_in_the_engine_is_a_case_there(cell: Cell) -> None:
    """Of an older release: one that scripts/test.sh names for it."""
    cases = [case for case in CASES_OF_THE_ENGINE if proven(cell, case)]
    if cell.version != RELEASES[-1].version:
        script = (ROOT / "scripts" / "test.sh").read_text()
        cases = [case for case in cases if f" {case.name} " in script.replace('"', " ")]
    assert cases


CASES_OF_THE_ENGINE: list[Case] = [
    case if isinstance(case, Case) else case.values[0]
    for case in (*CASES, *HOST_CASES, *STAGED_CASES)
]


@pytest.mark.parametrize(
    "cell",
    [c for c in CELLS if (c.version, c.backend) == (here().version, "mooncake")],
    ids=lambda c: c.part,
)
def test_the_plan_refuses_the_same(cell: Cell) -> None:
    """With the installed SGLang's rules, on what SGLang makes of the line."""
    model = f" --model-path {model_path('mla')} --speculative-draft-model-path {DRAFTER}"
    for (role, line), reasons in zip(cell.lines(), cell.refused(), strict=True):
        server = read(role, line + model)
        assert server.enabled
        assert len([text for text in server.refused if " is not supported" in text]) == len(reasons)
