"""scripts/mutate.sh on a small checkout: what survives is named, and nothing is left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray")

from mutants import OWN, mutants

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


def test_what_the_tools_own_operators_make_is_python(tmp_path: Path) -> None:
    """What is none would be killed by the first test, whatever that looks at."""
    (tmp_path / "blocks.py").write_text(BLOCKS)
    skip = {"functions": [], "calls": [], "keywords": []}
    found = mutants(tmp_path, "blocks.py", {"operators": list(OWN), "skip": skip})
    counts = Counter(one.operator for one in found)
    assert counts == {"Delete": 7, "Negate": 3, "Arguments": 4, "Nothing": 1}
    for one in found:
        compile(one.code(tmp_path), one.operator, "exec")


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
    for command in ("init -q", "add -A", "-c user.name=a -c user.email=a@b commit -qm all"):
        subprocess.run(["git", *command.split()], cwd=tree, check=True)
    return tree


def start(checkout: Path, *options: str) -> subprocess.Popen[str]:
    left = checkout.parent / "tmp"
    left.mkdir(exist_ok=True)
    env = os.environ | {"TMPDIR": str(left), "XDG_CACHE_HOME": str(checkout.parent)}
    return subprocess.Popen(
        [sys.executable, "-B", "scripts/mutate.py", *options], cwd=checkout, env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def rows(checkout: Path, *options: str) -> list[str]:
    found = start(checkout, *options).communicate(timeout=60)[0].splitlines()
    assert not list((checkout.parent / "tmp").iterdir())
    status = ["git", "status", "--porcelain", "--ignored"]
    assert set(subprocess.check_output(status, cwd=checkout, text=True).split()) <= {
        "M", "sglang_mixkv/small.py", "tests/mutants.toml",
    }  # fmt: skip
    return found


def test_survivors_are_named_and_a_run_goes_on_where_it_stopped(checkout: Path) -> None:
    assert rows(checkout, "--seconds", "0") == ["killed: none; 6 not run"]
    assert rows(checkout, "sglang_mixkv") == [
        DEFAULT,
        BOUNDARY,
        "killed: sglang_mixkv 66 % of 6; 0 not run",
    ]
    assert rows(checkout, "--seconds", "0")[-1].endswith("66 % of 6; 0 not run")
    assert rows(checkout, "tests") == ["killed: none; 0 not run"]


def test_only_changed_lines_and_a_draw(checkout: Path) -> None:
    small = checkout / "sglang_mixkv" / "small.py"
    small.write_text(PACKAGE.replace("if one", "if  one"))
    assert rows(checkout, "--since", "HEAD", "--seconds", "60") == [
        BOUNDARY, "killed: sglang_mixkv 50 % of 2; 0 not run",
    ]  # fmt: skip
    assert rows(checkout, "--draw", "3", "--seed", "4", "--seconds", "0")[-1].endswith("not run")


def test_a_claim_is_taken_and_one_of_no_mutant_is_an_error(checkout: Path) -> None:
    config = checkout / "tests" / "mutants.toml"
    config.write_text(CONFIG + CLAIM.format("<"))
    assert rows(checkout, "--seconds", "0") == ["killed: none; 5 not run"]
    config.write_text(CONFIG + CLAIM.format(">"))
    assert "not a mutant" in rows(checkout)[-1]


def test_a_run_that_is_ended_leaves_nothing_behind(checkout: Path) -> None:
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


def test_tests_that_fail_anyway_are_an_error(checkout: Path) -> None:
    (checkout / "tests" / "test_small.py").write_text("def test_nothing():\n    assert False\n")
    assert "fail without a mutant" in "".join(start(checkout).communicate(timeout=60)[0])


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
def test_what_nothing_depends_on_is_left(tmp_path: Path, code: str, found: list[str]) -> None:
    """Types, arguments in any order, and those that only say or check something."""
    (tmp_path / "small.py").write_text(f"{code}\n")
    config = {"operators": ["Arguments", "Negate"], "skip": SKIP}
    made = mutants(tmp_path, "small.py", config)
    assert [one.change(tmp_path)[1] for one in made] == found
