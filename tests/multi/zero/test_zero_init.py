"""Models sharded during construction train like models that are built unsharded."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zeroaccel
from tests.support.pool import Ranks
from tests.support.refusals import message
from tests.support.training import SGD, WIDTH, Run, Toy, batches, config, differences, finished, train_step
from zeroaccel import zero
from zeroaccel.comm.recording import RecordingCollectives
from zeroaccel.errors import EngineStateError, UsageError
from zeroaccel.zero.access.param_registry import handle_of


class Elaborate(Toy):
    """A constructor that uses parameters it has made: initializes, computes, ties, replaces."""

    def __init__(self, layers: int = 3, width: int = WIDTH) -> None:
        super().__init__(layers, width)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.2)
                if module.bias is not None:
                    module.bias.data.fill_(0.1)
        with torch.no_grad():
            self.layers[0].up.weight.mul_(0.5)
            self.layers[1].norm.weight.copy_(self.layers[2].norm.weight * 2)
            self.start = float(self.layers[1].up(torch.ones(1, width)).sum())
        self.layers[2].down.bias.data = torch.full((width,), 0.25)
        self.layers[0].up.bias = nn.Parameter(torch.full((2 * width + 1,), 0.125))


class LateParameter(nn.Module):
    """Replaces a parameter of a submodule after registering the submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Module()
        self.part.weight = nn.Parameter(torch.randn(7, 5))


def train(engine: Any) -> Run:
    run = Run()
    for batch in batches(engine.collectives.rank, 3):
        run.losses.append(train_step(engine, engine(batch)))
        run.norms.append(engine.get_global_grad_norm())
    return finished(engine, run)


def full_elements(model: nn.Module) -> int:
    """Returns the number of parameter elements in this rank's memory."""
    found = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() // p.element_size() for p in model.parameters()}
    return sum(found.values())


def _same(stage: int, precision: str, how: str, folder: str) -> Run:
    rank = torch.distributed.get_rank()
    torch.manual_seed(7 + rank)  # the values of rank 0 are used
    settings = config(stage, precision, optimizer=SGD)
    if how == "plain":
        model = Elaborate()
    else:
        device: Any = how if how in ("cpu", "nvme") else None
        with zero.Init(remote_device=device, nvme_path=folder if how == "nvme" else None):
            model = Elaborate()
        assert all(handle_of(param) is not None for param in model.parameters())
        assert handle_of(model.layers[1].up.weight).slot.fqn == "layers.1.up.weight"  # type: ignore[union-attr]
        read = model.layers[1].up.weight.norm()
        if how == "nvme":
            assert list(Path(folder).iterdir()) == []  # unlinked files vanish with the process
        with zero.GatheredParameters(model.parameters()):
            assert model.layers[2].down.bias[0].item() == 0.25
            assert torch.equal(read, model.layers[1].up.weight.norm())
            starts = model.layers[1].up(torch.ones(1, WIDTH)).sum().item()
        assert rank or starts == model.start
    assert model.head.weight is model.embed.weight
    engine, *_ = zeroaccel.initialize(model, config=settings)
    return train(engine)


@pytest.mark.parametrize(("stage", "precision"), [(3, "fp32"), (3, "bf16"), (1, "bf16")])
def test_training_equals_that_of_a_model_built_unsharded(
    ranks: Ranks, stage: int, precision: str, tmp_path: Path
) -> None:
    expected = ranks(2).run(_same, stage, precision, "plain", "")
    for how in ("init", "cpu", "nvme") if (stage, precision) == (3, "bf16") else ("init",):
        found = ranks(2).run(_same, stage, precision, how, str(tmp_path))
        assert [differences(*pair) for pair in zip(expected, found, strict=True)] == [[], []], how


def _in_groups(how: str, sharded: bool) -> Run:
    torch.manual_seed(7 + int(os.environ["RANK"]))
    keys = {"mics": {"mics_shard_size": 2}, "second copy": {"zero_hpz_partition_size": 2}}.get(how, {})
    settings = config(3, "bf16", optimizer=SGD, **keys)
    with zero.Init(enabled=sharded, config_dict_or_path=settings, dtype=torch.float32):
        model = Elaborate()
    mesh = init_device_mesh("cpu", (2, 2)) if how == "mesh" else None
    return train(zeroaccel.initialize(model, config=settings, mesh=mesh)[0])


@pytest.mark.parametrize("how", ["mics", "second copy", "mesh"])
def test_the_engine_may_shard_in_smaller_groups(ranks: Ranks, how: str) -> None:
    expected, found = (ranks(4).run(_in_groups, how, sharded) for sharded in (False, True))
    assert [differences(*pair) for pair in zip(expected, found, strict=True)] == [[]] * 4


def _sizes() -> None:
    """Sharded sizes with nested contexts, dtypes, existing models, and modules without a parent."""
    with zero.Init(dtype=torch.bfloat16):
        model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
        with zero.Init(dtype=torch.float32):
            inner = LateParameter()
        with zero.Init(enabled=False):
            outer = nn.Linear(3, 3)
        loose = nn.Linear(64, 64)  # belongs to no other module
        with torch.device("meta"):
            meta = nn.Linear(4, 4)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16} == {p.dtype for p in outer.parameters()}
    assert inner.part.weight.dtype is torch.float32
    assert model[0].weight.shape == (512, 512)
    assert full_elements(model) <= 8
    assert handle_of(loose.weight) is not None
    assert meta.weight.is_meta
    held = sum(b.shard.range.numel for b in {handle_of(p).buffer for p in model.parameters()})  # type: ignore[union-attr]
    assert held <= 2 * (512 * 512 + 512) // 2 + 4 * 64
    there = nn.Linear(16, 16)
    values = there.weight.detach().clone()
    zero.Init(there)
    there.weight.data.mul_(2)
    with zero.GatheredParameters(there.weight):
        assert torch.equal(there.weight, 2 * values)
    with zero.GatheredParameters(model[0].weight, modifier_rank=1), torch.no_grad():
        model[0].weight.fill_(float(torch.distributed.get_rank()))
    assert float(zero.safe_get_full_fp32_param(model[0].weight).sum()) == 512 * 512  # type: ignore[union-attr]
    kept = handle_of(loose.weight).registry  # type: ignore[union-attr]
    before = len(kept.units)
    zeroaccel.initialize(loose, config=config(3))[0].destroy()
    assert len(kept.units) == before - 1  # its shards are freed


def test_each_rank_holds_its_part_of_every_model(ranks: Ranks) -> None:
    ranks(2).run(_sizes)


def _undone() -> list[str]:
    """Exits remove every hook, also after an error; and each unsupported use raises an error."""
    hooks = [
        nn.modules.module._global_module_registration_hooks,
        nn.modules.module._global_parameter_registration_hooks,
    ]
    with pytest.raises(ZeroDivisionError), zero.Init(), zero.Init():
        nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3 // 0))
    assert [len(table) for table in hooks] == [0, 0]
    assert torch.overrides._get_current_function_mode() is None
    assert handle_of(nn.Sequential(nn.Linear(3, 3))[0].weight) is None
    found = []

    def attempt(error: type[Exception], action: Callable[[], object]) -> None:
        found.append(message(error, action))

    with zero.Init():
        model = nn.Sequential(nn.Linear(5, 5))
    attempt(EngineStateError, lambda: __import__("pickle").dumps(model))
    with zero.GatheredParameters(model.parameters()):
        expected = model(torch.ones(1, 5))
        assert torch.equal(copy.deepcopy(model)(torch.ones(1, 5)), expected)
    copied = copy.deepcopy(model)
    assert full_elements(copied) <= 2
    for one in (copied, model):
        assert torch.equal(one(torch.ones(1, 5)), expected)
    attempt(UsageError, lambda: nn.parallel.DistributedDataParallel(model))
    attempt(UsageError, lambda: nn.parallel.DistributedDataParallel(model, init_sync=False))
    copied(torch.ones(1, 5)).sum().backward()
    for optimizer in (torch.optim.SGD(copied.parameters(), lr=0.1), torch.optim.AdamW(copied.parameters())):
        attempt(UsageError, optimizer.step)
    early = model[0].weight.data
    attempt(UsageError, lambda: zero.Init(dtype=torch.int32))
    attempt(UsageError, lambda: zero.Init(remote_device="tape"))  # type: ignore[arg-type]
    attempt(UsageError, lambda: zero.Init(remote_device="nvme"))
    first, *_ = zeroaccel.initialize(model, config=config(3))
    attempt(EngineStateError, early.sum)
    attempt(UsageError, lambda: zeroaccel.initialize(model, config=config(3)))
    first.destroy()
    second, *_ = zeroaccel.initialize(model, config=config(3))  # the model of a destroyed engine
    with zero.Init():
        other = nn.Linear(4, 4)  # while an engine exists
    second(torch.ones(1, 5))
    second.destroy()
    zeroaccel.initialize(other, config=config(3))[0].destroy()
    return found


def test_exits_undo_everything_and_mistakes_are_named(ranks: Ranks) -> None:
    for found in ranks(2).run(_undone):
        pickled, *wrapped, sgd, adamw, dtype, device, nvme, early, twice = found
        assert "parameter 0.weight: expected no read of its values while it is sharded" in pickled
        assert len(wrapped) == 2
        for error in wrapped:
            assert "DistributedDataParallel, parameter 0.weight: expected a model whose parameters are whole" in error
            assert "accelerate wraps it if ACCELERATE_USE_CPU or cpu=True is set" in error
        for error in (sgd, adamw):
            assert "optimizer.step(), parameter " in error
            assert "expected an engine, which sums the gradients of all ranks" in error
        assert "a view of parameter 0.weight: expected a view that was made of the parameter as it is" in early
        assert "read param.data or state_dict() again" in early
        assert "a floating-point torch.dtype" in dtype
        assert "'tape'" in device
        assert "nvme_path" in nvme
        assert "a parameter of another engine'; call destroy() of that engine first" in twice


def _alone() -> list[Tensor]:
    with zero.Init(dtype=torch.bfloat16):
        model = nn.Sequential(nn.Linear(4, 4))
    assert handle_of(model[0].weight) is None
    assert bool(model[0].weight.isfinite().all())
    return [param.detach() for param in model.parameters()]


def test_one_rank_only_casts(ranks: Ranks) -> None:
    (values,) = ranks(1).run(_alone)
    assert {value.dtype for value in values} == {torch.bfloat16}


def _assigned() -> bool:
    with zero.Init(config_dict_or_path=config(3)):
        model = nn.Linear(4, 6)
    whole, other = model.weight.data.clone(), torch.zeros(6, 4)
    other[:3, :], other[3:, :] = model.weight.data[:3, :], model.weight.data[3:, :]
    return handle_of(model.weight) is not None and torch.equal(other, whole)


def test_another_tensor_gets_the_values_by_index(ranks: Ranks) -> None:
    """As transformers resizes the embeddings of a quantized base."""
    assert ranks(2).run(_assigned) == [True, True]


def _traffic() -> list[str]:
    """initialize() does not send values again that are already equal on all ranks."""
    zeroaccel.comm.topology.init_process_group()
    collectives = RecordingCollectives(
        zeroaccel.comm.collectives.Collectives(zeroaccel.comm.topology.current_topology())
    )
    with zero.Init(collectives=collectives):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    collectives.calls.clear()
    model[1].weight.sum()
    assert [call.label for call in collectives.calls] == ["unshard 1"]  # a hang's report shows it
    engine, *_ = zeroaccel.initialize(model, config=config(3), collectives=collectives)
    engine.destroy()
    return [call.label for call in collectives.calls if "initial weights" in call.label]


def test_initialize_does_not_send_them_again(ranks: Ranks) -> None:
    assert ranks(2).run(_traffic) == [[], []]
