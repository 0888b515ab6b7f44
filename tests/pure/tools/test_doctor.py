"""The checks of the `doctor` command, its command line and its report."""

from __future__ import annotations

import json
import os
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from sglang_mixkv.config import OFF, Config
from sglang_mixkv.tools import doctor, doctor_read
from sglang_mixkv.tools.doctor_read import READ, ReadFailed, Result, Wire

main = doctor.main
UP, DOWN = "4: ACTIVE", "1: DOWN"


def problems(found: Any) -> list[str]:
    return [finding.problem for finding in found if finding.problem]


PARAMS = "SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS"


@pytest.mark.parametrize(
    ("name", "value", "shown", "words"),
    [
        ("SGLANG_MIXKV_STAGING", "64", "64", "the closest match is SGLANG_MIXKV_STAGING_MB"),
        ("SGLANG_MIXKV_PATIENCE", "long", "long", "to be a number from 0.1 to 60; got 'long'"),
        ("SGLANG_RUST_SERVER", "1", "1", "SGLANG_RUST_SERVER=1 is not"),
        ("MC_FORCE_TCP", "1", "1", ""),
        ("MC_ACCESS_KEY", "hush", "(set, not shown)", ""),
        (PARAMS, '{"a": "hush"}', "(set, not shown)", ""),
        (PARAMS, "hush", "(set, not shown)", "got a value that may contain keys"),
        ("MOONCAKE_MASTER", "http://user:hush@host:1/", "http://***@host:1/", ""),
        ("SGLANG_URL", "http://u:p@h/?token=hush", "http://***@h/?***", ""),
    ],
)
def test_a_variable_is_shown_with_its_problem(
    name: str, value: str, shown: str, words: str
) -> None:
    (found,) = doctor.environment({name: value, "HOME": "/home/somebody"})
    assert (found.name, found.value) == (name, shown)
    assert "hush" not in found.problem
    assert ".." not in found.problem
    assert (words in found.problem, bool(found.problem)) == (True, bool(words))


def test_missing_packages_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing or unsupported package is reported.

    If SGLang is missing, nothing else is checked.
    """
    for names in ("one, two", ",", " "):
        (problem,) = problems(doctor.entry_point({"SGLANG_PLUGINS": names}))
        assert "leaves out mixkv" in problem
    assert problems(doctor.entry_point({"SGLANG_PLUGINS": "one, mixkv"})) == []
    for version, words in (
        ("0.5.20", "expected SGLang 0.5.21 or 0.5.22 or 0.5.23: pip install sglang==0.5.23"),
        ("0.5.23", "neither Mooncake nor NIXL is installed"),
        ("none", "doctor needs SGLang, and checked nothing else"),
    ):
        known = {"sglang": version}
        monkeypatch.setattr(doctor, "version_of", lambda name, k=known: k.get(name, "none"))
        (problem,) = problems(doctor.versions())
        assert words in problem
    monkeypatch.setattr(doctor, "seams", lambda: pytest.fail("seams compared without SGLang"))
    assert doctor.main([]) == 1
    assert capsys.readouterr().out.endswith("\n1 problem, marked !!\n")
    monkeypatch.setattr(metadata, "entry_points", lambda group: ())
    assert "will not load" in problems(doctor.entry_point({}))[0]


def as_expected() -> list[str]:
    print("INFO something")
    return []


def differing() -> list[str]:
    return ["a.b:C.d: expected", "e:f: found"]


def raising() -> list[str]:
    raise ModuleNotFoundError("No module named 'nothing'")


def ending() -> list[str]:
    print("INFO something", flush=True)
    os._exit(1)


@pytest.mark.parametrize(
    ("compare", "names", "words"),
    [
        (as_expected, ["checked"], ""),
        (differing, ["a.b:C.d", "e:f"], "found"),
        (raising, ["checked"], "the check failed: No module named 'nothing'"),
        (ending, ["checked"], "a process died.*: INFO something"),
    ],
)
def test_differences_of_seams_are_reported(compare: Any, names: list[str], words: str) -> None:
    """Differences of seams are reported, and also the death of the process that compares them.

    The comparison runs in a separate process, since importing SGLang may crash the process.
    """
    found = [*doctor.seams(compare)]
    assert [finding.name for finding in found] == names
    assert re.search(words, found[-1].problem)
    assert len(problems(found)) == (len(names) if words else 0)


def test_the_sglang_on_the_path_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seams of an unpacked SGLang on the path are compared, not those of the installed one."""
    info, package = tmp_path / "sglang-0.5.20.dist-info", tmp_path / "sglang"
    for place in (info, package):
        place.mkdir()
    (info / "METADATA").write_text("Name: sglang\nVersion: 0.5.20\n")
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    report = "\n".join(problems(doctor.seams()))
    assert "found 0.5.20" in report
    assert "sglang.srt.disaggregation.utils:get_kv_class: expected it with parameters" in report


# ---------------------------------------------------------------- RDMA devices


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that gives the host an RDMA device in a given state, or none."""
    monkeypatch.setattr(doctor, "DEVICES", tmp_path / "devices")

    def made(state: str = "") -> None:
        if state:
            port = tmp_path / "devices" / "mlx5_0" / "ports" / "1"
            port.mkdir(parents=True)
            (port / "state").write_text(f"{state}\n")
            (port / "link_layer").write_text("Ethernet\n")

    return made


@pytest.mark.parametrize(
    ("state", "plane", "environ", "value", "problem"),
    [
        ("", "mooncake", {}, "TCP", ""),
        ("", "nixl", {"MOONCAKE_PROTOCOL": "rdma"}, "no RDMA device", ""),
        (UP, "mooncake", {}, "TCP", "expected RDMA: .*MC_FORCE_TCP=1"),
        (UP, "nixl", {"MC_FORCE_TCP": "1"}, "no RDMA device", "SGLANG_MIXKV_DATA_PLANE=mooncake"),
        (UP, "mooncake", {"MC_FORCE_TCP": "0"}, "TCP: MC_FORCE_TCP is set", ""),
    ],
)
def test_an_unexpected_transport_is_a_problem(
    host: Any, state: str, plane: str, environ: dict[str, str], value: str, problem: str
) -> None:
    host(state)
    found = doctor.transport(plane, [], environ)
    assert (found.value, bool(found.problem)) == (value, bool(problem))
    assert re.search(problem, found.problem)
    over = doctor.transport(plane, ["mlx5_0"], environ)
    name = "RDMA" if plane == "mooncake" else "NIXL"
    assert (over.value, over.problem) == (f"{name} over mlx5_0", "")


@pytest.mark.parametrize(
    ("state", "wrong"), [(UP, "mlx5_7"), (DOWN, "mlx5_0,mlx5_7"), ("", "mlx5_0,mlx5_7")]
)
def test_a_named_device_must_be_active(host: Any, state: str, wrong: str) -> None:
    host(state)
    device, named = doctor.rdma(["mlx5_0, mlx5_7"])
    assert device.value == (f"port 1 {state[3:]} (Ethernet)" if state else "none")
    assert (device.problem, named.value) == ("", wrong)
    known = "mlx5_0" if state else "it has none"
    assert f"devices of this host ({known}) with an active port" in named.problem


@pytest.mark.parametrize("form", ["plain", "JSON", "file"])
def test_devices_are_named_as_in_sglangs_flag(
    run: Any, host: Any, tmp_path: Path, form: str
) -> None:
    """RDMA devices are accepted in all forms of SGLang's flag.

    All devices are checked, and the read uses those of the first GPU.
    """
    from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
        get_ib_devices_for_gpu,
    )

    host(UP)
    names = {"10": "mlx5_9", "0": "mlx5_0", "2": "mlx5_0,mlx5_7"}
    given = "mlx5_0, mlx5_9, mlx5_7" if form == "plain" else json.dumps(names)
    if form == "file":
        (tmp_path / "ib.json").write_text(given)
        given = str(tmp_path / "ib.json")
    status, text = run("--disaggregation-ib-device", given)
    assert status == 1
    missing = "mlx5_9,mlx5_7" if form == "plain" else "mlx5_7,mlx5_9"
    assert f"--disaggregation-ib-device  {missing}\n" in text
    assert run.asked[0].devices == get_ib_devices_for_gpu(given, 0)


@pytest.mark.parametrize("given", ["{mlx5_0}", '{"a": "mlx5_0"}', "none.json"])
def test_invalid_device_flags_are_rejected(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        doctor.main(["--disaggregation-ib-device", given])
    assert (caught.value.code, f"device: {given}: " in capsys.readouterr().err) == (2, True)


@pytest.mark.parametrize(
    ("version", "module", "value"),
    [
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06", False, "dma-buf"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06", True, "nvidia_peermem"),
        ("NVIDIA UNIX Open Kernel Module", True, "nvidia_peermem, dma-buf"),
        ("NVIDIA UNIX x86_64 Kernel Module", False, "unreachable"),
    ],
)
def test_drivers_that_let_a_nic_reach_gpu_memory(
    host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, module: bool,
    value: str,
) -> None:  # fmt: skip
    host(UP)
    assert len([*doctor.rdma([""])]) == 1, "GPU memory is not checked without a GPU"
    (tmp_path / "version").write_text(version)
    monkeypatch.setattr(doctor, "NVIDIA", tmp_path / "version")
    monkeypatch.setattr(doctor, "PEERMEM", tmp_path / ("version" if module else "none"))
    _, found = doctor.rdma([""])
    assert (found.name, found.value) == ("GPU memory", value)
    assert bool(found.problem) == (value == "unreachable")


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("words", "error"),
    [
        *(([f"--peer={text}"], f"as in 10.0.0.1:18515 or [fd00::1]:18515, got {text!r}")
          for text in ("10.0.0.1", "[fd00::1]", ":80", "host:65536")),
        (["--listen=1", "--peer=host:1"], "not allowed with argument"),
        *(([f"--listen={port}"], f"expected 1 to 65535, got '{port}'") for port in (0, 65536, -1)),
        (["--disaggregation-transfer-backend=mori"], "invalid choice: 'mori'"),
    ],
)  # fmt: skip
def test_invalid_arguments_exit_with_status_2(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        doctor.main(words)
    assert (caught.value.code, error in capsys.readouterr().err) == (2, True)


@pytest.fixture
def run(host: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs doctor on a host without problems, with a given read result.

    The function returns doctor's exit status and output. Its attribute `asked` has the arguments of
    the read.
    """
    for name in ("versions", "entry_point"):
        monkeypatch.setattr(doctor, name, list)
    for name in {*filter(doctor._SHOWN.match, os.environ)}:
        monkeypatch.delenv(name)
    asked: list[Any] = []

    def ran(*words: str, fails: str = "", wrong: Any = ()) -> tuple[int, str]:
        def result(*whom: Any) -> Any:
            asked[:] = whom
            if fails:
                raise ReadFailed(fails)
            return Result("host, 64 slots", [], [*wrong], READ << 22, 0.01)

        monkeypatch.setattr(doctor_read, "result", result)
        status = doctor.main(["--no-seams", *words])
        return status, capsys.readouterr().out

    ran.asked = asked  # type: ignore[attr-defined]
    return ran


def test_the_read_follows_the_flags(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    status, text = run("--mixkv-staging-mb", "64")
    assert (status, text.splitlines()[-1]) == (0, "nothing is wrong")
    assert "32 MiB between two processes here in 10.0 ms, 3,355 MB/s" in text
    assert run.asked == [Wire("mooncake", "", Config(staging_mb=64)), None, None]
    assert "from fd00::1 in" in run("--peer", "[fd00::1]:80")[1]
    assert run.asked[1:] == [None, ("fd00::1", 80)]
    status, text = run("--listen", "80")
    assert (status, "8 of 8 slots right" in text, run.asked[1:]) == (0, True, [80, None])
    monkeypatch.setenv("SGLANG_MIXKV_DATA_PLANE", "nixl")
    text = run("--disaggregation-transfer-backend", "nixl")[1]
    assert "nixl: SGLANG_MIXKV_DATA_PLANE is set" in text
    monkeypatch.delenv("SGLANG_MIXKV_DATA_PLANE")
    monkeypatch.setenv("MC_FORCE_TCP", "")  # so that monkeypatch restores it after the test
    monkeypatch.delenv("MC_FORCE_TCP")
    assert "TCP: MC_FORCE_TCP is set" in run("--disaggregation-transfer-backend=mooncake_tcp")[1]
    assert os.environ["MC_FORCE_TCP"] == "1", "SGLang sets it for mooncake_tcp"
    assert run.asked[0] == Wire()


@pytest.mark.parametrize(
    ("words", "changed", "problem"),
    [
        (("--listen", "1"), {"wrong": ["byte 1 of slot 3", "byte 0 of slot 5"]},
         "byte 1 of slot 3, byte 0 of slot 5 arrived wrong"),
        ((), {"fails": "no route"}, "no route"),
    ],
)  # fmt: skip
def test_a_failed_read_is_a_problem(run: Any, words: Any, changed: Any, problem: str) -> None:
    status, text = run(*words, **changed)
    assert (status, text.splitlines()[-1]) == (1, "1 problem, marked !!")
    assert f"\n      {problem}\n" in text
    status, text = run(*words, "--json", **changed)
    found = json.loads(text)
    assert (status, found["ok"], found["schema"]) == (1, False, doctor.SCHEMA)
    assert [one["problem"] for one in found["findings"] if one["problem"]] == [problem]


def test_problems_of_the_plugin_do_not_stop_a_stock_server(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Findings that affect only the plugin are problems only if the plugin is enabled.

    Otherwise doctor shows them, and its exit status is 0.
    """
    monkeypatch.setattr(doctor, "seams", lambda: [doctor.Finding("seams", "a", "differs", "a: b")])
    argv = ["--no-transfer", "--disaggregation-transfer-backend", "mooncake"]
    for name, text in (("SGLANG_MIXKV_STAGING", "64"), ("SGLANG_RUST_SERVER", "1"), ("A", "b")):
        with monkeypatch.context() as shell:
            shell.setenv(name, text)
            shell.setattr(
                doctor, "main", lambda words: main([w for w in words if w != "--no-seams"])
            )
            assert run(*argv)[0] == 0
            assert "(would stop a server with --enable-mixkv)" in run(*argv)[1]
            assert run(*argv, "--enable-mixkv")[0] == 1
            for is_on in ("1", "yes", "on", "maybe"):
                shell.setenv("SGLANG_ENABLE_MIXKV", is_on)
                assert run(*argv)[0] == 1
            for is_off in ("", *OFF, " N "):
                shell.setenv("SGLANG_ENABLE_MIXKV", is_off)
                assert run(*argv)[0] == 0


def test_without_a_transfer_no_device_is_checked(run: Any, host: Any) -> None:
    """With `--no-transfer`, no RDMA device is checked.

    The build of an image, or a pod's init container, lacks the devices that the server gets.
    """
    host(UP)
    assert run("--disaggregation-ib-device", "mlx5_7")[0] == 1
    status, text = run("--no-transfer")
    assert (status, "mlx5_0" in text, "data plane" in text) == (0, True, False)
