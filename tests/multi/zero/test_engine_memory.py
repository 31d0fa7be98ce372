"""Model states per rank against the formulas of Rajbhandari et al., ZeRO (2020), section 5, on padded elements.

With N elements on W ranks in 16 bits and Adam: parameters 2N, gradients 2N, fp32 master and two moments 12N; each
divided by W from the stage that shards it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroaccel
from tests.multi.zero.test_engine_traffic import Trained
from tests.support.pool import Ranks
from tests.support.training import SGD, batches, config, train_step
from zeroaccel.zero.grad_reducer import GradientBuffer, GradReducer

States = dict[str, int]


def _states(settings: dict[str, Any]) -> tuple[int, list[States], States]:
    """Returns (N, states after each backward but the last of the second step, states after that step)."""
    engine, *_ = zeroaccel.initialize(Trained(), config=settings)
    accumulation = engine.gradient_accumulation_steps()
    seen = []
    for number, batch in enumerate(batches(engine.collectives.rank, 2 * accumulation), 1):
        engine.backward(engine(batch))
        if accumulation < number < 2 * accumulation:
            seen.append(engine.model_state_nbytes())
        engine.step()
    after = engine.model_state_nbytes()
    numel = sum(unit.numel for unit in engine.units)
    engine.destroy()
    return numel, seen, after


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_memory_equals_the_papers_formulas(ranks: Ranks, world_size: int, stage: int) -> None:
    settings = config(stage, "bf16", 3, data_types={"grad_accum_dtype": "bf16"})
    for numel, seen, after in ranks(world_size).run(_states, settings):
        part = numel // world_size
        optimizer = 12 * (part if stage >= 1 else numel)
        gradients = 2 * (part if stage >= 2 else numel)
        params = 2 * (part if stage >= 3 else numel)
        assert seen == [{"params": params, "gradients": gradients, "optimizer": optimizer}] * 2
        assert after == {"params": params, "gradients": 0, "optimizer": optimizer}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sums_in_fp32_take_twice_as_much(ranks: Ranks, stage: int) -> None:
    for numel, seen, _ in ranks(2).run(_states, config(stage, "bf16", 3)):
        gradients = [states["gradients"] for states in seen]
        # If sharded, the first micro-step's gradient keeps the dtype of its reduction: there is no sum yet.
        assert gradients == ([4 * numel, 4 * numel] if stage < 2 else [2 * numel // 2, 4 * numel // 2])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_in_fp32_the_parameters_are_the_master(ranks: Ranks, stage: int) -> None:
    for optimizer, nbytes in ((None, 8), (SGD, 4)):
        settings = config(stage, "fp32", 2, **({"optimizer": optimizer} if optimizer else {}))
        for numel, seen, after in ranks(2).run(_states, settings):
            part = numel // 2
            states = nbytes * (part if stage >= 1 else numel)
            gradients = 4 * (part if stage >= 2 else numel)
            params = 4 * (part if stage >= 3 else numel)
            assert seen == [{"params": params, "gradients": gradients, "optimizer": states}]
            assert after == {"params": params, "gradients": 0, "optimizer": states}


def _unsharded_in_forward(settings: dict[str, Any]) -> tuple[int, int]:
    engine, *_ = zeroaccel.initialize(Trained(), config=settings)
    batch = batches(engine.collectives.rank, 1)[0]
    seen = []
    engine.module.norm.register_forward_hook(lambda *_: seen.append(engine.model_state_nbytes()["params"]))
    train_step(engine, engine(batch))
    resting = engine.model_state_nbytes()["params"]
    engine.destroy()
    return seen[0], resting


def test_full_parameters_are_counted_while_they_are_unsharded(ranks: Ranks) -> None:
    for whole, resting in ranks(2).run(_unsharded_in_forward, config(3, "bf16", stage3_max_reuse_distance=0)):
        assert whole > resting


class _Sharing(nn.Module):
    """Four matrices, each a unit: two gradients share memory, and a hook keeps a reference to the last one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.blocks = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))
        self.seen: list[Tensor] = []
        self.blocks[3].weight.register_hook(lambda grad: self.seen.append(grad))  # type: ignore[arg-type, union-attr]

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, last = self.blocks
        both: Any = second.weight.view(-1) + third.weight.view(-1)  # type: ignore[operator]
        out: Tensor = last(nn.functional.linear(first(x).tanh(), both.view(16, 16)).tanh())
        return out.square().mean()


def _sharing_batch(number: int, rank: int) -> Tensor:
    return torch.randn(3, 16, generator=torch.Generator().manual_seed(10 * number + rank))


def _sharing_weights(stage: int) -> tuple[list[Tensor], set[str]]:
    """Returns the weights after two steps of two micro-steps, and the units that reuse autograd's gradient."""
    arrived: list[Tensor] = []  # keeps the gradients alive, so their memory is not reused
    taken: set[str] = set()
    arrive, start = GradReducer.on_grad_ready, GradReducer._start_reduction

    def arrives(reducer: GradReducer, param: nn.Parameter) -> None:
        assert param.grad is not None
        arrived.append(param.grad)
        arrive(reducer, param)

    def starts(reducer: GradReducer, gradients: GradientBuffer, flat: Tensor, label: str) -> Any:
        if flat.data_ptr() in [grad.data_ptr() for grad in arrived]:
            taken.add(gradients.name)
        return start(reducer, gradients, flat, label)

    model = _Sharing()
    engine, *_ = zeroaccel.initialize(model, config=config(stage, "fp32", 2, optimizer=SGD))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradReducer, "on_grad_ready", arrives)
        patch.setattr(GradReducer, "_start_reduction", starts)
        for number in range(4):
            arrived.clear()
            train_step(engine, engine(_sharing_batch(number, engine.collectives.rank)))
    engine.destroy()
    return [param.detach().clone() for param in model.parameters()], taken


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_gradient_of_a_unit_of_one_parameter_is_not_copied_where_nothing_shares_it(
    ranks: Ranks, stage: int
) -> None:
    plain = _Sharing()
    params = list(plain.parameters())
    optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.9)
    for step in range(2):
        batches_of_step = [_sharing_batch(number, rank) for number in (2 * step, 2 * step + 1) for rank in range(2)]
        # Not by `backward`: torch adds a second gradient twice into gradients that share memory.
        grads = [torch.autograd.grad(plain(batch) / 4, params) for batch in batches_of_step]
        for param, *parts in zip(params, *grads, strict=True):
            param.grad = torch.stack(parts).sum(0)
        optimizer.step()
    for weights, taken in ranks(2).run(_sharing_weights, stage):
        for weight, expected in zip(weights, plain.parameters(), strict=True):
            assert torch.allclose(weight, expected, rtol=1e-6, atol=1e-7)
        # Below stage 2 the sum over micro-steps is formed in the first gradient, and reduced with the second.
        assert taken == ({"blocks.0", "blocks.3"} if stage >= 2 else set())
