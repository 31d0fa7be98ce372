"""A toy transformer with every unusual kind of parameter, and one training run of it; the engine's tests compare runs.

Sizes are odd on purpose: no width is a multiple of a world size. There are tied, frozen, unused, 0-dim and empty
parameters, a buffer, and a parameter that is read outside its module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zeroaccel
from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.recording import RecordingCollectives
from zeroaccel.comm.topology import current_topology, init_process_group

VOCABULARY = 61
WIDTH = 23
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
SGD = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}


class Block(nn.Module):
    """A residual two-layer network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + added


class Toy(nn.Module):
    """Embedding, blocks, a tied head, and unusual parameters; returns the loss."""

    offset: Tensor

    def __init__(self, layers: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.temperature = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.zeros(0))
        self.unused = nn.Parameter(torch.ones(5))
        self.frozen = nn.Parameter(torch.full((width,), 0.5), requires_grad=False)
        self.register_buffer("offset", torch.full((width,), 0.25))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1]) + (self.frozen * self.offset).to(self.frozen.dtype)
        return self.loss(self.run_layers(x), tokens)

    def run_layers(self, x: Tensor) -> Tensor:
        """Runs the layers; most subclasses override this."""
        for layer in self.layers:
            x = layer(x)
        return x

    def loss(self, x: Tensor, tokens: Tensor) -> Tensor:
        logits = self.head(self.norm(x)) * self.temperature
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def batches(rank: int, count: int, size: int = 2) -> list[Tensor]:
    """Returns `count` batches of tokens, different on every rank."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return [torch.randint(0, VOCABULARY, (size, 8), generator=generator) for _ in range(count)]


@dataclass
class Run:
    """Results of a training run that must be equal if the arithmetic is equal."""

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    skipped: int = 0


def differences(one: Run, other: Run) -> list[str]:
    """Returns the names of the results that are not bitwise equal in two runs."""
    found = [name for name, a, b in (("losses", one.losses, other.losses), ("norms", one.norms, other.norms)) if a != b]
    found += [name for name, weight in one.weights.items() if not torch.equal(weight, other.weights[name])]
    return found + (["skipped steps"] if one.skipped != other.skipped else [])


def config(stage: int, precision: str = "fp32", accumulation: int = 1, **changes: Any) -> dict[str, Any]:
    """Returns a small config; `changes` are top-level keys, or keys of `zero_optimization` if that section has them.

    Without an optimizer section if `optimizer` is None.
    """
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    tree: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,  # as in torch, also with `import deepspeed`
        "zero_optimization": zero,
        "optimizer": ADAMW,
    }
    if precision == "fp16":
        tree["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 5}
    elif precision == "bf16":
        tree["bf16"] = {"enabled": True}
    top = {"optimizer", "gradient_clipping", "scheduler", "communication_data_type", "data_types", "fp16", "bf16"}
    for key, value in changes.items():
        (tree if key in top or key.startswith("gradient_") or key.startswith("prescale") else zero)[key] = value
    return tree if tree["optimizer"] is not None else {key: tree[key] for key in tree if key != "optimizer"}


def offloaded(folder: Path, optimizer: str = "none", param: str = "none", **optimizer_keys: Any) -> dict[str, Any]:
    """Returns keys of `zero_optimization` for small sub-groups that keep nothing in memory that may lie in a file."""
    keys: dict[str, Any] = {"sub_group_size": 512}
    if optimizer != "none":
        keys["offload_optimizer"] = {"device": optimizer, "nvme_path": str(folder), **optimizer_keys}
    if param != "none":
        keys["offload_param"] = {"device": param, "nvme_path": str(folder), "max_in_cpu": 0}
    return keys


def recording() -> RecordingCollectives:
    """Returns collectives over the ranks of this test that count their calls."""
    init_process_group()
    return RecordingCollectives(Collectives(current_topology()))


def train_step(engine: Any, loss: Tensor) -> float:
    """Runs backward and step; returns the loss."""
    engine.backward(loss)
    engine.step()
    return loss.item()


def plain_step(optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    """Runs backward and step in plain torch; returns the loss."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def train(
    settings: Mapping[str, Any],
    steps: int = 20,
    *,
    make: Callable[[], nn.Module] = Toy,
    before: Callable[[Any], None] = lambda engine: None,
    **arguments: Any,
) -> Run:
    """Trains a new model under `settings` on this rank's batches."""
    torch.manual_seed(7)
    model = make()
    engine, *_ = zeroaccel.initialize(model, config=dict(settings), **arguments)
    before(engine)
    run = Run()
    device = next(model.parameters()).device
    for batch in batches(engine.collectives.rank, steps * engine.gradient_accumulation_steps()):
        loss = engine(batch.to(device))
        engine.backward(loss)
        boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        run.losses.append(loss.item())
        if boundary:
            run.norms.append(engine.get_global_grad_norm())
    run.skipped = engine.skipped_steps
    return finished(engine, run)


def finished(engine: Any, run: Run) -> Run:
    """Completes the run with its weights, which the engine returns when it ends."""
    engine.destroy()
    run.weights = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    return run
