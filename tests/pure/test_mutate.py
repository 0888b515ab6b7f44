"""scripts/mutate.sh on a small checkout: it lists surviving mutants and cleans up after itself."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray")

from mutants import OWN, mutants
from rig.channel.threads import wait_for

ROOT = Path(__file__).parents[2]
PACKAGE = '''\
"""Text."""


def least(one: int, other: int = 0) -> int:
    """The smaller one."""
    if one < other:
        return one
    return other
'''
TESTS = """\
from hypothesis import given, strategies

from sglang_mixkv.small import least


@given(strategies.integers())
def test_least(other):
    assert least(other, other) == other
    assert [least(1, 2), least(4, 3), least(0)] == [1, 3, 0]
"""
CONFIG = """\
operators = [
    "Nothing", "NumberReplacer",
    "ReplaceComparisonOperator_Lt_LtE", "ReplaceComparisonOperator_Lt_GtE",
]
skip = { functions = [], calls = [] }
[[part]]
files = ["sglang_mixkv/*.py"]
tests = ["tests/test_small.py"]
"""
BOUNDARY = "sglang_mixkv/small.py:6 least: if one < other:  ->  if one <= other:"
DEFAULT = (
    "sglang_mixkv/small.py:4 least: "
    "def least(one: int, other: int = 0) -> int:  ->  def least(one: int, other: int = 1) -> int:"
)
CLAIM = """\
[[equivalent]]
file = "sglang_mixkv/small.py"
function = "least"
line = "if one {} other:"
mutant = "if one <= other:"
why = "Of two that are equal either is the smaller one."
"""


BLOCKS = """\
class One:
    def two(self, three, *args, **kwargs):
        # a comment
        self.four = three
        try:
            if three:
                del self.four  # another
                raise ValueError
            elif self.four in args: return
            while three(1, self.four, *args, name=5, **kwargs):

                self.four += 1; three(max(1, self.four))
        finally:
            three(
                1,
                six=2,
            )
        return self.four
"""


def test_mutants_of_our_own_operators_compile(tmp_path: Path) -> None:
    """All mutants compile.

    Any test kills a mutant with a syntax error, so the mutant would measure nothing.
    """
    (tmp_path / "blocks.py").write_text(BLOCKS)
    skip = {"functions": [], "calls": [], "keywords": []}
    found = mutants(tmp_path, "blocks.py", {"operators": list(OWN), "skip": skip})
    counts = Counter(one.operator for one in found)
    assert counts == {"Delete": 7, "Negate": 3, "Arguments": 4, "Nothing": 1}
    for one in found:
        compile(one.code(tmp_path), one.operator, "exec")


COMMIT = ("-c user.name=a -c user.email=a@b commit -qm all",)


def git(checkout: Path, *commands: str) -> None:
    for command in commands:
        subprocess.run(["git", *command.split()], cwd=checkout, check=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    tree = tmp_path / "checkout"
    for folder in ("scripts", "tests", "sglang_mixkv"):
        (tree / folder).mkdir(parents=True)
    for file in ("scripts/mutate.py", "tests/mutants.py"):
        shutil.copy(ROOT / file, tree / file)
    (tree / "sglang_mixkv" / "__init__.py").touch()
    (tree / "sglang_mixkv" / "small.py").write_text(PACKAGE)
    (tree / "tests" / "test_small.py").write_text(TESTS)
    (tree / "tests" / "mutants.toml").write_text(CONFIG)
    git(tree, "init -q", "add -A", *COMMIT)
    return tree


def start(checkout: Path, *options: str) -> subprocess.Popen[str]:
    left = checkout.parent / "tmp"
    left.mkdir(exist_ok=True)
    env = os.environ | {"TMPDIR": str(left), "XDG_CACHE_HOME": str(checkout.parent)}
    return subprocess.Popen(
        [sys.executable, "-B", "scripts/mutate.py", *options], cwd=checkout, env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def rows(checkout: Path, *options: str, status: int = 0) -> list[str]:
    running = start(checkout, *options)
    found = running.communicate(timeout=60)[0].splitlines()
    assert running.returncode == status, found
    assert not list((checkout.parent / "tmp").iterdir())
    status = ["git", "status", "--porcelain", "--ignored"]
    assert set(subprocess.check_output(status, cwd=checkout, text=True).split()) <= {
        "M", "sglang_mixkv/small.py", "tests/mutants.toml",
    }  # fmt: skip
    return found


def test_survivors_are_listed_and_a_run_can_be_resumed(checkout: Path) -> None:
    assert rows(checkout, "--seconds", "0") == ["killed: none; 0 late, 6 not run"]
    assert rows(checkout, "sglang_mixkv", status=1) == [
        DEFAULT,
        BOUNDARY,
        "killed: sglang_mixkv 66 % of 6; 0 late, 0 not run",
    ]
    assert rows(checkout, "--seconds", "0", status=1)[-1].endswith("66 % of 6; 0 late, 0 not run")


def test_uncovered_files_are_listed(checkout: Path) -> None:
    (checkout / "sglang_mixkv" / "deep").mkdir()
    (checkout / "sglang_mixkv" / "deep" / "bare.py").write_text(PACKAGE)
    config = CONFIG.replace("sglang_mixkv/*.py", "sglang_mixkv/small.py")
    (checkout / "tests" / "mutants.toml").write_text(config)
    git(checkout, "add -A", *COMMIT)
    bare = "not covered, no part of tests/mutants.toml has tests: sglang_mixkv/deep/bare.py"
    none = "killed: none; 0 late, {} not run"
    assert rows(checkout, "sglang_mixkv/deep") == [bare, none.format(0)]
    assert rows(checkout, "--seconds", "0") == [bare, none.format(6)]
    assert rows(checkout, "tests", status=1) == ["no file of the package is in tests"]


def test_each_file_has_tests_or_a_reason_why_not() -> None:
    config = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text())
    patterns = [one for part in config["part"] for one in part["files"]]
    files = {str(file.relative_to(ROOT)) for file in (ROOT / "sglang_mixkv").rglob("*.py")}
    bare = {f for f in files if not any(fnmatch(f, one) for one in patterns)}
    bare = {f for f in bare if mutants(ROOT, f, config)}
    assert bare == set(config["uncovered"]), "add the file to a part in tests/mutants.toml"


def test_each_equivalent_entry_has_a_mutant() -> None:
    config = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text())
    claims = {tuple(one.values())[:4] for one in config["equivalent"]}
    files = {file for file, *_ in claims}
    found = (one for file in sorted(files) for one in mutants(ROOT, file, config))
    places = {claim[:2] for claim in claims}
    made = {
        (one.file, one.function, *one.change(ROOT))
        for one in found
        if (one.file, one.function) in places
    }
    assert claims - made == set(), "change the line in tests/mutants.toml, or drop the entry"


LATE = """\
import time

from sglang_mixkv.small import least

open({runs!r}, "a").write("x")


def test_least():
    if least(1, 2) != 1:
        time.sleep(60)
"""


def test_a_late_mutant_runs_again_but_not_the_clean_run(checkout: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    (checkout / "tests" / "test_small.py").write_text(LATE.format(runs=str(runs)))
    config = CONFIG.replace('"Nothing", "NumberReplacer",', "").replace("Lt_LtE", "Lt_GtE", 1)
    (checkout / "tests" / "mutants.toml").write_text(config)
    git(checkout, "add -A", *COMMIT)
    assert rows(checkout) == ["killed: none; 1 late, 0 not run"]
    assert runs.read_text() == "xx"
    ending = start(checkout)
    assert wait_for(lambda: runs.read_text() == "xxx")
    ending.send_signal(signal.SIGTERM)
    assert ending.communicate(timeout=60)[0] == "killed: none; 0 late, 1 not run\n"
    assert ending.returncode == 130


ALONE = """\
import os, pathlib, time

from sglang_mixkv.small import least

runs = pathlib.Path({runs!r})


def test_least():
    if least(1, 2) != 1:
        runs.write_text(f"/proc/{{os.getpid()}}")
        time.sleep(60)
    elif runs.exists():
        runs.write_text(str(os.path.exists(runs.read_text())))
"""


def test_the_next_mutant_runs_without_a_late_one(checkout: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    (checkout / "tests" / "test_small.py").write_text(ALONE.format(runs=str(runs)))
    operators = '"ReplaceComparisonOperator_Lt_GtE", "ReplaceComparisonOperator_Lt_LtE",'
    config = CONFIG.replace(CONFIG[CONFIG.index('"Nothing"') : CONFIG.index("]\nskip")], operators)
    (checkout / "tests" / "mutants.toml").write_text(config)
    git(checkout, "add -A", *COMMIT)
    assert rows(checkout, status=1)[-1] == "killed: sglang_mixkv 0 % of 1; 1 late, 0 not run"
    assert runs.read_text() == "False"


def test_since_and_draw_select_mutants(checkout: Path) -> None:
    small = checkout / "sglang_mixkv" / "small.py"
    small.write_text(PACKAGE.replace("if one", "if  one"))
    assert rows(checkout, "--since", "HEAD", "--seconds", "60", status=1) == [
        BOUNDARY, "killed: sglang_mixkv 50 % of 2; 0 late, 0 not run",
    ]  # fmt: skip
    drawn = rows(checkout, "--draw", "3", "--seed", "4", "--seconds", "0", status=1)
    assert drawn[-1].endswith("of 1; 0 late, 2 not run")


def test_an_equivalence_claim_must_match_a_mutant(checkout: Path) -> None:
    config = checkout / "tests" / "mutants.toml"
    config.write_text(CONFIG + CLAIM.format("<"))
    assert rows(checkout, "--seconds", "0") == ["killed: none; 0 late, 5 not run"]
    config.write_text(CONFIG + CLAIM.format(">"))
    assert "entries without a mutant" in rows(checkout, status=1)[-1]


def test_a_terminated_run_leaves_nothing_behind(checkout: Path) -> None:
    tests = checkout / "tests" / "test_small.py"
    tests.write_text(
        f"import time\n\n\n{TESTS}    open('begun', 'w').close()\n    time.sleep(60)\n"
    )
    process = start(checkout)
    until = time.monotonic() + 30
    while not list(checkout.parent.glob("tmp/*/0/begun")) and time.monotonic() < until:
        time.sleep(0.05)
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGTERM)
    assert "6 not run" in process.communicate(timeout=30)[0]
    assert not Path(f"/proc/{child}").exists()
    assert not list((checkout.parent / "tmp").iterdir())


def test_tests_that_fail_without_a_mutant_are_an_error(checkout: Path) -> None:
    (checkout / "tests" / "test_small.py").write_text("def test_nothing():\n    assert False\n")
    output = "".join(start(checkout).communicate(timeout=60)[0])
    assert "fail without a mutant" in output
    assert "test_small.py::test_nothing - assert False" in output


SKIP = {"functions": [], "calls": []}


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("max(a, b)", []), ("zip(a, strict=True)", []), ("f(a, name=b)", []),
        ("f(a, b)", ["f(b, a)"]), ("f(a, c=b)", ["f(a)"]), ("f(min(a, math.gcd(b, c)))", []),
        ("f(a, **b)", ["f(a)"]), ("if TYPE_CHECKING:\n    import a", []),
        ("if a:\n    import b", ["if not (a):"]),
    ],
)  # fmt: skip
def test_code_without_an_effect_is_not_mutated(tmp_path: Path, code: str, found: list[str]) -> None:
    """No mutant changes code without an effect on behaviour, such as types or argument order."""
    (tmp_path / "small.py").write_text(f"{code}\n")
    config = {"operators": ["Arguments", "Negate"], "skip": SKIP}
    made = mutants(tmp_path, "small.py", config)
    assert [one.change(tmp_path)[1] for one in made] == found
