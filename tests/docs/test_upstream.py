"""The patches of upstream/: each applies, its own test passes with it and fails without, and what
it ends of README's reasons for the plugin is right in the ring of SGLang's own managers.

They apply to the newest supported release alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rig.process.patched import NAMES, ROOT, UPSTREAM, own_tests, patched, python, touched

from sglang_mixkv.engine.releases import SUPPORTED_SGLANG, sglang_version

pytestmark = pytest.mark.skipif(
    sglang_version() != SUPPORTED_SGLANG[-1], reason="patches for the newest supported SGLang"
)
# These two decide otherwise over the same pairs: one refuses what the other moves.
REFUSES, MOVES = "refuse-draft-layout", "draft-heads"
TOGETHER = [name for name in NAMES if name != REFUSES]
ON_PATCHED = ROOT / "tests" / "protocol" / "on_patched.py"
ENDS = {"draft-heads": (22, 20), "dcp-hybrid-draft": (4, 1)}
"""By patch: how many pairs of on_patched.py it is tried with, and how many are wrong without."""


def run_tests(site: Path, *names: str) -> tuple[int, str]:
    files = [file for name in names for file in own_tests(name)]
    done = python(site, "-m", "unittest", *files)
    return done.returncode, done.stderr


def ring(site: Path, *options: str) -> str:
    done = python(
        site, "-m", "pytest", "-q", "-p", "no:cacheprovider", ON_PATCHED, *options, cwd=ROOT
    )
    return done.stdout.splitlines()[-1]


def test_all_apply_together(tmp_path: Path) -> None:
    patched(tmp_path / "site", NAMES)


def test_each_applies_alone_and_has_a_test(tmp_path: Path) -> None:
    for name in NAMES:
        patched(tmp_path / name, [name])
        assert own_tests(name)
        assert any(file.startswith("python/") for file in touched(name))


def test_own_tests_pass_with_the_patches(tmp_path: Path) -> None:
    status, said = run_tests(patched(tmp_path / "site", TOGETHER), *TOGETHER)
    assert status == 0, said


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_an_own_test_passes_with_its_patch_alone(name: str, tmp_path: Path) -> None:
    status, said = run_tests(patched(tmp_path / "site", [name]), name)
    assert status == 0, said


def test_each_own_test_fails_without_its_patch(tmp_path: Path) -> None:
    status, said = run_tests(patched(tmp_path / "site", [], tests_of=NAMES), *NAMES)
    assert status == 1, said
    failed = {*re.findall(r"(?m)^(?:FAIL|ERROR): .*?\bregistered\.\S*?\.(test_\w+)\.", said)}
    assert failed == {Path(file).stem for name in NAMES for file in own_tests(name)}


def test_the_cause_is_ended_in_the_ring(tmp_path: Path) -> None:
    """22 pairs over stock managers, in which `plan` says that the plugin is not needed."""
    said = ring(patched(tmp_path / "site", [MOVES]), "-k", "draft_heads")
    assert re.match(rf"{ENDS[MOVES][0]} passed", said), said


@pytest.mark.full
@pytest.mark.parametrize("names", [["dcp-hybrid-draft"], TOGETHER], ids=["alone", "together"])
def test_dcp_is_ended_in_the_ring(names: list[str], tmp_path: Path) -> None:
    said = ring(patched(tmp_path / "site", names), "-k", "dcp")
    assert re.match(rf"{ENDS['dcp-hybrid-draft'][0]} passed", said), said


@pytest.mark.full
def test_without_the_patches_as_many_are_wrong(tmp_path: Path) -> None:
    """`plan` and the ring agree: the one that is right has one head on each rank."""
    said = ring(patched(tmp_path / "site", []))
    wrong, tried = (sum(column) for column in zip(*((b, a) for a, b in ENDS.values()), strict=True))
    assert re.match(rf"{wrong} failed, {tried - wrong} passed", said), said


def test_the_readme_counts_lines() -> None:
    """It counts the lines that the patches change in SGLang, and those of the plugin that they make
    needless."""
    readme = (UPSTREAM / "README.md").read_text()
    counted = {}
    for name in NAMES:
        parts = (UPSTREAM / f"{name}.patch").read_text().split("diff --git ")
        code = "".join(part for part in parts if part.startswith("a/python/"))
        added, removed = (len(re.findall(rf"(?m)^{s}(?!{s}{s} )", code)) for s in ("[+]", "-"))
        counted[name] = f"+{added} -{removed}"
    assert dict(re.findall(r"(?m)^\| `([\w-]+)` \| (\+\d+ -\d+) \|", readme)) == counted
    assert int(counted[MOVES].split()[0]) <= 350
    ended = re.findall(r"`(\S+\.py)` \((\d+) lines\)", readme)
    assert len(ended) == 4
    for file, lines in ended:
        assert len((ROOT / "sglang_mixkv" / file).read_text().splitlines()) == int(lines), file
    assert sorted(re.findall(r"(?m)^### (\S+)$", readme)) == NAMES
