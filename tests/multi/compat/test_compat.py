"""DeepSpeed's calls on real ranks: attributes of parameters, refused calls, and the removal of the facade."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.multi.compat.facade_engines import small_model, with_facade
from tests.support.pool import Ranks
from tests.support.refusals import message
from tests.support.training import train_step
from zeroaccel import compat
from zeroaccel.errors import CheckpointError, UsageError, ZeroAccelError

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


pytestmark = pytest.mark.usefixtures("ranks_without_libraries")


def _shown_on_parameters() -> list[Any]:
    compat.install()
    try:
        import deepspeed
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        with deepspeed.zero.Init(config_dict_or_path=CONFIG):
            model = small_model()
        weight = model[0].weight  # type: ignore[index]
        assert torch.equal(model(torch.ones(1, 4)), small_model()(torch.ones(1, 4)))
        seen = [(weight.ds_status, weight.ds_shape, weight.ds_numel, weight.shape)]
        assert not hasattr(nn.Parameter(torch.zeros(1)), "ds_id")
        engine, _, _, _ = deepspeed.initialize(model=model, config=CONFIG)
        assert len({param.ds_id for param in model.parameters()}) == 6
        assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
        own = weight.ds_tensor.clone()
        with deepspeed.zero.GatheredParameters(model.parameters()):
            assert weight.ds_status is ZeroParamStatus.AVAILABLE
            whole = weight.detach().flatten().clone()
            offload = engine.optimizer.parameter_offload  # as TRL does before it generates
            for param in [p for _, p in offload.module.named_parameters()] + list(model.ds_external_parameters()):
                param.ds_active_sub_modules.clear()
            engine.module(torch.ones(1, 4))
            offload._register_deepspeed_module(offload.module)
        assert any(torch.equal(part, own) for part in whole.unfold(0, max(1, own.numel()), 1)) or not own.numel()
        assert torch.equal(whole.view(6, 4), small_model()[0].weight)  # type: ignore[index]
        plain, _, _, _ = deepspeed.initialize(model=small_model(), config={**CONFIG, "zero_optimization": {"stage": 2}})
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


def _sharded_when() -> list[bool]:
    import deepspeed

    everyone = torch.distributed.group.WORLD
    stages = [{"zero_optimization": {"stage": stage}} for stage in (2, 3)]
    given = [{}, {"data_parallel_group": everyone}, *({"config_dict_or_path": stage} for stage in stages)]
    found = []
    for arguments in given:
        with deepspeed.zero.Init(**arguments):
            model = small_model()
        found.append(hasattr(model[0].weight, "ds_id"))  # type: ignore[index]
    return found


def test_init_shards_unless_the_config_says_another_stage(ranks: Ranks) -> None:
    assert ranks(2).run(with_facade, _sharded_when) == [[True, True, False, True]] * 2


class _Layer(nn.Module):
    """A class of this test, because `module.compile()` does not compile torch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(inputs)
        return result


def _compiled_afterwards(how: str) -> tuple[list[float], int]:
    """Trains four steps; returns the losses and the number of compiled graphs."""
    import deepspeed

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = nn.Sequential(_Layer(), _Layer())
    engine, _, _, _ = deepspeed.initialize(model=model, config=CONFIG)
    if how == "whole":
        engine.compile(backend="eager", compile_kwargs={"dynamic": False})
    for block in [module for module in engine.module if how == "blocks"]:
        block.compile(backend="eager")
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler reads .grad of every tensor
        for step in range(4):
            losses.append(train_step(engine, engine(torch.full((1, 4), 1.0 + step)).square().mean()))
    engine.destroy()
    return losses, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_a_model_compiled_after_its_engine_was_made(ranks: Ranks) -> None:
    """Compiles as accelerate does; tracing the hooks would make many graphs."""
    plain, whole, blocks = (ranks(2).run(with_facade, _compiled_afterwards, how)[0] for how in ("", "whole", "blocks"))
    assert plain[0] == whole[0] == blocks[0]
    assert plain[1] == 0 < whole[1] <= 3
    assert 0 < blocks[1] <= 3


def _optimizers() -> dict[str, str]:
    """Passes param groups of any optimizer to these classes, as accelerate does for offloaded states."""
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

    params = [nn.Parameter(torch.ones(3, 3))]
    told = {}
    for kind in ("SGD", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD", "Adadelta", "Adafactor", "Muon"):
        groups = getattr(torch.optim, kind)(params).param_groups
        told[kind] = message(ZeroAccelError, DeepSpeedCPUAdam, groups, lr=0.1)
    for kind in ("Adam", "AdamW"):
        DeepSpeedCPUAdam(getattr(torch.optim, kind)(params, lr=0.5).param_groups, lr=0.1, adamw_mode=False)
    adagrad = DeepSpeedCPUAdagrad(params, 0.1, 1e-6, 0.2)
    assert [adagrad.defaults[key] for key in ("lr", "eps", "weight_decay", "lr_decay")] == [0.1, 1e-6, 0.2, 0.0]
    for made in (DeepSpeedCPUAdagrad, DeepSpeedCPUAdam, DeepSpeedCPULion):
        told[made.__name__] = message(ZeroAccelError, made, params, fp32_optimizer_states=False)
    for made in (FusedAdam, FusedLion):
        told[made.__name__] = message(ZeroAccelError, made, params, set_grad_none=False)
    return told


def test_optimizers_take_their_arguments_and_no_other_optimizers_place(ranks: Ranks) -> None:
    (told,) = ranks(1).run(with_facade, _optimizers)
    for name, said in told.items():
        own = name.startswith(("DeepSpeed", "Fused"))
        assert (f"{name}, " if own else "created with the param groups of another optimizer") in said


def _refused() -> dict[str, str]:
    import deepspeed

    told = {
        "mpu": message(ZeroAccelError, deepspeed.initialize, model=small_model(), config=CONFIG, mpu=object()),
        "no config": message(ZeroAccelError, deepspeed.initialize, model=small_model()),
        "no model": message(ZeroAccelError, deepspeed.initialize, config=CONFIG),
        "group": message(ZeroAccelError, deepspeed.zero.Init, data_parallel_group=object()),
        "leaf": message(ZeroAccelError, deepspeed.utils.set_z3_leaf_modules, small_model(), ["Expert"]),
        "mics": message(ZeroAccelError, deepspeed.zero.Init, zero_param_parallel_group=object()),
        "quantized": message(ZeroAccelError, deepspeed.zero.Init, zero_quantized_weights=True),
        "two configs": message(
            ZeroAccelError, deepspeed.initialize, model=small_model(), config=CONFIG, config_params=CONFIG
        ),
        "another rank": message(ZeroAccelError, deepspeed.init_distributed, rank=7, world_size=9),
    }
    model = small_model()
    first, _, _, _ = deepspeed.initialize(model=model, config=CONFIG)
    first.backward(first(torch.ones(1, 4)).sum())  # without pending gradients, the second engine takes over the model
    told["second engine"] = message(ZeroAccelError, deepspeed.initialize, model=model, config=CONFIG)
    first.destroy()
    told["destroyed"] = message(ZeroAccelError, first, torch.ones(1, 4))
    second, _, _, _ = deepspeed.initialize(model=model, config=CONFIG)  # a model without a live engine is free
    second.backward(second(torch.ones(1, 4)).sum())
    told["schedule"] = message(ZeroAccelError, second.compile, schedule=[(0, [])])
    told["lr_kwargs"] = message(ZeroAccelError, second.step, lr_kwargs={"epoch": 1})
    second.step()
    second.destroy()
    return told


def test_unsupported_calls_are_refused_on_every_rank(ranks: Ranks) -> None:
    told = ranks(2).run(with_facade, _refused)
    assert told[0] == told[1]
    parts = {
        "mpu": "an object with get_sequence_parallel_world_size",
        "no config": "expected a config",
        "no model": "deepspeed.initialize(model)",
        "group": "deepspeed.zero.Init(data_parallel_group)",
        "mics": "deepspeed.zero.Init(zero_param_parallel_group)",
        "quantized": "deepspeed.zero.Init(zero_quantized_weights)",
        "two configs": "got 'config and config_params'; keep config only",
        "schedule": "engine.compile(schedule)",
        "leaf": "module classes of the model",
        "another rank": "deepspeed.init_distributed(rank, world_size)",
        "second engine": "destroy()",
        "destroyed": "an engine after destroy()",
        "lr_kwargs": "engine.step(lr_kwargs)",
    }
    for name, part in parts.items():
        assert part in told[0][name], name


def _resumes_if_there_is_something(folder: str) -> list[Any]:
    import deepspeed

    engine, _, _, _ = deepspeed.initialize(model=small_model(), config={**CONFIG, "gradient_accumulation_steps": 2})
    empty = f"{folder}/empty"
    os.makedirs(empty, exist_ok=True)
    found = [engine.load_checkpoint(f"{folder}/absent"), engine.load_checkpoint(empty)]
    os.makedirs(f"{folder}/logs/run", exist_ok=True)
    Path(folder, "logs", "notes.txt").write_text("no checkpoint")
    found.append(engine.load_checkpoint(f"{folder}/logs"))
    for nowhere in ("", None):
        with pytest.raises(UsageError, match=r"save_checkpoint\(save_dir\): expected a folder"):
            engine.save_checkpoint(nowhere)
    with pytest.raises(CheckpointError):
        engine.load_checkpoint(empty, tag="global_step1")  # an explicit tag claims that there is a checkpoint
    loss = engine(torch.ones(1, 4)).sum()
    returned = engine.backward(loss)
    engine.step()
    undivided = engine.backward(engine(torch.ones(1, 4)).sum(), scale_wrt_gas=False)
    assert returned.item() == loss.item() / 2
    assert undivided.item() == loss.item()
    engine.step()
    engine.save_checkpoint(f"{folder}/saved")
    path, state = engine.load_checkpoint(f"{folder}/saved")
    if torch.distributed.get_rank() == 0:
        os.remove(f"{folder}/saved/latest")
    torch.distributed.barrier()
    with pytest.raises(CheckpointError):
        engine.load_checkpoint(f"{folder}/saved")  # with tags, but without `latest`
    engine.destroy()
    return [*found, (path is not None, state)]


def test_a_folder_without_a_checkpoint_and_the_loss_that_is_returned(ranks: Ranks, tmp_path: Path) -> None:
    expected = [(None, None), (None, None), (None, None), (True, {})]
    assert ranks(2).run(with_facade, _resumes_if_there_is_something, str(tmp_path)) == [expected] * 2


def _clones() -> None:
    from deepspeed.checkpoint.utils import clone_tensors_for_torch_save

    part = torch.arange(6.0)[2:]
    copied = clone_tensors_for_torch_save({"a": part, "tied": part.detach(), "other": [part[1:]]})
    assert copied["a"] is copied["tied"]
    assert copied["a"].untyped_storage().nbytes() == 16
    assert copied["other"][0].tolist() == [3.0, 4.0, 5.0]
    assert copied["a"].data_ptr() != part.data_ptr()


def test_tied_weights_are_cloned_once(ranks: Ranks) -> None:
    ranks(1).run(with_facade, _clones)
