"""scripts/gpu.sh without a GPU: what each part lacks, its dry run, its processes, its options."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import types
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from rig.gpu import FOLDER, ROOT, load

pytest.importorskip("torch")
LIMIT_S = 300

Verdicts = dict[str, tuple[str, str]]


def start(*options: object, script: Path | None = None) -> subprocess.Popen[str]:
    """scripts/gpu.sh, or a script in its place, on the CPU."""
    command = [sys.executable, script] if script else ["bash", ROOT / "scripts" / "gpu.sh"]
    return subprocess.Popen(
        [*map(str, command), "--device", "cpu", *map(str, options)], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHON": sys.executable},
    )  # fmt: skip


def check(file: Path, *options: object, script: Path | None = None) -> tuple[int, str, Verdicts]:
    """Its status, its output, and what each part came to."""
    with start("--json", file, *options, script=script) as running:
        output, _ = running.communicate(timeout=LIMIT_S)
    assert file.exists(), output
    parts = json.loads(file.read_text())["parts"]
    return running.returncode, output, {p["name"]: (p["verdict"], p["message"]) for p in parts}


@pytest.fixture
def changed(tmp_path: Path) -> Any:
    """The check with some lines of Python before it, in each of its processes."""

    def run(lines: str, *options: object) -> tuple[int, Verdicts]:
        script = tmp_path / "changed.py"
        script.write_text(
            f"import sys\nsys.path.insert(0, {str(FOLDER)!r})\nimport check\n{lines}\n"
            "sys.exit(check.main())\n"
        )
        status, _, found = check(tmp_path / "changed.json", *options, script=script)
        return status, found

    return run


DRY = {
    "rows": (r"every byte right in 6 cases", ()),
    "order": (r"5 waits; without each of them bytes are wrong", ()),
    "mooncake": (r"every byte right, in host memory", ("mooncake",)),
    "nixl": (r"every byte right, in host memory", ("nixl",)),
    "flashinfer": (r"\d+ outputs equal the single server's bit by bit", ()),
}


def test_each_part_lacks_a_gpu_and_runs_dry(tmp_path: Path) -> None:
    """One line each, and the JSON; what is lacking is no failure."""
    file = tmp_path / "deep" / "gpu.json"
    status, output, found = check(file, "--seed", 7)
    assert status == 0, output
    assert {verdict for verdict, _ in found.values()} == {"lacks"}
    result = json.loads(file.read_text())
    assert (result["device"], result["seed"]) == ("cpu", 7)
    assert "seed 7" in output
    assert "this shows nothing of a GPU" in output
    for part in result["parts"]:
        name, message = part["name"], part["message"]
        assert re.search(rf"^{name} +lacks +[\d.]+ s  {re.escape(message)}$", output, re.M)
        assert message.startswith(("an NVIDIA GPU", "a GPU, with --device cpu"))
        shown, needed = DRY.get(name, ("", ("no GPU",)))
        runs = all(importlib.util.find_spec(module) for module in needed)
        assert bool(part["figures"]) == runs
        assert re.search(rf"\. Dry run: {shown}$", message) if runs else "Dry run" not in message


def test_what_is_there_names_what_each_part_lacks(tmp_path: Path) -> None:
    """And whether checkout and wheels can be carried; no part runs."""
    with (tmp_path / "large.whl").open("wb") as wheel:
        wheel.truncate(64 << 20)
    with start("--what-is-there", "--json", tmp_path / "none.json") as running:
        output, _ = running.communicate(timeout=LIMIT_S)
    size = float(re.search(r"^to carry +([\d.]+) MiB of checkout and wheels", output, re.M)[1])
    assert size < 6.9, "docs/gpu.md: the wheels of one transfer backend take up to 57.1 MiB"
    for name in ("rows", "order", "mooncake", "nixl", "flashinfer", "demo"):
        assert re.search(rf"^{name} +lacks .*GPU", output, re.M)
    assert re.search(r"^Triton +(compiles|lacks .+)$", output, re.M)
    assert not (tmp_path / "none.json").exists()
    assert load("needs").carried(ROOT, [tmp_path]) > load("needs").MOST


def test_another_host_reads_what_is_packed_here(tmp_path: Path) -> None:
    """--listen and --peer."""
    pytest.importorskip("mooncake")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    listening = start("--listen", address)
    assert any("listening on" in line for line in listening.stdout)
    file = tmp_path / "gpu.json"
    _, output, found = check(file, "--only", "mooncake", "--peer", address)
    listening.send_signal(signal.SIGINT)
    listening.communicate(timeout=30)
    assert listening.returncode == 0
    assert found["mooncake"][1].endswith("Dry run: every byte right, in host memory"), output


BARE = """
class Bare:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("msgspec", "mooncake", "nixl", "sglang", "flashinfer"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Bare())
import importlib.util
spec = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name in ("msgspec", "sglang") else spec(name)
"""


def test_a_bare_machine_lacks_packages_and_runs_nothing(changed: Any) -> None:
    status, found = changed(BARE)
    assert status == 0
    assert {verdict for verdict, _ in found.values()} == {"lacks"}
    assert all("; the packages msgspec" in message for _, message in found.values())
    assert not any("Dry run" in message for _, message in found.values())
    for part, words in (("mooncake", "the package mooncake-transfer-engine"),
                        ("nixl", "the package nixl"), ("demo", "the packages sglang"),
                        ("flashinfer", "the package flashinfer-python")):  # fmt: skip
        assert words in found[part][1]


DEAD = """
import os, time, types
from parts import Found
here = lambda _: Found(__import__("mixkv_probe").TEXT)
sys.modules["part_flashinfer"] = types.SimpleNamespace(run=here)
sys.modules["part_order"] = types.SimpleNamespace(run=lambda _: os._exit(3))
def hang(_):
    print(*(f"line {number}" for number in range(100)), sep="\\n", flush=True)
    time.sleep(600)
sys.modules["part_rows"] = types.SimpleNamespace(run=hang)
"""


def test_a_part_that_ends_badly_leaves_the_others(changed: Any, tmp_path: Path) -> None:
    """Those see what --wheels brings; of one that hangs the last lines are known."""
    (tmp_path / "mixkv_probe.py").write_text("TEXT = 'from the folder'\n")
    options = ("--wheels", tmp_path, "--part-limit-s", 5, "--only", "rows,order,flashinfer")
    status, found = changed(DEAD, *options)
    assert status == 1
    assert found["rows"] == ("failed", "did not end within 5 s: line 97 | line 98 | line 99")
    assert found["order"] == ("failed", "its process ended with status 3")
    assert found["flashinfer"][1].endswith("Dry run: from the folder")
    part, *_ = json.loads((tmp_path / "changed.json").read_text())["parts"]
    assert part["output"] == [f"line {number}" for number in range(40, 100)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--only", "rows,speed"], "unknown: speed"),
        (["--wheels", "/nowhere"], "there is no folder /nowhere"),
        (["--repeats", "0"], "expected a whole number from 1 on, got '0'"),
        (["--peer", "10.0.0.1"], "expected HOST:PORT, got '10.0.0.1'"),
    ],
)
def test_unusable_arguments_are_refused(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        load("options").parse(options)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_wheels_are_unpacked_aside_and_a_bad_one_is_named(tmp_path: Path) -> None:
    """A folder of unpacked packages is a path."""
    (folder := tmp_path / "wheels").mkdir()
    (unpacked := tmp_path / "unpacked").mkdir()
    with zipfile.ZipFile(folder / "good-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("mixkv_good.py", "HERE = True\n")
    (folder / "bad-1.0-py3-none-any.whl").write_text("no wheel")
    paths, notes = load("check").unpacked([folder, unpacked], tmp_path / "into")
    assert paths == [str(tmp_path / "into"), str(unpacked)]
    assert (tmp_path / "into" / "mixkv_good.py").exists()
    assert notes == ["bad-1.0-py3-none-any.whl: File is not a zip file"]


def test_what_compiles_kernels_is_a_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvcc, and what FlashInfer starts beside it."""
    needs = load("needs")
    for name in ("CXX", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    assert needs.nvcc().startswith("ninja, c++, nvcc (or in CUDA_HOME) on the PATH")
    for name in ("nvcc", "ninja", "c++"):
        (tmp_path / "bin" / name).touch(0o755)
    assert needs.nvcc() == ""


def test_a_mooncake_without_cuda_is_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    needs, engine = load("needs"), types.ModuleType("mooncake.engine")
    monkeypatch.setitem(sys.modules, "mooncake", types.ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.engine", engine)
    monkeypatch.setattr(metadata, "distributions", list)
    for supports, words in ((False, "this one is built without CUDA"), (True, "")):
        engine.SUPPORT_CUDA = supports  # type: ignore[attr-defined]
        assert words in needs.mooncake_cuda()
        assert bool(needs.mooncake_cuda()) == bool(words)
        assert needs.mooncake() == ""
