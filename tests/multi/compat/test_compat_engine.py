"""Members of DeepSpeed's engine and optimizer on real ranks, and where the facade behaves as DeepSpeed does.

What DeepSpeed does in each case is in docs/deepspeed_names.md, with what is decided here.
"""

from __future__ import annotations

import argparse
import copy
import enum
import json
import math
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import TestCase

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests import time_limits
from tests.support.pool import Ranks
from zeroaccel import compat
from zeroaccel.errors import ConfigError, EngineStateError, UsageError

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "betas": [0.8, 0.99]}},
}


pytestmark = pytest.mark.usefixtures("ranks_without_libraries")


def _facade(body: Callable[..., Any], *args: Any) -> Any:
    compat.install()
    try:
        return body(*args)
    finally:
        compat.uninstall()


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 6)), nn.Linear(6, 2))


def _engine(stage: int = 0, **more: Any) -> Any:
    import deepspeed  # type: ignore[import-not-found]

    engine, *_ = deepspeed.initialize(model=_model(), config={**CONFIG, "zero_optimization": {"stage": stage}, **more})
    return engine


def _loss(engine: Any) -> Tensor:
    return engine(torch.ones(2, 4, dtype=next(engine.parameters()).dtype)).float().square().mean()


# -- questions


def _answers(stage: int) -> list[Any]:
    engine = _engine(stage, gradient_clipping=0.5, steps_per_print=7, wall_clock_breakdown=False)
    ranks = torch.distributed.get_world_size()
    assert (engine.local_rank, engine.global_rank) == (torch.distributed.get_rank(),) * 2
    assert (engine.world_size, engine.dp_world_size, engine.mp_world_size) == (ranks, ranks, 1)
    assert engine.data_parallel_group is torch.distributed.group.WORLD
    assert engine.get_batch_info() == (4 * ranks, 2, 2)
    assert engine.get_data_types() == (torch.float32, torch.float32)
    assert engine.communication_data_type is torch.float32
    assert engine.get_mom() == [(0.8, 0.99)]
    assert engine.get_type() == [None]
    assert engine.zero_offload_optimizer() is engine.zero_offload_param() is None
    assert not engine.zero_cpu_offload()
    assert not engine.zero_use_cpu_optimizer()
    assert (engine.optimizer_name(), engine.scheduler_name()) == ("adam", None)
    assert engine.zero_optimization_partition_gradients() == (stage >= 2)
    assert engine.module_state_dict().keys() == _model().state_dict().keys()
    engine.destroy()
    return [engine.gradient_clipping(), engine.steps_per_print(), engine.wall_clock_breakdown(), engine.dump_state()]


def test_an_engine_answers_about_ranks_and_config(ranks: Ranks) -> None:
    for stage in (0, 3):
        assert ranks(2).run(_facade, _answers, stage) == [[0.5, 7, False, False]] * 2


def _every_question() -> None:
    from zeroaccel.compat.surface import ABSENT_MEMBERS, QUESTIONS

    engine = _engine(3, zero_optimization={"stage": 3, "offload_optimizer": {"device": "cpu"}})
    for name in QUESTIONS:
        getattr(engine, name)()
    assert engine.zero_offload_optimizer().device == "cpu"
    assert engine.zero_cpu_offload()
    assert engine.zero_prefetch_bucket_size() == 50_000_000
    assert engine.torch_autocast_dtype() is torch.bfloat16
    for name, instead in ABSENT_MEMBERS.items():
        assert not hasattr(engine, name)
        with pytest.raises(AttributeError, match=f"engine.{name}: zeroaccel answers for deepspeed") as caught:
            getattr(engine, name)
        assert instead in str(caught.value)
    with pytest.raises(
        AttributeError, match="neither DeepSpeedEngine nor its model Sequential has an attribute 'losses'"
    ):
        engine.losses  # noqa: B018 - the attribute is what is tried
    engine.destroy()


def test_every_question_has_an_answer_and_what_is_absent_is_not_the_models_fault(ranks: Ranks) -> None:
    ranks(1).run(_facade, _every_question)


# -- batches and gradients


def _batch_sizes() -> list[Any]:
    engine = _engine()
    seen = []
    for _ in range(4):
        engine.backward(_loss(engine))
        seen.append(engine.global_samples)
        engine.step()
    seen.append(engine.global_samples)
    engine.set_train_batch_size(16)  # of 2 ranks and 2 samples: four micro-batches
    seen += [engine.gradient_accumulation_steps(), engine.train_batch_size()]
    engine.set_train_micro_batch_size(1)
    seen += [engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()]
    with pytest.raises(ValueError, match="a multiple of 2"):
        engine.set_train_batch_size(7)
    engine.backward(_loss(engine))
    with pytest.raises(EngineStateError, match="between steps"):
        engine.set_train_batch_size(2)
    engine.destroy()
    return seen


def test_batch_sizes_change_between_steps(ranks: Ranks) -> None:
    """`global_samples` counts whole steps, as DeepSpeed does: 0 until the first update."""
    assert ranks(2).run(_facade, _batch_sizes) == [[0, 0, 8, 8, 16, 4, 16, 8, 1]] * 2


def _weights(way: str) -> list[float]:
    engine = _engine(2, fp16={"enabled": True, "initial_scale_power": 8})
    for _ in range(4):
        loss = _loss(engine)
        if way == "scale":
            scaled = engine.scale(loss)
            assert scaled.item() == pytest.approx(loss.item() * 256.0)
            scaled.backward()
            engine.allreduce_gradients()
        else:
            engine.backward(loss)
        engine.step()
    with pytest.raises(EngineStateError, match="misses the loss scale"):
        _loss(engine).backward()
    values = torch.cat([param.flatten().float() for param in engine.module.parameters()]).tolist()
    engine.reset()
    engine.destroy()
    return values


def test_a_scaled_loss_may_run_backward_by_itself(ranks: Ranks) -> None:
    by_engine, by_itself = (ranks(1).run(_facade, _weights, way)[0] for way in ("", "scale"))
    assert by_itself == pytest.approx(by_engine, abs=2e-3)


def _gradients_so_far(stage: int, dtype: str) -> list[list[float]]:
    from zeroaccel.zero import safe_get_full_grad, safe_get_local_grad

    precision = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    engine = _engine(stage, **precision)
    weight = next(engine.module.parameters())
    rank = torch.distributed.get_rank()
    assert safe_get_full_grad(weight) is None
    seen = []
    for micro_step in range(2):
        x = torch.full((2, 4), 1.0 + rank + micro_step, dtype=weight.dtype)
        engine.backward(engine(x).float().square().mean())
        seen.append(safe_get_full_grad(weight).flatten().tolist())
        if stage < 2 and micro_step == 0:
            with pytest.raises(EngineStateError, match="before the accumulation boundary"):
                safe_get_local_grad(weight)
    engine.step()
    updated = torch.cat([param.flatten().float() for param in engine.module.parameters()]).tolist()
    engine.destroy()
    return [*seen, updated]


def test_gradients_are_read_before_the_boundary_at_every_stage(ranks: Ranks) -> None:
    """DeepSpeed gives the gradient so far; that nobody changes it shows in the same weights after the step."""
    for dtype in ("fp32", "bf16"):
        results = [ranks(2).run(_facade, _gradients_so_far, stage, dtype) for stage in (0, 1, 2)]
        assert all(result[0] == result[1] for result in results)
        assert results[0] == results[1]
        first, second, _ = results[0][0]
        assert first == results[2][0][0]  # one micro-step: the bits of the stage that reduces each
        assert second == pytest.approx(results[2][0][1], rel=1e-2)
        assert sum(abs(value) for value in first) > 0


def _unused(stage: int, forbidden: bool) -> str:
    import deepspeed

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, both: bool) -> Tensor:
            used: Tensor = self.used(x)
            return self.unused(used) if both else used

    section = {"stage": stage, "ignore_unused_parameters": not forbidden}
    engine, *_ = deepspeed.initialize(
        model=Half(), config={**CONFIG, "gradient_accumulation_steps": 1, "zero_optimization": section}
    )
    told = ""
    both = torch.distributed.get_rank() == 0  # unused on one rank only
    engine.backward(engine(torch.ones(2, 4), both).sum())
    try:
        engine.step()
    except AssertionError as error:
        told = str(error)
    engine.reset()
    engine.backward(engine(torch.ones(2, 4), True).sum())
    engine.step()
    engine.destroy()
    return told


def test_unused_parameters_are_refused_where_the_config_says_so(ranks: Ranks) -> None:
    for stage in (1, 2):
        told = ranks(2).run(_facade, _unused, stage, True)
        assert told[0] == told[1]
        assert "expected a gradient for every parameter, got 'none for unused.bias, unused.weight'" in told[0]
    assert ranks(2).run(_facade, _unused, 2, False) == ["", ""]
    assert ranks(2).run(_facade, _unused, 3, True) == ["", ""]  # DeepSpeed does not look there, either


# -- the optimizer


def _optimizer_members() -> list[Any]:
    import deepspeed

    engine = _engine(1, fp16={"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 1})
    optimizer, kind = engine.optimizer, type(engine.optimizer)
    assert isinstance(optimizer, deepspeed.DeepSpeedOptimizer)
    assert optimizer.optimizer is optimizer
    assert (kind.__name__, engine.loss_scale.__class__.__name__) == ("Adam", "DynamicLossScale")
    found = [optimizer.cur_scale, optimizer.loss_scale, optimizer.loss_scaler.cur_scale, optimizer.dynamic_loss_scale]
    found += [engine.loss_scale(), engine.dynamic_loss_scale(), optimizer.loss_scaler.scale_window]
    for step in range(8):
        loss = _loss(engine)
        engine.backward(loss * (float("inf") if step == 3 else 1.0))
        engine.step()
        if step % 2:
            found.append((optimizer.cur_scale, optimizer.overflow))
    assert optimizer.needs_scaler()
    optimizer.cur_scale = 2.0
    assert engine.loss_scale.value == 2.0
    copied = pickle.loads(pickle.dumps(copy.copy(engine.loss_scale)))
    assert (type(copied).__name__, copied.value) == ("DynamicLossScale", 2.0)
    assert not hasattr(copied, "cur_scale")
    engine.destroy()
    assert not hasattr(optimizer, "cur_scale")
    assert not hasattr(optimizer, "overflow")
    assert type(optimizer) is type(optimizer).__mro__[0] is not kind
    plain = _engine(1)
    assert (plain.optimizer.cur_scale, plain.optimizer.dynamic_loss_scale, plain.optimizer.overflow) == (
        1.0,
        False,
        False,
    )
    assert not plain.optimizer.needs_scaler()
    with pytest.raises(UsageError, match=r"engine.scale\(loss\): expected a scalar"):
        plain.scale(torch.ones(2, requires_grad=True))
    with pytest.raises(UsageError, match="expected fp16"):
        plain.optimizer.loss_scale = 8.0
    plain.destroy()
    return found


def test_the_optimizer_shows_the_loss_scale(ranks: Ranks) -> None:
    """Scale and overflow after four steps, the second of which overflows."""
    (found,) = ranks(1).run(_facade, _optimizer_members)
    assert found[:7] == [16.0, 16.0, 16.0, True, 0.0, True, 2]
    assert found[7:] == [(16.0, False), (8.0, True), (8.0, False), (8.0, False)]


def _passed_optimizer(path: str) -> tuple[list[str], list[float]]:
    import deepspeed

    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5)
    engine, used, _, scheduler = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config=path
    )
    names = [type(used).__name__, type(scheduler).__name__, engine.optimizer_name()]
    rates = engine.get_lr()
    engine.destroy()
    with pytest.raises(ConfigError):  # as the config's alone it is wrong
        deepspeed.initialize(model=_model(), config=path)
    return names, rates


def test_a_passed_optimizer_takes_the_place_of_the_configs(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    sections = {"optimizer": {"type": "NoSuchThing"}, "scheduler": {"type": "WarmupLR", "params": {}}}
    path.write_text(json.dumps({**CONFIG, **sections}))
    assert ranks(1).run(_facade, _passed_optimizer, str(path)) == [(["SGD", "ConstantLR", "SGD"], [0.0625])]


def _oldest_argument(path: str) -> int:
    import deepspeed

    engine, *_ = deepspeed.initialize(args=SimpleNamespace(deepscale_config=path), model=_model())
    steps = engine.gradient_accumulation_steps()
    engine.destroy()
    return int(steps)


def test_the_config_by_the_oldest_name_of_its_argument(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    assert ranks(1).run(_facade, _oldest_argument, str(path)) == [2]


def _with_enumerations(folder: str) -> list[str]:
    import deepspeed
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

    section = {"stage": ZeroStageEnum.gradients, "offload_optimizer": {"device": OffloadDeviceEnum.cpu}}
    engine, *_ = deepspeed.initialize(
        model=_model(), config={**CONFIG, "zero_optimization": section, "log_level": "ERROR"}
    )
    engine.save_checkpoint(folder)  # the config is part of it
    found = [type(engine.config["zero_optimization"]["offload_optimizer"]["device"]).__name__, engine.log_level()]
    engine.destroy()
    return found


def test_members_of_enumerations_in_a_config(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(1).run(_facade, _with_enumerations, str(tmp_path)) == [["str", "ERROR"]]


def _unwrapped() -> tuple[list[bool], bool, list[bool]]:
    from deepspeed.runtime.zero import ZeroParamStatus, unwrap_model_for_generation

    engine = _engine(3, zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0})
    weights = [param for param in engine.module.parameters() if param.dim() > 1]
    with unwrap_model_for_generation(engine) as unwrapped:
        whole = [weight.ds_status is ZeroParamStatus.AVAILABLE for weight in weights]
        same = unwrapped is engine
    after = [weight.ds_status is ZeroParamStatus.AVAILABLE for weight in weights]
    for _ in range(2):  # and it goes on training
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
    engine.destroy()
    return whole, same, after


def test_unwrapping_for_generation_gathers_all_parameters(ranks: Ranks) -> None:
    assert ranks(2).run(_facade, _unwrapped) == [([True] * 3, True, [False] * 3)] * 2


# -- zero.Init and leaf modules


def _init_members(precision: str) -> list[Any]:
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    config = {**CONFIG, "zero_optimization": {"stage": 3}, precision: {"enabled": True}}
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = _model()
    weight = model[0].weight  # type: ignore[index]
    found = [str(weight.dtype), weight.ds_numel, tuple(weight.ds_shape), isinstance(weight.ds_status, ZeroParamStatus)]
    assert len({param.ds_id for param in model.parameters()}) == 6
    if torch.distributed.get_world_size() == 1:
        assert torch.equal(weight.ds_tensor, weight.detach().flatten())
        with deepspeed.zero.Init(module=_model()):
            pass
    engine, *_ = deepspeed.initialize(model=model, config=config)
    assert weight.ds_numel == 24
    engine.destroy()
    assert not hasattr(nn.Parameter(torch.zeros(1)), "ds_id")
    return found


def test_parameters_of_init_have_all_bits_and_members_on_any_number_of_ranks(ranks: Ranks) -> None:
    for world_size in (1, 2):
        for precision in ("bf16", "fp16"):
            results = ranks(world_size).run(_facade, _init_members, precision)
            assert results == [["torch.float32", 24, (6, 4), True]] * world_size


def _leaf_marks(path: str) -> list[Any]:
    import deepspeed
    from deepspeed.utils import (
        get_z3_leaf_modules,
        set_z3_leaf_module,
        set_z3_leaf_modules,
        set_z3_leaf_modules_by_name,
        set_z3_leaf_modules_by_suffix,
        unset_z3_leaf_modules,
        z3_leaf_module,
        z3_leaf_parameter,
    )

    model = _model()
    section = {"stage": 3, "leaf_module": {"names": ["1"]}}
    engine, *_ = deepspeed.initialize(model=model, config={**CONFIG, "zero_optimization": section})
    inner = model[1]  # type: ignore[index]
    assert get_z3_leaf_modules(model) == [inner]
    assert [z3_leaf_parameter(param) for param in model.parameters()] == [False] * 2 + [True] * 2 + [False] * 2
    engine.destroy()

    model = _model()
    assert set_z3_leaf_modules(model, ["Conv2d"], raise_if_not_found=False) == []
    for call, names in ((set_z3_leaf_modules, [nn.Conv2d]), (set_z3_leaf_modules_by_name, ["9"])):
        with pytest.raises(ValueError, match="set_z3_leaf_modules"):
            call(model, names)
    assert set_z3_leaf_modules_by_name(model, ["1", "9"], raise_if_not_found=False)[1] == ["9"]
    assert z3_leaf_module(model[1])  # type: ignore[index]
    assert len(set_z3_leaf_modules_by_suffix(model, ["1.0", "2"])[0]) == 2
    assert len(unset_z3_leaf_modules(model, [nn.Linear])) == 4 - 1
    set_z3_leaf_module(model[1], False)  # type: ignore[index]
    assert get_z3_leaf_modules(model) == []
    set_z3_leaf_module(model[1], True)  # type: ignore[index]
    engine, *_ = deepspeed.initialize(model=model, config=path)  # marks count beside a file, too
    names = [unit.name for unit in engine.units]
    engine.destroy()
    return names


def _one_part_per_rank() -> list[str]:
    import deepspeed

    class OnePart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.parts[torch.distributed.get_rank()](x)
            return out

    model = OnePart()
    deepspeed.utils.set_z3_leaf_modules(model, [OnePart])
    section = {"stage": 3, "stage3_param_persistence_threshold": 0}
    engine, *_ = deepspeed.initialize(
        model=model, config={**CONFIG, "gradient_accumulation_steps": 1, "zero_optimization": section}
    )
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step()
    names = [unit.name for unit in engine.units]
    engine.destroy()
    return names


def test_a_whole_model_may_be_a_leaf(ranks: Ranks) -> None:
    """Ranks may then run different parts of it."""
    assert ranks(2).run(_facade, _one_part_per_rank) == [["root"], ["root"]]


def test_leaf_modules_are_marked_by_config_and_calls(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    section = {"stage": 3, "stage3_param_persistence_threshold": 0}
    path.write_text(json.dumps({**CONFIG, "zero_optimization": section}))
    names = ranks(2).run(_facade, _leaf_marks, str(path))
    assert names[0] == names[1]
    assert "1" in names[0]


# -- checkpoints


def _saved_and_converted(folder: str) -> list[Any]:
    from deepspeed.utils.zero_to_fp32 import (
        convert_zero_checkpoint_to_fp32_state_dict,
        get_fp32_state_dict_from_zero_checkpoint,
    )

    engine = _engine(3)
    for _ in range(2):
        engine.backward(_loss(engine))
        engine.step()
    engine.save_checkpoint(folder, tag="epoch/1", client_state={"epoch": 1})
    with pytest.raises(UsageError, match="custom_load_fn"):
        engine.load_checkpoint(folder, None, True, True, True, False, lambda src, dst: None)
    path, state = engine.load_checkpoint(folder)
    engine.load_module_state_dict({"module": {name: torch.zeros_like(w) for name, w in _model().state_dict().items()}})
    weights = engine.consolidated_state_dict()
    zeros = weights is None or all(not value.any() for value in weights.values())
    engine.empty_partition_cache()
    engine.destroy()
    torch.distributed.barrier()
    found: list[Any] = [str(path).removeprefix(folder), state, zeros]
    if torch.distributed.get_rank() == 0:
        convert_zero_checkpoint_to_fp32_state_dict(folder, f"{folder}/whole")
        loaded = torch.load(f"{folder}/whole/pytorch_model.bin", weights_only=True)
        same = get_fp32_state_dict_from_zero_checkpoint(folder, lazy_mode=True)
        found.append(all(torch.equal(loaded[name], same[name]) for name in same))
    torch.distributed.barrier()
    return found


def test_checkpoints_with_deepspeeds_arguments_and_file_names(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks(2).run(_facade, _saved_and_converted, str(tmp_path))
    assert results == [["/epoch/1", {"epoch": 1}, True, True], ["/epoch/1", {"epoch": 1}, True]]


# -- data, reports and communication


def _data_and_reports(folder: str) -> list[Any]:
    import deepspeed
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum

    csv = {"enabled": True, "output_path": folder, "job_name": "run"}
    model, data = _model(), [torch.full((4,), float(index)) for index in range(8)]
    engine, _, loader, _ = deepspeed.initialize(
        model=model, training_data=data, config={**CONFIG, "zero_optimization": {"stage": 3}, "csv_monitor": csv}
    )
    assert engine.training_dataloader is loader
    assert [batch[:, 0].tolist() for batch in engine.deepspeed_io(data, route="eval")] == [
        [float(index + torch.distributed.get_rank()) for index in pair] for pair in ((0, 2), (4, 6))
    ]
    sampled = engine.deepspeed_io(data, batch_size=1, data_sampler=[3, 5])
    assert [batch[0, 0].item() for batch in sampled] == [3.0, 5.0]
    engine.monitor.write_events([("Own/value", 2.5, 8)])
    for index, batch in enumerate(deepspeed.utils.RepeatingLoader(loader)):
        engine.backward(engine(batch).square().mean())
        engine.step()
        if index == 3:
            break
    engine.offload_states(include=[OffloadStateTypeEnum.optim_states], device=OffloadDeviceEnum.cpu)
    engine.reload_states()
    with engine.coalesce_grad_reduction():
        engine.backward(_loss(engine))
    engine.step()
    assert not engine.is_compiled
    engine.destroy()
    return sorted(path.name for path in Path(folder).rglob("*.csv"))


def test_loaders_and_monitors(ranks: Ranks, tmp_path: Path) -> None:
    names = ranks(2).run(_facade, _data_and_reports, str(tmp_path))
    assert "Own_value.csv" in names[0]


def _communication() -> list[Any]:
    import deepspeed
    import deepspeed.comm as dist

    assert deepspeed.dist.all_reduce is dist.all_reduce
    rank, size = dist.get_rank(), dist.get_world_size()
    value = torch.tensor([rank + 1.0])
    dist.all_reduce(value, op=dist.ReduceOp.SUM, prof=True, log_name="own", debug="here")
    parts = [torch.full((2,), float(rank)), torch.full((1,), float(-rank))]
    whole = [torch.empty(2 * size), torch.empty(size)]
    assert dist.all_gather_coalesced(whole, parts) is None
    for work in dist.all_gather_coalesced(whole, parts, async_op=True):
        work.wait()
    pair = torch.tensor([1.0 + rank])
    dist.inference_all_reduce(pair)
    halves = [torch.tensor([1.0]), torch.tensor([2.0, 3.0])]
    dist.all_reduce_coalesced(halves)
    assert [half.tolist() for half in halves] == [[1.0 * size], [2.0 * size, 3.0 * size]]
    own = torch.empty(1)
    dist.reduce_scatter_tensor(own, torch.ones(size))
    assert own.item() == size
    dist.configure(enabled=True)
    assert dist.log_summary() is None
    assert dist.log_summary(return_dict=True)["summary"] == {}
    assert dist.has_all_gather_into_tensor()
    group = dist.new_group([1])
    assert dist.get_global_rank(None, 1) == 1
    if rank == 1:
        assert dist.get_all_ranks_from_group(group) == [1]
        assert dist.get_global_rank(group, 0) == 1
    mesh = dist.initialize_mesh_device((size,), ("dp",))
    deepspeed.init_distributed(dist_backend="nccl", init_method="env://", rank=rank, world_size=size, config={})
    deepspeed.init_distributed("gloo", timeout=900)
    accelerator = deepspeed.get_accelerator()
    found = [value.item(), pair.item(), dist.get_all_ranks_from_group(), whole[0].tolist(), whole[1].tolist()]
    groups = deepspeed.utils.groups
    assert groups._get_data_parallel_world_size() == groups.get_data_parallel_world_size() == size
    return [*found, mesh.mesh_dim_names, accelerator.device_count()]


def test_collectives_take_deepspeeds_arguments(ranks: Ranks) -> None:
    """`device_count` on the CPU is that of the ranks of a machine, as DeepSpeed has it by LOCAL_SIZE."""
    expected = [3.0, 3.0, [0, 1], [0.0, 0.0, 1.0, 1.0], [0.0, -1.0], ("dp",), 2]
    assert ranks(2).run(_facade, _communication) == [expected] * 2


JOINING = """
import sys
from zeroaccel import compat

compat.install()
import deepspeed
import torch

rank, address = int(sys.argv[1]), sys.argv[2]
try:
    deepspeed.init_distributed("gloo", init_method=address, rank=2, world_size=2)
except ValueError as error:
    assert "a rank below the world size" in str(error)
deepspeed.init_distributed("gloo", init_method=address, rank=rank, world_size=2)
deepspeed.init_distributed()
model = torch.nn.Linear(2, 1)
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 3}}
engine, *_ = deepspeed.initialize(model=model, config=config)
loss = engine(torch.ones(1, 2)).sum()
engine.backward(loss)
engine.step()
print(deepspeed.comm.get_rank(), engine.world_size, engine.global_steps)
engine.destroy()
"""


def test_a_job_is_joined_by_its_address(tmp_path: Path) -> None:
    """Without any variable of a launcher, as DeepSpeed's own tests join."""
    address = f"file://{tmp_path}/store"
    program = tmp_path / "joining.py"
    program.write_text(JOINING)
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    running = [
        subprocess.Popen(
            [sys.executable, str(program), str(rank), address],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=time_limits.seconds(100)) for process in running]
    for rank, (printed, errors) in enumerate(outputs):
        assert printed.split() == [str(rank), "2", "1"], errors


def _first_line_and_private_names() -> dict[str, Any]:
    import io
    import logging

    import deepspeed
    from deepspeed.utils import logger

    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    try:
        engine = _engine()
    finally:
        logger.removeHandler(handler)
    hints = {}
    for name in ("_config", "_global_grad_norm", "_save_checkpoint", "_step_applied"):
        try:
            getattr(engine, name)
        except AttributeError as error:
            hints[name] = str(error)
    present = [
        hasattr(engine, "_zero3_consolidated_16bit_state_dict"),
        hasattr(engine, "_consolidated_16bit_state_dict"),
        hasattr(deepspeed.runtime.zero.partition_parameters, "_orig_torch_arange"),
        hasattr(deepspeed.utils.groups, "_get_data_parallel_world_size"),
        hasattr(engine.optimizer.parameter_offload, "_register_deepspeed_module"),
    ]
    missing = hasattr(engine, "_nothing_like_it")
    engine.destroy()
    return {"lines": stream.getvalue(), "hints": hints, "present": present, "missing": missing}


def _state_dict_of_rank_0() -> dict[str, tuple[int, ...]] | None:
    engine = _engine(3, zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 3})
    shapes = None
    if torch.distributed.get_rank() == 0:  # no collective, so no rank waits for another
        state = engine.module.state_dict(prefix="model.")
        shapes = {name: tuple(value.shape) for name, value in state.items()}
        with pytest.raises(RuntimeError, match="size mismatch"):
            _model().load_state_dict({name.removeprefix("model."): value for name, value in state.items()})
    with _gathered(engine.module):
        whole = engine.module.state_dict()
    assert all(torch.equal(whole[name], value) for name, value in _model().state_dict().items())
    engine.destroy()
    return shapes


def _gathered(model: nn.Module) -> Any:
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(model.parameters()))


def test_a_state_dict_at_stage_3_on_one_rank_has_no_elements(ranks: Ranks) -> None:
    shapes, _ = ranks(2).run(_facade, _state_dict_of_rank_0)
    assert shapes == {f"model.{name}": (2,) if name == "2.bias" else (0,) for name in _model().state_dict()}


def _natively_prepared_and_unwrapped() -> bool:
    import deepspeed

    from zeroaccel import Accelerator, ZeroPlugin

    accelerator = Accelerator(zero_plugin=ZeroPlugin(zero_stage=3))
    model = _model()
    engine = accelerator.prepare(model)
    known = isinstance(engine, deepspeed.DeepSpeedEngine) and not isinstance(model, deepspeed.DeepSpeedEngine)
    accelerator.free_memory()
    return known


def test_the_first_line_and_what_private_names_say(ranks: Ranks) -> None:
    first, second = ranks(2).run(_facade, _first_line_and_private_names)
    assert f"DeepSpeed info: version={compat.VERSION}, git-hash=" in first["lines"]
    assert "DeepSpeed info" not in second["lines"]
    assert first["present"] == [True] * 5
    assert not first["missing"]
    assert "get_global_grad_norm() is the norm" in first["hints"]["_global_grad_norm"]
    assert "was_step_applied()" in first["hints"]["_step_applied"]
    assert "engine.save_checkpoint" in first["hints"]["_save_checkpoint"]
    assert "engine.config" in first["hints"]["_config"]


def test_engines_of_an_accelerator_are_known_as_deepspeeds(ranks: Ranks) -> None:
    assert ranks(1).run(_facade, _natively_prepared_and_unwrapped) == [True]


def _throughput() -> list[Any]:
    engine = _engine()
    counts = []
    for step in range(6):
        if step == 2:
            engine.tput_timer.update_epoch_count()
        if step == 4:
            with torch.no_grad():
                engine.eval()(torch.ones(2, 4))
            engine.train()
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        timer = vars(engine).get("tput_timer")
        counts.append(None if timer is None else (timer.global_step_count, timer.micro_step_count))
    found = [*counts, engine.tput_timer.batch_size, engine.tput_timer.epoch_count]
    found.append(engine.tput_timer.avg_samples_per_sec() > 0)
    engine.destroy()
    return found


def test_throughput_is_counted_from_when_it_is_asked_for(ranks: Ranks) -> None:
    """Steps and micro-steps of training; until then nothing waits for the device."""
    expected = [None, None, (0, 1), (1, 2), (1, 3), (2, 4), 4, 1, True]
    assert ranks(1).run(_facade, _throughput) == [expected]


def _save_by_the_clock(folder: str) -> list[Any]:
    engine = _engine(2)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
    rank = torch.distributed.get_rank()
    engine.save_checkpoint(f"{folder}/run-at-{rank}", client_state={"step": 1})
    loaded = engine.load_checkpoint(f"{folder}/run-at-0")[1]
    engine.destroy()
    return [sorted(os.listdir(folder)), loaded]


def test_a_folder_that_each_rank_names_for_itself_is_rank_0s(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(_facade, _save_by_the_clock, str(tmp_path)) == [[["run-at-0"], {"step": 1}]] * 2


class _Mode(enum.Enum):
    FAST = "fast"


@dataclass
class _Options:
    path: Path
    mode: _Mode = _Mode.FAST


def _as_lightning_does(folder: str) -> list[Any]:
    import deepspeed
    from deepspeed.utils.zero_to_fp32 import get_model_state_file, get_optim_files

    model = _model()
    config = {**CONFIG, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 3}}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    # Its summary of a model, and Fabric's test for what has a step of its own.
    own = sum(param.partition_numel() for param in model.parameters())
    assert all(hasattr(engine, name) for name in ("step", "param_groups", "defaults", "state", "load_state_dict"))
    assert engine.param_groups is engine.optimizer.param_groups
    for _ in range(3):  # the epoch ends inside an accumulation
        engine.backward(_loss(engine))
        engine.step()
    state = {"hyper": argparse.Namespace(options=_Options(Path("x"))), "epoch": np.int64(1), "lock": [threading.Lock()]}
    with TestCase().assertLogs("zeroaccel") as said:
        engine.save_checkpoint(folder, tag="end", client_state=state)
    assert any("omits the gradients of 1 micro-steps" in line for line in said.output)
    assert any("client_state['lock'][0] is left out, as a _thread.lock" in line for line in said.output)
    stage = torch.load(get_optim_files(f"{folder}/end")[0])["optimizer_state_dict"]["zero_stage"]
    read = torch.load(get_model_state_file(f"{folder}/end", stage), weights_only=False)
    engine.backward(_loss(engine))
    engine.step()
    # validate: the same model once more, without an optimizer, while nothing destroyed the first engine.
    with TestCase().assertLogs("zeroaccel") as said:
        inference, *_ = deepspeed.initialize(model=model, model_parameters=[], config={**config, "optimizer": None})
    assert any("an earlier engine has this model" in line for line in said.output)
    inference.eval()
    with torch.no_grad():
        loss = _loss(inference).item()
    again, *_ = deepspeed.initialize(model=model, config=config)
    _, loaded = again.load_checkpoint(folder)
    assert again.micro_steps == 2
    assert again.global_steps == 1
    assert loaded["hyper"] == argparse.Namespace(options=argparse.Namespace(path=Path("x"), mode="fast"))
    again.optimizer.offload_states()  # OpenRLHF
    again.optimizer.reload_states()
    again.backward(_loss(again))
    with pytest.raises(UsageError, match=r"expected a model of its own, got 'one that another engine holds'"):
        deepspeed.initialize(model=model, config=config)  # gradients wait in it
    again.destroy()
    return [own, stage, read["epoch"], read["lock"], read["global_steps"], math.isfinite(loss)]


def test_lightnings_calls(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks(2).run(_facade, _as_lightning_does, str(tmp_path))
    assert [result[1:] for result in results] == [[3, 1, [], 1, True]] * 2
    assert sum(result[0] for result in results) == sum(param.numel() for param in _model().parameters())
