"""scripts/gpu.sh without a GPU: which verdict each part has, and that each can fail."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import types
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
GPU = ROOT / "scripts" / "gpu"
LIMIT_S = 300

torch = pytest.importorskip("torch")


def verdicts(done: subprocess.CompletedProcess[str], file: Path) -> dict[str, tuple[str, str]]:
    """What each part came to, and what it says."""
    assert file.exists(), done.stdout + done.stderr
    return {p["name"]: (p["verdict"], p["says"]) for p in json.loads(file.read_text())["parts"]}


def check(*options: object, script: Path | None = None) -> subprocess.CompletedProcess[str]:
    """scripts/gpu.sh, or a script in its place, on the CPU."""
    command = [sys.executable, script] if script else ["bash", ROOT / "scripts" / "gpu.sh"]
    return subprocess.run(
        [*map(str, command), "--device", "cpu", *map(str, options)], text=True,
        capture_output=True, timeout=LIMIT_S, env={**os.environ, "PYTHON": sys.executable},
    )  # fmt: skip


@pytest.fixture
def changed(tmp_path: Path) -> Any:
    """The check with some lines of Python before it, in each of its processes."""

    def run(lines: str, *options: object) -> tuple[int, dict[str, tuple[str, str]]]:
        script, file = tmp_path / "changed.py", tmp_path / "changed.json"
        script.write_text(
            f"import sys\nsys.path.insert(0, {str(GPU)!r})\nimport check\n{lines}\n"
            "sys.exit(check.main())\n"
        )
        done = check("--json", file, *options, script=script)
        return done.returncode, verdicts(done, file)

    return run


def passes(*modules: str) -> str:
    """The verdict of a part that needs these."""
    there = all(importlib.util.find_spec(module) for module in modules)
    return "passed" if there else "lacks"


def test_each_part_goes_as_far_as_it_can_without_a_gpu(tmp_path: Path) -> None:
    """One line each, the JSON, and the tables; what is lacking is no failure."""
    file, table = tmp_path / "deep" / "gpu.json", tmp_path / "table.md"
    done = check("--json", file, "--table", table, "--seed", 7)
    found = verdicts(done, file)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {name: verdict for name, (verdict, _) in found.items()} == {
        "kernels": passes("triton"), "bandwidth": "lacks", "order": passes("triton"),
        "flashinfer": "lacks", "memory": "passed", "mooncake": passes("mooncake"),
        "nixl": passes("nixl"), "demo": "lacks",
    }  # fmt: skip
    result, text = json.loads(file.read_text()), table.read_text()
    assert (result["device"], result["seed"]) == ("cpu", 7)
    assert "seed 7" in done.stdout
    assert "says nothing of a GPU" in text
    for name, (verdict, says) in found.items():
        assert re.search(rf"^{name} +{verdict} +[\d.]+ s  {re.escape(says)}$", done.stdout, re.M)
        assert f"| {name} | {verdict} | {says} |" in text
        part = next(p for p in result["parts"] if p["name"] == name)
        assert bool(part["figures"]) == (verdict == "passed")


WRONG_KERNEL = """
from sglang_mixkv.rows import cuda
right = cuda.variant
cuda.variant = lambda word: {**right(word), "COLUMN": cuda.LINE // word // 2 or 1}
"""


def test_a_wrong_kernel_fails(changed: Any) -> None:
    """One that copies half of each cache line."""
    pytest.importorskip("triton")
    status, found = changed(WRONG_KERNEL, "--only", "kernels")
    verdict, says = found["kernels"]
    assert (status, verdict) == (1, "failed")
    assert "copies with wrong bytes, the first: word 16, widths [" in says


BARE = """
class Bare:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("msgspec", "mooncake", "nixl", "sglang", "zmq"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Bare())
"""


def test_a_bare_machine_is_told_what_it_lacks(changed: Any) -> None:
    """That is a failure with --strict."""
    status, found = changed(BARE, "--strict", "--only", "memory,mooncake,nixl")
    assert status == 1
    assert {name: verdict for name, (verdict, _) in found.items()} == dict.fromkeys(found, "lacks")
    assert found["memory"][1].startswith("the package msgspec, to send with; the allocation was")
    assert found["mooncake"][1] == "the package mooncake"
    assert found["nixl"][1] == "the package nixl"


DEAD = """
import os, time, types
from parts import Found
here = lambda _: Found(__import__("mixkv_probe").SAYS)
sys.modules["part_memory"] = types.SimpleNamespace(run=here)
sys.modules["part_kernels"] = types.SimpleNamespace(run=lambda _: time.sleep(600))
sys.modules["part_order"] = types.SimpleNamespace(run=lambda _: os._exit(3))
"""


def test_a_part_that_does_not_end_is_ended(changed: Any) -> None:
    status, found = changed(DEAD, "--part-limit-s", 2, "--only", "kernels")
    assert (status, found) == (1, {"kernels": ("failed", "did not end within 2 s")})


UNCOMPILED = """
import os, types
os.environ["PATH"] = "/nowhere"
os.environ.pop("CC", None)
def run(_):
    from triton.runtime import build
    try:
        build._build("kernel", "kernel.c", "/nowhere", [], [], [], [])
    except Exception as error:
        raise ValueError(f"expected a kernel; found {type(error).__name__}: {error}")
sys.modules["part_kernels"] = types.SimpleNamespace(run=run)
"""


def test_without_a_compiler_it_is_lacking(changed: Any) -> None:
    """As Triton says so, and as CudaRows.warm_up passes it on."""
    pytest.importorskip("triton")
    status, found = changed(UNCOMPILED, "--only", "kernels")
    says = "a C compiler for Triton (gcc or clang on the PATH, or one that CC names)"
    assert (status, found) == (0, {"kernels": ("lacks", says)})


HANGING_DEMO = """
import types
lines = "import time\\nfor i in range(100): print('line', i)\\ntime.sleep(600)"
def run(_):
    sys.modules["torch"] = types.ModuleType("torch")
    import part_demo
    part_demo.passed_on([sys.executable, "-c", lines])
sys.modules["part_memory"] = types.SimpleNamespace(run=run)
"""


def test_what_a_demo_said_before_it_was_cut_is_kept(changed: Any, tmp_path: Path) -> None:
    """Its last lines."""
    status, found = changed(HANGING_DEMO, "--part-limit-s", 10, "--only", "memory")
    says = "did not end within 10 s: line 97 | line 98 | line 99"
    assert (status, found) == (1, {"memory": ("failed", says)})
    (part,) = json.loads((tmp_path / "changed.json").read_text())["parts"]
    assert part["output"] == [f"line {number}" for number in range(40, 100)]


LATE = """
import atexit, time, types
from parts import Found
run = lambda _: (Found("all is right"), atexit.register(time.sleep, 600))[0]
sys.modules["part_memory"] = types.SimpleNamespace(run=run)
"""


def test_a_part_that_hangs_behind_its_verdict_has_passed(changed: Any) -> None:
    status, found = changed(LATE, "--part-limit-s", 10, "--only", "memory")
    assert (status, found) == (0, {"memory": ("passed", "all is right")})


def test_a_part_that_ends_badly_leaves_the_others(changed: Any, tmp_path: Path) -> None:
    """Those see what --wheels brings."""
    (tmp_path / "mixkv_probe.py").write_text("SAYS = 'from the folder'\n")
    status, found = changed(DEAD, "--wheels", tmp_path, "--only", "order,memory")
    assert status == 1
    assert found["memory"] == ("passed", "from the folder")
    assert found["order"] == ("failed", "its process ended with status 3")


# ---------------------------------------------------------------- in this process


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of the check by its name; forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "bench"))
    monkeypatch.syspath_prepend(str(GPU))
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(ROOT / "scripts") in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("part_limit_s", "verdict", "says"),
    [
        ("240", "lacks", r"time: the 60 s of all parts were over \d+ s after its start"),
        ("10", "failed", "did not end within 10 s: its last line"),
    ],
)
def test_a_part_that_the_others_leave_no_time_lacks_it(
    modules: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_limit_s: str, verdict: str,
    says: str,
) -> None:  # fmt: skip
    check, parts = modules("check"), modules("parts")
    limits = ["--limit-s", "60", "--part-limit-s", part_limit_s]
    made = check.Check([], modules("options").parse(["--device", "cpu", *limits]), tmp_path)

    def late(_: str, limit_s: float) -> None:
        raise check.Late(f"did not end within {limit_s:.0f} s", ["its last line"])

    monkeypatch.setattr(made, "_ask", late)
    outcome = made.run(parts.PARTS[0])
    assert outcome.verdict == verdict
    assert re.fullmatch(says, outcome.says)
    assert outcome.output == ["its last line"]
    long_one = made._run(replace(parts.PARTS[0], is_long=True), 50.0)
    assert (long_one.verdict, long_one.says[-25:]) == ("lacks", "over 50 s after its start")


@pytest.fixture
def order(modules: Any) -> Any:
    """Runs that part, in the model of streams."""
    pytest.importorskip("triton")
    options = modules("options").parse(["--device", "cpu"])
    return lambda: modules("part_order").run(options)


def test_a_removed_wait_fails(order: Any, modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that do not wait for their copies."""
    from sglang_mixkv.rows import cuda

    @contextlib.contextmanager
    def unwaited(rows: Any) -> Iterator[None]:
        with torch.cuda.stream(torch.cuda.Stream(rows._device)):
            yield

    monkeypatch.setattr(cuda.CudaRows, "_own_stream", unwaited)
    with pytest.raises(modules("parts").Wrong, match="moved 1,048,576 old bytes") as caught:
        order()
    assert [figure["old bytes"] for figure in caught.value.found.figures] == [1 << 20] * 2


def test_a_wait_for_nothing_shows_nothing(
    order: Any, modules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the other stream's work is never late, the part has tried nothing, and says so."""
    monkeypatch.setattr(modules("streams").ModelStream, "do", lambda _, work: work())
    with pytest.raises(modules("parts").Wrong, match="pack without its wait moved no old byte"):
        order()


def test_the_help_says_what_the_defaults_are(modules: Any) -> None:
    command_line = modules("options")
    parser = command_line.parser()
    for action in parser._actions:
        said = re.search(r"\(default (\S+?)(?:, on the CPU (\d+))?(?:[):]| \()", action.help or "")
        if said is None or action.dest in ("json", "only", "peer_gpu", "seed"):
            continue
        cut = command_line.SIZES["cpu"].get(action.dest)
        normally = command_line.SIZES["cuda"].get(action.dest, action.default)
        words = str(normally).removesuffix(".0"), cut and str(cut)
        assert (said[1], said[2]) == words, action.dest
    text = parser.format_help()
    for part in modules("parts").PARTS:
        assert f"  {part.name:<10}  {part.about}\n" in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--only", "kernels,speed"], "unknown: speed"),
        (["--wheels", "/nowhere"], "there is no folder /nowhere"),
        (["--rounds", "0"], "expected a whole number from 1 on, got '0'"),
        (["--leave-mb", "256"], "--buffer-mb has to be more than --leave-mb"),
    ],
)
def test_unusable_arguments_are_refused(
    modules: Any, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        modules("options").parse(options)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def wheel(folder: Path, name: str, *, whole: bool = True) -> None:
    """A wheel with one module; one that is not whole has no metadata."""
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", "HERE = True\n")
        if whole:
            about = f"{name}-1.0.dist-info"
            archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\n"
                             "Version: 1.0\nRequires-Dist: not-here\n")  # fmt: skip
            tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            archive.writestr(f"{about}/WHEEL", tag)
            archive.writestr(f"{about}/RECORD", "")


def test_wheels_are_installed_aside_and_a_bad_one_is_named(modules: Any, tmp_path: Path) -> None:
    """With none of what they require; a folder of unpacked packages is a path."""
    pytest.importorskip("pip")
    folder, unpacked, into = (tmp_path / name for name in ("wheels", "unpacked", "into"))
    for path in (folder, unpacked, into):
        path.mkdir()
    wheel(folder, "mixkv_good")
    wheel(folder, "mixkv_bad", whole=False)
    found = modules("wheels").Wheels([folder, unpacked], into)
    assert found.paths == [str(into), str(unpacked)]
    assert (into / "mixkv_good.py").exists()
    assert not (into / "mixkv_bad.py").exists()
    (note,) = found.notes
    assert note.startswith("mixkv_bad-1.0-py3-none-any.whl was not installed: ")


def test_pip_has_its_time(modules: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, into = tmp_path / "wheels", tmp_path / "into"
    for path in (folder, into):
        path.mkdir()
    wheel(folder, "mixkv_good")
    module = modules("wheels")
    monkeypatch.setattr(module, "PIP", (sys.executable, "-c", "import time; time.sleep(600)"))
    found = module.Wheels([folder], into, 0.5)
    words = "mixkv_good-1.0-py3-none-any.whl was not installed: pip did not end within 0.5 s"
    assert found.notes == [words]


@pytest.fixture
def mooncake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A Mooncake of this build, of no package."""

    def made(**build: bool) -> None:
        package = types.ModuleType("mooncake")
        package.engine = types.SimpleNamespace(**build)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "mooncake", package)
        monkeypatch.setattr(metadata, "distributions", list)

    return made


def test_a_mooncake_without_cuda_is_lacking(modules: Any, mooncake: Any) -> None:
    needs, parts = modules("needs"), modules("parts")
    mooncake(SUPPORT_CUDA=False)
    needs.check_backend("mooncake", "cpu")
    with pytest.raises(parts.Lacks, match=r"for GPU memory: .* is built without CUDA"):
        needs.check_backend("mooncake", "cuda")
    mooncake(SUPPORT_CUDA=True)
    needs.check_backend("mooncake", "cuda")


@pytest.mark.parametrize(
    ("build", "compiler", "words"),
    [
        ({"SUPPORT_CUDA": False}, "", "is built without CUDA"),
        ({"SUPPORT_CUDA": True}, "a C compiler", "a C compiler"),
        ({"SUPPORT_CUDA": True}, "", "nvcc, with which SGLang compiles"),
    ],
)
def test_what_the_demo_lacks(
    modules: Any, mooncake: Any, monkeypatch: pytest.MonkeyPatch, build: dict[str, bool],
    compiler: str, words: str, tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    part, parts = modules("part_demo"), modules("parts")
    mooncake(**build)
    plugin = types.SimpleNamespace(name="mixkv")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [plugin])
    monkeypatch.setattr(part, "NEEDED", {})
    monkeypatch.setattr(part.needs, "compiler", lambda: compiler)
    with pytest.raises(parts.Lacks, match=words):
        part.run(modules("options").parse(["--device", "cuda"]))


def record(tokens: int, share: float, size: int) -> dict[str, Any]:
    """As scripts/bench/kernels.py measures one."""
    speeds = ("kernel GB/s", "device copy GB/s", "kernel launch us", "device copy launch us")
    return {
        "kind": "pack", "layout": "random", "tokens": tokens, "width": 256, "word": 16,
        "bytes": size, "share_of_copy": share, "call us": 50.0, **dict.fromkeys(speeds, 8.0),
    }  # fmt: skip


@pytest.mark.parametrize(("share", "size", "fails"), [(0.81, 128 << 20, False),
                         (0.79, 128 << 20, True), (0.2, 64 << 20, False)])  # fmt: skip
def test_bandwidth_is_judged_where_bytes_count(
    modules: Any, monkeypatch: pytest.MonkeyPatch, share: float, size: int, fails: bool
) -> None:
    pytest.importorskip("triton")
    part, parts = modules("part_bandwidth"), modules("parts")
    monkeypatch.setattr(part.torch.cuda, "set_device", lambda _: None)
    records = [record(64, 0.1, 1 << 15), record(8192, share, size)]
    monkeypatch.setattr(part, "measured", lambda _: records)
    options = modules("options").parse([])
    if fails:
        with pytest.raises(parts.Wrong, match=r"79% of the device's copy at least.*expected 80%"):
            part.run(options)
    else:
        found = part.run(options)
        assert found.figures == records
        assert "a launch 8 us" in found.says
        assert [r["share of copy, least"] for r in found.short] == [0.1, share]
