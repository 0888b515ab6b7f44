"""The patches of upstream/: what they are made against, what they mend, and that the plugin serves
an engine that has them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from rig.model import Case
from rig.ring import run

from sglang_mixkv.engine.releases import sglang_version

ROOT = Path(__file__).parents[2]
UNEQUAL = [(2, 1), (1, 2)]

against_this_release = pytest.mark.skipif(
    sglang_version() != "0.5.23", reason="the patches are made against SGLang 0.5.23"
)


def script(*options: str) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "upstream.py", *options],
        text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def engine_that_refuses() -> None:
    """With refuse-draft-layout.patch. scripts/upstream.py runs these tests over one."""
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

    if not hasattr(MooncakeKVManager, "_draft_kv_mismatch"):
        pytest.skip("needs an SGLang that has the patch; scripts/upstream.py runs it")


@against_this_release
def test_they_apply() -> None:
    script("--check")


@against_this_release
@pytest.mark.full
@pytest.mark.timeout(3600)
def test_each_mends_what_its_test_shows() -> None:
    script()


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), UNEQUAL)
@pytest.mark.usefixtures("engine_that_refuses")
def test_a_patched_engine_refuses_without_the_plugin(prefill_tp: int, decode_tp: int) -> None:
    outcome = run(Case(prefill_tp, decode_tp, prefill_mixkv=False, decode_mixkv=False))
    assert {s for r in outcome.decode for s in r.status} == {"failed"}
    assert outcome.wrong == []
    assert "draft KV item length mismatch" in outcome.reasons


@pytest.mark.parametrize("backend", ["mooncake", "nixl"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), UNEQUAL)
@pytest.mark.usefixtures("engine_that_refuses")
def test_a_patched_engine_is_served(prefill_tp: int, decode_tp: int, backend: str) -> None:
    outcome = run(Case(prefill_tp, decode_tp, backend=backend))
    assert outcome.wrong == []
    assert outcome.statuses == {"success"}


def test_an_engine_that_compares_lengths_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the patch does: a peer with a plan is not judged by its item lengths."""
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

    def compare(manager: MooncakeKVManager, info: object) -> tuple[bool, str | None]:
        differ = info.dst_kv_item_lens and info.dst_kv_item_lens != manager.kv_args.kv_item_lens
        return True, "item lengths differ" if differ else None

    monkeypatch.setattr(MooncakeKVManager, "_validate_peer_state_layout", compare)
    outcome = run(Case(2, 1))
    assert outcome.wrong == []
    assert outcome.statuses == {"success"}
