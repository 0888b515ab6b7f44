"""Packing, verifying, unpacking and clearing are correct to the byte in each pool layout."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from sglang_mixkv.draft.rows import DraftRows, Staging
from sglang_mixkv.draft.slot_format import HEADER, SlotCheck

from .copies import STAMP, WAYS, Request
from .pools import DRAFTERS, DTYPES, HEAD, SLOT, Drafter, Ints, as_bytes, pool, rows_of, settle

COUNT = {"cuda": 64, "cpu": 3}  # slots: the maximum of a batch on CUDA
IN_ORDER = 0


@pytest.mark.parametrize("page", [IN_ORDER, 64, 16, 1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("drafter", DRAFTERS, ids=str)
def test_every_byte_is_right(device: torch.device, drafter: Drafter, dtype: str, page: int) -> None:
    """Copies are correct for all heads (as between equal sizes), for three heads, and for a single
    head. A slot with a wrong stamp and one with a wrong byte are rejected. The control compares
    rows in another order, which must differ."""
    for way, wanted in product(WAYS[device.type], (drafter.heads, 3, 1)):
        settle()
        slots, slot_bytes = COUNT[device.type], SLOT[device.type]
        per_token = 2 * drafter.layers * wanted * HEAD * DTYPES[dtype].itemsize
        step = (slot_bytes - HEADER) // per_token
        cuts = [range(number * step, (number + 1) * step) for number in range(slots)]
        numbers = np.arange(slots * step) if page == IN_ORDER else rows_of(slots * step, page)
        own, held = range(drafter.heads), int(numbers.max()) + 64
        heads = own[-wanted:]
        needed = 4 * slots * slot_bytes * drafter.heads // wanted
        if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < needed:
            pytest.skip(f"less than {needed >> 30} GiB of GPU memory are free")
        entries = pool(drafter.layers, drafter.heads, held, dtype, device)
        staging, request = Staging(slots, slot_bytes, device), Request(numbers, heads, cuts)
        copies = way(entries, own, page or 64, staging)
        settle()
        copies.pack(request)
        truth = payload(entries, numbers, heads.start)
        host = DraftRows([torch.empty_like(e[:step], device="cpu") for e in as_bytes(entries)], own)
        for number, cut in enumerate(cuts):
            slot, right = staging.slot(number), payload(entries, request.rows(cut), heads.start)
            assert torch.equal(slot[HEADER : HEADER + len(right)], right)
            found = host.unpack(np.arange(step), heads, slot.cpu(), STAMP + number)
            assert found is SlotCheck.OK
        if step > 1:
            other = payload(entries, request.rows(cuts[0])[::-1].copy(), heads.start)
            assert not torch.equal(staging.slot(0)[HEADER : HEADER + len(other)], other)
        for entry in as_bytes(entries):
            entry.zero_()
        for wrong in (True, False):
            staging.slot(0)[0] ^= 1
            staging.slot(1)[HEADER] ^= 1
            settle()
            first = [SlotCheck.STALE, SlotCheck.DIFFERS] if wrong else [SlotCheck.OK] * 2
            assert copies.unpack(request) == first + [SlotCheck.OK] * (slots - 2)
            used = payload(entries, numbers[: 2 * step], heads.start).any()
            assert used != wrong, "wrong slots were used"
        assert torch.equal(payload(entries, numbers, heads.start), truth)
        written = sum(int(entry.count_nonzero()) for entry in as_bytes(entries))
        assert written == int(truth.count_nonzero()), "other rows or heads were written"
        for entry in as_bytes(entries):
            entry.fill_(1)
        settle()
        copies.clear(request, range(1, len(numbers)))
        for entry in as_bytes(entries):
            assert not entry[torch.from_numpy(numbers[1:]).to(device)].any()
            assert int(entry.count_nonzero()) == (held - len(numbers) + 1) * entry[0].numel()


def payload(entries: list[Tensor], numbers: Ints, first: int) -> Tensor:
    """Return a slot's expected bytes for these rows, from head `first` on."""
    places = torch.from_numpy(numbers).to(entries[0].device)
    return torch.cat([entry[places][:, first:].flatten() for entry in as_bytes(entries)])
