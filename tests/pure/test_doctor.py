"""The doctor's checks one by one, and one real transfer between two child processes."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import socket
import threading
from importlib import metadata
from pathlib import Path

import pytest

from sglang_mixkv import config
from sglang_mixkv.tools import doctor, doctor_diff, doctor_memory, doctor_transfer
from sglang_mixkv.tools import doctor_checks as checks
from sglang_mixkv.tools.doctor_checks import Finding


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
    assert set(found) == set(config.Config.__struct_fields__)
    assert found["enabled"] == "True (flag --enable-mixkv)"
    assert found["staging_mb"] == "64 (environment, SGLANG_MIXKV_STAGING_MB)"
    assert found["stats_dir"] == "'' (default)"


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


@pytest.mark.parametrize("way", ["cold", "refuse"])
def test_the_environment_is_judged_with_the_flags(way: str) -> None:
    flags = argparse.Namespace(mixkv_on_draft_mismatch=way)
    found = list(checks.environment({"SGLANG_MOONCAKE_CUSTOM_MEM_POOL": "True"}, flags))
    assert len(problems(found)) == (way == "cold")


def test_environment_shows_what_matters_and_no_secret() -> None:
    environ = {
        "MC_FORCE_TCP": "1",
        "MC_ACCESS_KEY": "hush",
        "MOONCAKE_MASTER": "http://user:hush@host:1/",
        "HOME": "/home/somebody",
        "SGLANG_DISAGG_STAGING_BUFFER": "1",
    }
    found = list(checks.environment(environ))
    assert {finding.name: finding.value for finding in found} == {
        "MC_ACCESS_KEY": "(set, not shown)",
        "MC_FORCE_TCP": "1",
        "MOONCAKE_MASTER": "http://***@host:1/",
        "SGLANG_DISAGG_STAGING_BUFFER": "1",
    }
    (problem,) = problems(found)
    assert problem.startswith("SGLANG_DISAGG_STAGING_BUFFER=1 is not")


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
    assert "expected SGLang 0.5.22 or 0.5.23" in found[0]
    assert "neither Mooncake nor NIXL is installed" in found[1]


def test_a_missing_library_names_its_package() -> None:
    def load(name: str) -> None:
        if name.startswith("libnuma"):
            raise OSError("cannot open shared object file")

    (problem,) = problems(list(checks.libraries(load)))
    assert "apt-get install libnuma1" in problem


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


DISAGG = "sglang/srt/disaggregation"


def unpacked(folder: Path, version: str, **files: str) -> Path:
    """An SGLang as pip unpacks it, with these files of disaggregation/."""
    info = folder / f"sglang-{version}.dist-info"
    for place in (info, folder / DISAGG):
        place.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: sglang\nVersion: {version}\n")
    (folder / "sglang" / "__init__.py").touch()
    for name, text in files.items():
        (folder / DISAGG / f"{name}.py").write_text(text)
    return folder


def test_another_sglang_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The one in the folder, not the installed one."""
    assert doctor.main(["--against", str(unpacked(tmp_path, "9.9.9"))]) == 1
    said = capsys.readouterr().out
    assert "found 9.9.9" in said
    assert "sglang.srt.disaggregation.utils:get_kv_class: expected it with parameters" in said
    assert re.search(r"sglang\.srt\.disaggregation\.mooncake\.conn +gone", said)


@pytest.fixture
def two_releases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The folder of the newer of two; the older is the installed one."""
    old = unpacked(tmp_path / "old", "1.0", utils="a\nb\nc\n", decode="same\n", prefill="x\n")
    new = unpacked(tmp_path / "new", "1.1", utils="a\nB\nc\nd", decode="same\n", unlisted="n\n")
    monkeypatch.setattr(doctor_diff, "installed", lambda: doctor_diff.tree(old))
    return str(new)


def test_changed_files_are_counted_and_the_same_left_out(two_releases: str) -> None:
    found = {finding.name: finding.value for finding in doctor_diff.findings(two_releases)}
    assert found == {
        "compared": "1.0 -> 1.1",
        "sglang.srt.disaggregation.prefill": "gone",
        "sglang.srt.disaggregation.utils": "+2 -1",
    }
    assert problems(list(doctor_diff.findings(two_releases))) == []


def test_the_whole_diff(two_releases: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--against", two_releases, "--diff"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "--- 1.0/sglang.srt.disaggregation.prefill", "+++ 1.1/sglang.srt.disaggregation.prefill",
        "@@ -1 +0,0 @@", "-x",
        "--- 1.0/sglang.srt.disaggregation.utils", "+++ 1.1/sglang.srt.disaggregation.utils",
        "@@ -1,3 +1,4 @@", " a", "-b", "+B", " c", "+d",
    ]  # fmt: skip


def test_a_diff_needs_another_sglang() -> None:
    with pytest.raises(SystemExit):
        doctor.main(["--diff"])


def test_without_an_sglang_nothing_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_diff, "installed", lambda: None)
    (found,) = doctor_diff.findings(str(tmp_path))
    assert "no SGLang is installed" in found.value
    assert doctor_diff.whole(str(tmp_path)) == ""


# ---------------------------------------------------------------- transfer


def test_pattern_shows_a_shifted_page() -> None:
    data = doctor_transfer.pattern(4 << 20)
    assert len(data) == 4 << 20
    pages = {data[start : start + 16384] for start in range(0, len(data), 16384)}
    assert len(pages) == 256


def test_first_difference() -> None:
    assert doctor_transfer.first_difference(b"abc", b"abc") == -1
    assert doctor_transfer.first_difference(b"abc", b"abX") == 2
    assert doctor_transfer.first_difference(b"abc", b"ab") == 2


def test_split_address() -> None:
    assert doctor_transfer.split_address("[::1]:80") == ("::1", 80)
    with pytest.raises(ValueError, match="HOST:PORT"):
        doctor_transfer.split_address("80")


def test_nobody_there_is_a_problem() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(doctor_memory.TransferFailed, match="no connection"):
        doctor_transfer.send("127.0.0.1", port)


def test_a_stranger_is_told_so() -> None:
    """A peer that speaks something else gets a reason, and so does the listener."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    failures: list[str] = []

    def serve() -> None:
        try:
            doctor_transfer.listen(port, "127.0.0.1", 10)
        except doctor_memory.TransferFailed as error:
            failures.append(str(error))

    thread = threading.Thread(target=serve)
    thread.start()
    for _ in range(200):
        try:
            stranger = socket.create_connection(("127.0.0.1", port), 5)
        except ConnectionRefusedError:
            thread.join(0.05)
        else:
            break
    with stranger, stranger.makefile("rw") as stream:
        stream.write('{"hello": "another doctor"}\n')
        stream.flush()
        reply = json.loads(stream.readline())
    thread.join(10)
    assert "another version" in reply["failed"]
    assert failures == [reply["failed"]]


@pytest.mark.parametrize("backend", ["mooncake", "nixl"])
def test_a_real_transfer_between_two_processes(backend: str) -> None:
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    blocks = doctor_transfer.loopback(backend)
    assert [(block["bytes"], block["first_wrong"]) for block in blocks] == [
        (64 << 10, -1),
        (4 << 20, -1),
    ]
    assert all(0 < block["seconds"] < 30 for block in blocks)


# ---------------------------------------------------------------- the report


def run(monkeypatch: pytest.MonkeyPatch, blocks: list[dict[str, float]], *argv: str) -> int:
    """The doctor with this transfer; on a host where everything else is right."""
    monkeypatch.setattr(doctor_transfer, "loopback", lambda _: blocks)
    for name in ("versions", "entry_point", "environment", "libraries"):
        monkeypatch.setattr(checks, name, lambda **_: [])
    return doctor.main(["--no-seams", "--backend", "mooncake", *argv])


def test_exit_status_and_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = {"bytes": 65536, "seconds": 0.001, "first_wrong": -1}
    assert run(monkeypatch, [right]) == 0
    assert capsys.readouterr().out.endswith("nothing is wrong\n")
    assert run(monkeypatch, [{**right, "first_wrong": 7}]) == 1
    out = capsys.readouterr().out
    assert "!! 64 KiB between two processes here" in out
    assert "byte 7 arrived wrong" in out
    assert out.endswith("1 problem, marked !!\n")


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = [{"bytes": 65536, "seconds": 0.001, "first_wrong": 0}]
    assert run(monkeypatch, blocks, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"schema", "ok", "findings"}
    assert found["ok"] is False
    assert set(found["findings"][0]) == {"section", "name", "value", "problem"}


def test_a_failed_transfer_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> None:
        raise doctor_memory.TransferFailed("no route")

    args = argparse.Namespace(listen=None, peer=None)
    monkeypatch.setattr(doctor_transfer, "loopback", fail)
    assert problems(list(doctor.transfer_findings(args, "mooncake"))) == ["no route"]
