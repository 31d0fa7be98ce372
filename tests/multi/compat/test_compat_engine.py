"""Members of DeepSpeed's engine and optimizer on real ranks, and the behaviour that equals DeepSpeed's.

docs/deepspeed_names.md lists where the facade differs from DeepSpeed.
"""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.multi.compat.facade_engines import CONFIG, loss_of, make_engine, small_model, with_facade
from tests.support.pool import Ranks
from tests.support.training import train_step
from zeroaccel.errors import ConfigError, EngineStateError, UsageError

pytestmark = pytest.mark.usefixtures("ranks_without_libraries")


def _answers(stage: int) -> list[Any]:
    engine = make_engine(stage, gradient_clipping=0.5, steps_per_print=7, wall_clock_breakdown=False)
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
    assert engine.module_state_dict().keys() == small_model().state_dict().keys()
    engine.destroy()
    return [engine.gradient_clipping(), engine.steps_per_print(), engine.wall_clock_breakdown(), engine.dump_state()]


def test_an_engine_answers_about_ranks_and_config(ranks: Ranks) -> None:
    for stage in (0, 3):
        assert ranks(2).run(with_facade, _answers, stage) == [[0.5, 7, False, False]] * 2


def _clipped(given: dict[str, Any], folder: Path) -> tuple[float, bool]:
    """Returns the limit, and whether a step of SGD with gradients of a norm above 1 moved by the limit."""
    import deepspeed

    sgd = {"type": "SGD", "params": {"lr": 1.0}}
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": sgd, "zero_optimization": {"stage": 2}, **given}
    path = folder / f"{torch.distributed.get_rank()}.json"
    path.write_text(json.dumps(config))
    norms = []
    for source in (config, str(path)):
        model = nn.Linear(4, 2)
        before = [param.detach().clone() for param in model.parameters()]
        engine, *_ = deepspeed.initialize(model=model, config=source)
        engine.backward(10 * engine(torch.ones(2, 4)).sum())
        engine.step()
        moves = [(new - old).square().sum() for old, new in zip(before, model.parameters(), strict=True)]
        norms.append(torch.stack(moves).sum().sqrt().item())
        limit = engine.gradient_clipping()
        engine.destroy()
    return limit, all(abs(norm - limit) < 1e-3 for norm in norms)


@pytest.mark.parametrize(
    ("given", "limit"),
    [({}, 1.0), ({"gradient_clipping": "auto"}, 1.0), ({"gradient_clipping": 0.5}, 0.5), ({"gradient_clipping": 0}, 0)],
)
def test_gradients_are_clipped_at_1_unless_the_config_sets_the_norm(
    ranks: Ranks, tmp_path: Path, given: dict[str, Any], limit: float
) -> None:
    assert ranks(2).run(with_facade, _clipped, given, tmp_path) == [(limit, limit > 0)] * 2


def _every_question() -> None:
    from zeroaccel.compat.surface import ABSENT_MEMBERS, QUESTIONS

    engine = make_engine(3, zero_optimization={"stage": 3, "offload_optimizer": {"device": "cpu"}})
    for name in QUESTIONS:
        getattr(engine, name)()
    assert engine.zero_offload_optimizer().device == "cpu"
    assert engine.zero_cpu_offload()
    assert engine.zero_prefetch_bucket_size() == 50_000_000
    assert engine.torch_autocast_dtype() is torch.bfloat16
    for name, instead in ABSENT_MEMBERS.items():
        assert not hasattr(engine, name)
        with pytest.raises(AttributeError, match=f"engine.{name}: zeroaccel provides deepspeed") as caught:
            getattr(engine, name)
        assert instead in str(caught.value)
    with pytest.raises(
        AttributeError, match="neither DeepSpeedEngine nor its model Sequential has an attribute 'losses'"
    ):
        engine.losses  # noqa: B018 - the test is the access itself
    engine.destroy()


def test_every_getter_answers_and_missing_ones_name_the_alternative(ranks: Ranks) -> None:
    ranks(1).run(with_facade, _every_question)


def _batch_sizes() -> list[Any]:
    engine = make_engine()
    seen = []
    for _ in range(4):
        engine.backward(loss_of(engine))
        seen.append(engine.global_samples)
        engine.step()
    seen.append(engine.global_samples)
    engine.set_train_batch_size(16)  # 2 ranks with 2 samples each: four micro-batches
    seen += [engine.gradient_accumulation_steps(), engine.train_batch_size()]
    engine.set_train_micro_batch_size(1)
    seen += [engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()]
    with pytest.raises(ValueError, match="a multiple of 2"):
        engine.set_train_batch_size(7)
    engine.backward(loss_of(engine))
    with pytest.raises(EngineStateError, match="between steps"):
        engine.set_train_batch_size(2)
    engine.destroy()
    return seen


def test_batch_sizes_change_between_steps(ranks: Ranks) -> None:
    """`global_samples` counts whole steps, as in DeepSpeed: 0 until the first update."""
    assert ranks(2).run(with_facade, _batch_sizes) == [[0, 0, 8, 8, 16, 4, 16, 8, 1]] * 2


def _weights(way: str) -> list[float]:
    engine = make_engine(2, fp16={"enabled": True, "initial_scale_power": 8})
    for _ in range(4):
        loss = loss_of(engine)
        if way == "scale":
            scaled = engine.scale(loss)
            assert scaled.item() == pytest.approx(loss.item() * 256.0)
            scaled.backward()
            engine.allreduce_gradients()
        else:
            engine.backward(loss)
        engine.step()
    with pytest.raises(EngineStateError, match="misses the loss scale"):
        loss_of(engine).backward()
    values = torch.cat([param.flatten().float() for param in engine.module.parameters()]).tolist()
    engine.reset()
    engine.destroy()
    return values


def test_a_scaled_loss_may_run_backward_by_itself(ranks: Ranks) -> None:
    by_engine, by_itself = (ranks(1).run(with_facade, _weights, way)[0] for way in ("", "scale"))
    assert by_itself == pytest.approx(by_engine, abs=2e-3)


def _gradients_so_far(stage: int, dtype: str) -> list[list[float]]:
    from zeroaccel.zero import safe_get_full_grad, safe_get_local_grad

    precision = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    engine = make_engine(stage, **precision)
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
    """DeepSpeed returns the gradient so far; equal weights after the step show that reading does not change it."""
    for dtype in ("fp32", "bf16"):
        results = [ranks(2).run(with_facade, _gradients_so_far, stage, dtype) for stage in (0, 1, 2)]
        assert all(result[0] == result[1] for result in results)
        assert results[0] == results[1]
        first, second, _ = results[0][0]
        assert first == results[2][0][0]  # one micro-step: the bits of stage 2
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
    train_step(engine, engine(torch.ones(2, 4), True).sum())
    engine.destroy()
    return told


def test_unused_parameters_are_refused_where_the_config_says_so(ranks: Ranks) -> None:
    for stage in (1, 2):
        told = ranks(2).run(with_facade, _unused, stage, True)
        assert told[0] == told[1]
        assert "expected a gradient for every parameter, got 'none for unused.bias, unused.weight'" in told[0]
    assert ranks(2).run(with_facade, _unused, 2, False) == ["", ""]
    assert ranks(2).run(with_facade, _unused, 3, True) == ["", ""]  # DeepSpeed does not check this case either


def _optimizer_members() -> list[Any]:
    import deepspeed

    engine = make_engine(1, fp16={"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 1})
    optimizer, kind = engine.optimizer, type(engine.optimizer)
    assert isinstance(optimizer, deepspeed.DeepSpeedOptimizer)
    assert optimizer.optimizer is optimizer
    assert (kind.__name__, engine.loss_scale.__class__.__name__) == ("Adam", "DynamicLossScale")
    found = [optimizer.cur_scale, optimizer.loss_scale, optimizer.loss_scaler.cur_scale, optimizer.dynamic_loss_scale]
    found += [engine.loss_scale(), engine.dynamic_loss_scale(), optimizer.loss_scaler.scale_window]
    for step in range(8):
        loss = loss_of(engine)
        train_step(engine, loss * (float("inf") if step == 3 else 1.0))
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
    plain = make_engine(1)
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
    """Reads scale and overflow after four steps, the second of which overflows."""
    (found,) = ranks(1).run(with_facade, _optimizer_members)
    assert found[:7] == [16.0, 16.0, 16.0, True, 0.0, True, 2]
    assert found[7:] == [(16.0, False), (8.0, True), (8.0, False), (8.0, False)]


def _passed_optimizer(path: str) -> tuple[list[str], list[float]]:
    import deepspeed

    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5)
    engine, used, _, scheduler = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config=path
    )
    names = [type(used).__name__, type(scheduler).__name__, engine.optimizer_name()]
    rates = engine.get_lr()
    engine.destroy()
    with pytest.raises(ConfigError):  # the config alone is wrong
        deepspeed.initialize(model=small_model(), config=path)
    return names, rates


def test_a_passed_optimizer_takes_the_place_of_the_configs(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    sections = {"optimizer": {"type": "NoSuchThing"}, "scheduler": {"type": "WarmupLR", "params": {}}}
    path.write_text(json.dumps({**CONFIG, **sections}))
    assert ranks(1).run(with_facade, _passed_optimizer, str(path)) == [(["SGD", "ConstantLR", "SGD"], [0.0625])]


def _oldest_argument(path: str) -> int:
    import deepspeed

    engine, *_ = deepspeed.initialize(args=SimpleNamespace(deepscale_config=path), model=small_model())
    steps = engine.gradient_accumulation_steps()
    engine.destroy()
    return int(steps)


def test_the_config_may_be_passed_by_its_oldest_argument_name(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    assert ranks(1).run(with_facade, _oldest_argument, str(path)) == [2]


def _natively_prepared_and_unwrapped() -> bool:
    import deepspeed

    from zeroaccel import Accelerator, ZeroPlugin

    accelerator = Accelerator(zero_plugin=ZeroPlugin(zero_stage=3))
    model = small_model()
    engine = accelerator.prepare(model)
    known = isinstance(engine, deepspeed.DeepSpeedEngine) and not isinstance(model, deepspeed.DeepSpeedEngine)
    accelerator.free_memory()
    return known


def test_engines_of_an_accelerator_are_known_as_deepspeeds(ranks: Ranks) -> None:
    assert ranks(1).run(with_facade, _natively_prepared_and_unwrapped) == [True]
