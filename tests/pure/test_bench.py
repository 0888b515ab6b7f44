"""The benchmarks run, find no wrong byte, and their results become tables."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCH = Path(__file__).parents[2] / "scripts" / "bench"
DOCUMENT = Path(__file__).parents[2] / "docs" / "evidence.md"
LIMIT_S = 300


def run(name: str, *options: str) -> str:
    """A script of the benchmarks, in a process of its own; its output."""
    command = [sys.executable, str(BENCH / name), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def quick(name: str, folder: Path, *options: str) -> dict[str, Any]:
    """The result of a quick run."""
    path = folder / f"{name}.json"
    output = run(f"{name}.py", "--quick", "--json", str(path), *options)
    assert "Quick run: its figures mean nothing" in output
    result: dict[str, Any] = json.loads(path.read_text())
    assert (result["bench"], result["quick"]) == (name, True)
    return result


def test_transfer_moves_every_byte_each_way(tmp_path: Path) -> None:
    """Raises of itself on a wrong byte or a return code; here: nothing was left out."""
    only = ("--only", r"^(gather-2|scatter-1)-(64|512)-(16|64)-random-")
    parts = quick("transfer", tmp_path, "--repeats", "1", *only)["parts"]
    methods = {(r["direction"], r["method"]) for r in parts["slices"]}
    every = ("plain", "region", "direct", "stock")
    assert methods == {(d, m) for d in ("gather", "scatter") for m in every} | {
        ("scatter", "packed"), ("gather", "by page"),
    }  # fmt: skip
    by_method = {(r["direction"], r["tokens"], r["method"]): r for r in parts["slices"]}
    assert by_method["gather", 512, "region"]["ranges"] == 4, "two senders, K and V"
    assert by_method["gather", 512, "by page"]["ranges"] == 4 * 32
    assert by_method["gather", 512, "direct"]["ranges"] == 4 * 512
    assert by_method["scatter", 512, "packed"]["ranges"] >= 2 * 20
    assert by_method["scatter", 512, "region"]["ranges"] == 2
    assert {r["method"] for r in parts["whole"]} == {
        "MLA alone", "with draft slices", "with direct slices",
    }  # fmt: skip
    at_once = parts["at_once"]
    assert [(r["codes"], r["wrong_bytes"]) for r in at_once] == [([0], 0)] * 3
    assert [(r["regions"], r["by_page"]) for r in at_once] == [(8, 0), (0, 0), (4, 4)]


def test_transfer_notices_a_wrong_byte(tmp_path: Path) -> None:
    """The comparison itself can fail: with a product that moves each slice by one byte."""
    script = tmp_path / "wrong.py"
    script.write_text(
        "import dataclasses, sys\n"
        f"sys.path.insert(0, {str(BENCH)!r})\n"
        f"sys.argv = ['transfer.py', '--quick', '--parts', 'slices', '--only', 'scatter-1-64']\n"
        "import cases\n"
        "right = cases.component_copies\n"
        "def wrong(*args):\n"
        "    copies = right(*args)\n"
        "    return dataclasses.replace(copies, src_offset=copies.src_offset - 1)\n"
        "cases.component_copies = wrong\n"
        "import transfer\n"
        "transfer.main()\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode != 0
    assert "wrong bytes" in done.stderr


def test_kernels_say_what_is_missing_or_run(tmp_path: Path) -> None:
    result = quick("kernels", tmp_path)
    assert bool(result["lacks"]) != bool(result["parts"]["rows"])


@pytest.mark.full
def test_planning_compares_with_the_installed_sglang(tmp_path: Path) -> None:
    """It raises of itself unless both plan the same ranges; the speed is not judged here."""
    records = quick("planning", tmp_path)["parts"]["chunk"]
    assert {r["method"] for r in records} == {"stock", "product", "product, ranges only"}


def test_a_line_and_its_interval_are_found_in_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of noise that grows with time: the small sizes say what a is."""
    monkeypatch.syspath_prepend(str(BENCH))
    common = importlib.import_module("common")
    rng = np.random.default_rng(3)
    seconds = {
        size: (1e-3 + 1e-9 * size) * rng.normal(1, 0.1, 15)
        for size in (64 << 12 << step for step in range(10))
    }
    a, b = common.line(seconds)
    assert a == pytest.approx(1e-3, rel=0.15)
    assert b == pytest.approx(1e-9, rel=0.1)
    low, high = common.interval(np.median, rng.normal(5, 1, 400))
    assert 4.7 < low < 5 < high < 5.3


def test_a_look_belongs_to_who_called_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    startup = importlib.import_module("startup")
    owners = {one: folder for folder, one in startup.OWNERS.items()}
    ours, theirs = f"hook ({owners['plugin']}/plugin.py:1)", f"run ({owners['SGLang']}/a.py:1)"
    importing, server = "_find_and_load (<frozen importlib._bootstrap>:1)", 'process 1:"python"'
    shares = startup.read(
        [
            f"{server};{theirs};{ours} 5",
            f"{server};{theirs};{ours};{importing} 1",
            f"{server};{ours};{theirs};{importing} 3",
            f"{server};{theirs};{ours};{importing};{theirs} 4",
            f"{server};{theirs};{ours};{importing};{ours};{importing} 2",
            f'{server};process 2:"python -c a;b";{theirs};{ours};{theirs} 2',
        ]
    )
    assert shares == {1: {"plugin": 8, "imports": 7}, 2: {"SGLang": 2}}


@pytest.mark.full
def test_a_start_is_watched() -> None:
    assert "| sglang::scheduler |" in run("startup.py")


def test_a_result_fills_the_document(tmp_path: Path) -> None:
    document = tmp_path / "evidence.md"
    document.write_text(DOCUMENT.read_text())
    result = tmp_path / "planning.json"
    record = {"layout": "random", "median": 0.00125, "bytes": 3 << 20, "codes": [0, -1]}
    check = {"name": "a figure", "target": 2.0, "value": 3.0, "at_most": True, "met": False}
    machine = {"cores": 2, "load_at_start": 0.5, "load_at_end": 0.75, "packages": {"numpy": "2"}}
    parts = {"chunk": [record]}
    head = {"bench": "planning", "quick": False, "lacks": "", "machine": machine}
    result.write_text(json.dumps({**head, "checks": [check], "parts": parts}))
    for _ in range(2):  # twice: the markers stay
        run("render.py", str(result), "--into", str(document))
    text = document.read_text()
    assert text.count("| a figure | at most 2 | 3 | **no** |") == 1
    whole = run("render.py", str(result))
    assert "| random | 1.25 | 3 | 0, -1 |" in whole
    assert "| load average, start to end | planning 0.5 to 0.8 |" in whole


def test_a_document_without_markers_is_refused(tmp_path: Path) -> None:
    result = tmp_path / "planning.json"
    machine = {"load_at_start": 0.0, "load_at_end": 0.0}
    empty = {"bench": "planning", "lacks": "", "machine": machine, "checks": [], "parts": {}}
    result.write_text(json.dumps(empty))
    (tmp_path / "empty.md").write_text("nothing")
    command = [sys.executable, str(BENCH / "render.py"), str(result), "--into"]
    done = subprocess.run([*command, str(tmp_path / "empty.md")], capture_output=True, text=True)
    assert done.returncode != 0
    assert "no markers for any" in done.stderr
