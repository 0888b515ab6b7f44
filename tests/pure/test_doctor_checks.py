"""The doctor's checks, one by one."""

from __future__ import annotations

import argparse
import ast
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import sglang_mixkv
from sglang_mixkv import config
from sglang_mixkv.tools import doctor
from sglang_mixkv.tools import doctor_checks as checks
from sglang_mixkv.tools import doctor_rdma as rdma
from sglang_mixkv.tools.doctor_checks import Finding

PACKAGE = Path(sglang_mixkv.__file__).parent


def problems(found: list[Finding]) -> list[str]:
    return [finding.problem for finding in found if finding.problem]


def settings(environ: dict[str, str], *flags: str) -> dict[str, str]:
    parser = argparse.ArgumentParser()
    config.add_flags(parser)
    found = checks.configuration(parser.parse_args(flags), environ)
    return {finding.name: finding.value for finding in found}


# ---------------------------------------------------------------- configuration, environment


def test_every_setting_is_reported_with_its_origin() -> None:
    found = settings({"SGLANG_MIXKV_STAGING_MB": "64"}, "--enable-mixkv")
    assert found["enabled"] == "True (flag --enable-mixkv)"
    assert found["staging_mb"] == "64 (environment, SGLANG_MIXKV_STAGING_MB)"
    defaults = {text.partition("=")[0] for text in found.pop("defaults").split(", ")}
    assert defaults | set(found) == set(config.Config.__struct_fields__)
    assert not defaults & set(found)


def test_the_staging_variable_comes_with_a_word_on_mla_targets() -> None:
    (found,) = checks.environment({"SGLANG_DISAGG_STAGING_BUFFER": "1"})
    assert found.value.startswith("1 (unset it with an MLA target")
    assert found.problem == ""


def test_a_flag_wins_over_the_environment() -> None:
    environ = {"SGLANG_MIXKV_STAGING_MB": "64"}
    assert settings(environ, "--mixkv-staging-mb", "32")["staging_mb"] == (
        "32 (flag --mixkv-staging-mb)"
    )


def test_unusable_configuration_is_a_problem() -> None:
    found = list(checks.configuration(argparse.Namespace(), {config.ENABLE_ENV: "perhaps"}))
    assert "perhaps" in problems(found)[0]


@pytest.mark.parametrize(("value", "problem"), [("3.5", True), ("-1", False), ("x", False)])
def test_an_environment_that_makes_the_accept_length_up(value: str, problem: bool) -> None:
    found = list(checks.environment({"SGLANG_SIMULATE_ACC_LEN": value}))
    assert ["make their accept length up" in text for text in problems(found)] == [True] * problem


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("SGLANG_MIXKV_STAGING", "64", "the nearest that is known is SGLANG_MIXKV_STAGING_MB"),
        ("SGLANG_ENABLE_MIX_KV", "1", "the nearest that is known is SGLANG_ENABLE_MIXKV"),
        ("SGLANG_MIXKV_PATIENCE", "long", "to be a number from 0.1 to 60; got 'long'"),
        ("SGLANG_MIXKV_PORT", "1.5", "to be a whole number from 1024 to 65000; got '1.5'"),
        ("SGLANG_MIXKV_PATIENCE", "0.5", None),
        ("SGLANG_MIXKV_PORT", "", None),
    ],
)
def test_a_variable_that_the_plugin_does_not_read(name: str, value: str, words: str | None) -> None:
    (found,) = checks.environment({name: value})
    assert (found.name, found.value) == (name, value)
    assert words in found.problem if words else not found.problem


def test_the_variables_that_are_known_are_those_in_the_source() -> None:
    found = {
        node.value
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(r"SGLANG_[A-Z_]*MIXKV[A-Z_]*", node.value)
    }
    assert found == config.KNOWN


def test_environment_shows_what_matters_and_no_secret() -> None:
    environ = {
        "MC_FORCE_TCP": "1",
        "MC_ACCESS_KEY": "hush",
        "MOONCAKE_MASTER": "http://user:hush@host:1/",
        "HOME": "/home/somebody",
        "SGLANG_RUST_SERVER": "1",
    }
    found = list(checks.environment(environ))
    assert {finding.name: finding.value for finding in found} == {
        "MC_ACCESS_KEY": "(set, not shown)",
        "MC_FORCE_TCP": "1",
        "MOONCAKE_MASTER": "http://***@host:1/",
        "SGLANG_RUST_SERVER": "1",
    }
    (problem,) = problems(found)
    assert problem.startswith("SGLANG_RUST_SERVER=1 is not")


# ---------------------------------------------------------------- plugin, versions, libraries


def test_a_whitelist_without_the_plugin_is_a_problem() -> None:
    left_out = problems(list(checks.entry_point({"SGLANG_PLUGINS": "one, two"})))
    listed = problems(list(checks.entry_point({"SGLANG_PLUGINS": "one, mixkv"})))
    assert any("leaves out mixkv" in problem for problem in left_out)
    assert not any("leaves out mixkv" in problem for problem in listed)


def test_a_missing_entry_point_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda group: ())
    assert "will not load" in problems(list(checks.entry_point({})))[0]


def test_versions_missing_and_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "version_of", lambda *names: "none")
    found = problems(list(checks.versions()))
    assert len(found) == 2
    assert "expected SGLang 0.5.21 or 0.5.22 or 0.5.23" in found[0]
    assert "neither Mooncake nor NIXL is installed" in found[1]


def test_a_missing_library_names_its_package() -> None:
    def load(name: str) -> None:
        if name.startswith("libnuma"):
            raise OSError("cannot open shared object file")

    missing, found = checks.libraries(load)
    assert "apt-get install libnuma1" in missing.problem
    assert found.value == "libibverbs.so.1, librdmacm.so.1"


# ---------------------------------------------------------------- RDMA devices


UP, DOWN = "4: ACTIVE", "1: DOWN"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A host with a device of this state, none without."""

    def made(state: str = "") -> None:
        if state:
            port = tmp_path / "mlx5_0" / "ports" / "1"
            port.mkdir(parents=True)
            (port / "state").write_text(f"{state}\n")
            (port / "link_layer").write_text("Ethernet\n")
        monkeypatch.setattr(rdma, "DEVICES", tmp_path)

    return made


@pytest.mark.parametrize(
    ("state", "plane", "environ", "value", "problem"),
    [
        ("", "mooncake", {}, "TCP", ""),
        ("", "nixl", {}, "no RDMA device", ""),
        (
            "",
            "mooncake",
            {"MOONCAKE_PROTOCOL": "rdma"},
            "TCP",
            "expected RDMA: .*MC_FORCE_TCP=1",
        ),
        ("", "nixl", {"MOONCAKE_PROTOCOL": "rdma"}, "no RDMA device", ""),
        (UP, "mooncake", {}, "TCP", "expected RDMA: .*MC_FORCE_TCP=1"),
        (
            UP,
            "nixl",
            {},
            "no RDMA device",
            "or set SGLANG_MIXKV_DATA_PLANE=mooncake",
        ),
        (UP, "mooncake", {"MC_FORCE_TCP": "0"}, "TCP: MC_FORCE_TCP is set", ""),
        (UP, "nixl", {"MC_FORCE_TCP": "1"}, "no RDMA device", "SGLANG_MIXKV_DATA_PLANE=mooncake"),
        (DOWN, "mooncake", {}, "TCP", "expected RDMA: .*MC_FORCE_TCP=1"),
    ],
)
def test_a_transport_that_was_not_meant_is_a_problem(
    host: Any, state: str, plane: str, environ: dict[str, str], value: str, problem: str
) -> None:
    host(state)
    found = rdma.transport(plane, [], environ)
    assert found.value == value
    assert re.search(problem, found.problem)
    assert bool(found.problem) == bool(problem)
    over = rdma.transport(plane, ["mlx5_0"], environ)
    name = "RDMA" if plane == "mooncake" else "NIXL"
    assert (over.value, over.problem) == (f"{name} over mlx5_0", "")


def test_the_devices_that_a_process_has_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, verbs = tmp_path / "fd", tmp_path / "verbs"
    (verbs / "uverbs1").mkdir(parents=True)
    (verbs / "uverbs1" / "ibdev").write_text("mlx5_1\n")
    files.mkdir()
    monkeypatch.setattr(rdma, "FILES", files)
    monkeypatch.setattr(rdma, "VERBS", verbs)
    for number, target in enumerate(["/dev/null", "socket:[1]", "/dev/infiniband/rdma_cm"]):
        (files / str(number)).symlink_to(target)
    assert rdma.in_use() == []
    for number in (7, 8):
        (files / str(number)).symlink_to("/dev/infiniband/uverbs1")
    assert rdma.in_use() == ["mlx5_1"]


@pytest.mark.parametrize("state", [UP, DOWN, ""])
def test_a_device_that_is_named_has_to_be_active(host: Any, state: str) -> None:
    host(state)
    (device,) = rdma.findings([])
    assert not device.problem
    assert device.value == (f"port 1 {state[3:]} (Ethernet)" if state else "none")
    (problem,) = problems(list(rdma.findings(["mlx5_0", "mlx5_7"])))
    assert "with an active port" in problem
    assert [f.value for f in rdma.findings(["mlx5_0", "mlx5_7"])][-1] == (
        "mlx5_7" if state == UP else "mlx5_0,mlx5_7"
    )


@pytest.mark.parametrize("text", ["a, b", '{"0": "a", "1": "a,b"}', "file.json"])
def test_devices_as_sglang_reads_them(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file.json").write_text('{"0": "a", "1": "b"}')
    args = doctor._parser().parse_args(["--disaggregation-ib-device", text])
    assert args.disaggregation_ib_device == ["a", "b"]


# ---------------------------------------------------------------- seams


def test_seams_as_expected() -> None:
    assert problems(list(checks.seam_findings("INFO something\ndone:\n", "", 0))) == []


def test_each_changed_seam_is_a_problem() -> None:
    out = "seam:a.b:C.d: expected parameters ('x',); found ()\nseam:e:f: found none\ndone:\n"
    found = list(checks.seam_findings(out, "", 0))
    assert [finding.name for finding in found] == ["a.b:C.d", "e:f"]
    assert len(problems(found)) == 2


def test_a_check_that_dies_is_a_problem() -> None:
    (problem,) = problems(list(checks.seam_findings("", "Traceback\nImportError: no GPU\n", 1)))
    assert "ImportError: no GPU" in problem
