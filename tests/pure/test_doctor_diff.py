"""What the doctor says of another SGLang's sources, which it reads and does not import."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_mixkv.engine.seams import RESTATED, SEAMS
from sglang_mixkv.tools import doctor, doctor_diff, sources
from sglang_mixkv.tools.sources import Tree

DISAGG = "sglang.srt.disaggregation"


def unpacked(folder: Path, version: str, modules: dict[str, str]) -> Path:
    """An SGLang as pip unpacks it, with these modules of disaggregation/."""
    info = folder / f"sglang-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: sglang\nVersion: {version}\n")
    for name, text in modules.items():
        file = folder.joinpath(*DISAGG.split("."), *name.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


# ---------------------------------------------------------------- where a function is


def found(tmp_path: Path, path: str, modules: dict[str, str]) -> str | None:
    """Place and text of the function at this path of an SGLang of these modules."""
    tree = sources.tree(unpacked(tmp_path, "1.0", modules))
    body = sources.body(tree, f"{DISAGG}.{path}")
    return body and f"{body.place.removeprefix(DISAGG + '.')}|{''.join(body.lines)}"


CLASS = (
    "class A:\n    x = 1\n    @staticmethod\n    def f(a):\n        return a\n    def g(self): 0\n"
)


@pytest.mark.parametrize(
    ("path", "modules", "place", "text"),
    [
        ("a:f", {"a": "def f():\n    1\n\ndef g(): 2\n"}, "a:f", "def f():\n    1\n"),
        ("a:A.f", {"a": CLASS}, "a:A.f",
         "    @staticmethod\n    def f(a):\n        return a\n"),
        # defined twice, assigned, and not at the end of a file
        ("a:f", {"a": "if x:\n    def f(): 1\nelse:\n    def f(): 2\n"}, "a:f",
         "    def f(): 1\n    def f(): 2\n"),
        ("a:f", {"a": "f = partial(g)\n"}, "a:f", "f = partial(g)\n"),
        # imported by name: under another, from the package, by a package
        ("a:f", {"a": "from .b import g as f", "b": "def g(): 1"}, "b:g", "def g(): 1"),
        ("a:f", {"a": f"from {DISAGG}.b import f", "b": "from .c import f", "c": "def f(): 1"},
         "c:f", "def f(): 1"),
        ("p:f", {"p.__init__": "from .b import f", "p.b": "def f(): 1"}, "p.b:f", "def f(): 1"),
        # inherited: in the module, from another, behind a class without it, in order
        ("a:A.f", {"a": "class B:\n    def f(): 1\nclass A(B): pass"}, "a:B.f",
         "    def f(): 1\n"),
        ("a:A.f", {"a": "from .b import B\nclass C(B): 0\nclass A(Generic[T], C[T]): 0",
                   "b": "class B:\n    def f(): 1"}, "b:B.f", "    def f(): 1"),
        ("a:A.f", {"a": "class C:\n  def f(): 2\nclass B:\n  def f(): 1\nclass A(B, C): 0"},
         "a:B.f", "  def f(): 1\n"),
    ],
)  # fmt: skip
def test_a_function_is_found_where_it_is_defined(
    tmp_path: Path, path: str, modules: dict[str, str], place: str, text: str
) -> None:
    assert found(tmp_path, path, modules) == f"{place}|{text}"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("gone:f", ""), ("a:f", "x = 1"), ("a:f", "def f( !"), ("a:f", "from .gone import f"),
        ("a:A.f", "class A:\n    def g():\n        def f(): 1"), ("a:A.f", "A = 1"),
        ("a:A.f", "class A(A): 0"), ("a:f", "import f"),
    ],
)  # fmt: skip
def test_what_is_not_found_is_none(tmp_path: Path, path: str, text: str) -> None:
    assert found(tmp_path, path, {"a": text}) is None


# ---------------------------------------------------------------- what changed

UTILS = "def get_kv_class():\n    {0}\n\n# {0}\ndef is_mla_backend(): 0\ndef _all_reduce_polls(): 0"
SENDER = """
class BaseKVSender:
    def poll(self): 0
class CommonKVSender(BaseKVSender):
    def clear(self): 1
"""
MOVED = """
class BaseKVSender:
    def init(self): 0
class CommonKVSender(BaseKVSender):
    def poll(self): 0
    def clear(self): 1
"""
MOONCAKE = """
from ..common.conn import CommonKVSender
class MooncakeKVSender(CommonKVSender):
    def clear(self):
        {0}
class Other:
    def poll(self): {0}
"""


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The folder of the newer of two; the older is the installed one."""
    older = {
        "utils": UTILS.format(1),
        "common.conn": SENDER,
        "mooncake.conn": MOONCAKE.format(1),
        "nixl.conn": "x\n",
    }
    newer = {
        "utils": UTILS.format(2),
        "common.conn": MOVED,
        "mooncake.conn": MOONCAKE.format(2),
        "base.conn": "class BaseKVManager:\n    def teardown(self): 0",
    }
    old = sources.tree(unpacked(tmp_path / "old", "1.0", older))
    monkeypatch.setattr(doctor_diff, "installed", lambda: old)
    return str(unpacked(tmp_path / "new", "1.1", newer))


def test_changed_functions_are_listed_with_why(two: str) -> None:
    """One whose module alone changed, or that moved to another class, is not; a backend's is."""
    listed = list(doctor_diff.findings(two))
    assert not any(finding.problem for finding in listed)
    values = {
        (one.section, one.name.removeprefix(DISAGG + ".")): one.value
        for one in listed if "not found in either" not in one.value
    }  # fmt: skip
    assert values == {
        ("changes", "compared"): "1.0 -> 1.1",
        ("changed seams", "in all"): f"4 of {len(SEAMS)}",
        ("changed seams", "utils:get_kv_class"): "+1 -1: SGLang's classes with a mixin each",
        ("changed seams", "base.conn:BaseKVManager.teardown"): "new: ends the channel",
        ("changed seams", "common.conn:CommonKVSender.init"): "new: begins a room",
        ("changed seams", "common.conn:CommonKVSender.clear"): "+1 -1: ends a room",
        ("changed behaviours", "in all"): f"0 of {len(doctor_diff.BEHAVIOURS)}",
        ("changed modules", "in all"): f"3 of {len(RESTATED)} whose rules are restated",
        ("changed modules", "mooncake.conn"): "+2 -2",
        ("changed modules", "nixl.conn"): "gone",
        ("changed modules", "base.conn"): "new",
    }


def test_what_is_in_neither_is_not_called_the_same(two: str) -> None:
    values = {one.name: one.value for one in doctor_diff.findings(two)}
    assert values[f"{DISAGG}.decode:DecodeTransferQueue.extend"].startswith("not found in either")
    assert f"{DISAGG}.utils:is_mla_backend" not in values


def test_the_diff_of_the_functions_alone(two: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--against", two, "--diff"]) == 0
    lines = capsys.readouterr().out.replace(f"/{DISAGG}.", "/").splitlines()
    heads = [line for line in lines if line[:3] in ("---", "+++")]
    assert lines[:6] == [
        "--- 1.0/utils:get_kv_class", "+++ 1.1/utils:get_kv_class",
        "@@ -1,2 +1,2 @@", " def get_kv_class():", "-    1", "+    2",
    ]  # fmt: skip
    assert [head.partition("/")[2] for head in heads[::2]] == [
        "utils:get_kv_class", "base.conn:BaseKVManager.teardown", "common.conn:CommonKVSender.init",
        "mooncake.conn:MooncakeKVSender.clear",
    ]  # fmt: skip


def test_the_diff_of_whole_modules(two: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--against", two, "--diff", "modules"]) == 0
    lines = capsys.readouterr().out.replace(f"/{DISAGG}.", "/").splitlines()
    assert [line for line in lines if line[:3] == "+++"] == [
        f"+++ 1.1/{name}" for name in ("base.conn", "common.conn", "mooncake.conn", "nixl.conn",
                                       "utils")
    ]  # fmt: skip
    assert "-# 1" in lines


def test_without_an_sglang_nothing_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_diff, "installed", lambda: None)
    (only,) = doctor_diff.findings(str(tmp_path))
    assert "no SGLang is installed" in only.value
    assert doctor_diff.whole(str(tmp_path)) == ""


def test_a_folder_without_a_release_has_none(tmp_path: Path) -> None:
    assert sources.tree(tmp_path) == Tree(tmp_path, "unknown")
