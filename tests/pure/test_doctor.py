"""The doctor's checks one by one, and one real transfer between two child processes."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from sglang_mixkv import config
from sglang_mixkv.tools import doctor, doctor_child, doctor_diff, doctor_memory, doctor_transfer
from sglang_mixkv.tools import doctor_checks as checks
from sglang_mixkv.tools import doctor_rdma as rdma
from sglang_mixkv.tools.doctor_checks import Finding
from sglang_mixkv.tools.doctor_transfer import Wire


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


# ---------------------------------------------------------------- RDMA devices


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., rdma.Seen]:
    """A host with a device of this state, of which Mooncake finds these names."""

    def made(state: str, finds: list[str] | None, names: Sequence[str] = ()) -> rdma.Seen:
        port = tmp_path / "mlx5_0" / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "link_layer").write_text("Ethernet\n")
        answer = "no such file" if finds is None else (finds, False)
        monkeypatch.setattr(rdma, "FOLDER", tmp_path)
        monkeypatch.setattr(rdma, "ask_mooncake", lambda _: answer)
        monkeypatch.setattr(rdma, "version_of", lambda *_: "1.0")
        return rdma.look(names)

    return made


UP, DOWN = "4: ACTIVE", "1: DOWN"


@pytest.mark.parametrize(
    ("state", "finds", "environ", "value", "problem"),
    [
        (UP, ["mlx5_0"], {}, "RDMA over mlx5_0", ""),
        (UP, None, {}, "RDMA over mlx5_0", "says what it would use; no such file"),
        (UP, ["mlx5_0"], {"MC_FORCE_TCP": "0"}, "TCP: MC_FORCE_TCP is set", ""),
        (DOWN, [], {"MC_FORCE_TCP": "1"}, "TCP: MC_FORCE_TCP is set", ""),
        (DOWN, [], {}, "TCP", "Bring a port up, or set MC_FORCE_TCP=1"),
        (DOWN, None, {}, "TCP", "says what it would use; no such file"),
        (UP, [], {}, "TCP", "Give this container /dev/infiniband"),
        (UP, ["mlx5_0"], {"MOONCAKE_PROTOCOL": "tcp"}, "RDMA over mlx5_0", "for TCP set MC_FORCE"),
    ],
)
def test_a_device_counts_where_mooncake_uses_it(
    host: Any, state: str, finds: list[str], environ: dict[str, str], value: str, problem: str
) -> None:
    seen = host(state, finds)
    device, mooncake = rdma.findings(seen, environ=environ)
    assert (device.value, device.problem) == (f"port 1 {state[3:]} (Ethernet)", "")
    assert mooncake.value == value
    assert problem in mooncake.problem
    assert bool(mooncake.problem) == bool(problem)
    assert seen.way(environ) == value.split()[0].strip(":").lower()


@pytest.mark.parametrize(("protocol", "way"), [("efa", "efa"), ("rdma", "tcp")])
def test_a_mooncake_for_efa_goes_by_its_variable(protocol: str, way: str) -> None:
    assert rdma.Seen((), (), for_efa=True).way({"MOONCAKE_PROTOCOL": protocol}) == way


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["mlx5_0"], "--disaggregation-ib-device names it, and it has no active port"),
        (["mlx5_7"], "expected devices of this host (mlx5_0), got mlx5_7: SGLang does not start"),
    ],
)
def test_a_device_that_is_named_has_to_work(host: Any, names: list[str], problem: str) -> None:
    found = list(rdma.findings(host(DOWN, [], names), names, {"MC_FORCE_TCP": "1"}))
    (said,) = problems(found)
    assert said.startswith(problem)


@pytest.mark.parametrize("environ", [{}, {"MOONCAKE_PROTOCOL": "rdma"}])
def test_a_host_without_devices(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rdma, "FOLDER", tmp_path / "none")
    monkeypatch.setattr(rdma, "version_of", lambda *_: "1.0")
    found, mooncake = rdma.findings(rdma.look(), environ=environ)
    assert [found.value, mooncake.value] == ["none", "TCP"]
    assert ("Load the device's driver" in mooncake.problem) == bool(environ)


def test_mooncake_says_which_devices_it_finds() -> None:
    pytest.importorskip("mooncake")
    assert rdma.ask_mooncake(["no_such_device"]) == ([], False)


@pytest.mark.parametrize("text", ["a, b", '{"0": "a", "1": "a,b"}', "file.json"])
def test_devices_as_sglang_reads_them(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file.json").write_text('{"0": "a", "1": "b"}')
    args = doctor._parser().parse_args(["--disaggregation-ib-device", text])
    assert args.disaggregation_ib_device == ["a", "b"]


@pytest.mark.parametrize("text", ["", ",", '{"x": "a"}', "{", '{"0": 1}', "{}", "none.json"])
def test_unreadable_devices_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        doctor.main(["--disaggregation-ib-device", text])
    assert "expected device names as in mlx5_0,mlx5_1, or JSON" in capsys.readouterr().err


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


@pytest.mark.parametrize(
    ("text", "address"), [("[::1]:80", ("::1", 80)), ("10.0.0.1:80", ("10.0.0.1", 80))]
)
def test_an_address(text: str, address: tuple[str, int]) -> None:
    assert doctor_transfer.split_address(text) == address


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        *(("--peer", value, f"expected HOST:PORT, as in 10.0.0.1:18515 or [fd00::1]:18515, got "
           f"{value!r}; PORT is the one that the other host's --listen names")
          for value in ("10.0.0.1", "fd00::1", "[fd00::1]", ":80", "host:", "host:65536")),
        ("--listen", "65536", "expected a port from 0 (any that is free) to 65535, got '65536'"),
    ],
)  # fmt: skip
def test_an_address_that_is_none_is_refused(
    option: str, value: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        doctor.main([option, value])
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_nobody_there_is_a_problem() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(doctor_memory.TransferFailed, match="no connection"):
        doctor_transfer.send("127.0.0.1", port, Wire("mooncake"))


def test_a_port_that_is_taken_is_said() -> None:
    words = r"cannot listen on port \d+: Address already in use"
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(doctor_memory.TransferFailed, match=words):
            doctor_child.run_listener(port, Wire("mooncake"))


def test_a_process_that_does_not_end_is_ended() -> None:
    with (
        doctor_child.Child("listen", "127.0.0.1", 0, Wire("mooncake"), 1) as child,
        pytest.raises(doctor_memory.TransferFailed, match="no end after 1 s"),
    ):
        child.result()


def test_who_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_transfer, "HELLO_S", 0.05)
    ours, silent = socket.socketpair()
    with ours, silent, pytest.raises(TimeoutError):
        doctor_transfer._greet(ours, "mooncake")


def hellos() -> list[bytes]:
    """Of another doctor, a health check, a port scanner, and one that says nothing."""
    return [b'{"hello": "another doctor"}\n', b"GET / HTTP/1.1\r\n\r\n", b"\xff\xfe\n", b""]


def test_a_stranger_does_not_end_the_listener(capsys: pytest.CaptureFixture[str]) -> None:
    """Each hears why it is dropped, and so does the user; then comes the peer."""
    pytest.importorskip("mooncake")
    strangers = ["127.0.0.1", *(["::1"] if has_ipv6() else [])]
    with doctor_child.Child("listen", "", 0, Wire("mooncake"), 60) as listener:
        port = listener.port()
        for host, hello in itertools.product(strangers, hellos()):
            with socket.create_connection((host, port), 10) as stranger:
                stranger.sendall(hello)
                stranger.shutdown(socket.SHUT_WR)
                reply = json.loads(stranger.makefile().readline())
            kind = "another version" if b"another" in hello else "or is not a doctor"
            assert kind in reply["failed"]
        blocks = doctor_child.run_sender("127.0.0.1", port, Wire("mooncake"))
        assert listener.result() == len(blocks) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == len(strangers) * len(hellos())
    assert all(re.match(r"dropped \S+, still listening: the other side ", line) for line in said)


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def test_over_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mooncake needs a variable for that; the failure names it."""
    pytest.importorskip("mooncake")
    if not has_ipv6():
        pytest.skip("no IPv6 address here")
    monkeypatch.delenv("MC_USE_IPV6", raising=False)
    wire = Wire("mooncake")

    def tried() -> list[dict[str, Any]]:
        with doctor_child.Child("listen", "", 0, wire, 60) as listener:
            return doctor_child.run_sender("::1", listener.port(), wire)

    with pytest.raises(doctor_memory.TransferFailed, match="it needs MC_USE_IPV6=1"):
        tried()
    monkeypatch.setenv("MC_USE_IPV6", "1")
    assert [block["first_wrong"] for block in tried()] == [-1, -1]


@pytest.mark.parametrize("backend", ["mooncake", "nixl"])
def test_a_real_transfer_between_two_processes(backend: str) -> None:
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    blocks = doctor_child.loopback(Wire(backend))
    assert [(block["bytes"], block["first_wrong"]) for block in blocks] == [
        (64 << 10, -1),
        (4 << 20, -1),
    ]
    assert all(0 < block["seconds"] < 30 for block in blocks)


BACKEND, PARAMS = doctor_memory.NIXL_BACKEND, doctor_memory.NIXL_PARAMS


@pytest.mark.parametrize(
    ("environ", "names", "taken"),
    [
        ({}, [], ("UCX", {})),
        ({BACKEND: "UCCL", PARAMS: '{"a": "b"}'}, ["mlx5_0"], ("UCCL", {"a": "b"})),
        ({}, ["mlx5_0", "mlx5_1"], ("UCX", {"device_list": "mlx5_0, mlx5_1"})),
        ({PARAMS: '{"device_list": "mlx5_0"}'}, ["mlx5_0"], ("UCX", {"device_list": "mlx5_0"})),
        ({"UCX_NET_DEVICES": "mlx5_1:1"}, ["mlx5_0"], ("UCX", {})),
    ],
)
def test_nixls_backend_is_sglangs(
    environ: dict[str, str], names: list[str], taken: tuple[str, dict[str, str]]
) -> None:
    assert doctor_memory.nixl_backend(names, environ) == taken


@pytest.mark.parametrize(
    ("environ", "names", "words"),
    [
        ({PARAMS: "{"}, [], "expected a JSON object of strings, got {"),
        ({PARAMS: '{"num_threads": 8}'}, [], "expected a JSON object of strings"),
        ({}, ["mlx5_0:1"], "expected devices without ports"),
        ({PARAMS: '{"device_list": "mlx5_1"}'}, ["mlx5_0"], "leave one of them out"),
    ],
)
def test_what_sglang_refuses_of_nixl(environ: dict[str, str], names: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        doctor_memory.nixl_backend(names, environ)


def test_a_nixl_backend_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nixl")
    monkeypatch.setenv(BACKEND, "ABACUS")
    args = argparse.Namespace(listen=None, peer=None)
    (found,) = doctor.transfer_findings(args, Wire("nixl"))
    assert found.section == "transfer over NIXL, ABACUS"
    assert "NIXL could not make its backend ABACUS" in found.problem


# ---------------------------------------------------------------- the report


def run(monkeypatch: pytest.MonkeyPatch, blocks: list[dict[str, float]], *argv: str) -> int:
    """The doctor with this transfer; on a host where everything else is right."""
    monkeypatch.setattr(doctor_child, "loopback", lambda _: blocks)
    for name in ("versions", "entry_point", "environment", "libraries"):
        monkeypatch.setattr(checks, name, lambda **_: [])
    monkeypatch.setattr(rdma, "findings", lambda *_, **__: [])
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
    def fail(_: Wire) -> None:
        raise doctor_memory.TransferFailed("no route")

    args = argparse.Namespace(listen=None, peer=None)
    monkeypatch.setattr(doctor_child, "loopback", fail)
    assert problems(list(doctor.transfer_findings(args, Wire("mooncake")))) == ["no route"]


def test_a_listener_ends_with_the_doctor_that_started_it(tmp_path: Path) -> None:
    """Also where that is killed: the port is free for the next one."""
    program = (
        "import os\nfrom sglang_mixkv.tools.doctor_child import Child\n"
        "from sglang_mixkv.tools.doctor_transfer import Wire\n"
        "child = Child('listen', '127.0.0.1', 0, Wire('mooncake'), 60)\n"
        "print(child.port(), flush=True)\nos._exit(9)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    port = int(done.stdout)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return
        time.sleep(0.1)
    pytest.fail(f"something still listens on {port}")


def test_without_a_transfer_mooncake_is_not_asked(
    host: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An image's build, or a pod's init container, has not the devices that the server gets."""
    host(UP, [])
    for variable in ("MC_FORCE_TCP", "MOONCAKE_PROTOCOL"):
        monkeypatch.delenv(variable, raising=False)
    for name in ("versions", "entry_point", "environment", "libraries"):
        monkeypatch.setattr(checks, name, lambda **_: [])
    monkeypatch.setattr(doctor_child, "loopback", lambda _: [])
    assert doctor.main(["--no-seams", "--backend", "mooncake"]) == 1
    assert "it finds none to use" in capsys.readouterr().out
    assert doctor.main(["--no-seams", "--backend", "mooncake", "--no-transfer"]) == 0
    assert "mlx5_0" in capsys.readouterr().out


def test_mooncakes_devices_are_of_no_interest_over_nixl(host: Any) -> None:
    seen = host(DOWN, [])
    assert [f.name for f in rdma.findings(seen, over_mooncake=False)] == ["mlx5_0"]
    assert [f.name for f in rdma.findings(seen)] == ["mlx5_0", "Mooncake"]
