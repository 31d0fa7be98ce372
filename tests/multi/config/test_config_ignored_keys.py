"""Config keys that zeroaccel ignores: two steps of a small model with and without them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import zeroaccel
from tests.support.pool import Ranks
from tests.support.training import train_step
from zeroaccel.compat.deepspeed_engine import initialize as deepspeed_initialize


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))


def _train(settings: dict[str, Any]) -> list[torch.Tensor]:
    """Returns the weights after two optimizer steps."""
    model = _model()
    optimizer = None
    if "optimizer" not in settings:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = zeroaccel.initialize(model, optimizer, config=settings)
    dtype = engine.dtype if hasattr(engine, "dtype") else next(model.parameters()).dtype
    torch.manual_seed(5)
    for _ in range(2 * engine.settings.accumulation):
        train_step(engine, engine(torch.randn(4, 8).to(dtype)).float().square().mean())
    assert engine.global_steps == 2
    weights = [weight.detach().float().clone() for _, weight in engine.iter_named_full_params()]
    engine.destroy()
    return weights


def _same(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[int]:
    """Returns the pairs of configs that train differently."""
    different = []
    for index, (one, other) in enumerate(pairs):
        weights = zip(_train(one), _train(other), strict=True)
        if not all(torch.equal(a, b) for a, b in weights):
            different.append(index)
    return different


def _base(stage: int = 0, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, **more.pop("zero", {})}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2}}
    return {"train_micro_batch_size_per_gpu": 4, "optimizer": optimizer, "zero_optimization": zero, **more}


def test_keys_that_do_nothing_change_no_bit(ranks: Ranks, tmp_path: object) -> None:
    cpu, folder = {"device": "cpu"}, str(tmp_path)
    nvme = {"device": "nvme", "nvme_path": folder}
    bf16 = {"bf16": {"enabled": True}}
    residual = {"data_types": {"master_weights": "residual"}}
    host = {"cpu_checkpointing": True, "contiguous_memory_optimization": True, "partition_activations": True}
    pairs = [
        (_base(2, zero={"offload_param": cpu}), _base(2)),
        (_base(2, zero={"offload_param": {"device": "nvme"}}), _base(2)),
        (_base(0, zero={"offload_optimizer": cpu, "offload_param": cpu}), _base(0)),
        (_base(0, zero={"offload_optimizer": {"device": "nvme"}}), _base(0)),
        (_base(2, zero={"zero_quantized_weights": True, "zero_hpz_partition_size": 8}), _base(2)),
        (_base(3, zero={"sub_group_size": 0, "offload_optimizer": nvme}), _base(3)),
        (_base(3, zero={"sub_group_size": 0, "reduce_bucket_size": 0}), _base(3)),
        (_base(2, **bf16, **residual, zero={"sub_group_size": 0}), _base(2, **bf16)),
        (_base(1, bf16={"enabled": True, "loss_scale": 128, "hysteresis": 2}), _base(1, **bf16)),
        (_base(2, activation_checkpointing=host), _base(2)),
        (_base(2, activation_checkpointing={**host, "wrap_blocks": True}), _base(2)),
        (_base(2, hybrid_engine={"enabled": True}, comms_logger={"enabled": True}), _base(2)),
        (_base(3, allgather=1, _comment="x", checkpoint={"use_node_local_storage": True}), _base(3)),
    ]
    pairs.append((_base(2, gradient_clipping=0.1), _base(2)))  # a key that has an effect
    assert ranks(1).run(_same, pairs) == [[len(pairs) - 1]]


def test_keys_that_do_nothing_change_no_bit_on_two_ranks(ranks: Ranks, tmp_path: object) -> None:
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    bf16 = {"bf16": {"enabled": True}}
    pairs = [
        (_base(3, zero={"sub_group_size": 0, "offload_optimizer": nvme}), _base(3)),
        (_base(2, **bf16, data_types={"master_weights": "residual"}, zero={"sub_group_size": 0}), _base(2, **bf16)),
        (_base(2, zero={"offload_param": {"device": "cpu"}, "zero_quantized_gradients": True}), _base(2)),
        (_base(0, zero={"offload_optimizer": nvme, "zero_hpz_partition_size": 2}), _base(0)),
    ]
    assert ranks(2).run(_same, pairs) == [[], []]


def _train_under_the_facade(settings: dict[str, Any]) -> int:
    model = _model()
    engine, *_ = deepspeed_initialize(model=model, model_parameters=model.parameters(), config=settings)
    for _ in range(2):
        train_step(engine, engine(torch.randn(4, 8)).square().mean())
    engine.destroy()
    return engine.global_steps


def test_unknown_keys_stop_no_script_written_for_deepspeed(ranks: Ranks) -> None:
    settings = _base(2, overlap_comm=True, gradient_clippin=1.0)
    settings["optimizer"]["torch_adam"] = True
    assert ranks(1).run(_train_under_the_facade, settings) == [2]
