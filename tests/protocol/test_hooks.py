"""Test each of the plugin's hooks and checks, and the order of its steps, without a launcher.
test_startup.py and test_launchers.py test the hooks in launchers and ranks.
"""

from __future__ import annotations

import argparse
import builtins
from collections.abc import Callable
from importlib import metadata
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
from sglang.srt.managers import multi_tokenizer_mixin as theirs

from sglang_mixkv import config, plugin, refusals
from sglang_mixkv.config import Config
from sglang_mixkv.engine import manager, releases, workers
from sglang_mixkv.engine.seams import HOOKS
from sglang_mixkv.refusals import Rule

ON, OFF = Config(enabled=True, allow_untested_sglang=True), Config()


def given(record: Config | None = ON) -> Any:
    return SimpleNamespace(_mixkv=record) if record else SimpleNamespace()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """Record all calls that the hooks make in one list."""
    made = MagicMock()
    for name in ("check", "check_once", "stop_if"):
        monkeypatch.setattr(releases, name, getattr(made, name))
    monkeypatch.setattr(manager, "mixed", made.mixed)
    made.mixed.side_effect = lambda *args: type("Mixed", (), {"of": args})
    made.original.return_value = "SGLang's"
    return made


# ---------------------------------------------------------------- the launcher


@pytest.mark.parametrize("record", [ON, OFF, None])
def test_a_launcher_is_checked_after_sglangs_own_checks(
    record: Config | None, steps: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher does not check SGLang's functions, since it imports their modules later. A
    recorded decision (`_mixkv`) overrides the environment."""
    monkeypatch.setenv("SGLANG_ENABLE_MIXKV", "1")
    args, seen = given(record), list[Any]()
    steps.check.side_effect = lambda of, **_: seen.append(of._mixkv)
    plugin.validate(args, steps.previous)
    checks = [] if record is OFF else [call.check(args, functions=False)]
    assert steps.mock_calls == [call.previous(args), *checks]
    assert seen == [args._mixkv] * len(checks)
    assert config.config_of(args).enabled == (record is not OFF)


def test_the_plugins_flags_are_added_to_sglangs() -> None:
    parser = argparse.ArgumentParser()
    plugin.add_flags(lambda parser: parser.add_argument("--theirs"), parser)
    flags = parser.parse_args(["--theirs", "1", "--enable-mixkv", "--mixkv-staging-mb", "7"])
    made = SimpleNamespace()
    original = MagicMock(return_value=made)
    assert plugin.attach_config(original, int, flags) is made
    assert original.mock_calls == [call(int, flags)]
    assert (made._mixkv["enabled"], made._mixkv["staging_mb"]) == (True, 7)


def test_a_load_failure_is_reported_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_MIXKV", "1")
    monkeypatch.setattr(plugin, "_register", MagicMock(side_effect=KeyError("why")))
    with pytest.raises(SystemExit) as stopped:
        plugin.register()
    said = str(stopped.value).splitlines()
    assert said[0].startswith("[MIXKV-START-02] ")
    assert "but the plugin failed to load; the server does not start" in said[0]
    assert said[1:] == ["  - KeyError('why')", "Report this with the message above."]


def test_a_tokenizer_worker_loads_plugins_with_its_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang itself loads no plugins in the workers of --tokenizer-worker-num."""
    done: list[int] = []
    monkeypatch.setattr(workers, "load_plugins", lambda: done.append(1))
    info = {"max_req_input_len": 7}
    memory = workers.around_write(theirs.write_data_for_multi_tokenizer, "ports", "args", info)
    try:
        assert done == []
        found = theirs.read_from_shared_memory(memory.name)
    finally:
        memory.unlink()
    assert found == ("ports", "args", info)
    assert type(found[2]) is dict
    assert done == [1]


# ---------------------------------------------------------------- KV classes


class Named(SimpleNamespace):
    """A member of one of SGLang's enums."""

    def __hash__(self) -> int:
        return hash(self.value)


MOONCAKE, NIXL = Named(value="mooncake"), Named(value="nixl")
FAKE, ASCEND = Named(value="fake"), Named(value="ascend")
SENDER, RECEIVER = Named(value="sender"), Named(value="receiver")


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    monkeypatch.setattr(plugin, "_handed_out", {})
    return lambda args: monkeypatch.setattr(plugin, "_published", lambda: args)


def test_a_class_is_returned_after_a_check_of_its_arguments(
    steps: MagicMock, published: Callable[[Any], None]
) -> None:
    """Arguments are checked once, not per request. The arguments of another server are checked
    again."""
    for args in (given(), given()):
        published(args)
        for backend in (MOONCAKE, NIXL, FAKE):
            for kind in (SENDER, RECEIVER):
                of = "SGLang's", backend.value, kind.value
                assert plugin.kv_class(steps.original, backend, kind).of == of  # type: ignore[attr-defined]
                assert steps.mock_calls == [
                    call.check_once(args), call.original(backend, kind), call.mixed(*of)
                ]  # fmt: skip
                steps.reset_mock(side_effect=False)
                assert plugin.kv_class(steps.original, backend, kind).of == of  # type: ignore[attr-defined]
                assert steps.mock_calls == [], "a repeated lookup must not check again"


def test_no_class_is_returned_for_an_unsupported_backend(
    steps: MagicMock, published: Callable[[Any], None]
) -> None:
    published(args := given())
    steps.stop_if.side_effect = SystemExit
    with pytest.raises(SystemExit):
        plugin.kv_class(steps.original, ASCEND, SENDER)
    refused = call.stop_if([str(refusals.OTHER_BACKEND)])
    assert steps.mock_calls == [call.check_once(args), refused]
    steps.reset_mock()
    steps.check_once.side_effect = SystemExit
    for _ in range(2):
        with pytest.raises(SystemExit):
            plugin.kv_class(steps.original, MOONCAKE, SENDER)
    assert steps.mock_calls == [call.check_once(args)] * 2, "a refusal must not be forgotten"


def test_nothing_is_checked_before_arguments_are_published(
    steps: MagicMock, published: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until arguments are published, only the environment decides whether the plugin is active. The
    manager checks the arguments later."""
    published(None)
    assert plugin.kv_class(steps.original, MOONCAKE, SENDER) == "SGLang's"
    monkeypatch.setenv("SGLANG_ENABLE_MIXKV", "1")
    assert plugin.kv_class(steps.original, MOONCAKE, SENDER).of[0] == "SGLang's"  # type: ignore[attr-defined]
    assert not steps.check_once.mock_calls


def test_every_hook_calls_sglangs_function_without_opting_in(
    steps: MagicMock, published: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = MagicMock(return_value="ours")
    monkeypatch.setattr(plugin, "_hook", lambda name: hook)
    published(given(OFF))
    assert plugin.kv_class(steps.original, MOONCAKE, SENDER) == "SGLang's"
    assert steps.mock_calls == [call.original(MOONCAKE, SENDER)]
    names = set(HOOKS.values())
    looks = {"plugin.add_flags", "plugin.attach_config", "plugin.kv_class"}  # these check opt-in
    assert looks < names
    for name in names:
        found = plugin._around(name, steps.original, 1, two=2)
        assert found == ("ours" if name in looks else "SGLang's"), name
    assert steps.mock_calls[1:] == [call.original(1, two=2)] * len(names - looks)
    published(given())
    hook.reset_mock()
    assert {plugin._around(name, steps.original, 1, two=2) for name in names} == {"ours"}
    assert hook.mock_calls == [call(steps.original, 1, two=2)] * len(names)


@pytest.mark.parametrize("error", [ImportError, ValueError])
def test_unpublished_arguments_are_none(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt import runtime_context

    monkeypatch.setattr(runtime_context, "get_server_args", MagicMock(side_effect=error))
    assert plugin._published() is None


# ---------------------------------------------------------------- the check


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that simulates an SGLang of this version: with `problems` missing
    functions, `dead` hooks that were not applied, and one more rule."""
    from sglang.srt.arg_groups import overrides
    from sglang.srt.plugins.hook_registry import HookRegistry

    def install(version: str, problems: int = 0, dead: int = 0, rule: Rule | None = None) -> None:
        monkeypatch.setattr(releases, "sglang_version", lambda: version)
        seams = {f"sglang:gone_{number}": () for number in range(problems)}
        monkeypatch.setattr(releases, "SEAMS", seams)
        monkeypatch.setattr(releases, "ATTRIBUTES", {})
        monkeypatch.setattr(HookRegistry, "_patched", {*list(releases.HOOKS)[dead:]})
        monkeypatch.setattr(releases, "rules", lambda: (rule,) if rule else ())
        monkeypatch.setattr(overrides, "resolved_view", lambda args: SimpleNamespace(of=args))

    return install


def codes(args: Any, **how: Any) -> str:
    try:
        releases.check(args, **how)
    except SystemExit as stopped:
        return str(stopped)
    return ""


NEWEST, LATER = releases.SUPPORTED_SGLANG[-1], "99.0"


@pytest.mark.parametrize("functions", [True, False])
@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("problems", [0, 2])
@pytest.mark.parametrize("version", [NEWEST, LATER])
def test_a_mismatch_stops_unless_an_untested_release_is_allowed(
    version: str, problems: int, allowed: bool, functions: bool, installed: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    installed(version, problems)
    found = problems * functions + (version == LATER)
    record = Config(enabled=True, allow_untested_sglang=allowed)
    said = codes(given(record), functions=functions)
    goes_on = not found or (version == LATER and allowed)
    assert said.startswith("" if goes_on else "[MIXKV-START-01]")
    assert bool(said) != goes_on
    assert len(caplog.messages) == (found if goes_on else 0)
    assert said.count("\n  - ") == (0 if goes_on else found)
    if said:
        assert (config.ALLOW_UNTESTED_ENV in said) == (version == LATER)
        assert said.count("expected") == found


def test_missing_hooks_stop_the_server_before_rules_do(installed: Any) -> None:
    args = given()
    rule = Rule("--a-flag", lambda one: getattr(one, "of", one) is args, "drop it")
    for dead in (2, 1):
        installed(NEWEST, dead=dead, rule=rule)
        said = codes(args)
        assert said.startswith("[MIXKV-START-02]")
        assert said.count("\n  - ") == dead
    installed(NEWEST, rule=rule)
    assert codes(args).startswith("[MIXKV-START-03]")
    assert "\n  - --a-flag is not supported: drop it\n" in codes(args)
    assert codes(given()) == ""


@pytest.mark.parametrize("given_too", [True, False])
@pytest.mark.parametrize("resolved", [True, False])
def test_a_rule_is_checked_against_the_resolved_arguments(
    resolved: bool, given_too: bool, installed: Any
) -> None:
    """A rule applies if the resolved arguments break it. The remedy differs if the operator's did
    not: SGLang may set a flag itself, or drop one."""
    args = given()
    rule = Rule("--a-flag", lambda one: given_too if one is args else resolved, "drop it")
    installed(NEWEST, rule=rule)
    said = codes(args)
    assert said.startswith("[MIXKV-START-03]") == bool(said) == resolved
    if resolved:
        assert ("drop it" in said, "SGLang sets it itself" in said) == (given_too, not given_too)


def test_a_check_includes_the_environment(installed: Any, monkeypatch: Any) -> None:
    installed(NEWEST)
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    assert codes(given()).startswith("[MIXKV-START-03]")


def test_arguments_are_checked_until_they_have_passed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second, checked = given(), given(), list[Any]()
    check = MagicMock(side_effect=[SystemExit, None, None])
    monkeypatch.setattr(releases, "check", lambda *args: checked.append(args) or check())
    monkeypatch.setattr(releases, "_checked", None)
    with pytest.raises(SystemExit):
        releases.check_once(first)
    for args in (first, first, second, second):
        releases.check_once(args)
    assert checked == [(first,), (first,), (second,)]


def test_a_package_that_is_not_installed_has_no_version() -> None:
    assert releases.version_of("sglang-mixkv-of-nobody") == "none"
    assert releases.version_of("numpy") == metadata.version("numpy")


@pytest.mark.parametrize(
    "path", ["sglang:gone", "sglang.gone:one", "sglang.gone.one:two", "sglang.version:gone.one", ""]
)
def test_a_seam_that_is_gone_is_reported_whatever_is_missing(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing package, module, class or function is reported, and does not raise."""
    for table, other in (("SEAMS", "ATTRIBUTES"), ("ATTRIBUTES", "SEAMS")):
        monkeypatch.setattr(releases, other, {})
        monkeypatch.setattr(releases, table, {path: ("one",)})
        (line,) = releases.lacking(NEWEST)
        assert line.startswith(f"{path}: expected it with")


class Seam:
    declared: int

    def __init__(self) -> None:
        self.assigned = 1
        print(self.read)


class Under(Seam): ...


max = builtins.max


def takes(one: int, *, other: int = 0) -> None: ...


@pytest.mark.parametrize(
    ("path", "names", "missing"),
    [
        ("Under", ("declared", "assigned", "__init__"), ()),
        ("Under", ("declared", "read", "nowhere"), ("read", "nowhere")),
        ("takes", ("one", "other"), ()),
        ("takes", ("one", "two", "three"), ("two", "three")),
        ("gone", ("one",), ("one",)),
        ("NEWEST", ("one",), ("one",)),  # not a function
        ("max", ("one",), ("one",)),  # a function without a signature
    ],
)
def test_a_changed_seam_is_reported_with_the_missing_names(
    path: str, names: tuple[str, ...], missing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name in LATER, which only newer releases of SGLang have, is not reported."""
    seam = f"{__name__}:{path}"
    monkeypatch.setattr(releases, "sglang_version", lambda: NEWEST)
    for later in ((), *([(missing[0],)] if path in ("Under", "takes") and missing else [])):
        monkeypatch.setattr(releases, "LATER", {NEWEST: later, LATER: names})
        due = [name for name in missing if name not in later]
        for table, other in (("SEAMS", "ATTRIBUTES"), ("ATTRIBUTES", "SEAMS")):
            monkeypatch.setattr(releases, other, {})
            monkeypatch.setattr(releases, table, {seam: names})
            found = releases.problems()
            assert len(found) == bool(due)
            assert all(repr(name) in found[0] for name in due)
            assert not due or found[0].startswith(f"{seam}: ")
            assert releases.problems(functions=False) == []
