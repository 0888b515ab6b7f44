"""Every command in the documents is run, here or by the test that the table names.

A command that the table does not know fails. What needs a cluster is parsed by SGLang's own
parser (tests/protocol/test_launch_lines.py) and planned here.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_mixkv.__main__ import COMMANDS
from sglang_mixkv.tools import accept, plan

from .pages import IDS, PAGES, ROOT, Block, bash, prose, words

# As scripts/env.sh chooses it.
SGLANG = "-{MIXKV_SGLANG}".format(**os.environ) if os.environ.get("MIXKV_SGLANG") else ""
VERSION = "-{}.{}".format(*sys.version_info) if os.environ.get("PYTHON") else ""
SCRIPTS_ENVIRONMENT = ROOT / f".venv{SGLANG}{VERSION}"
HERE = "run by test_blocks_do_what_the_page_shows"
PARSED = "tests/protocol/test_launch_lines.py::test_sglang_accepts_the_line"

# Command -> where it is run: HERE, the test that runs it, or a sentence of the page that says it
# is not run.
TABLE: dict[str, str] = {
    r"bash scripts/demo\.sh": "tests/e2e/test_demo.py::test_the_documented_demo",
    r"(PYTHON=python3\.12 |MIXKV_SGLANG=\S+ )?bash scripts/test\.sh( -k (routes|\".*\")| --full)?":
        "tests/docs/test_commands.py::test_a_python_that_this_machine_lacks_is_an_error",
    r"bash scripts/dist\.sh":
        "tests/docs/test_package.py::test_a_tag_that_is_not_the_version_is_an_error",
    r"pip install \.": "tests/docs/test_package.py::test_the_commands_work",
    r"\.venv/bin/pip install -e '\.\[dev\]' && \.venv/bin/ruff check \. && \.venv/bin/mypy":
        "tests/docs/test_lint.py::test_hook_passes_on_all_files",
    r"source .* pre-commit run --all-files":
        "tests/docs/test_lint.py::test_hook_passes_on_all_files",
    r"python -m sglang\.launch_server .*": PARSED,
    r"python -m sglang_router\.launch_router .*":
        "tests/protocol/test_launch_lines.py::test_the_router_accepts_the_line",
    r"python -m sglang_mixkv accept .*": "tests/pure/test_accept.py::test_within_the_gate",
    r"python -m sglang_mixkv status .*":
        "tests/pure/test_status.py::test_the_exit_status_and_figures_for_scripts",
    r"python -m sglang_mixkv doctor --enable-mixkv":
        "tests/docs/test_commands.py::test_the_doctor_finds_this_machine_right",
    r"python -m sglang_mixkv doctor --(listen 18515|peer 10\.0\.0\.1:18515)":
        "tests/docs/test_commands.py::test_two_doctors",
    r"PYTHONPATH=new python -m sglang_mixkv doctor --no-transfer":
        "tests/pure/test_doctor.py::test_the_sglang_on_the_path_is_compared",
    r"pip download .*|python -m zipfile .*|git diff --no-index .*":
        "No test runs these commands",
    r"python -m sglang_mixkv plan .*": HERE,
    r"(\w+=\S+ )*scripts/launch/\w+\.sh --dry-run": HERE,
    r"(\w+=\S+ )*scripts/launch/(prefill|decode)\.sh --enable-metrics": PARSED,
    r"(\w+=\S+ )*scripts/launch/router\.sh":
        "tests/protocol/test_launch_lines.py::test_the_router_accepts_the_line",
    r"python -m build --wheel": "tests/docs/test_package.py::test_the_commands_work",
    r"docker (build|compose) .*":
        "no image was built and no container started",
    r"source scripts/env\.sh":
        "tests/docs/test_commands.py::test_a_python_that_this_machine_lacks_is_an_error",
    r"bash scripts/fuzz/run\.sh FOLDER":
        "tests/docs/test_commands.py::test_a_long_script_runs",
    r"python -m pytest tests/gpu(/\S+)?( --(listen|peer) \S+)?( --figures \S+)?":
        "tests/gpu/test_transfer.py::test_another_host_packs",
    r"bash scripts/faults/run\.sh": "tests/protocol/test_faults.py::test_fault",
    r"bash scripts/faults/run\.sh --soak": "tests/protocol/test_soak.py::test_soak",
    r"python scripts/faults/load\.py --kill":
        "tests/e2e/test_load.py::test_nobody_pays_for_another",
    r"python scripts/bench/cost\.py": "tests/e2e/test_bench.py::test_cost_fits_a_line_to_each_way",
    r"python scripts/bench/scheduler\.py":
        "tests/e2e/test_bench.py::test_every_call_of_the_scheduler_is_metered",
    r"python scripts/bench/peers\.py": "tests/e2e/test_bench.py::test_peers_are_counted",
    r"python -m sglang\.benchmark\.serving .*":
        "tests/e2e/test_launch.py::test_sglangs_benchmark_runs_against_a_deployment",
    r"python scripts/simulate\.py --(seed|replay) .*":
        "tests/docs/test_commands.py::test_the_simulator_runs",
}  # fmt: skip

PAIR = "mixkv_demo/models/mla"
FLAGS = (
    f"--model-path {PAIR}/target --speculative-algorithm EAGLE3 "
    f"--speculative-draft-model-path {PAIR}/drafter --page-size 16 --enable-mixkv"
)
# What the pages leave to the reader.
READER = {
    "TARGET": f"{PAIR}/target",
    "DRAFT": f"{PAIR}/drafter",
    "PREFILL_LINE": f"{FLAGS} --tp 2",
    "DECODE_LINE": f"{FLAGS} --tp 1",
    "PREFILL_HOST": "10.0.0.1",
    "DECODE_HOST": "10.0.0.2",
    "SINGLE": "10.0.0.3",
    "ROUTER_HOST": "10.0.0.4",
}


def where(command: str) -> str | None:
    """Where a command is run, by the table."""
    return next((place for rule, place in TABLE.items() if re.fullmatch(rule, command)), None)


def every_command() -> list[tuple[Path, str]]:
    return [(page, c) for page in PAGES for block in bash(page) for c in block.commands()]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_command_is_in_the_table(page: Path) -> None:
    unknown = [c for block in bash(page) for c in block.commands() if where(c) is None]
    assert unknown == [], "run it in a test, and say in TABLE which"


def test_an_unknown_command_is_noticed() -> None:
    assert where("python -m sglang_mixkv plan --json") == HERE
    assert where("bash scripts/demo.sh && rm -r .venv") is None


def test_the_table_is_true() -> None:
    """Each place exists, says so, and is needed."""
    used = {where(command) for _, command in every_command()}
    assert set(TABLE.values()) - used == set()
    for page, command in every_command():
        place = where(command) or ""
        if "::" in place:
            file, _, test = place.partition("::")
            assert f"def {test}(" in (ROOT / file).read_text(), place
        elif place != HERE:
            assert place in " ".join(page.read_text().split()), page


# ---------------------------------------------------------------- run here


def run(
    script: str, cwd: Path, limit_s: int = 300, **variables: str
) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, **variables, "PATH": path}
    return subprocess.run(
        ["bash", "-c", script], cwd=cwd, env=env, text=True, capture_output=True, timeout=limit_s,
        check=False,
    )  # fmt: skip


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder like a checkout, in which commands may rewrite documents."""
    for name in ("sglang_mixkv", "mixkv_demo", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "docs").mkdir()
    return tmp_path


def runs_here(block: Block) -> bool:
    return {where(command) for command in block.commands()} == {HERE}


@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(map(runs_here, bash(p)))], ids=lambda page: page.name
)
def test_blocks_do_what_the_page_shows(page: Path, checkout: Path) -> None:
    """A page's blocks in order, in one shell each with what the ones before have set."""
    before = ""
    left = {name: value for name, value in READER.items() if f"${name}" in page.read_text()}
    for block in filter(runs_here, bash(page)):
        done = run(f"{before}\nexec 2>&1\n{block.text}", checkout, **left)
        if block.shown is None:
            assert done.returncode == 0, done.stdout
        else:
            assert stripped(done.stdout) == stripped(block.shown)
        before += "\n".join(line for line in block.text.splitlines() if "=" in line.split(" ")[0]
                            or line.startswith("export ")) + "\n"  # fmt: skip
    for drawn in (checkout / "docs").iterdir():
        assert drawn.read_text() == (ROOT / "docs" / drawn.name).read_text()


def stripped(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def test_the_readmes_pair_of_lines_is_planned(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is refused, and the plan is the one that the README speaks of: 8 -> 1."""
    monkeypatch.chdir(checkout)
    lines = [c for block in bash(PAGES[0]) for c in block.commands() if "launch_server" in c]
    prefill, decode = (" ".join(words(line, READER)) for line in lines)
    assert plan.main(["--prefill", prefill, "--decode", decode]) == 0
    said = capsys.readouterr().out
    assert "attention TP 8" in said
    assert "attention TP 1" in said


def test_a_python_that_this_machine_lacks_is_an_error() -> None:
    """Nothing is set up or tested on another version instead."""
    done = run("PYTHON=python3.99 bash scripts/test.sh --version", ROOT, 60)
    assert done.returncode == 1
    assert "PYTHON=python3.99: no Python 3.11 or newer of that name runs here" in done.stderr


def test_the_flags_of_accept_are_its_own() -> None:
    for line in {c for _, c in every_command() if " accept " in c}:
        assert accept.parse(words(line, READER)[4:]).gate == 0.05


def test_the_simulator_runs(tmp_path: Path) -> None:
    """The documented commands, with fewer schedules."""
    for line in {c for _, c in every_command() if "simulate.py" in c}:
        done = run(line.replace("10000", "20").replace("scripts/", f"{ROOT}/scripts/"), tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "20 schedules" in done.stdout or "no finding" in done.stdout


# ---------------------------------------------------------------- the doctor


def test_two_doctors(tmp_path: Path) -> None:
    """The two documented commands, with a free port and both ends on this host."""
    pytest.importorskip("mooncake")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    written = dict.fromkeys(c for _, c in every_command() if re.search("doctor --(li|pe)", c))
    listen, peer = (
        c.replace("18515", port).replace("10.0.0.1", "127.0.0.1").replace("python", sys.executable)
        for c in written
    )  # fmt: skip
    quick = " --no-seams --mixkv-staging-mb 8"
    listener = subprocess.Popen(
        ["bash", "-c", f"exec {listen}{quick}"], cwd=tmp_path,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert listener.stderr is not None
        assert listener.stderr.readline() == f"listening on port {port} for one --peer\n"
        reader = run(f"{peer}{quick}", tmp_path)
        report, _ = listener.communicate(timeout=60)
    finally:
        listener.kill()
    assert "1 MiB from 127.0.0.1 in" in reader.stdout
    assert "8 of 8 slots right" in report
    assert (reader.returncode, listener.returncode) == (0, 0)


@pytest.mark.full
def test_the_doctor_finds_this_machine_right(tmp_path: Path) -> None:
    """With everything that it looks at: SGLang is imported, bytes are sent."""
    done = run("python -m sglang_mixkv doctor --enable-mixkv", tmp_path)
    assert done.returncode == 0, done.stdout


# ---------------------------------------------------------------- slow


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("script", "options", "result"),
    [
        ("fuzz/run.sh", "--runs 2000", "endpoint.log"),
    ],
)
def test_a_long_script_runs(script: str, options: str, result: str, tmp_path: Path) -> None:
    if Path(sys.prefix) != SCRIPTS_ENVIRONMENT:
        pytest.skip("scripts/ would set up another environment than this one")
    done = run(f"bash {ROOT}/scripts/{script} {tmp_path} {options}", ROOT, 1700)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / result).stat().st_size > 0


# ---------------------------------------------------------------- what else can be wrong


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        file = (page.parent / target) if target else page
        assert file.exists(), target
        if anchor:
            heads = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_files_that_are_named_exist(page: Path) -> None:
    spans = re.findall(
        r"`((?:sglang_mixkv|scripts|tests|docs|docker|examples)/[\w./-]*)`", prose(page)
    )
    assert [name for name in spans if not (ROOT / name).exists()] == []


def test_the_readme_leads_to_every_page() -> None:
    readme = (ROOT / "README.md").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert {name for name in pages if f"(docs/{name})" not in readme} == set()


def test_commands_in_running_text_exist() -> None:
    """`python -m sglang_mixkv NAME` anywhere, and the options that follow it."""
    helps: dict[str, str] = {}
    for page in PAGES:
        for name, rest in re.findall(r"python -m sglang_mixkv (\w+)([^`|\n]*)", page.read_text()):
            assert name in COMMANDS, f"{page.name}: {name}"
            if name not in helps:
                helps[name] = run(f"python -m sglang_mixkv {name} --help", ROOT).stdout
            own = re.sub(r'"[^"]*"', "", rest)
            for flag in re.findall(r"--[a-z-]+", own):
                assert flag in helps[name], f"{page.name}: {name} {flag}"
