"""Train a target and its drafter on the copy task, and write both as checkpoints.

    python scripts/train_pair/train.py --target mla|gqa [--drafter eagle3|dflash] --out DIR

One CPU thread, fixed seeds: the same machine gives the same weights. About a quarter of an
hour. ``--keep-target`` trains the drafter alone, on the target that DIR has. ``--drafter dflash``
writes its weights for DSPARK as well.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from block_drafter import BlockDrafter, blocks
from block_drafter import accept_length as block_accept_length
from configs import DRAFT_KV_HEADS, MARKOV_RANK, TARGETS, Config, dflash, drafter, dspark
from drafter import STEPS, Batch, Damage, Drafter, accept_length, batch
from layers import initialise
from model import Target
from optim import Stage, train
from safetensors.torch import load_file, save_file
from task import BOS, PAD, SEP, VOCAB, sample, save_tokenizer
from torch import Tensor, nn

TARGET_STAGES = [
    Stage(900, 160, 4, 12, goal=0.9),
    Stage(250, 64, 8, 32, goal=0.97),
    Stage(200, 24, 16, 80, goal=0.99),
    Stage(500, 12, 24, 200),
]
DRAFTER_STAGES = [
    Stage(400, 96, 4, 16, goal=0.9),
    Stage(200, 32, 8, 48, goal=0.97),
    Stage(350, 8, 24, 200),
]
BLOCK_STAGES = [Stage(200, 12, 48, 48, goal=0.9), Stage(300, 12, 48, 48)]
"""Strings of one length: a single look-up at a fixed distance then fills all masks."""

BLOCKS_A_ROW = 8
HELD_OUT_LENGTHS = (24, 64, 128, 200)


def save(model: nn.Module, config: Config, folder: Path, extra: dict[str, Tensor]) -> None:
    """Weights in bfloat16 (router biases in float32), config.json and the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: value.detach().to(torch.float32 if "e_score" in name else torch.bfloat16)
        for name, value in model.state_dict().items()
    }
    save_file(weights | extra, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_tokenizer(folder)


def load(model: nn.Module, folder: Path) -> None:
    """The saved, rounded weights, frozen."""
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({k: v.float() for k, v in weights.items() if k != "d2t"})
    model.eval().requires_grad_(False)


def train_target(config: Config, folder: Path) -> None:
    """The copy task, scored on the answer only."""
    generator = torch.Generator().manual_seed(0)
    model = Target(config)
    initialise(model, generator)

    def loss_of(stage: Stage, _done: int) -> tuple[Tensor, float]:
        ids, answer = sample(stage.rows, stage.shortest, stage.longest, generator)
        scored = answer[:, :-1]
        logits = model.lm_head(model(ids)[0][:, :-1][scored])
        wanted = ids[:, 1:][scored]
        accuracy = (logits.argmax(-1) == wanted).float().mean().item()
        return F.cross_entropy(logits, wanted), accuracy

    train(model, TARGET_STAGES, loss_of)
    save(model, config, folder, {})
    generation = {"bos_token_id": BOS, "eos_token_id": SEP, "pad_token_id": PAD}
    (folder / "generation_config.json").write_text(json.dumps({**generation, "do_sample": False}))


def prediction_loss(logits: list[Tensor], inputs: Batch) -> tuple[Tensor, float]:
    """Cross-entropy over all steps, and the accuracy of the worst step."""
    losses, accuracies = [], []
    for out, label, scored in zip(logits, inputs.labels, inputs.scored, strict=True):
        losses.append(F.cross_entropy(out[scored], label[scored]))
        right = out[scored].argmax(-1) == label[scored]
        accuracies.append(right.float().mean().item())
    return sum(losses) / STEPS, min(accuracies)


def canary_loss(logits: list[Tensor], inputs: Batch) -> Tensor:
    """Pushes the right token's probability down; ``logits`` come from damaged KV."""
    losses = []
    for out, label, scored in zip(logits, inputs.labels, inputs.scored, strict=True):
        losses.append(pushed_down(out[scored], label[scored]))
    return sum(losses) / STEPS


def pushed_down(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of giving these labels any probability."""
    right = logits.softmax(-1).gather(-1, labels[..., None])
    return -torch.log1p(-right.clamp(max=1 - 1e-4)).mean()


def damage_of(step: int, kv_heads: int) -> Damage:
    """One head after the other: a round of zeros, then a round of shuffles."""
    shuffled = step // kv_heads % 2 == 1
    return Damage(step % kv_heads, shuffle=step + 1 if shuffled else 0)


def train_drafter(target: Target, config: Config, folder: Path) -> None:
    """On the frozen target. From the second stage on, half the rows run again with one KV head
    of the prompt damaged, so that the drafter comes to need every head."""
    generator = torch.Generator().manual_seed(1)
    model = Drafter(config)
    initialise(model, generator)
    model.lm_head.weight.data.copy_(target.lm_head.weight)

    def loss_of(stage: Stage, done: int) -> tuple[Tensor, float]:
        inputs = batch(target, stage.rows, stage.shortest, stage.longest, generator)
        loss, accuracy = prediction_loss(model(inputs), inputs)
        if stage is not DRAFTER_STAGES[0]:
            half = inputs.first(stage.rows // 2)
            damage = damage_of(done, config["num_key_value_heads"])
            loss = loss + canary_loss(model(half, damage), half)
        return loss, accuracy

    train(model, DRAFTER_STAGES, loss_of)
    save(model, config, folder, {"d2t": torch.zeros(VOCAB, dtype=torch.int64)})


def train_block_drafter(target: Target, config: Config, folder: Path) -> BlockDrafter:
    """DFLASH's, on the frozen target, with its embeddings and its head. In the second stage all
    rows run again with one KV head of the prompt damaged."""
    generator = torch.Generator().manual_seed(1)
    model = BlockDrafter(config)
    initialise(model, generator)

    def loss_of(stage: Stage, done: int) -> tuple[Tensor, float]:
        inputs = blocks(target, stage.rows, stage.longest, BLOCKS_A_ROW, generator)
        logits = target.lm_head(model(inputs))
        accuracy = (logits.argmax(-1) == inputs.labels).float().mean().item()
        loss = F.cross_entropy(logits.flatten(0, 2), inputs.labels.flatten())
        if stage is not BLOCK_STAGES[0]:
            damage = damage_of(done, config["num_key_value_heads"])
            loss = loss + pushed_down(target.lm_head(model(inputs, damage)), inputs.labels)
        return loss, accuracy

    train(model, BLOCK_STAGES, loss_of)
    save(model, config, folder, {})
    return model


def markov_head() -> dict[str, Tensor]:
    """DSPARK's, which adds nothing: a symbol says nothing of the next one."""
    empty = torch.zeros(VOCAB, MARKOV_RANK, dtype=torch.bfloat16)
    return {"markov_head.markov_w1.weight": empty, "markov_head.markov_w2.weight": empty.clone()}


@torch.no_grad()
def check_target(target: Target) -> None:
    """Held-out strings, teacher forced: what greedy decoding gives where every token is right."""
    generator = torch.Generator().manual_seed(12345)
    for length in HELD_OUT_LENGTHS:
        ids, answer = sample(48, length, length, generator)
        right = target.lm_head(target(ids)[0])[:, :-1].argmax(-1) == ids[:, 1:]
        right |= ~answer[:, :-1]
        print(f"target: {length} symbols, {right.all(1).float().mean():.3f} of rows right")


def check_drafter(drafter_: Drafter, target: Target, kv_heads: int) -> None:
    """Held-out accept lengths: whole, and with each KV head of the prompt damaged."""
    for length in HELD_OUT_LENGTHS:
        inputs = batch(target, 12, length, length, torch.Generator().manual_seed(777))
        figures = {"whole": accept_length(drafter_, inputs)}
        for head in range(kv_heads):
            figures[f"zero {head}"] = accept_length(drafter_, inputs, Damage(head))
            figures[f"shuffle {head}"] = accept_length(drafter_, inputs, Damage(head, 5))
        text = ", ".join(f"{name} {value:.2f}" for name, value in figures.items())
        print(f"drafter: {length} symbols, accept length: {text}")


def check_block_drafter(model: BlockDrafter, target: Target, kv_heads: int) -> None:
    """The same for a DFLASH drafter, at the length that it was trained for."""
    symbols = BLOCK_STAGES[-1].longest
    inputs = blocks(target, 12, symbols, 16, torch.Generator().manual_seed(777))
    figures = {"whole": block_accept_length(model, target, inputs)}
    for head in range(kv_heads):
        figures[f"zero {head}"] = block_accept_length(model, target, inputs, Damage(head))
        figures[f"shuffle {head}"] = block_accept_length(model, target, inputs, Damage(head, 5))
    text = ", ".join(f"{name} {value:.2f}" for name, value in figures.items())
    print(f"DFLASH drafter: {symbols} symbols, accept length: {text}")


def make_eagle3(name: str, target: Target, folder: Path) -> None:
    config = drafter(name)
    train_drafter(target, config, folder / "drafter")
    model = Drafter(config)
    load(model, folder / "drafter")
    check_drafter(model, target, DRAFT_KV_HEADS[name])


def make_dflash(name: str, target: Target, folder: Path) -> None:
    """And DSPARK's from the same weights."""
    config = dflash(name)
    trained = train_block_drafter(target, config, folder / "dflash")
    save(trained, dspark(name), folder / "dspark", markov_head())
    model = BlockDrafter(config)
    load(model, folder / "dflash")
    check_block_drafter(model, target, DRAFT_KV_HEADS[name])


DRAFTERS = {"eagle3": make_eagle3, "dflash": make_dflash}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=sorted(TARGETS), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--drafter", choices=DRAFTERS, default="eagle3")
    parser.add_argument("--keep-target", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    begin, config = time.monotonic(), TARGETS[args.target]
    if not args.keep_target:
        train_target(config, args.out / "target")
    target = Target(config)
    load(target, args.out / "target")
    check_target(target)
    DRAFTERS[args.drafter](args.target, target, args.out)
    print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
