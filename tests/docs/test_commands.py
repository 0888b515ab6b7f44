"""Documented commands that need no cluster print the output shown on the page.

Commands that need a cluster are parsed by SGLang's own parsers
(tests/protocol/test_launch_lines.py), and the README's are planned here.
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
from sglang_mixkv.channel.slots import share_of, slots_of
from sglang_mixkv.draft.layout import DraftFacts, heads_on_rank, readers_of
from sglang_mixkv.tools import plan_pair, plan_server

from .pages import IDS, PAGES, ROOT, Block, bash, prose, readme_flags, words

HERE = r"python -m sglang_mixkv plan .*|(\w+=\S+ )*scripts/launch/\w+\.sh --dry-run( --\S+)?"
PAIR = "mixkv_demo/models/mla"
# The README's models, with the local models that replace them.
HERE_MODELS = {
    "AQ-MedAI/Kimi-K26-eagle3": f"{PAIR}/drafter",
    "moonshotai/Kimi-K2.6": f"{PAIR}/target",
}
FLAGS = readme_flags()
for name, folder in HERE_MODELS.items():
    FLAGS = FLAGS.replace(name, folder)
# Variables that the reader has to set.
READER = {
    "FLAGS": FLAGS,
    "PREFILL_LINE": f"{FLAGS} --tp 2",
    "DECODE_LINE": f"{FLAGS} --tp 1",
    "PREFILL_HOST": "10.0.0.1",
    "DECODE_HOST": "10.0.0.2",
    "SINGLE": "10.0.0.3",
    "ROUTER_HOST": "10.0.0.4",
}


def commands(pattern: str) -> list[str]:
    """Return all documented commands that match the pattern, without duplicates."""
    found = [c for page in PAGES for block in bash(page) for c in block.commands()]
    return [c for c in dict.fromkeys(found) if re.search(pattern, c)]


def run(script: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, **variables, "PATH": path}
    command = ["bash", "-c", script]
    return subprocess.run(command, cwd=cwd, env=env, text=True, capture_output=True, timeout=300)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Make a folder that resembles a checkout."""
    for name in ("sglang_mixkv", "mixkv_demo", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def runs_here(block: Block) -> bool:
    found = [*block.commands()]
    return bool(found) and all(re.fullmatch(HERE, command) for command in found)


@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(map(runs_here, bash(p)))], ids=lambda page: page.name
)
def test_commands_print_the_output_on_the_page(page: Path, checkout: Path) -> None:
    """The blocks of a page run in order, each in a new shell with the variables set by earlier
    blocks."""
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


def stripped(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def test_the_readmes_launch_lines_have_no_findings(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`plan` reads TP 8 -> 1 from the README's two launch lines, which need the newest release."""
    monkeypatch.chdir(checkout)
    lines = [c for block in bash(PAGES[0]) for c in block.commands() if "launch_server" in c]
    servers = [plan_server.read(role, " ".join(words(line, READER)))
               for role, line in zip(("prefill", "decode"), lines, strict=True)]  # fmt: skip
    assert [server.attention_tp for server in servers] == [8, 1]
    assert plan_pair.make_plan(*servers).findings == ()


def test_the_readme_is_short() -> None:
    """The number of words in the README is limited: before "Do you need it?", before the
    installation, and in total."""
    readme = PAGES[0].read_text()
    for end, limit in (("## Do you need it?", 250), ("pip install", 350)):
        assert len(readme[: readme.index(end)].split()) < limit, end
    assert len(readme.split()) <= 800


def test_the_table_of_fleet_sizes_agrees_with_the_code() -> None:
    """The table in docs/deploy.md agrees with the channel's formulas, for Kimi-K2's EAGLE3 head and
    TP 8 -> 8 DP-attention groups. Each group reads from all prefill ranks."""
    facts = DraftFacts("LlamaForCausalLMEagle3", "EAGLE3", 64, (256, 256), "bfloat16")
    count, size = slots_of(256)
    per_slot = facts.tokens_in(size, len(heads_on_rank(64, 8, 0)))
    page = (ROOT / "docs" / "deploy.md").read_text()
    rows = re.findall(r"^\| (\d+) x (\d+) \| (\d+) \| (\d+) \| (\d+) \| ([\d,]+) \|", page, re.M)
    assert rows
    for row in rows:
        prefills, decodes, *figures = (int(cell.replace(",", "")) for cell in row)
        readers, owners = 8 * decodes * readers_of(8, 1), 8 * prefills
        slots = min(share_of(count, readers), share_of(count, owners))
        assert figures == [readers, owners, slots, slots * per_slot]


def test_the_simulator_runs(tmp_path: Path) -> None:
    """The documented commands work. The test runs fewer schedules."""
    for line in commands(r"simulate\.py"):
        done = run(line.replace("10000", "20").replace("scripts/", f"{ROOT}/scripts/"), tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "20 schedules" in done.stdout or "no finding" in done.stdout


def test_doctor_between_two_processes(tmp_path: Path) -> None:
    """The documented `--listen` and `--peer` commands work, with a free port and both ends on this
    host."""
    pytest.importorskip("mooncake")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    listen, peer = (
        c.replace("18515", port).replace("10.0.0.1", "127.0.0.1").replace("python", sys.executable)
        for c in commands("doctor --(li|pe)")
    )
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


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_and_file_names_exist(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        file = (page.parent / target) if target else page
        assert file.exists(), target
        if anchor:
            heads = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads}
    folders = "sglang_mixkv|scripts|tests|docs|docker|examples|findings"
    spans = re.findall(rf"`((?:{folders})/[\w./-]*)`", prose(page))
    assert [name for name in spans if not (ROOT / name).exists()] == []


def test_commands_in_running_text_exist() -> None:
    """Every `python -m sglang_mixkv NAME` in a page names an existing command, followed by options
    that its --help lists."""
    helps: dict[str, str] = {}
    for page in PAGES:
        for name, rest in re.findall(r"python -m sglang_mixkv (\w+)([^`|\n]*)", page.read_text()):
            assert name in COMMANDS, f"{page.name}: {name}"
            if name not in helps:
                helps[name] = run(f"python -m sglang_mixkv {name} --help", ROOT).stdout
            own = re.sub(r'"[^"]*"', "", rest)
            for flag in re.findall(r"--[a-z-]+", own):
                assert flag in helps[name], f"{page.name}: {name} {flag}"
