"""Pack, unpack, clear and verify of the drafter's rows, against a memcpy of the same bytes.

One K and one V layer, 8 heads x 128 x bf16 on the rank, the upper half of the heads packed; the
pool has FAN times the tokens. One line per number of tokens, layout and method, taken in turns;
`ratio`: to the memcpy (on a GPU the copy on the device) of the same turn. `by slots`: in segments
of 4 MiB, as the channel packs them by default, each in a slot of its own.

On the host a time is the thread's CPU time: copies never sleep, and what else a machine does counts
only as far as it takes caches and memory away. On a GPU it is the wall's, from the call to the end
of its wait.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from common import Check, Record, Result, Samples, interleave, options, ratio, repeats

from sglang_mixkv.channel.slots import slot_bytes
from sglang_mixkv.draft.rows import DraftRows, Staging
from sglang_mixkv.draft.slot_format import HEADER

AT_MOST = 2.0
JUDGED = 8192  # tokens
ON_RANK, HEADS, HEAD_BYTES = range(8), range(4, 8), 256
PER_TOKEN = 2 * len(HEADS) * HEAD_BYTES  # bytes
FAN = 4
SLOT = slot_bytes(256)  # the default of --mixkv-staging-mb
BASE, STAMP = "memcpy", 7
LAYOUTS = {"run": 0, "pages of 64": 64, "pages of 16": 16, "pages of 1": 1}


def row_numbers(tokens: int, page_size: int) -> Any:
    """Rows of random pages; of page size 0 one run of rows."""
    if not page_size:
        return np.arange(64, 64 + tokens)
    pages = np.random.default_rng(3).permutation(FAN * tokens // page_size)
    return (pages[: tokens // page_size, None] * page_size + np.arange(page_size)).ravel()


@dataclass
class Scene:
    """A pool with known bytes, one slot for all tokens, and as many of 4 MiB as they fill."""

    device: torch.device
    tokens: int
    page_size: int

    def __post_init__(self) -> None:
        torch.manual_seed(3)
        shape = (FAN * self.tokens + 64, len(ON_RANK), HEAD_BYTES)
        make = partial(torch.randint, 0, 256, dtype=torch.uint8, device=self.device)
        self.pool = [make(size=shape) for _ in range(2)]
        self.draft, self.torch = DraftRows(self.pool, ON_RANK), DraftRows(self.pool, ON_RANK, False)
        self.rows = row_numbers(self.tokens, self.page_size)
        size = self.draft.packed_bytes(self.tokens, len(HEADS))
        self.whole = Staging(1, -(-size // 64) * 64, self.device).slot(0)
        self.step = (SLOT - self.draft.packed_bytes(0, 0)) // PER_TOKEN
        self.slots = Staging(-(-self.tokens // self.step), SLOT, self.device)
        self.source, self.target = (make(size=(self.tokens * PER_TOKEN,)) for _ in range(2))
        self.draft.pack(self.rows, HEADS, self.whole, STAMP)
        self.check()

    def check(self) -> None:
        """Raises where a byte of the slot is wrong."""
        rows = torch.from_numpy(self.rows).to(self.device)
        wanted = torch.cat([pool[rows][:, HEADS.start :].flatten() for pool in self.pool])
        if not torch.equal(self.whole[HEADER : HEADER + wanted.numel()], wanted):
            raise RuntimeError(f"{self.tokens} tokens: wrong bytes")

    def by_slots(self, act: Callable[[Any, torch.Tensor], Any]) -> None:
        for number, first in enumerate(range(0, self.tokens, self.step)):
            act(self.rows[first : first + self.step], self.slots.slot(number))


def on_both(scene: Scene) -> dict[str, Callable[[], Any]]:
    """The product's calls, and with numpy the code for a GPU too."""
    draft, other, rows, slot = scene.draft, scene.torch, scene.rows, scene.whole
    found: dict[str, Callable[[], Any]] = {
        "pack": lambda: draft.pack(rows, HEADS, slot, STAMP),
        "pack by slots": lambda: scene.by_slots(lambda r, s: draft.pack(r, HEADS, s, STAMP)),
        "unpack": lambda: draft.unpack(rows, HEADS, slot),
        "unpack by slots": lambda: scene.by_slots(lambda r, s: draft.unpack(r, HEADS, s)),
        "clear (twice the bytes)": lambda: draft.clear(rows),
        "verify": lambda: draft.verify(slot, len(rows), len(HEADS), STAMP),
        "verify by slots": lambda: scene.by_slots(
            lambda r, s: draft.verify(s, len(r), len(HEADS), STAMP)
        ),
    }
    if scene.device.type == "cpu":
        found["pack, torch"] = lambda: other.pack(rows, HEADS, slot, STAMP)
        found["unpack, torch"] = lambda: other.unpack(rows, HEADS, slot)
        found["verify, torch"] = lambda: other.verify(slot, len(rows), len(HEADS), STAMP)
    return found


def on_host(scene: Scene) -> dict[str, Callable[[], Any]]:
    """memcpy, numpy as one would write it, and CRC-32."""
    pools, source, target = [p.numpy() for p in scene.pool], scene.source, scene.target
    halves = np.split(target.numpy().reshape(-1, len(HEADS), HEAD_BYTES), 2)
    rows, heads = scene.rows, slice(HEADS.start, HEADS.stop)

    def plain_pack() -> None:
        for half, pool in zip(halves, pools, strict=True):
            half[:] = pool[rows][:, heads]

    def plain_unpack() -> None:
        for half, pool in zip(halves, pools, strict=True):
            pool[rows, heads] = half

    return {
        BASE: lambda: np.copyto(target.numpy(), source.numpy()),
        "pack, plain numpy": plain_pack,
        "unpack, plain numpy": plain_unpack,
        "CRC-32": lambda: zlib.crc32(source.numpy()),
    }


def on_gpu(scene: Scene) -> dict[str, Callable[[], Any]]:
    """The device's copy, and torch's other way to scatter."""

    def waited(do: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: (do(), torch.cuda.synchronize())

    def index_copy() -> None:
        size, items = scene.draft._items(scene.rows, HEADS)
        for entry, places, packed in scene.draft._parts(size, items, scene.whole):
            entry.index_copy_(0, places, packed)

    return {
        BASE: waited(lambda: scene.target.copy_(scene.source)),
        "unpack, index_copy_": waited(index_copy),
    }


def measure(device: torch.device, tokens: int, layout: str, count: int) -> list[Record]:
    scene = Scene(device, tokens, LAYOUTS[layout])
    calls = on_both(scene) | (on_host(scene) if device.type == "cpu" else on_gpu(scene))

    clock = time.thread_time if device.type == "cpu" else time.perf_counter

    def sample(call: Callable[[], Any], samples: Samples) -> None:
        start = clock()
        call()
        samples.add(clock() - start)

    for call in calls.values():
        call()
    scene.draft.pack(scene.rows, HEADS, scene.whole, STAMP)
    scene.check()
    taken = interleave({name: partial(sample, call) for name, call in calls.items()}, count)
    return [
        {"tokens": tokens, "layout": layout, "bytes": tokens * PER_TOKEN, "method": name,
         **found.record(), "ratio": ratio(found, taken[BASE])}
        for name, found in taken.items()
    ]  # fmt: skip


def checks(records: list[Record]) -> list[Check]:
    """The worst layout of each."""
    found = []
    for method in ("pack", "pack by slots", "unpack", "unpack by slots"):
        ratios = [r["ratio"] for r in records if (r["tokens"], r["method"]) == (JUDGED, method)]
        if ratios:
            name = f"{method} of {JUDGED:,} tokens, times a memcpy: worst layout"
            found.append(Check(name, AT_MOST, max(ratios)))
    return found


def main() -> None:
    parser = options((__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = Result("copies", arguments.quick, {"rows": []})
    if arguments.device == "cuda" and not torch.cuda.is_available():
        result.lacks = "no CUDA device, or a PyTorch built without CUDA"
    else:
        sizes = (128,) if arguments.quick else (1024, JUDGED, 32768)
        device = torch.device(arguments.device, *[0] * (arguments.device == "cuda"))
        for tokens, layout in product(sizes, LAYOUTS):
            result.parts["rows"] += measure(device, tokens, layout, repeats(arguments, 15))
        result.checks = checks(result.parts["rows"])
    result.finish(arguments)


if __name__ == "__main__":
    main()
