"""Each patch in upstream/ applies, and its own test passes with it and fails without it. With the
patches that replace the plugin for some pairs, SGLang's own managers transfer these pairs
correctly.

The patches apply only to the newest supported release."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rig.process.patched import NAMES, ROOT, UPSTREAM, own_tests, patched, python, touched

from sglang_mixkv.engine.releases import SUPPORTED_SGLANG, sglang_version

pytestmark = pytest.mark.skipif(
    sglang_version() != SUPPORTED_SGLANG[-1], reason="patches for the newest supported SGLang"
)
# These two patches exclude each other: one refuses the pairs that the other moves.
REFUSES, MOVES = "refuse-draft-layout", "draft-heads"
TOGETHER = [name for name in NAMES if name != REFUSES]
ON_PATCHED = ROOT / "tests" / "protocol" / "on_patched.py"
ENDS = {"draft-heads": (22, 20), "dcp-hybrid-draft": (4, 1), "l3-draft-keys": (1, 1)}
"""By patch: the number of pairs in on_patched.py, and how many are wrong without the patch."""


def run_tests(site: Path, *names: str) -> tuple[int, str]:
    files = [file for name in names for file in own_tests(name)]
    done = python(site, "-m", "unittest", *files)
    return done.returncode, done.stderr


def ring(site: Path, *options: str) -> str:
    done = python(
        site, "-m", "pytest", "-q", "-p", "no:cacheprovider", ON_PATCHED, *options, cwd=ROOT
    )
    return done.stdout.splitlines()[-1]


def test_all_patches_apply_together(tmp_path: Path) -> None:
    patched(tmp_path / "site", NAMES)


def test_each_patch_applies_alone_and_has_a_test(tmp_path: Path) -> None:
    for name in NAMES:
        patched(tmp_path / name, [name])
        assert own_tests(name)
        assert any(file.startswith("python/") for file in touched(name))


def test_the_patches_own_tests_pass_with_them(tmp_path: Path) -> None:
    status, said = run_tests(patched(tmp_path / "site", TOGETHER), *TOGETHER)
    assert status == 0, said


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_a_patchs_own_test_passes_with_it_alone(name: str, tmp_path: Path) -> None:
    status, said = run_tests(patched(tmp_path / "site", [name]), name)
    assert status == 0, said


def test_a_patchs_own_test_fails_without_it(tmp_path: Path) -> None:
    status, said = run_tests(patched(tmp_path / "site", [], tests_of=NAMES), *NAMES)
    assert status == 1, said
    failed = {*re.findall(r"(?m)^(?:FAIL|ERROR): .*?\bregistered\.\S*?\.(test_\w+)\.", said)}
    assert failed == {Path(file).stem for name in NAMES for file in own_tests(name)}


def test_draft_heads_is_correct_in_the_ring(tmp_path: Path) -> None:
    """With `draft-heads`, stock managers transfer 22 pairs correctly, and `plan` reports that they
    need no plugin."""
    said = ring(patched(tmp_path / "site", [MOVES]), "-k", "draft_heads")
    assert re.match(rf"{ENDS[MOVES][0]} passed", said), said


def test_plan_detects_l3_draft_keys(tmp_path: Path) -> None:
    said = ring(patched(tmp_path / "site", ["l3-draft-keys"]), "-k", "l3_draft_keys")
    assert re.match(r"1 passed", said), said


@pytest.mark.full
@pytest.mark.parametrize("names", [["dcp-hybrid-draft"], TOGETHER], ids=["alone", "together"])
def test_dcp_hybrid_draft_is_correct_in_the_ring(names: list[str], tmp_path: Path) -> None:
    said = ring(patched(tmp_path / "site", names), "-k", "dcp")
    assert re.match(rf"{ENDS['dcp-hybrid-draft'][0]} passed", said), said


@pytest.mark.full
def test_pairs_are_wrong_without_the_patches(tmp_path: Path) -> None:
    """`plan` and the ring agree about all pairs. The pairs that are correct without a patch have
    one head on each rank."""
    said = ring(patched(tmp_path / "site", []))
    wrong, tried = (sum(column) for column in zip(*((b, a) for a, b in ENDS.values()), strict=True))
    assert re.match(rf"{wrong} failed, {tried - wrong} passed", said), said


def test_the_readme_of_upstream_has_correct_line_counts() -> None:
    """upstream/README.md has the correct numbers of lines that the patches change in SGLang, and of
    the plugin's lines that they make unnecessary."""
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
