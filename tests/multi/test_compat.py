"""DeepSpeed's calls on real ranks: what they show on parameters, what they refuse, and that nothing of them stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.multi.pool import Pool
from zeroaccel import compat
from zeroaccel.errors import ConfigError, EngineStateError, UsageError

Ranks = Callable[[int], Pool]

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 6)), nn.Linear(6, 2))


def _named_error(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises((ConfigError, UsageError, EngineStateError)) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def _shown_on_parameters() -> list[Any]:
    compat.install()
    try:
        import deepspeed
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        with deepspeed.zero.Init(config_dict_or_path=CONFIG):
            model = _model()
        weight = model[0].weight  # type: ignore[index]
        seen = [(weight.ds_status, weight.ds_shape, weight.ds_numel, weight.shape)]
        assert not hasattr(nn.Parameter(torch.zeros(1)), "ds_id")
        engine, _, _, _ = deepspeed.initialize(model=model, config=CONFIG)
        assert len({param.ds_id for param in model.parameters()}) == 6
        assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
        own = weight.ds_tensor.clone()
        with deepspeed.zero.GatheredParameters(model.parameters()):
            assert weight.ds_status is ZeroParamStatus.AVAILABLE
            whole = weight.detach().flatten().clone()
            offload = engine.optimizer.parameter_offload  # what TRL does before it generates
            for param in [p for _, p in offload.module.named_parameters()] + list(model.ds_external_parameters()):
                param.ds_active_sub_modules.clear()
            engine.module(torch.ones(1, 4))
            offload._register_deepspeed_module(offload.module)
        assert any(torch.equal(part, own) for part in whole.unfold(0, max(1, own.numel()), 1)) or not own.numel()
        assert torch.equal(whole.view(6, 4), _model()[0].weight)  # type: ignore[index]
        plain, _, _, _ = deepspeed.initialize(model=_model(), config={**CONFIG, "zero_optimization": {"stage": 2}})
        assert not hasattr(next(plain.module.parameters()), "ds_id")
        engine.destroy()
        assert not hasattr(weight, "ds_id")
        plain.destroy()
        return [*seen, own.numel()]
    finally:
        compat.uninstall()
        assert not hasattr(nn.Parameter, "ds_id")
        assert not hasattr(nn.Module, "ds_external_parameters")


def test_parameters_show_what_libraries_read(ranks: Ranks) -> None:
    results = ranks(2).run(_shown_on_parameters)
    assert [result[0][1:] for result in results] == [(torch.Size([6, 4]), 24, torch.Size([6, 4]))] * 2
    assert sum(result[1] for result in results) == 24


def _refused() -> dict[str, str]:
    compat.install()
    try:
        import deepspeed

        told = {
            "mpu": _named_error(deepspeed.initialize, model=_model(), config=CONFIG, mpu=object()),
            "no config": _named_error(deepspeed.initialize, model=_model()),
            "no model": _named_error(deepspeed.initialize, config=CONFIG),
            "group": _named_error(deepspeed.zero.Init, data_parallel_group=object()),
            "leaf": _named_error(deepspeed.utils.set_z3_leaf_modules, _model(), ["Expert"]),
            "address": _named_error(deepspeed.init_distributed, init_method="tcp://127.0.0.1:1"),
        }
        model = _model()
        first, _, _, _ = deepspeed.initialize(model=model, config=CONFIG)
        told["second engine"] = _named_error(deepspeed.initialize, model=model, config=CONFIG)
        first.destroy()
        told["destroyed"] = _named_error(first, torch.ones(1, 4))
        second, _, _, _ = deepspeed.initialize(model=model, config=CONFIG)  # a model whose engine is gone is free
        second.backward(second(torch.ones(1, 4)).sum())
        told["lr_kwargs"] = _named_error(second.step, lr_kwargs={"epoch": 1})
        second.step()
        second.destroy()
        return told
    finally:
        compat.uninstall()


def test_what_cannot_be_is_named_on_every_rank(ranks: Ranks) -> None:
    told = ranks(2).run(_refused)
    assert told[0] == told[1]
    parts = {
        "mpu": "model and sequence parallelism",
        "no config": "expected a config",
        "no model": "deepspeed.initialize(model)",
        "group": "deepspeed.zero.Init(data_parallel_group)",
        "leaf": "classes of modules of the model",
        "address": "zeroaccel launch or torchrun",
        "second engine": "destroy()",
        "destroyed": "one after destroy()",
        "lr_kwargs": "engine.step(lr_kwargs)",
    }
    for name, part in parts.items():
        assert part in told[0][name], name


def _leaves() -> list[str]:
    compat.install()
    try:
        import deepspeed

        model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.ModuleList([nn.Linear(4, 4)]))
        found = deepspeed.utils.set_z3_leaf_modules(model, [nn.ModuleList])
        assert found == deepspeed.utils.get_z3_leaf_modules(model)
        engine, _, _, _ = deepspeed.initialize(model=model, config=CONFIG)
        names = [unit.name for unit in engine.units]
        engine.destroy()
        return names
    finally:
        compat.uninstall()


def test_marked_modules_are_one_unit(ranks: Ranks) -> None:
    names = ranks(2).run(_leaves)
    assert names[0] == names[1]
    assert "1" in names[0]
