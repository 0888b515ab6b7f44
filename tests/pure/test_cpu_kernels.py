"""The PyTorch kernels of the CPU engine, each against plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mixkv_cpu.kernels import attention, cache, host_cache, speculative

SCALE = 0.3
POOL = 40


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def softmax_average(q: Tensor, keys: Tensor, values: Tensor, cap: float) -> Tensor:
    """One query head over the keys that it may see: q [D], keys [m, D], values [m, Dv]."""
    scores = [float(q @ key) * SCALE for key in keys]
    if cap:
        scores = [cap * math.tanh(score / cap) for score in scores]
    weights = [math.exp(score - max(scores)) for score in scores]
    weighted = [w * value for w, value in zip(weights, values, strict=True)]
    return sum(weighted) / sum(weights)


def reference(
    q: Tensor, k: Tensor, v: Tensor, slots: Tensor, window: int = 0, cap: float = 0.0
) -> Tensor:
    """The last len(q) positions of one request, whose keys and values lie at ``slots``."""
    group, out = q.shape[1] // k.shape[1], []
    for i in range(len(q)):
        stop = len(slots) - len(q) + i + 1
        seen = slots[max(0, stop - window) if window else 0 : stop]
        heads = range(q.shape[1])
        out.append(
            torch.stack(
                [
                    softmax_average(q[i, h], k[seen, h // group], v[seen, h // group], cap)
                    for h in heads
                ]
            )
        )
    return torch.stack(out)


class Cache:
    """Three requests of 5, 9 and 4 tokens at shuffled slots of one KV cache."""

    lengths = (5, 9, 4)

    def __init__(self, kv_heads: int, width: int, value_width: int, mla: bool = False) -> None:
        self.k = torch.randn(POOL, kv_heads, width)
        self.v = self.k[..., :value_width] if mla else torch.randn(POOL, kv_heads, value_width)
        self.rows = torch.tensor([4, 0, 2])
        self.req_to_token = torch.randperm(POOL * 6).view(6, POOL).int() % POOL
        free = torch.randperm(POOL).int()
        for row, length in zip(self.rows.tolist(), self.lengths, strict=True):
            self.req_to_token[row, :length], free = free[:length], free[length:]

    def slots(self, request: int) -> Tensor:
        return self.req_to_token[self.rows[request], : self.lengths[request]].long()


SHAPES = [
    pytest.param(4, 4, 8, 8, False, id="mha"),
    pytest.param(4, 2, 8, 6, False, id="gqa"),
    pytest.param(4, 1, 8, 5, True, id="mla"),
]


@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (3, 0.0), (0, 2.0)])
@pytest.mark.parametrize(("heads", "kv_heads", "width", "value_width", "mla"), SHAPES)
def test_decode_attention(heads, kv_heads, width, value_width, mla, window, cap) -> None:
    kv = Cache(kv_heads, width, value_width, mla)
    q, out = torch.randn(3, heads, width), torch.empty(3, heads, value_width)
    new_k = torch.randn(3, kv_heads, width)
    new_v = new_k[..., :value_width] if mla else torch.randn(3, kv_heads, value_width)
    loc = torch.stack([kv.slots(i)[-1] for i in range(3)])
    k, v = kv.k.clone(), kv.v.clone()
    k[loc], v[loc] = new_k, new_v
    table = (kv.req_to_token, kv.rows, torch.tensor(kv.lengths))
    rule = (SCALE, cap, False, window, None, None)
    new = (new_k.flatten(1), new_v.flatten(1), loc, torch.empty(0))
    attention.decode_attention_cpu(q, kv.k, kv.v, 1.0, 1.0, out, *new, *table, *rule)
    want = torch.cat([reference(q[i : i + 1], k, v, kv.slots(i), window, cap) for i in range(3)])
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(kv.k, k)
    torch.testing.assert_close(kv.v, v)


@pytest.mark.parametrize("given", ["with k and v", "from the cache"])
@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (3, 0.0), (0, 2.0)])
@pytest.mark.parametrize(("heads", "kv_heads", "width", "value_width", "mla"), SHAPES)
def test_extend_attention(heads, kv_heads, width, value_width, mla, window, cap, given) -> None:
    kv, new = Cache(kv_heads, width, value_width, mla), (2, 4, 4)
    tokens = torch.cat([kv.slots(i)[-n:] for i, n in enumerate(new)])
    k, v = kv.k[tokens].flatten(1), kv.v[tokens].flatten(1)
    stored_k, stored_v = kv.k.clone(), kv.v.clone()
    if given == "with k and v":
        stored_k[tokens], stored_v[tokens] = float("nan"), float("nan")
    else:
        k = v = None
    q, out = torch.randn(10, heads, width), torch.empty(10, heads, value_width)
    spans = (torch.tensor(kv.lengths), torch.tensor(new), torch.tensor([0, 2, 6]), 4)
    attention.extend_attention_cpu(
        *(q, k, v, out, stored_k, stored_v, 1.0, 1.0, kv.req_to_token, kv.rows, *spans),
        *(SCALE, cap, False, window, None, None, None, True),
    )
    parts = zip(q.split(new), range(3), strict=True)
    want = torch.cat([reference(x, kv.k, kv.v, kv.slots(i), window, cap) for x, i in parts])
    torch.testing.assert_close(out, want)


def test_rows_that_dp_attention_pads_become_zero() -> None:
    kv, q = Cache(4, 8, 8), torch.randn(7, 4, 8)
    out, rows = torch.full((7, 4, 8), float("nan")), torch.cat([kv.rows, torch.tensor([0, 0])])
    spans = (torch.tensor(kv.lengths), torch.tensor([1, 2, 1]), torch.tensor([0, 1, 3]), 2)
    attention.extend_attention_cpu(
        *(q, None, None, out, kv.k, kv.v, 1.0, 1.0, kv.req_to_token, rows, *spans),
        *(SCALE, 0.0, False, 0, None, None, None, True),
    )
    parts = zip(q[:4].split((1, 2, 1)), range(3), strict=True)
    want = torch.cat([reference(x, kv.k, kv.v, kv.slots(i)) for x, i in parts])
    torch.testing.assert_close(out, torch.cat([want, torch.zeros(3, 4, 8)]))


def test_a_prompt_without_prefix_may_have_other_heads_than_the_cache() -> None:
    """MLA computes fresh prompts with full heads; the cache holds latents of another width."""
    latents, q = torch.randn(POOL, 1, 12), torch.randn(3, 4, 8)
    k, v, out = torch.randn(3, 4, 8), torch.randn(3, 4, 6), torch.empty(3, 4, 6)
    table = (torch.arange(POOL).int()[None], torch.tensor([0]), torch.tensor([3]))
    attention.extend_attention_cpu(
        *(q, k, v, out, latents, latents[..., :9], 1.0, 1.0, *table),
        *(torch.tensor([3]), torch.tensor([0]), 3, SCALE, 0.0, False, 0, None, None, None, True),
    )
    torch.testing.assert_close(out, reference(q, k, v, torch.arange(3)))


def test_attention_refuses_what_it_would_ignore() -> None:
    with pytest.raises(NotImplementedError, match="sinks"):
        attention._refuse(cross_attention=False, sinks=torch.ones(1), kv_scale=False)


def test_req_to_token_is_written_and_read() -> None:
    table, rows = torch.zeros(5, 12, dtype=torch.int32), torch.tensor([3, 1, 4])
    start, end = torch.tensor([2, 0, 7]), torch.tensor([5, 0, 9])
    slots = torch.tensor([11, 12, 13, 21, 22])
    cache.assign_req_to_token_pool_cpu(rows, table, start, end, slots, 12)
    want = torch.zeros(5, 12, dtype=torch.int32)
    want[3, 2:5], want[4, 7:9] = torch.tensor([11, 12, 13]).int(), torch.tensor([21, 22]).int()
    assert torch.equal(table, want)
    read = torch.full((6,), -1)
    cache.assign_extend_cache_locs_cpu(rows, table, start, end, read, 12)
    assert read.tolist() == [11, 12, 13, 21, 22, -1]


def test_draft_slots_follow_the_committed_tokens() -> None:
    table, out = torch.arange(24).view(2, 12).int(), torch.zeros(6, dtype=torch.long)
    lengths = torch.tensor([4, 1])
    cache.assign_draft_cache_locs_contiguous_cpu(
        torch.tensor([1, 0]), table, lengths, out, 12, 1, 3
    )
    assert out.tolist() == [16, 17, 18, 1, 2, 3]


def test_moving_slots_reads_all_before_it_writes() -> None:
    buffers = [torch.randn(8, 2, 4), torch.randn(8, 3)]
    want = [x.clone() for x in buffers]
    for x in want:
        x[[1, 2, 5]] = x[[2, 3, 1]]
    pointers = torch.tensor([x.data_ptr() for x in buffers], dtype=torch.uint64)
    sizes = torch.tensor([x[0].numel() * x.element_size() for x in buffers])
    cache.copy_all_layer_kv_cache_cpu(
        pointers, sizes, torch.tensor([1, 2, 5]), torch.tensor([2, 3, 1])
    )
    assert all(torch.equal(x, y) for x, y in zip(buffers, want, strict=True))


def test_the_draft_table_has_the_requests_rows() -> None:
    table = torch.arange(30).view(3, 10).int()
    rows = attention.build_draft_decode_metadata_cpu(
        table, torch.tensor([2, 0]), torch.tensor([3, 3]), 1, 3, 10
    )
    assert torch.equal(rows, table[[2, 0]])
    with pytest.raises(NotImplementedError, match="topk 2"):
        attention.build_draft_decode_metadata_cpu(table, torch.tensor([0]), rows[:1, 0], 2, 3, 10)


def build_chain(mode: int, lengths: Tensor, n: int, topk: int = 1) -> tuple[Tensor, ...]:
    """positions, mask and the three retrive tensors of a batch."""
    bs = len(lengths)
    prefix = int(lengths.sum()) if mode == speculative.FULL_MASK else 0
    mask = torch.ones(n * (prefix + bs * n), dtype=torch.bool)
    positions, retrive = torch.empty(bs * n, dtype=torch.long), torch.full((3, bs, n), -1)
    none = torch.empty(0)
    speculative.build_tree_kernel_efficient_cpu(
        none, none, lengths, mask, positions, *retrive, topk, 3, n, mode
    )
    return positions, mask, *retrive


@pytest.mark.parametrize("mode", [0, 1], ids=["full mask", "drafts only"])
def test_the_draft_tree_is_a_chain(mode: int) -> None:
    positions, mask, index, following, sibling = build_chain(mode, torch.tensor([3, 5]), 4)
    assert positions.tolist() == [3, 4, 5, 6, 5, 6, 7, 8]
    assert index.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert following.tolist() == [[1, 2, 3, -1]] * 2
    assert (sibling == -1).all()
    prefixes = (3, 5) if mode == speculative.FULL_MASK else (0, 0)
    want = [
        column <= prefix + row
        for prefix in prefixes
        for row in range(4)
        for column in range(prefix + 4)
    ]
    assert mask.tolist() == want


def test_real_trees_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="topk 2"):
        build_chain(1, torch.tensor([3]), 4, topk=2)


@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_greedy_verify_accepts_up_to_the_first_wrong_draft(right: int) -> None:
    lengths, n = torch.tensor([3, 5]), 4
    chain = build_chain(1, lengths, n)[2:]
    target = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23]])
    candidates = torch.tensor([[1, 10, 11, 12], [2, 20, 99, 22]])
    if right < 3:
        candidates[0, right + 1] = 99
    predicts, index = torch.full((8,), -7), torch.full((2, 4), -1, dtype=torch.int32)
    accepted = torch.zeros(2, dtype=torch.int32)
    speculative.verify_tree_greedy_cpu(
        predicts, index, accepted, candidates, *chain, target.flatten()
    )
    assert accepted.tolist() == [right, 1]
    assert index.tolist() == [[*range(right + 1)] + [-1] * (3 - right), [4, 5, -1, -1]]
    assert predicts[: right + 1].tolist() == [10, 11, 12, 13][: right + 1]
    assert predicts[4:6].tolist() == [20, 21]
    assert (predicts[right + 1 : 4] == -7).all()


def test_bonus_tokens_and_accepted_slots() -> None:
    bonus = torch.zeros(2, dtype=torch.int32)
    tokens, lengths = torch.tensor([[5, 6, 7], [8, 9, 4]]), torch.tensor([2, 3])
    speculative.fill_bonus_tokens_cpu(tokens, lengths, bonus, 3)
    assert bonus.tolist() == [6, 4]
    out = torch.full((4,), -1)
    index, slots = torch.tensor([[0, 1, -1], [3, -1, -1]]), torch.tensor([30, 31, 32, 33])
    speculative.fill_accept_out_cache_loc_cpu(index, slots, out)
    assert out.tolist() == [30, 31, 33, -1]


@pytest.mark.parametrize(
    ("select", "want"), [(None, [1, 2, 90, 4, 91]), (torch.tensor([1, 4]), [1, 90, 2, 4, 91])]
)
def test_rotating_tokens(select: Tensor | None, want: list[int]) -> None:
    tokens = torch.arange(5)
    spans = (torch.tensor([0, 3]), torch.tensor([3, 2]))
    speculative.rotate_input_ids_cpu(tokens, *spans, torch.tensor([90, 91]), select)
    assert tokens.tolist() == want


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct"])
@pytest.mark.parametrize("groups", [1, 2], ids=["mla", "mha"])
def test_rows_come_back_from_the_host(groups: int, layout: str, dtype: torch.dtype) -> None:
    """All layers of some pages to the host, and layer by layer to other pages of another pool."""
    layers, pages, size, row = 3, 6, 4, (2, 5)
    rows = torch.randn(groups * layers, pages * size, *row).to(dtype)
    source, destination = list(rows), list(torch.zeros_like(rows))
    host = torch.zeros(groups, layers, pages * size, *row, dtype=dtype)
    if layout == "page_first_direct":
        host = torch.zeros(groups, pages, layers, size, *row, dtype=dtype)
    old, kept, new = (
        torch.cat([torch.arange(size) + page * size for page in chosen])
        for chosen in ((4, 0), (1, 5), (2, 3))
    )
    if layout == "layer_first":
        host_layers = list(host.flatten(0, 1))
        host_cache.transfer_kv_direct(source, host_layers, old, kept, size)
        for layer in range(groups * layers):
            one = slice(layer, layer + 1)
            host_cache.transfer_kv_direct(host_layers[one], destination[one], kept, new, size)
    else:
        host_cache.transfer_kv_all_layer_direct_lf_pf(source, list(host), old, kept, size)
        for layer in range(layers):
            host_cache.transfer_kv_per_layer_direct_pf_lf(
                list(host), destination[layer::layers], kept, new, layer, size
            )
    for before, after in zip(source, destination, strict=True):
        for here, there in zip(old.tolist(), new.tolist(), strict=True):
            assert torch.equal(before[here].float(), after[there].float())
        others = sorted(set(range(pages * size)) - set(new.tolist()))
        assert not after.float()[others].any()
