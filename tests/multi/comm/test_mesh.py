"""Process groups of a device mesh: replicated shards, and ZeRO on one axis with tensor parallelism on the other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zeroaccel
from tests.support.log_lines import log_lines
from tests.support.pool import Ranks
from tests.support.refusals import message
from tests.support.training import SGD, Run, config, differences, train, train_step
from zeroaccel import zero
from zeroaccel.comm.hierarchical import HierarchicalCollectives
from zeroaccel.comm.topology import init_process_group
from zeroaccel.errors import UsageError

WIDTH = 24


class Layer(nn.Module):
    """Two linear layers that tensor parallelism splits by columns and by rows, and a norm that stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def _mesh(*sizes: int) -> DeviceMesh:
    init_process_group()
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[: len(sizes)])


def _cut(model: Network, mesh: DeviceMesh) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _run(settings: Mapping[str, Any], dp: int, tp: int, dtype: torch.dtype) -> Run:
    """Trains six steps; with tp=1 each rank has the full model. Data-parallel rank d gets batch d."""
    mesh = _mesh(dp, tp)
    torch.manual_seed(7)
    model = Network().to(dtype)
    if tp > 1:
        _cut(model, mesh["tp"])
    engine, *_ = zeroaccel.initialize(model, config=dict(settings), mesh=mesh["dp"])
    assert engine.collectives.world_size == dp
    run = Run()
    for step in range(6):
        generator = torch.Generator().manual_seed(100 * step + engine.collectives.rank)
        run.losses.append(train_step(engine, engine(torch.randn(4, WIDTH, generator=generator).to(dtype))))
        run.norms.append(engine.get_global_grad_norm())
    engine.destroy()
    for name, param in model.named_parameters():
        whole = param.full_tensor() if hasattr(param, "full_tensor") else param
        run.weights[name] = whole.detach().clone()
    return run


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_zero_with_tensor_parallelism(ranks: Ranks, precision: str, dtype: torch.dtype) -> None:
    """The same bits at every stage, and the same training as without tensor parallelism."""
    clipped = {"gradient_clipping": 0.05, "optimizer": SGD}
    settings = [config(stage, precision, **clipped) for stage in (0, 2, 3)]
    settings.append(config(3, precision, **clipped, zero_hpz_partition_size=2, stage3_max_reuse_distance=0))
    whole = ranks(2).run(_run, config(3, precision, **clipped), 2, 1, dtype)
    runs = [ranks(4).run(_run, setting, 2, 2, dtype) for setting in settings]
    for other in runs[1:]:
        assert [differences(a, b) for a, b in zip(runs[0], other, strict=True)] == [[]] * 4
    tolerance = 1e-4 if dtype is torch.float32 else 3e-2
    for rank, run in enumerate(runs[2]):
        plain = whole[rank // 2]
        assert run.losses == pytest.approx(plain.losses, rel=tolerance)
        # Each element counts once, whether tensor parallelism splits or replicates its parameter.
        assert run.norms == pytest.approx(plain.norms, rel=tolerance)
        assert plain.norms[0] is not None
        assert plain.norms[0] > 0.1
        for name, weight in plain.weights.items():
            assert torch.allclose(run.weights[name].float(), weight.float(), atol=tolerance), name


def _reads_of_dtensors() -> list[str]:
    mesh = _mesh(2, 2)
    model = Network()
    _cut(model, mesh["tp"])
    engine, *_ = zeroaccel.initialize(model, config=config(3), mesh=mesh["dp"])
    weight: Any = model.layers[1].up.weight
    reads: tuple[Callable[[], object], ...] = (
        lambda: weight.square().sum(),
        lambda: weight.data.mul(2),
        lambda: weight.detach().add_(1),
        lambda: weight.to_local(),
        lambda: weight.full_tensor(),
        lambda: copy.deepcopy(weight),
    )
    said = [message(zeroaccel.errors.EngineStateError, read) for read in reads]
    with zero.GatheredParameters(weight):
        assert type(weight.full_tensor()) is Tensor
        assert weight.full_tensor().isfinite().all()
    engine.destroy()
    return said


def test_reads_of_sharded_dtensors_are_named(ranks: Ranks) -> None:
    for said in ranks(4).run(_reads_of_dtensors):
        assert all(line.startswith("parameter layers.1.up.weight: expected no ") for line in said)
        called = ["square", "mul", "add_", "to_local", "full_tensor", "deepcopy"]
        assert [line.partition(", got ")[2].split("'")[1] for line in said] == called


def _replicated(sizes: tuple[int, ...]) -> tuple[Run, int]:
    shard_size = 0

    def look(engine: Any) -> None:
        nonlocal shard_size
        assert isinstance(engine.collectives, HierarchicalCollectives)
        shard_size = engine.collectives.shard_world_size

    return train(config(3, "bf16"), steps=5, before=look, mesh=_mesh(*sizes)), shard_size


def _plain() -> Run:
    return train(config(3, "bf16"), steps=5)


def test_two_axes_are_replicas_and_shards(ranks: Ranks) -> None:
    plain = ranks(4).run(_plain)
    for sizes in ((2, 2), (4, 1), (1, 4), (4,)):
        for rank, (run, shard_size) in enumerate(ranks(4).run(_replicated, sizes)):
            assert differences(plain[rank], run) == []
            assert shard_size == sizes[-1]


def _saved(folder: str) -> list[str]:
    mesh = _mesh(2, 2)
    model = Network()
    _cut(model, mesh["tp"])
    with log_lines() as said:
        engine, *_ = zeroaccel.initialize(model, config=config(3, "fp32"), mesh=mesh["dp"])
    told = [line for line in said if "save_checkpoint() and the other calls" in line]
    calls = (engine.save_checkpoint, engine.load_checkpoint, engine.save_16bit_model)
    told += [message(zeroaccel.errors.EngineStateError, call, folder) for call in calls]
    engine.destroy()
    return told


def test_checkpoints_of_a_divided_model_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    for early, *told in ranks(4).run(_saved, str(tmp_path)):
        assert "iter_named_full_params" in early  # before any training
        assert [line.partition("(")[0] for line in told] == [
            "engine.save_checkpoint",
            "engine.load_checkpoint",
            "engine.save_16bit_model",
        ]
        assert all("divided on another axis of the mesh (2 of the job's 4 ranks" in line for line in told)


def _mistaken(what: str) -> str:
    mesh = _mesh(2, 2)
    model: nn.Module = Network()
    settings = config(3, "fp32")
    if what == "half":
        mesh = DeviceMesh("cpu", [0, 1], _init_backend=False)  # two ranks are left out
    elif what == "key":
        settings = config(3, "fp32", mics_shard_size=4)
    elif what == "dtype":
        _cut(model, mesh["tp"])  # type: ignore[arg-type]
        mesh, settings = mesh["dp"], config(3, "bf16")
    elif what == "divisor":
        mesh, settings = mesh["dp"], config(3, "fp32", mics_shard_size=4)
    try:
        zeroaccel.initialize(model, config=settings, mesh=mesh)
    except zeroaccel.errors.ZeroAccelError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it was taken")


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("half", "UsageError: initialize(mesh): expected one or two axes that put each of the 4 ranks in one group"),
        ("key", "zero_optimization.mics_shard_size: expected 2, the size of the mesh's second axis, got 4"),
        ("dtype", "layers.0.up.weight, a DTensor: expected torch.bfloat16, from the config's precision"),
        ("divisor", "zero_optimization.mics_shard_size: expected a divisor of the 2 ranks: 1, 2, got 4"),
    ],
)
def test_meshes_that_do_not_fit_are_named(ranks: Ranks, what: str, says: str) -> None:
    for said in ranks(4).run(_mistaken, what):
        assert says in said


def _another_rate(sizes: tuple[int, ...]) -> str:
    """Sets another rate on the last of four ranks; with a second axis, rank 0 is in a different group."""
    mesh = _mesh(*sizes)
    engine, *_ = zeroaccel.initialize(Network(), config=config(3), mesh=mesh["dp"])
    if torch.distributed.get_rank() == 3:
        engine.optimizer.param_groups[0]["lr"] = 7
    engine.backward(engine(torch.ones(4, WIDTH)))
    said = message(UsageError, engine.step)
    engine.destroy()
    return said


@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
def test_param_groups_are_compared_over_all_ranks_of_the_job(ranks: Ranks, sizes: tuple[int, ...]) -> None:
    for said in ranks(4).run(_another_rate, sizes):
        assert said.startswith("step 0: optimizer.param_groups[0]['lr'] is 0.01 on ranks 0-2 and 7 on rank 3: ")
