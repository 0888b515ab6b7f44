"""Version 0.1.0 of the plugin on the other side: every request is served, every byte right.
Another SGLang there: refused."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rig.model import Cache, Case, Request
from rig.ring import run

from sglang_mixkv.engine import releases

RELEASED, ITS_SGLANG = "20f005c", "0.5.23"
"""The commit of version 0.1.0."""

REQUESTS = (Request(23), Request(8, chunk_pages=1), Request(170, chunk_pages=8))


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That version's package, which knows one release of SGLang."""
    if releases.here().version != ITS_SGLANG:
        pytest.skip(f"version 0.1.0 starts on SGLang {ITS_SGLANG} alone")
    folder = tmp_path_factory.mktemp("released")
    archive = folder / "package.tar"
    command = ["git", "archive", "-o", str(archive), RELEASED, "sglang_mixkv"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this copy has no history: {done.stderr.strip()}")
    with tarfile.open(archive) as package:
        package.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize("mode", ["direct", "packed"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2), (4, 2)])
@pytest.mark.parametrize("old", ["prefill", "decode"])
def test_the_version_before_is_served(
    released: Path, old: str, prefill_tp: int, decode_tp: int, mode: str
) -> None:
    extra = {"package": {old: released}, "config": {"draft_transfer": mode, "staging_mb": 1}}
    draft = Cache("mha", layers=2, heads=4, k_bytes=64, v_bytes=64)
    outcome = run(Case(prefill_tp, decode_tp, draft=draft, requests=REQUESTS, extra=extra))
    assert outcome.wrong == []
    assert outcome.statuses == {"success"}


@pytest.mark.parametrize("old", ["prefill", "decode"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("window", [0, 1400])
def test_without_room_for_regions(released: Path, old: str, page_size: int, window: int) -> None:
    """The version before knows extents that are pages only, and does not say where they begin."""
    extra = {"package": {old: released}, "config": {"draft_transfer": "packed", "staging_mb": 1}}
    draft = Cache("mha", heads=2, k_bytes=256, v_bytes=256)
    case = Case(
        2, 1, draft=draft, requests=(Request(1500), Request(900)), page_size=page_size,
        shuffled=False, draft_window=window, extra=extra,
    )  # fmt: skip
    outcome = run(case)
    assert outcome.wrong == []
    assert outcome.statuses == {"success"}


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_another_sglang_is_refused(side: str) -> None:
    """Both sides end the request, decode says why, and nothing is written."""

    def of_another_release(rank: Any) -> None:
        rank.facts = msgspec.structs.replace(rank.facts, engine="0.5.0")

    outcome = run(Case(2, 1, requests=REQUESTS[:1], extra={"facts": {side: of_another_release}}))
    assert outcome.wrong == []
    assert outcome.statuses == {"failed"}
    (said,) = (reason for reason in outcome.reasons.splitlines() if reason.startswith("decode"))
    assert "SGLang version: prefill has" in said
    assert "Run the same SGLang release on both sides" in said
