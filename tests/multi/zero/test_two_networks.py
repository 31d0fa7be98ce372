"""Two networks with an engine and an optimizer each, trained against each other: the bits of a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import zeroaccel
from tests.support.pool import Ranks

STEPS, BATCH, NOISE, WIDTH = 5, 4, 4, 8


def _networks() -> tuple[nn.Module, nn.Module]:
    """Returns a generator and a discriminator."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(NOISE, 16), nn.ReLU(), nn.Linear(16, WIDTH))
    return generator, nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 1))


def _optimizer(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(network.parameters(), lr=0.01, betas=(0.5, 0.999))


def _batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Returns real samples and noise."""
    random = torch.Generator().manual_seed(2 * step + rank)
    return torch.randn(BATCH, WIDTH, generator=random), torch.randn(BATCH, NOISE, generator=random)


def _error(logits: Tensor, is_real: bool) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(is_real)))


@contextmanager
def _frozen(network: nn.Module) -> Iterator[None]:
    """Keeps the generator's loss from the gradients of the discriminator, as Lightning's `toggle_optimizer` does."""
    network.requires_grad_(False)
    yield
    network.requires_grad_(True)


def _losses(
    generator: Any, discriminator: Any, update: Callable[[Any, Tensor], None], way: str, rank: int
) -> list[tuple[float, float]]:
    losses = []
    for step in range(STEPS):
        real, noise = _batch(step, rank)
        if way == "frozen":
            with _frozen(getattr(discriminator, "module", discriminator)):
                of_generator = _error(discriminator(generator(noise)), True)
                update(generator, of_generator)
        else:
            of_generator = _error(discriminator(generator(noise)), True)
            update(generator, of_generator)
            if way == "zero_grad":
                discriminator.zero_grad()
        fake = generator(noise).detach()
        of_discriminator = (_error(discriminator(real), True) + _error(discriminator(fake), False)) / 2
        update(discriminator, of_discriminator)
        losses.append((of_generator.item(), of_discriminator.item()))
    return losses


def _plain(way: str) -> tuple[list[tuple[float, float]], list[Tensor]]:
    """Trains without engines; ranks add up gradients after each backward."""
    networks = _networks()
    optimizers = {network: _optimizer(network) for network in networks}
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def update(network: nn.Module, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        for param in network.parameters():
            assert param.grad is not None
            torch.distributed.all_reduce(param.grad)
            param.grad /= ranks
        optimizers[network].step()
        optimizers[network].zero_grad()

    losses = _losses(*networks, update, way, rank)
    return losses, [param.detach() for network in networks for param in network.parameters()]


def _with_engines(stage: int, way: str) -> tuple[list[tuple[float, float]], list[Tensor]]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": BATCH, "zero_optimization": zero}
    engines = [zeroaccel.initialize(each, _optimizer(each), config=config)[0] for each in _networks()]

    def update(engine: Any, loss: Tensor) -> None:
        engine.backward(loss)
        engine.step()

    losses = _losses(*engines, update, way, engines[0].collectives.rank)
    weights = [value.clone() for engine in engines for _, value in engine.iter_named_full_params()]
    for engine in engines:
        engine.destroy()
    return losses, weights


@pytest.mark.parametrize("way", ["frozen", "zero_grad"])
def test_two_engines_train_a_gan(ranks: Ranks, way: str) -> None:
    expected = ranks(2).run(_plain, way)
    for stage in (0, 2, 3):
        for (losses, weights), (plain, same) in zip(ranks(2).run(_with_engines, stage, way), expected, strict=True):
            assert losses == plain
            assert all(torch.equal(own, other) for own, other in zip(weights, same, strict=True))


def _mixed(stage: int) -> bool:
    """True if losses differ when the generator's gradients stay in the discriminator."""
    losses, _ = _with_engines(stage, "neither")
    return losses != _with_engines(stage, "frozen")[0]


def test_gradients_of_the_other_loss_would_be_added(ranks: Ranks) -> None:
    assert ranks(2).run(_mixed, 2) == [True, True]
