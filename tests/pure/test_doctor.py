"""The doctor's command line, its report, and an SGLang that it is to compare."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sglang_mixkv.config import Config
from sglang_mixkv.tools import doctor, doctor_child
from sglang_mixkv.tools import doctor_checks as checks
from sglang_mixkv.tools import doctor_rdma as rdma
from sglang_mixkv.tools.doctor_child import READ, ReadFailed, Wire

# ---------------------------------------------------------------- another SGLang


def test_the_selftest_compares_the_sglang_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that lies unpacked in a folder, not the installed one."""
    info, package = tmp_path / "sglang-0.5.20.dist-info", tmp_path / "sglang"
    for place in (info, package):
        place.mkdir()
    (info / "METADATA").write_text("Name: sglang\nVersion: 0.5.20\n")
    (package / "__init__.py").touch()
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    assert doctor.main(["--selftest"]) == 1
    report = capsys.readouterr().out
    assert "found 0.5.20" in report
    assert "sglang.srt.disaggregation.utils:get_kv_class: expected it with parameters" in report


# ---------------------------------------------------------------- the command line


DEVICES = "expected device names as in mlx5_0,mlx5_1, or JSON"
ADDRESS = "expected HOST:PORT, as in 10.0.0.1:18515 or [fd00::1]:18515, got "
PORT = "expected a port from 0 (any that is free) to 65535, got '65536'"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        *((["--disaggregation-ib-device", text], DEVICES)
          for text in ("", ",", '{"x": "a"}', "{", '{"0": 1}', "{}", "none.json")),
        *((["--peer", text], f"{ADDRESS}{text!r}")
          for text in ("10.0.0.1", "fd00::1", "[fd00::1]", ":80", "host:", "host:65536")),
        (["--listen", "65536"], PORT),
        (["--listen", "1", "--peer", "host:1"], "not allowed with argument"),
        (["--backend", "mori"], "invalid choice: 'mori'"),
        (["--mixkv-staging-mb", "0"], "--mixkv-staging-mb"),
        (["--enable-mixkw"], "--enable-mixkw; the nearest that is known is --enable-mixkv"),
        (["--enable-mixkv", "selftest"], "unrecognized arguments: selftest"),
    ],
)  # fmt: skip
def test_unusable_words_end_it_with_status_2(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        doctor.main(words)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert (out, error in err) == ("", True)


@pytest.mark.parametrize(
    ("text", "address"),
    [("[::1]:80", ("::1", 80)), ("10.0.0.1:80", ("10.0.0.1", 80)), ("host:0", ("host", 0))],
)
def test_an_address(text: str, address: tuple[str, int]) -> None:
    assert doctor._parser().parse_args(["--peer", text]).peer == address


def test_help_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(SystemExit) as caught:
        doctor.main(["--enable-mixkv", "--help"])
    assert caught.value.code == 0
    assert "--listen" in capsys.readouterr().out


# ---------------------------------------------------------------- the report


READS = {
    "bytes": READ << 22, "seconds": 0.01, "wrong": {}, "right": READ, "used": [],
    "memory": "host, 64 slots of 4,096 KiB",
}  # fmt: skip


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Once it is made, it is an active device of the host, the only one."""
    monkeypatch.setattr(rdma, "DEVICES", tmp_path)
    return tmp_path / "mlx5_0" / "ports" / "1" / "state"


def activate(device: Path) -> None:
    device.parent.mkdir(parents=True)
    device.write_text("4: ACTIVE\n")


@pytest.fixture
def run(device: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """The doctor's status and text with such a read, or such a failure of it, on a host that is
    right. `asked`: what it would have read, with whom."""
    for name in ("versions", "entry_point", "libraries"):
        monkeypatch.setattr(checks, name, list)
    for name in {*filter(checks._SHOWN.match, os.environ)}:
        monkeypatch.delenv(name)
    asked: list[Any] = []

    def ran(*words: str, fails: Exception | None = None, **changed: Any) -> tuple[int, str]:
        def result(*whom: Any) -> Any:
            asked[:] = whom
            if fails:
                raise fails
            return {**READS, **changed}

        monkeypatch.setattr(doctor_child, "result", result)
        status = doctor.main(["--no-seams", *words])
        return status, capsys.readouterr().out

    ran.asked = asked  # type: ignore[attr-defined]
    return ran


def test_what_is_read_and_with_whom(run: Any) -> None:
    status, text = run("--backend", "mooncake", "--mixkv-staging-mb", "64")
    assert (status, text.splitlines()[-1]) == (0, "nothing is wrong")
    assert "32 MiB between two processes here in 10.0 ms, 3,355 MB/s" in text
    assert run.asked == [Wire("mooncake", "", Config(staging_mb=64)), None, None]
    assert "from 10.0.0.1 in" in run("--peer", "10.0.0.1:80")[1]
    assert run.asked[1:] == [None, ("10.0.0.1", 80)]
    status, text = run("--listen", "0")
    assert (status, "8 of 8 slots right" in text, run.asked[1:]) == (0, True, [0, None])


def test_the_plane_and_why(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    flag = ("--disaggregation-transfer-backend", "nixl")
    assert "mooncake: NIXL's UCX is not safe without an RDMA device" in run(*flag)[1]
    monkeypatch.setenv("SGLANG_MIXKV_DATA_PLANE", "nixl")
    assert "nixl: SGLANG_MIXKV_DATA_PLANE is set" in run(*flag)[1]
    monkeypatch.setenv("SGLANG_MIXKV_DATA_PLANE", "nixI")
    status, text = run(*flag)
    assert (status, "expected SGLANG_MIXKV_DATA_PLANE to be mooncake or nixl" in text) == (1, True)


@pytest.mark.parametrize(
    ("words", "changed", "problem"),
    [
        ((), {"wrong": {"3": 17, "5": 0}}, "byte 17 of slot 3, byte 0 of slot 5 arrived wrong"),
        (("--listen", "1"), {"right": 7}, "bytes arrived wrong; see the other side"),
        ((), {"fails": ReadFailed("no route")}, "no route"),
    ],
)
def test_a_read_that_is_wrong(run: Any, words: Any, changed: Any, problem: str) -> None:
    status, text = run(*words, **changed)
    assert (status, text.splitlines()[-1]) == (1, "1 problem, marked !!")
    marked = [line for line in text.splitlines() if line.startswith("!!")]
    assert len(marked) == 1
    assert f"\n      {problem}\n" in text


def test_all_that_is_wrong_at_once(run: Any, device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    activate(device)
    monkeypatch.setenv("SGLANG_MIXKV_STAGING", "64")
    monkeypatch.setenv("SGLANG_ENABLE_MIXKV", "perhaps")
    status, text = run("--disaggregation-ib-device", "mlx5_7", "--enable-mixkv")
    assert status == 1
    for words in ("nearest that is known", "perhaps", "name others"):
        assert words in text
    assert text.endswith(f"{sum(line.startswith('!!') for line in text.splitlines())} problems, "
                         "marked !!\n")  # fmt: skip


def test_without_a_transfer_no_device_is_asked_for(run: Any, device: Path) -> None:
    """An image's build, or a pod's init container, has not the devices that the server gets."""
    activate(device)
    assert run()[0] == 1
    status, text = run("--no-transfer")
    assert (status, "mlx5_0" in text, "data plane" in text) == (0, True, False)


def test_a_selftest_compares_sglang_alone(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = "utils:f: expected that it is so"
    found = list(checks.seam_findings(f"seam:{problem}\ndone:", "", 0))
    monkeypatch.setattr(checks, "seams", lambda: found)
    status, text = run("--selftest")
    assert (status, text.split("\n")[0].split()) == (1, ["!!", "seams", "utils:f", "differs"])
    assert len(text.splitlines()) == 4


def test_json(run: Any) -> None:
    status, text = run("--json", wrong={"0": 7})
    found = json.loads(text)
    assert (status, set(found), found["ok"]) == (1, {"schema", "ok", "findings"}, False)
    assert set(found["findings"][0]) == {"section", "name", "value", "problem"}
    assert json.loads(run("--json")[1])["ok"] is True
