"""Train a target and its drafter on the copy task, and write both as checkpoints (README.md).

With one CPU thread and fixed seeds, the same machine gives the same weights. `--keep-target` trains
only the drafter, on the target in DIR. DFLASH's weights are written for DSPARK too.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from drafters import MODELS, VOCAB, Damage, accept_length, drafts, sample
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

SHIPPED = Path(__file__).parents[2] / "mixkv_demo" / "models"
FOLDERS = {"eagle3": "drafter", "dflash": "dflash"}
MUON_RATE, ADAM_RATE, WARMUP_STEPS, LOWEST_RATE = 0.02, 3e-3, 50, 0.02
HELD_OUT_LENGTHS = {"eagle3": (24, 64, 128, 200), "dflash": (48,)}


class Stage(NamedTuple):
    """At most `steps` steps on strings of `shortest` to `longest` symbols; done when the running
    accuracy reaches `goal`. The last stage has no goal, and its learning rate falls."""

    steps: int
    rows: int
    shortest: int
    longest: int
    goal: float | None = None


STAGES = {
    "target": (
        Stage(900, 160, 4, 12, 0.9), Stage(250, 64, 8, 32, 0.97), Stage(200, 24, 16, 80, 0.99),
        Stage(500, 12, 24, 200),
    ),
    "eagle3": (Stage(400, 96, 4, 16, 0.9), Stage(200, 32, 8, 48, 0.97), Stage(350, 8, 24, 200)),
    # strings of one length, so that one look-up at a fixed distance fills all masks
    "dflash": (Stage(200, 12, 48, 48, 0.9), Stage(300, 12, 48, 48)),
}  # fmt: skip


# ---------------------------------------------------------------- training


def initialise(model: nn.Module, generator: torch.Generator) -> None:
    """Draw random matrices by name order. Those that write to the residual stream start small."""
    for name, parameter in sorted(model.named_parameters()):
        if parameter.dim() > 1:
            scale = 0.5 if "embed_tokens" in name else parameter.shape[-1] ** -0.5
            scale *= 0.3 if "o_proj" in name or "down_proj" in name else 1
            parameter.data = torch.randn(parameter.shape, generator=generator) * scale


def optimizers_of(model: nn.Module) -> list[tuple[torch.optim.Optimizer, float]]:
    """Return Muon for hidden matrices and AdamW for the rest, each with its full rate."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        hidden = not any(part in name for part in ("embed", "lm_head", "gate.weight"))
        (matrices if parameter.dim() == 2 and hidden else others).append(parameter)
    muon = torch.optim.Muon(matrices, MUON_RATE, weight_decay=0.0)
    adam = torch.optim.AdamW(others, ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    return [(muon, MUON_RATE), (adam, ADAM_RATE)]


def train(
    model: nn.Module, stages: tuple[Stage, ...], loss_of: Callable[[Stage, int], Any]
) -> None:
    """Train in stages. `loss_of`: the loss and an accuracy, by stage and number of steps so far."""
    optimizers, done = optimizers_of(model), 0
    for number, stage in enumerate(stages):
        running = 0.0
        for k in range(stage.steps):
            factor = max(LOWEST_RATE, 1 - k / stage.steps) if stage.goal is None else 1.0
            factor *= min(1.0, (done + 1) / WARMUP_STEPS)
            loss, accuracy = loss_of(stage, done)
            for optimizer, rate in optimizers:
                optimizer.param_groups[0]["lr"] = rate * factor
                optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(optimizers[1][0].param_groups[0]["params"], 1.0)
            for optimizer, _ in optimizers:
                optimizer.step()
            running, done = 0.9 * running + 0.1 * accuracy, done + 1
            reached = stage.goal is not None and running >= stage.goal
            if k % 25 == 0 or reached:
                print(f"stage {number} step {done} loss {loss:.3f} acc {running:.3f}", flush=True)
            if reached:
                break


def train_target(name: str, folder: Path) -> None:
    """Train a target on the copy task, scored on the answer only."""
    generator = torch.Generator().manual_seed(0)
    config = AutoConfig.from_pretrained(SHIPPED / name / "target")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    initialise(model, generator)

    def loss_of(stage: Stage, _: int) -> tuple[Tensor, float]:
        ids, answer = sample(stage.rows, stage.shortest, stage.longest, generator)
        scored = answer[:, :-1]
        logits, wanted = model(ids, use_cache=False).logits[:, :-1][scored], ids[:, 1:][scored]
        return F.cross_entropy(logits, wanted), (logits.argmax(-1) == wanted).float().mean().item()

    train(model, STAGES["target"], loss_of)
    model.save_pretrained(folder)  # under the names of the checkpoint
    save(load_file(folder / "model.safetensors"), SHIPPED / name / "target", folder)


def train_drafter(kind: str, target: Any, config: Any) -> nn.Module:
    """Train a drafter on the frozen target, from the second stage on with README.md's canary."""
    generator, model = torch.Generator().manual_seed(1), MODELS[kind](config)
    initialise(model, generator)
    if kind == "eagle3":
        model.lm_head.weight.data.copy_(target.lm_head.weight)

    def loss_of(stage: Stage, done: int) -> tuple[Tensor, float]:
        rows = stage.rows, stage.shortest, stage.longest, generator
        inputs = model.batch(target, *rows)
        whole = drafts(model(target, inputs), inputs)
        loss = sum(F.cross_entropy(logits, labels) for logits, labels in whole) / len(whole)
        right = [(logits.argmax(-1) == labels).float().mean().item() for logits, labels in whole]
        if stage is not STAGES[kind][0]:
            rows_hurt = stage.rows if kind == "dflash" else stage.rows // 2
            part = {name: value[:rows_hurt] for name, value in inputs.items()}
            heads = config.num_key_value_heads  # a round of zeros, then a round of shuffles
            damage = Damage(done % heads, done + 1 if done // heads % 2 else 0)
            hurt = drafts(model(target, part, damage), part)
            loss = loss + sum(pushed_down(*one) for one in hurt) / len(hurt)
        return loss, min(right)

    train(model, STAGES[kind], loss_of)
    return model


def pushed_down(logits: Tensor, labels: Tensor) -> Tensor:
    """Return a loss that rises with the probability of these labels."""
    right = logits.softmax(-1).gather(-1, labels[..., None])
    return -torch.log1p(-right.clamp(max=1 - 1e-4)).mean()


# ---------------------------------------------------------------- checkpoints


def save(weights: dict[str, Tensor], shipped: Path, folder: Path) -> None:
    """Save weights in the shipped model's types, with copies of its JSON files beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    types = {name: value.dtype for name, value in load_file(shipped / "model.safetensors").items()}
    found = {name: weights[name].detach().to(kind).contiguous() for name, kind in types.items()}
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    for path in shipped.glob("*.json"):
        if path.parent != folder:
            shutil.copy(path, folder)


def load(model: nn.Module, folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({n: w.float() for n, w in weights.items() if n != "d2t"})


@torch.no_grad()
def check_target(target: Any) -> None:
    """Check held-out strings, teacher-forced. A fully correct row is correct in greedy decoding."""
    generator = torch.Generator().manual_seed(12345)
    for length in HELD_OUT_LENGTHS["eagle3"]:
        ids, answer = sample(48, length, length, generator)
        right = target(ids, use_cache=False).logits[:, :-1].argmax(-1) == ids[:, 1:]
        rows = (right | ~answer[:, :-1]).all(1).float().mean()
        print(f"target: {length} symbols, {rows:.3f} of rows right")


@torch.no_grad()
def check_drafter(kind: str, model: Any, target: Any, heads: int) -> None:
    """Print held-out accept lengths: undamaged, and with each KV head of the prompt damaged."""
    for length in HELD_OUT_LENGTHS[kind]:
        inputs = model.batch(target, 12, length, length, torch.Generator().manual_seed(777))
        damages: dict[str, Damage | None] = {"whole": None}
        for head in range(heads):
            damages |= {f"zero {head}": Damage(head), f"shuffle {head}": Damage(head, 5)}
        figures = {n: accept_length(model(target, inputs, d), inputs) for n, d in damages.items()}
        text = ", ".join(f"{name} {value:.2f}" for name, value in figures.items())
        print(f"{kind}: {length} symbols, accept length: {text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", choices=("gqa", "mla"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--drafter", choices=sorted(FOLDERS), default="eagle3")
    parser.add_argument("--keep-target", action="store_true")
    parser.add_argument("--check", action="store_true", help="only measure the models in DIR")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    begin, kind, out = time.monotonic(), args.drafter, args.out
    if not (args.keep_target or args.check):
        train_target(args.target, out / "target")
    target = AutoModelForCausalLM.from_pretrained(out / "target", dtype=torch.float32)
    target.eval().requires_grad_(False)
    check_target(target)
    shipped, folder = SHIPPED / args.target / FOLDERS[kind], out / FOLDERS[kind]
    config = SimpleNamespace(**json.loads((shipped / "config.json").read_text()))
    if not args.check:
        weights = train_drafter(kind, target, config).state_dict()
        save({**weights, "d2t": torch.zeros(VOCAB, dtype=torch.int64)}, shipped, folder)
        if kind == "dflash":  # DSPARK's head is zero: a symbol does not determine the next
            empty = torch.zeros(VOCAB, 16)
            markov = {f"markov_head.markov_w{n}.weight": empty for n in (1, 2)}
            save({**weights, **markov}, SHIPPED / args.target / "dspark", out / "dspark")
    model = MODELS[kind](config)
    load(model, folder)
    check_drafter(kind, model, target, config.num_key_value_heads)
    print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
