"""The tables by release, compared with the names in each supported release of SGLang.

scripts/seams.py reads these names from SGLang's wheels into seams.json. Only these tests cover
releases that are not installed.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_mixkv.decode.compare import MIXES
from sglang_mixkv.engine import releases
from sglang_mixkv.engine.releases import SUPPORTED_SGLANG, UNSERVED, lacking
from sglang_mixkv.engine.seams import ATTRIBUTES, LATER, SEAMS
from sglang_mixkv.refusals import SINGLE_SERVER, broken
from sglang_mixkv.tools import doctor
from sglang_mixkv.tools.against import Wheel, changes

TABLE = json.loads((Path(__file__).parent / "seams.json").read_text())
ASKED = SEAMS | ATTRIBUTES


def value(name: str, version: str) -> Any:
    """Return the value in a release. The table has a plain value if all releases agree."""
    found = TABLE.get(name)
    if not isinstance(found, dict):
        return found
    return next(one for versions, one in found.items() if version in versions.split())


def names(path: str, version: str) -> list[str]:
    found = value(path, version)
    if found is None:
        raise LookupError("not in the table: run scripts/seams.py, or support another release")
    return str(found).split()


def test_the_table_has_all_supported_releases() -> None:
    assert tuple(TABLE["releases"].split()) == SUPPORTED_SGLANG
    assert {one for mixes in MIXES.values() for mix in mixes for one in mix} == {*SUPPORTED_SGLANG}
    assert {*LATER} < {*SUPPORTED_SGLANG}


@pytest.mark.parametrize("version", SUPPORTED_SGLANG)
def test_each_release_has_all_names_but_later_ones(version: str) -> None:
    def find(path: str, _: Iterable[str]) -> list[str]:
        return names(path, version)

    assert lacking(version, find) == []
    lacks = {name for path, asked in ASKED.items() for name in asked if name not in find(path, ())}
    assert lacks == {*LATER.get(version, ())}


@pytest.mark.parametrize("version", SUPPORTED_SGLANG)
def test_the_rules_of_a_release_accept_its_defaults(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rules of a release accept SGLang's defaults in that release.

    The rule for the host receive threshold differs by release, and rejects all values but the
    default.
    """
    monkeypatch.setattr(releases, "sglang_version", lambda: version)
    threshold = "disaggregation_decode_host_receive_threshold"
    defaults = {
        name: value(name, version) for name in ATTRIBUTES["sglang.srt.server_args:ServerArgs"]
    }
    for algorithm in (None, "EAGLE3"):
        args = SimpleNamespace(**defaults | {"speculative_algorithm": algorithm})
        assert broken(releases.rules(), args, {}) == [str(SINGLE_SERVER)]
        for other in {0.0, 0.5, 1.0} - {defaults[threshold]}:
            setattr(args, threshold, other)
            (line,) = broken(UNSERVED[version], args, {})
            assert line.startswith(f"--{threshold.replace('_', '-')} other than")


@pytest.mark.parametrize("version", SUPPORTED_SGLANG)
@pytest.mark.parametrize(
    "given", [{"dcp_size": 2}, {"disaggregation_decode_enable_radix_cache": True}]
)
def test_some_flags_with_a_drafter_need_the_newest_release(
    version: str, given: dict[str, Any]
) -> None:
    """With a drafter, DCP and decode's radix cache need the newest release.

    docs/compatibility.md states the same.
    """
    for algorithm in (None, "EAGLE3"):
        args = SimpleNamespace(**{"speculative_algorithm": algorithm, **given})
        is_refused = version != SUPPORTED_SGLANG[-1] and algorithm is not None
        rules = [rule for rule in UNSERVED[version] if "threshold" not in rule.name]
        assert len(broken(tuple(rules), args, {})) == is_refused


# ---------------------------------------------------------------- reading a wheel

SOURCES = {
    "sglang/a.py": """
        from other import Base
        from sglang.b import Middle as Other
        class Class(Other, Base, Generic[T]):
            declared: int
            one = two = 1
            def method(self, first, /, second=lambda hidden: 1, *rest, last, **more):
                local = self.own = 1
                with thing as self.held: self.read
            async def later(self): pass
    """,
    "sglang/b/__init__.py": """
        class Middle:
            inherited = 0
            def method(self, another): pass
            def below(self, deep): self.of_base: int = 1
    """,
    "sglang/srt/server_args.py": "class ServerArgs:\n    def own(self): pass",
    "sglang/srt/arg_groups/fields/some.py": "class Some:\n    field: int = 1\nother = 1",
}


def source_of(text: str) -> str:
    return "\n".join(line[8:] if line[:8].isspace() else line for line in text.splitlines())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    path = tmp_path_factory.mktemp("wheel") / "sglang-0.5.20-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in SOURCES.items():
            archive.writestr(name, source_of(text))
    return Wheel(path)


def test_a_wheel_is_read_through_bases_and_imports(wheel: Wheel) -> None:
    assert wheel.version == "0.5.20"
    assert {*wheel.names("sglang.a:Class")} == {
        "declared", "one", "two", "method", "own", "held", "later", "inherited", "below", "of_base",
    }  # fmt: skip
    parameters = ["self", "first", "second", "rest", "last", "more"]
    assert wheel.names("sglang.a:Class.method") == parameters
    assert wheel.names("sglang.a:Class.below") == ["self", "deep"]
    assert wheel.names("sglang.a:Other.method") == ["self", "another"]
    assert {*wheel.names("sglang.srt.server_args:ServerArgs")} == {"own", "field"}
    for path in ("sglang.a:Base", "sglang.a:Class.read", "sglang.c:Class", "sglang.a:other"):
        with pytest.raises(LookupError):
            wheel.names(path)


def test_missing_names_of_a_wheel_are_listed(wheel: Wheel) -> None:
    found = lacking(wheel.version, lambda path, _: wheel.names(path))
    assert len(found) == len(ASKED)
    assert all("found none (" in line or "found (" in line for line in found)


# ---------------------------------------------------------------- another wheel


def test_changes_lists_the_names_that_a_wheel_lacks(
    wheel: Wheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`changes` lists the names that a wheel lacks.

    These are parameters, attributes and classes of the seams, and names that `plan` imports or
    uses.
    """
    asked = {"sglang.a:Class.method": ("first", "gone"), "sglang.c:Class": ("any",)}
    monkeypatch.setattr(releases, "SEAMS", asked)
    monkeypatch.setattr(releases, "ATTRIBUTES", {"sglang.a:Class": ("held", "declared", "away")})
    source = """
        from sglang.a import Class, Lost
        from sglang import b as module
        from sglang.other import thing
        Class.inherited, Class.removed, module.Middle, module._moved, Lost.some, Class.later()
    """
    monkeypatch.setattr(Path, "read_text", lambda self: source_of(source))
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [self / "plan_one.py"])
    lines = changes(wheel)
    seams, plans = lines[:3], lines[3:]
    assert [line.partition(": ")[0] for line in seams] == [*asked, "sglang.a:Class"]
    assert "expected parameters ['gone']" in seams[0]
    assert "expected attributes ['away']; found ('held', 'declared')" in seams[2]
    assert [line.removesuffix(": missing, and used in plan_one.py") for line in plans] == [
        "sglang.a:Class.removed", "sglang.a:Lost", "sglang.a:Lost.some", "sglang.other:thing",
        "sglang:b._moved",
    ]  # fmt: skip


def test_doctor_against_a_wheel_checks_only_the_wheel(
    wheel: Wheel, capsys: pytest.CaptureFixture[str]
) -> None:
    """`doctor --against` checks a wheel but not this host, and rejects other files."""
    assert doctor.main(["--against", str(wheel._zip.filename)]) == 1
    output = capsys.readouterr().out
    assert "sglang 0.5.20" in output
    assert "sglang.srt.disaggregation.utils:get_kv_class  differs" in output
    assert " python " not in output
    assert doctor.main(["--against", str(wheel._zip.filename), "--json"]) == 1
    assert not json.loads(capsys.readouterr().out)["ok"]
    with pytest.raises(SystemExit, match="2"):
        doctor.main(["--against", __file__])


def test_an_attribute_is_found_wherever_a_method_assigns_it() -> None:
    """The method has more than 256 names, so that bytecode extends some of their numbers."""
    read = "\n".join(f"    self.read{number}" for number in range(300))
    body = f"def method(self):\n    self.first = 1\n{read}\n    self.last.inner = 2\n"
    exec(body, namespace := {})
    owner = type("Owner", (type("Base", (), namespace),), {"__annotations__": {"declared": int}})
    names = "declared", "first", "inner", "last", "read5", "read299", "method", "none"
    found = [name for name in names if releases.has_attribute(owner, name)]
    assert found == ["declared", "first", "inner", "method"]


def test_arguments_are_checked_until_they_have_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`check_once` checks arguments until they pass once, and checks other arguments again."""
    asked, passing = list[object](), set[object]()

    def check(given: object) -> None:
        asked.append(given)
        if given not in passing:
            raise SystemExit

    monkeypatch.setattr(releases, "check", check)
    monkeypatch.setattr(releases, "_checked", None)
    first, second = object(), object()
    for _ in range(2):
        with pytest.raises(SystemExit):
            releases.check_once(first)
    passing.add(first)
    for one in (first, first):
        releases.check_once(one)
    with pytest.raises(SystemExit):
        releases.check_once(second)
    assert asked == [first, first, first, second]
