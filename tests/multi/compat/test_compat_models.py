"""`zero.Init`, leaf modules and the parameters of a sharded model under DeepSpeed's names, on real ranks.

docs/deepspeed_names.md lists where the facade differs from DeepSpeed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.multi.compat.facade_engines import CONFIG, loss_of, make_engine, small_model, with_facade
from tests.support.pool import Ranks
from tests.support.training import train_step
from zeroaccel.errors import UsageError

pytestmark = pytest.mark.usefixtures("ranks_without_libraries")


def _unwrapped() -> tuple[list[bool], bool, list[bool]]:
    from deepspeed.runtime.zero import ZeroParamStatus, unwrap_model_for_generation

    engine = make_engine(3, zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0})
    weights = [param for param in engine.module.parameters() if param.dim() > 1]
    with unwrap_model_for_generation(engine) as unwrapped:
        whole = [weight.ds_status is ZeroParamStatus.AVAILABLE for weight in weights]
        same = unwrapped is engine
    after = [weight.ds_status is ZeroParamStatus.AVAILABLE for weight in weights]
    for _ in range(2):  # and training continues
        train_step(engine, engine(torch.ones(2, 4)).sum())
    engine.destroy()
    return whole, same, after


def test_unwrapping_for_generation_gathers_all_parameters(ranks: Ranks) -> None:
    assert ranks(2).run(with_facade, _unwrapped) == [([True] * 3, True, [False] * 3)] * 2


def _init_members(precision: str) -> list[Any]:
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    config = {**CONFIG, "zero_optimization": {"stage": 3}, precision: {"enabled": True}}
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = small_model()
    weight = model[0].weight  # type: ignore[index]
    found = [str(weight.dtype), weight.ds_numel, tuple(weight.ds_shape), isinstance(weight.ds_status, ZeroParamStatus)]
    assert len({param.ds_id for param in model.parameters()}) == 6
    if torch.distributed.get_world_size() == 1:
        assert torch.equal(weight.ds_tensor, weight.detach().flatten())
        with deepspeed.zero.Init(module=small_model()):
            pass
    engine, *_ = deepspeed.initialize(model=model, config=config)
    assert weight.ds_numel == 24
    engine.destroy()
    assert not hasattr(nn.Parameter(torch.zeros(1)), "ds_id")
    return found


def test_parameters_of_init_have_all_bits_and_members_on_any_number_of_ranks(ranks: Ranks) -> None:
    for world_size in (1, 2):
        for precision in ("bf16", "fp16"):
            results = ranks(world_size).run(with_facade, _init_members, precision)
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

    model = small_model()
    section = {"stage": 3, "leaf_module": {"names": ["1"]}}
    engine, *_ = deepspeed.initialize(model=model, config={**CONFIG, "zero_optimization": section})
    inner = model[1]  # type: ignore[index]
    assert get_z3_leaf_modules(model) == [inner]
    assert [z3_leaf_parameter(param) for param in model.parameters()] == [False] * 2 + [True] * 2 + [False] * 2
    engine.destroy()

    model = small_model()
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
    engine, *_ = deepspeed.initialize(model=model, config=path)  # marks also count beside a config file
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
        train_step(engine, engine(torch.ones(2, 4)).square().mean())
    names = [unit.name for unit in engine.units]
    engine.destroy()
    return names


def test_a_whole_model_may_be_a_leaf(ranks: Ranks) -> None:
    """Ranks may then run different parts of the model."""
    assert ranks(2).run(with_facade, _one_part_per_rank) == [["root"], ["root"]]


def test_leaf_modules_are_marked_by_config_and_calls(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    section = {"stage": 3, "stage3_param_persistence_threshold": 0}
    path.write_text(json.dumps({**CONFIG, "zero_optimization": section}))
    names = ranks(2).run(with_facade, _leaf_marks, str(path))
    assert names[0] == names[1]
    assert "1" in names[0]


def _state_dict_of_rank_0() -> dict[str, tuple[int, ...]] | None:
    engine = make_engine(3, zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 3})
    shapes = None
    if torch.distributed.get_rank() == 0:  # no collective, so no rank waits for another
        state = engine.module.state_dict(prefix="model.")
        shapes = {name: tuple(value.shape) for name, value in state.items()}
        with pytest.raises(RuntimeError, match="size mismatch"):
            small_model().load_state_dict({name.removeprefix("model."): value for name, value in state.items()})
    with _gathered(engine.module):
        whole = engine.module.state_dict()
    assert all(torch.equal(whole[name], value) for name, value in small_model().state_dict().items())
    engine.destroy()
    return shapes


def _gathered(model: nn.Module) -> Any:
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(model.parameters()))


def _writes_without_a_rank(persistent_numel: int) -> tuple[list[bool], bool, str]:
    """Merges and unmerges adapters as PEFT does, DoRA's with other tensors; rank 1 writes more than rank 0."""
    section = {"stage": 3, "stage3_param_persistence_threshold": persistent_numel}
    engine = make_engine(3, zero_optimization=section)
    model, kept = engine.module, []
    with _gathered(model):
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
    for how in ("in place", "other tensors", "on one rank"):
        with _gathered(model):
            for name, param in model.named_parameters():
                if how == "in place":
                    param.data += 1
                elif how == "other tensors":
                    param.data = param.data + 1
                elif engine.global_rank == 1 and name.endswith("bias"):
                    param.data.zero_()
        with _gathered(model):
            kept.append(all(torch.equal(param, before[name]) for name, param in model.named_parameters()))
    loss = loss_of(engine)
    train_step(engine, loss)
    plain = make_engine(3, zero_optimization=section)
    expected = loss_of(plain)
    plain.destroy()
    engine.destroy()
    refused = make_engine(2)
    with (
        pytest.raises(UsageError, match=r"0\.weight.* written without a modifier_rank") as caught,
        _gathered(refused.module),
    ):
        next(refused.module.parameters()).data += 1
    return kept, torch.equal(loss, expected), str(caught.value)


@pytest.mark.parametrize("persistent_numel", [0, 10_000], ids=["sharded", "persistent"])
def test_writes_without_a_modifier_rank_are_undone_at_stage_3(ranks: Ranks, persistent_numel: int) -> None:
    """At other stages they remain an error: nothing is gathered there, and a write would stay on its rank."""
    for kept, equal, said in ranks(2).run(with_facade, _writes_without_a_rank, persistent_numel):
        assert kept == [True, True, True]
        assert equal
        assert "modifier_rank=0" in said


def test_a_state_dict_at_stage_3_on_one_rank_has_no_elements(ranks: Ranks) -> None:
    shapes, _ = ranks(2).run(with_facade, _state_dict_of_rank_0)
    assert shapes == {f"model.{name}": (2,) if name == "2.bias" else (0,) for name in small_model().state_dict()}
