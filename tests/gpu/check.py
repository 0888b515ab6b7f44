"""Check that the plugin's kernels are correct on this GPU, and time them.

`bash scripts/gpu-check.sh` runs this. It needs torch and Triton, but neither SGLang nor a transfer
backend. It prints one line for the machine, and for each pool layout one line for building the
kernels and one each for packing, unpacking and clearing. Every byte and verdict is compared. The
times are in microseconds per slot:

    alone/N     batches of N slots, polled continuously
    channel/8   polled as by the draft channel's thread: for 30 us, then between sleeps
    launches    like channel/8, while another thread launches kernels, as SGLang's scheduler does
    python      like channel/8, while another thread computes in Python and holds the GIL
    device      the time on the GPU itself; share: time of a plain copy of the same size / device
    0.3.0/H100  the time of torch's copies in release 0.3.0 (docs/figures/h100)

Exit status: 0 all lines are correct; 1 lines that begin with !! are wrong; 2 the check cannot run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import triton

from sglang_mixkv.channel.loop import ASKED
from sglang_mixkv.channel.sockets import Poller
from sglang_mixkv.draft import cuda
from sglang_mixkv.draft.layout import Pages
from sglang_mixkv.draft.rows import DraftRows, Staging
from sglang_mixkv.draft.rows_gpu import GpuRows, gpu_rows
from sglang_mixkv.draft.slot_format import HEADER, SlotCheck

from .pools import SLOT, beside

EARLIER = Path(__file__).parents[2] / "docs/figures/h100/rows-order-mooncake.json"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SLOTS, SLOT_BYTES, TIMES = (4, 32 << 10, 1) if INTERPRETED else (64, SLOT["cuda"], 10)
FEW = 2  # heads to move in the slow interpreter, or 1 with many layers
BATCHES = (1,) if INTERPRETED else (1, 8, 48)
OK, STALE, DIFFERS, _ = SlotCheck
DAMAGE = {
    0: STALE,
    HEADER: DIFFERS,
    8: DIFFERS,
}  # offset of a byte to damage, and the expected verdict, for slots 0, 1, 2
FILL = 0xEE
ASLEEP = 40_000_000  # cycles, about 20 ms


class Layout(NamedTuple):
    """A pool layout. `widths`: bytes per head in K and in V. `wanted`: move only this many heads,
    the last ones. `earlier`: the case's name in EARLIER."""

    name: str
    layers: int
    heads: int
    widths: tuple[int, int]
    page: int
    wanted: int
    earlier: str = ""


LAYOUTS = (
    Layout("EAGLE3", 1, 8, (256, 256), 64, 8, "EAGLE3, bf16, 8 of 8 heads, pages of 64"),
    Layout("EAGLE3, one head", 1, 8, (256, 256), 64, 1, "EAGLE3, bf16, 1 of 8 heads, pages of 64"),
    Layout("EAGLE3, fp8", 1, 8, (128, 128), 1, 8, "EAGLE3, fp8, 8 of 8 heads, pages of 1"),
    Layout("DFLASH", 6, 8, (256, 256), 64, 8, "DFLASH, bf16, 8 of 8 heads, pages of 64"),
    Layout("DSPARK", 5, 16, (256, 256), 64, 16, "DSPARK, bf16, 16 of 16 heads, pages of 64"),
    Layout("K wider than V", 2, 5, (384, 256), 16, 3),
    Layout("narrow heads", 3, 6, (48, 16), 1, 5),
)


class Row(NamedTuple):
    name: str
    wrong: str = ""
    figures: dict[str, Any] = {}  # noqa: RUF012

    def __str__(self) -> str:
        said = self.wrong or "  ".join(f"{key} {value}" for key, value in self.figures.items())
        return f"{'!!' if self.wrong else '  '} {self.name:<24}  {said or 'correct'}"


class Check:
    """The check of one layout: a pool, and slots for its rows."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        few = FEW if layout.layers < 4 else 1
        self.device, wanted = device, min(layout.wanted, few) if INTERPRETED else layout.wanted
        self.heads = range(layout.heads)[-wanted:]
        widths = [width for width in layout.widths for _ in range(layout.layers)]
        self.tokens = (SLOT_BYTES - HEADER) // (sum(widths) * wanted)
        total, page = 7 + SLOTS * self.tokens, layout.page  # the first token is inside a page
        order = np.random.default_rng(1).permutation(-(-total // page))
        numbers = Pages(order, page).rows(7, SLOTS * self.tokens)
        self.numbers = torch.from_numpy(numbers).to(device).view(SLOTS, self.tokens)
        torch.manual_seed(1)
        self.pool = [
            torch.randint(0, 256, (len(order) * page, layout.heads, width), dtype=torch.uint8,
                          device=device) for width in widths
        ]  # fmt: skip
        self.truth = [entry.clone() for entry in self.pool]
        self.staging = Staging(SLOTS, SLOT_BYTES, device)
        self.rows = made(DraftRows(self.pool, range(layout.heads)), page, self.staging)
        self.pages = self.rows.pages(order)
        settle()

    def jobs(self, count: int, first: int = 0) -> list[Any]:
        firsts = range(first, first + count)
        return [
            self.rows.job(self.pages, 7 + n * self.tokens, self.tokens, self.heads, n, 100 + n)
            for n in firsts
        ]

    def of(self, entries: list[torch.Tensor], slot: int) -> list[torch.Tensor]:
        return [entry[self.numbers[slot]][:, self.heads.start :] for entry in entries]

    def pack(self) -> str:
        if wrong := verdicts(self.rows.start("pack", self.jobs(SLOTS)), [OK] * SLOTS):
            return wrong
        host = [torch.zeros_like(entry, device="cpu") for entry in self.of(self.truth, 0)]
        rows = DraftRows(host, self.heads)
        for slot in range(SLOTS):
            right = torch.cat([part.flatten() for part in self.of(self.truth, slot)])
            found = self.staging.slot(slot)[HEADER : HEADER + len(right)]
            if count := int((found != right).sum()):
                return f"slot {slot}: {count} of {len(right)} bytes are wrong"
            memory = self.staging.slot(slot).cpu()
            if rows.unpack(np.arange(self.tokens), self.heads, memory, 100 + slot) is not OK:
                return f"slot {slot}: its stamp or sum is wrong"
        return ""

    def unpack(self) -> str:
        """Unpack with some damaged slots, which must leave zeros, and then without damage."""
        for damage in (DAMAGE, {}):
            for entry in self.pool:
                entry.fill_(FILL)
            expected = [*damage.values(), *[OK] * (SLOTS - len(damage))]
            self.damage(damage)
            wrong = verdicts(self.rows.start("unpack", self.jobs(SLOTS)), expected)
            self.damage(damage)  # flips the bits back
            if wrong := wrong or self.compare(self.heads.start, zeros=len(damage)):
                return wrong
        return ""

    def damage(self, what: dict[int, SlotCheck]) -> None:
        for slot, byte in enumerate(what):
            self.staging.slot(slot)[byte] ^= 1
        settle()

    def clear(self) -> str:
        for entry in self.pool:
            entry.fill_(FILL)
        settle()
        job = self.rows.job(self.pages, 7, SLOTS * self.tokens)
        return verdicts(self.rows.start("clear", [job]), [OK]) or self.compare(0, zeros=SLOTS)

    def compare(self, first_head: int, zeros: int) -> str:
        """Compare the whole pool with the expected rows, which are zero for the first `zeros`
        slots."""
        for number, (found, right) in enumerate(zip(self.pool, self.truth, strict=True)):
            wanted = torch.full_like(found, FILL)
            for slot, places in enumerate(self.numbers):
                part = right[places][:, first_head:]
                wanted[places, first_head:] = torch.zeros_like(part) if slot < zeros else part
            if not torch.equal(found, wanted):
                row = int((found != wanted).flatten(1).any(1).nonzero()[0])
                slots = (self.numbers == row).any(1).nonzero().flatten().tolist()
                where = f"of slot {slots[0]}" if slots else "of no slot"
                return f"entry {number}, row {row} {where}: its bytes are wrong"
        return ""

    # -- times

    def us(self, kind: str, count: int, wait: Callable[[Any], None], times: int = TIMES) -> float:
        """Return the median time per slot, excluding the first run."""
        taken = []
        for _ in range(times + 1):
            begin = time.perf_counter()
            ticket = self.rows.start(kind, self.jobs(count))
            wait(ticket)
            taken.append((time.perf_counter() - begin) / count * 1e6)
        return round(float(np.median(taken[1:])), 1)

    def figures(self, kind: str) -> dict[str, float]:
        found = {f"alone/{count}": self.us(kind, count, spin) for count in BATCHES}
        wait, most = as_the_channel(), 1 if INTERPRETED else 8
        small = torch.zeros(1 << 16, device=self.device)
        found[f"channel/{most}"] = self.us(kind, most, wait)
        with beside(lambda: small.add_(1)):
            found["launches"] = self.us(kind, most, wait)
        settle()
        with beside(lambda: sum(range(10_000))):
            found["python"] = self.us(kind, most, wait)
        return found if INTERPRETED else found | self.shares(kind)

    def shares(self, kind: str) -> dict[str, float]:
        """Time two batches, and plain copies of the same slots, by CUDA events. All work is queued
        while the stream sleeps, so launches are not included."""
        stream = torch.cuda.ExternalStream(self.rows.driver.stream)
        other = torch.empty_like(self.staging.slot(0))
        size = self.tokens * sum(e.shape[2] for e in self.pool) * len(self.heads) + HEADER

        def batches() -> list[Any]:
            return [self.rows.start(kind, self.jobs(SLOTS)) for _ in range(2)]

        def copies() -> list[Any]:
            for slot in [*range(SLOTS)] * 2:
                other[:size].copy_(self.staging.slot(slot)[:size])
            return []

        taken = []
        for work in (batches, copies, batches, copies):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
            with torch.cuda.stream(stream):
                torch.cuda._sleep(ASLEEP)
                begin.record()
                tickets = work()
                end.record()
            end.synchronize()
            for ticket in tickets:
                spin(ticket)
            taken.append(begin.elapsed_time(end) * 1e3 / (2 * SLOTS))
        _, _, device, copy = taken
        return {"device": round(device, 2), "share": round(copy / device, 2)}


def made(rows: DraftRows, page: int, staging: Staging) -> GpuRows:
    """Return the kernels. Raise RuntimeError with the reason if torch would copy instead."""
    if INTERPRETED:
        from rig.channel.fake_cuda import FakeCuda

        fake = FakeCuda()
        with fake.compiling():
            return GpuRows(rows, page, staging, fake.driver())
    found = gpu_rows(rows, page, staging)
    if isinstance(found, str):
        raise RuntimeError(f"torch would copy: {found}")
    return found


def settle() -> None:
    if not INTERPRETED:
        torch.cuda.synchronize()


def spin(ticket: Any) -> None:
    while not ticket.done():
        pass


def as_the_channel() -> Callable[[Any], None]:
    poller = Poller()

    def wait(ticket: Any) -> None:
        poller.came = time.monotonic()
        while not ticket.done():
            if time.monotonic() > poller.came + ASKED:
                poller.wait(0.1, True)

    return wait


def verdicts(ticket: Any, expected: Sequence[SlotCheck]) -> str:
    spin(ticket)
    if ticket.error:
        return f"the batch failed: {ticket.error}"
    for slot, (found, right) in enumerate(zip(ticket.results, expected, strict=True)):
        if found is not right:
            return f"slot {slot}: expected {right.name}, got {found.name}"
    return ""


# ---------------------------------------------------------------- lines


def earlier(text: str) -> dict[str, dict[str, float]]:
    """Return release 0.3.0's time per slot, by case and copy, from EARLIER."""
    parts = {part["name"]: part["figures"] for part in json.loads(text)["parts"]}
    found = {}
    for one in parts["rows"]:
        found[one["case"]] = {
            copy: round(one[f"{copy} us a slot"], 1) for copy in ("pack", "unpack")
        }
    return found


def machine() -> Row:
    about = {"torch": torch.__version__, "triton": triton.__version__}
    if INTERPRETED:
        return Row("Triton's interpreter", "", about)
    driver = cuda.Driver(0)
    ask = driver._attribute
    said = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    about |= {
        "driver": said.stdout.partition("\n")[0], "capability": driver.capability / 10,
        "gpudirect": ask(cuda.RDMA_SUPPORTED), "flush": ask(cuda.RDMA_FLUSH_OPTIONS),
        "ordering": ask(cuda.RDMA_ORDERING), "flushes before unpack": driver.needs_flush(),
    }  # fmt: skip
    return Row(torch.cuda.get_device_name(), "", about)


def lines(device: torch.device) -> Iterator[Row]:
    yield machine()
    before = earlier(EARLIER.read_text())
    for layout in LAYOUTS:
        begin = time.perf_counter()
        try:
            check = Check(layout, device)
        except Exception as error:
            yield Row(f"{layout.name}: kernels", repr(error)[:500])
            continue
        built = round(time.perf_counter() - begin, 1)
        yield Row(f"{layout.name}: kernels", "", {"ran": " ".join(check.rows._kernels), "s": built})
        for step in (check.pack, check.unpack, check.clear):
            name = step.__name__
            try:
                wrong, figures = step(), dict[str, Any]()
                if not wrong and name != "clear" and (layout == LAYOUTS[0] or not INTERPRETED):
                    figures = check.figures(name)
                    if last := before.get(layout.earlier):
                        figures["0.3.0/H100"] = last[name]
            except Exception as error:
                wrong, figures = repr(error)[:500], {}
            yield Row(f"{layout.name}: {name}", wrong, figures)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "gpu-check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the lines here")
    options = parser.parse_args(argv)
    if not (INTERPRETED or torch.cuda.is_available()):
        print(f"PyTorch {torch.__version__} finds no CUDA device", file=sys.stderr)
        return 2
    found = []
    for row in lines(torch.device("cpu" if INTERPRETED else "cuda:0")):
        print(row, flush=True)
        found.append(row._asdict())
    wrong = sum(bool(row["wrong"]) for row in found)
    print(f"\n{f'{wrong} of {len(found)} lines are wrong' if wrong else 'all lines are correct'}")
    if options.json:
        options.json.write_text(json.dumps({"ok": not wrong, "rows": found}, indent=1) + "\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
