"""How many answers a request waits for: the plan's count is SGLang's own, for each topology."""

from __future__ import annotations

import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rig.model import heads_of_rank

from sglang_mixkv.decode import plan as plans
from sglang_mixkv.draft.facts import Row
from sglang_mixkv.draft.layout import DraftLayout
from sglang_mixkv.engine import receiver as module

from .test_bootstrap import FACTS, row

ADDRESS, ROOM = "127.0.0.1:1", 7
# Attention-TP sizes of prefill and decode, and what else differs.
TOPOLOGIES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "P > D": (4, 2, {}),
    "P > D, a head on several ranks": (8, 2, {}),
    "P < D": (2, 4, {}),
    "P = D": (2, 2, {}),
    "DP on prefill": (2, 1, {"prefill_dp": 2}),
    "DP on decode": (2, 1, {"decode_dp": 2}),
    "PP on prefill": (2, 1, {"stages": 2, "mla": False}),
    "PP on prefill, MLA": (4, 2, {"stages": 2}),
    "DCP on decode": (2, 4, {"dcp": 2}),
    "GQA, P > D": (4, 1, {"mla": False}),
    "GQA, P < D": (1, 4, {"mla": False}),
    "hybrid MLA, P > D": (4, 2, {"mla": False, "is_hybrid_mla_backend": True}),
}


class Scene:
    """A decode rank whose receivers are SGLang's, of a prefill server that is only described."""

    def __init__(
        self, prefill_tp: int, decode_tp: int, rank: int, *, stages: int = 1, prefill_dp: int = 1,
        decode_dp: int = 1, dcp: int = 1, mla: bool = True, is_hybrid_mla_backend: bool = False,
    ) -> None:  # fmt: skip
        from sglang.srt.disaggregation.common.conn import CommonKVManager, PrefillServerInfo

        self.tp, self.stages, self.dps = prefill_tp, stages, prefill_dp
        self.notified: list[int] = []
        self.own = self._row(0, stages - 1, 0, tp=decode_tp, rank=rank)
        self.rows = {
            (one.rank_ip, one.rank_port): one
            for dp in range(prefill_dp) for stage in range(stages) for tp_rank in range(prefill_tp)
            for one in [self._row(dp, stage, tp_rank, tp=prefill_tp, rank=tp_rank)]
        }  # fmt: skip
        self.manager = SimpleNamespace(
            is_mla_backend=mla, is_hybrid_mla_backend=is_hybrid_mla_backend,
            attn_tp_size=decode_tp, attn_cp_size=1, attn_cp_rank=0, pp_size=1, pp_rank=0,
            kv_args=SimpleNamespace(engine_rank=rank), enable_all_cp_ranks_for_transfer=False,
            defer_decode_allocation=False, enable_staging=False, dcp_size=dcp,
            addr_to_rooms_tracker=defaultdict(set), prefill_response_tracker={},
            required_prefill_response_num_table={}, request_status={}, failures={},
            connection_lock=threading.Lock(), connection_pool={}, servers=self, kv_shard_size=1,
        )  # fmt: skip
        self.manager.update_status = self.manager.request_status.__setitem__
        self.manager.record_failure = self.manager.failures.__setitem__
        info = PrefillServerInfo(
            attn_tp_size=prefill_tp, attn_cp_size=1, dp_size=prefill_dp, pp_size=stages,
            page_size=4, kv_cache_dtype="auto", follow_bootstrap_room=True,
        )  # fmt: skip
        CommonKVManager._resolve_rank_mapping(self.manager, info)
        self.manager.prefill_info_table = {ADDRESS: info}

    def _row(self, dp: int, stage: int, at: int, *, tp: int, rank: int) -> Row:
        number = (dp * self.stages + stage) * self.tp + at
        last = stage == self.stages - 1
        changes: dict[str, Any] = {"attn_tp": tp, "attn_tp_rank": rank, "pp_rank": stage}
        changes |= {"instance": b"%08d" % number, "rank_port": 9000 + number}
        changes |= {"draft": DraftLayout(FACTS, tp, rank) if last else None}
        return msgspec.structs.replace(row(0), **changes)

    # -- what the receiver asks of the manager's PrefillServers

    def refusal(self, address: str) -> None:
        return None

    def plan(self, address: str, infos: Any) -> plans.Plan:
        cold, _ = plans.judge(self.rows.values(), self.own, serve_mismatch=False)
        return plans.make_plan(infos, self.rows, self.own, cold)

    def receiver(self, dp_rank: int) -> Any:
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVReceiver

        scene = self

        class Receiver(module.DraftReceiver, MooncakeKVReceiver):
            def _get_bootstrap_info_from_server(
                self, dp: int, cp: int, tp_rank: int, stage: int
            ) -> dict[str, Any]:
                number = (dp * scene.stages + stage) * scene.tp + tp_rank
                return {"rank_ip": "127.0.0.1", "rank_port": 9000 + number, "pp_rank": stage}

            def _register_kv_args(self) -> bool:
                return True

            def ensure_abort_notified(self, **_: Any) -> None:
                scene.notified.append(self.bootstrap_room)

        made = Receiver.__new__(Receiver)
        super(MooncakeKVReceiver, made).__init__(self.manager, ADDRESS, ROOM)
        made.init(dp_rank)
        return made


@pytest.fixture(autouse=True, scope="module")
def published() -> None:
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs

    publish(ServerArgs(model_path="dummy", disaggregation_mode="decode"), role="tokenizer")


def held_by(tp: int, rank: int) -> set[int]:
    return set(range(FACTS.total_heads)[heads_of_rank(FACTS.total_heads, tp, rank)])


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_counts_are_sglangs(topology: str) -> None:
    prefill_tp, decode_tp, changes = TOPOLOGIES[topology]
    for rank in range(decode_tp):
        for dp_rank in range(changes.get("prefill_dp", 1)):
            scene = Scene(prefill_tp, decode_tp, rank, **changes)
            one = scene.receiver(dp_rank)
            assert one.conclude_state is None, scene.manager.failures
            stock = one.required_prefill_response_num
            assert sum(one.plan.is_send_target) == stock
            assert scene.manager.required_prefill_response_num_table == {ROOM: stock}
            needed, answers = held_by(decode_tp, rank), 0
            for prefill_rank in scene.manager.prefill_info_table[ADDRESS].target_tp_ranks:
                answers += bool(needed & held_by(prefill_tp, prefill_rank))
                needed -= held_by(prefill_tp, prefill_rank)
            assert sum(bool(source.heads) for source in one.plan.sources) == answers > 0
            assert needed == set()


def one_answer_more(patch: pytest.MonkeyPatch) -> None:
    from sglang.srt.disaggregation.common.conn import CommonKVReceiver

    real = CommonKVReceiver._setup_bootstrap_infos

    def setup(self: Any) -> None:
        self.required_prefill_response_num += 1
        real(self)

    patch.setattr(CommonKVReceiver, "_setup_bootstrap_infos", setup)


def test_another_count_fails_the_request_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.disaggregation.base.conn import KVPoll

    one_answer_more(monkeypatch)
    scene = Scene(4, 2, 1)
    one = scene.receiver(0)
    assert one.poll() == KVPoll.Failed
    assert scene.notified == [ROOM]  # prefill holds no half of it
    reason = scene.manager.failures[ROOM]
    assert "[MIXKV-PAIR-05] expected the target from as many prefill ranks as SGLang" in reason
