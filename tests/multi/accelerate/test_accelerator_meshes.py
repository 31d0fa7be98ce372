"""An `Accelerator` with tensor parallelism: batches per data-parallel rank, and the same training as one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.mesh_training import NEEDS_SPLIT_LAYERS, NEEDS_STAGES, mean_loss, small_llama
from tests.support.pool import Ranks
from tests.support.refusals import message
from zeroaccel import Accelerator, PipelineConfig, ZeroPlugin
from zeroaccel.errors import ZeroAccelError
from zeroaccel.parallel import ParallelConfig

transformers = pytest.importorskip("transformers")


def _samples() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(64, (12, 8), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def _looped(accelerator: Accelerator) -> tuple[Any, list[float]]:
    """Trains for one pass over the data, in a loop that fits any mesh; returns the engine and the losses."""
    model: Any = small_llama()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader: Any = torch.utils.data.DataLoader(_samples(), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        loss = mean_loss(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def _trained(how: str) -> tuple[list[float], dict[str, Tensor], tuple[int, int, int]]:
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 3}}
    with pytest.MonkeyPatch.context() as patch:
        if how == "launch":
            patch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
            patch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
        if how == "config":
            config["tensor_parallel"] = {"autotp_size": 2}
        mesh = ParallelConfig(tp=2) if how == "argument" else None
        accelerator = Accelerator(cpu=True, zero_plugin=ZeroPlugin(hf_ds_config=config), parallelism_config=mesh)
        model, losses = _looped(accelerator)
    places = (accelerator.data_parallel_rank, accelerator.tensor_parallel_rank, model.train_batch_size())
    model.destroy()
    return losses, {name: param.detach().clone() for name, param in model.module.named_parameters()}, places


def _plain(places: int = 2) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Trains in one process, where each step uses one batch of each data-parallel rank."""
    model, samples = small_llama(), _samples()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses: list[list[float]] = [[] for _ in range(places)]
    for start in range(0, 12, 2 * places):
        total = torch.zeros(())
        for place in range(places):
            rows = samples[start + 2 * place : start + 2 * place + 2]
            loss = model(**{key: torch.stack([row[key] for row in rows]) for key in rows[0]}).loss
            losses[place].append(loss.item())
            total = total + loss / places
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: param.detach() for name, param in model.named_parameters()}


@NEEDS_SPLIT_LAYERS
@pytest.mark.parametrize("how", ["argument", "launch", "config"])
def test_processes_that_share_layers_get_the_same_batches(ranks: Ranks, how: str) -> None:
    losses, weights = _plain()
    runs = ranks(4).run(_trained, how)
    assert [run[2] for run in runs] == [(0, 0, 4), (0, 1, 4), (1, 0, 4), (1, 1, 4)]
    for rank, (own, trained, _) in enumerate(runs):
        assert own == pytest.approx(losses[rank // 2], rel=2e-6)
        for name, weight in weights.items():
            torch.testing.assert_close(trained[name], weight, rtol=1e-4, atol=2e-6, msg=name)


def _shared() -> tuple[list[float], dict[str, Tensor]]:
    """Trains with sp=2 and tp=2: tensor-parallel ranks get the same tokens, the others the rest of each sequence."""
    mesh = ParallelConfig(sp=2, tp=2)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
    accelerator = Accelerator(cpu=True, zero_plugin=ZeroPlugin(hf_ds_config=config), parallelism_config=mesh)
    model, losses = _looped(accelerator)
    model.destroy()
    return losses, {name: param.detach().clone() for name, param in model.module.named_parameters()}


@NEEDS_SPLIT_LAYERS
def test_processes_that_share_layers_and_sequences(ranks: Ranks) -> None:
    (losses,), weights = _plain(places=1)
    for own, trained in ranks(4).run(_shared):
        assert own == pytest.approx(losses, rel=2e-6)
        for name, weight in weights.items():
            torch.testing.assert_close(trained[name], weight, rtol=1e-4, atol=2e-6, msg=name)


def _mistaken() -> str:
    return message(ZeroAccelError, Accelerator, cpu=True, parallelism_config=ParallelConfig(tp=3))


def test_a_mesh_of_the_wrong_size_is_refused(ranks: Ranks) -> None:
    for said in ranks(4).run(_mistaken):
        assert "expected sizes that divide the job's 4 ranks" in said


def _staged(pp: int) -> tuple[list[float], str]:
    torch.manual_seed(0)
    stages = PipelineConfig(loss=torch.nn.functional.mse_loss)
    accelerator = Accelerator(
        cpu=True,
        zero_plugin=ZeroPlugin(zero_stage=1),
        gradient_accumulation_steps=2,
        parallelism_config=ParallelConfig(pp_size=pp),
        pipeline=stages,
    )
    model: Any = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)])
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rows = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randn(16, 4))
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    batches = iter(loader)
    losses = [model.train_batch(batches).item() for _ in range(3)]
    try:
        accelerator.backward(torch.zeros(1, requires_grad=True))
    except AttributeError as error:
        message = str(error)
    model.destroy()
    return losses, message


@NEEDS_STAGES
def test_an_accelerator_prepares_the_stages_of_a_pipeline(ranks: Ranks) -> None:
    (losses, _), (same, message) = ranks(2).run(_staged, 2)
    assert losses == same == ranks(1).run(_staged, 1)[0][0]
    assert message.startswith("engine.backward() on stage 1 of 2 of a pipeline: expected train_batch()")
