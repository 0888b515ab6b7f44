"""Every byte that is packed, unpacked, summed and cleared is right, in each layout of a pool."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from sglang_mixkv.draft.rows import HEADER, DraftRows, Staging

from .pools import DRAFTERS, DTYPES, LAYOUTS, STAMP, Drafter, Ints, as_bytes, pool, rows_of, settle

TOKENS = {"cuda": (1 << 17, 1 << 10), "cpu": (40,)}
MOST_SUMMED = 1 << 10  # tokens: about as many as a slot has


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("drafter", DRAFTERS, ids=str)
def test_every_byte_is_right(
    device: torch.device, drafter: Drafter, dtype: str, layout: str
) -> None:
    """Of all heads, as between equal sizes, and of one, the narrowest row of any reader. The
    control takes the rows in another order."""
    for tokens, count in product(TOKENS[device.type], (drafter.heads, 1)):
        settle()
        numbers, heads = rows_of(tokens, LAYOUTS[layout]), range(drafter.heads)[-count:]
        needed = 6 * 2 * drafter.layers * drafter.heads * 128 * DTYPES[dtype].itemsize * tokens
        if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < needed:
            pytest.skip(f"less than {needed >> 30} GiB of GPU memory are free")
        held = int(numbers.max()) + 64
        entries = pool(drafter.layers, drafter.heads, held, dtype, device)
        rows = DraftRows(entries, range(drafter.heads), by_numpy=False)
        slot = Staging(1, -(-rows.packed_bytes(tokens, count) // 64) * 64, device).slot(0)
        assert rows.pack(numbers, heads, slot, STAMP) == tokens * rows.bytes_per_token(count)
        truth = payload(entries, numbers, heads.start)
        packed = slot[HEADER : HEADER + len(truth)]
        assert torch.equal(packed, truth)
        assert not torch.equal(packed, payload(entries, numbers[::-1].copy(), heads.start))
        assert rows.stamps(slot, tokens, count) == (STAMP, STAMP)
        if tokens <= MOST_SUMMED:
            check_sum(rows, slot, tokens, count)
        for entry in as_bytes(entries):
            entry.zero_()
        rows.unpack(numbers, heads, slot)
        assert torch.equal(payload(entries, numbers, heads.start), truth)
        written = sum(int(entry.count_nonzero()) for entry in as_bytes(entries))
        assert written == int(truth.count_nonzero()), "other rows or heads were written"
        for entry in as_bytes(entries):
            entry.fill_(1)
        rows.clear(numbers[1:])
        for entry in as_bytes(entries):
            assert not entry[torch.from_numpy(numbers[1:]).to(device)].any()
            assert int(entry.count_nonzero()) == (held - tokens + 1) * entry[0].numel()


def payload(entries: list[Tensor], numbers: Ints, first: int) -> Tensor:
    """What a slot has to hold of these rows, from that head on."""
    places = torch.from_numpy(numbers).to(entries[0].device)
    return torch.cat([entry[places][:, first:].flatten() for entry in as_bytes(entries)])


def check_sum(rows: DraftRows, slot: Tensor, tokens: int, count: int) -> None:
    """It is what the host finds, and another one where a byte changed."""
    size = rows.head_bytes[0]
    memory = [torch.zeros((1, len(rows.heads), size), dtype=torch.uint8) for _ in rows.head_bytes]
    right = DraftRows(memory, rows.heads).checksum(slot.cpu(), tokens, count)
    assert rows.checksum(slot, tokens, count) == right
    slot[HEADER] ^= 1
    assert rows.checksum(slot, tokens, count) != right
    slot[HEADER] ^= 1
