"""Muon for hidden matrices, AdamW for the rest, and training in stages of growing length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

MUON_RATE, ADAM_RATE, MOMENTUM = 0.02, 3e-3, 0.95
WARMUP_STEPS = 50
LOWEST_RATE = 0.02
REPORT_EVERY = 25


@dataclass(frozen=True)
class Stage:
    """At most ``steps`` steps on strings of ``shortest`` to ``longest`` symbols; done when the
    running accuracy reaches ``goal``. The last stage has no goal, and its rate falls."""

    steps: int
    rows: int
    shortest: int
    longest: int
    goal: float | None = None


def orthogonalised(x: Tensor) -> Tensor:
    """x [k, rows, columns]: singular values brought near 1 by five Newton-Schulz steps."""
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum whose update of each matrix is orthogonalised."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def _by_shape(self, parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        for shape in {p.shape: None for p in parameters if p.grad is not None}:
            yield [p for p in parameters if p.grad is not None and p.shape == shape]

    def _momentum(self, parameter: nn.Parameter) -> Tensor:
        state = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
        state.mul_(MOMENTUM).add_(parameter.grad)
        return parameter.grad.add(state, alpha=MOMENTUM)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for same in self._by_shape(group["params"]):
                updates = orthogonalised(torch.stack([self._momentum(p) for p in same]))
                rows, columns = same[0].shape
                rate = group["lr"] * max(1, rows / columns) ** 0.5
                for parameter, update in zip(same, updates, strict=True):
                    parameter.add_(update, alpha=-rate)


class Optimizers:
    """Both optimizers of a model as one."""

    def __init__(self, model: nn.Module) -> None:
        matrices, self.others = [], []
        for name, parameter in model.named_parameters():
            hidden = not any(part in name for part in ("embed", "lm_head", "gate.weight"))
            (matrices if parameter.dim() == 2 and hidden else self.others).append(parameter)
        adam = torch.optim.AdamW(self.others, ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0)
        self.rates = [(Muon(matrices, MUON_RATE), MUON_RATE), (adam, ADAM_RATE)]

    def step(self, loss: Tensor, factor: float) -> None:
        """One update at ``factor`` times the full rates."""
        for optimizer, rate in self.rates:
            optimizer.param_groups[0]["lr"] = rate * factor
            optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.others, 1.0)
        for optimizer, _ in self.rates:
            optimizer.step()


Loss = Callable[[Stage, int], tuple[Tensor, float]]
"""From the stage and the number of steps so far to the loss and an accuracy."""


def train(model: nn.Module, stages: list[Stage], loss_of: Loss) -> None:
    """Run the stages, and print how it goes."""
    optimizers, done = Optimizers(model), 0
    for number, stage in enumerate(stages):
        running = 0.0
        for k in range(stage.steps):
            decay = max(LOWEST_RATE, 1 - k / stage.steps) if stage.goal is None else 1.0
            loss, accuracy = loss_of(stage, done)
            optimizers.step(loss, min(1.0, (done + 1) / WARMUP_STEPS) * decay)
            running, done = 0.9 * running + 0.1 * accuracy, done + 1
            reached = stage.goal is not None and running >= stage.goal
            if k % REPORT_EVERY == 0 or reached:
                print(f"stage {number} step {done} loss {loss:.3f} acc {running:.3f}", flush=True)
            if reached:
                break
