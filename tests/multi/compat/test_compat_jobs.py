"""Loaders, monitors, collectives and job setup under DeepSpeed's names, on real ranks.

docs/deepspeed_names.md lists where the facade differs from DeepSpeed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import time_limits
from tests.multi.compat.facade_engines import CONFIG, loss_of, make_engine, small_model, with_facade
from tests.support.pool import Ranks
from tests.support.training import train_step
from zeroaccel import compat

pytestmark = pytest.mark.usefixtures("ranks_without_libraries")


def _data_and_reports(folder: str) -> list[Any]:
    import deepspeed
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum

    csv = {"enabled": True, "output_path": folder, "job_name": "run"}
    model, data = small_model(), [torch.full((4,), float(index)) for index in range(8)]
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
        train_step(engine, engine(batch).square().mean())
        if index == 3:
            break
    engine.offload_states(include=[OffloadStateTypeEnum.optim_states], device=OffloadDeviceEnum.cpu)
    engine.reload_states()
    with engine.coalesce_grad_reduction():
        engine.backward(loss_of(engine))
    engine.step()
    assert not engine.is_compiled
    engine.destroy()
    return sorted(path.name for path in Path(folder).rglob("*.csv"))


def test_loaders_and_monitors(ranks: Ranks, tmp_path: Path) -> None:
    names = ranks(2).run(with_facade, _data_and_reports, str(tmp_path))
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
    """On the CPU, `device_count` is the number of ranks on the machine, which DeepSpeed takes from LOCAL_SIZE."""
    expected = [3.0, 3.0, [0, 1], [0.0, 0.0, 1.0, 1.0], [0.0, -1.0], ("dp",), 2]
    assert ranks(2).run(with_facade, _communication) == [expected] * 2


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
config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0}
config |= {"optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 3}}
engine, *_ = deepspeed.initialize(model=model, config=config)
loss = engine(torch.ones(1, 2)).sum()
engine.backward(loss)
engine.step()
print(deepspeed.comm.get_rank(), engine.world_size, engine.global_steps)
engine.destroy()
"""


def test_a_job_is_joined_by_its_address(tmp_path: Path) -> None:
    """Joins without any environment variable of a launcher, as DeepSpeed's own tests do."""
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


def _throughput() -> list[Any]:
    engine = make_engine()
    counts = []
    for step in range(6):
        if step == 2:
            engine.tput_timer.update_epoch_count()
        if step == 4:
            with torch.no_grad():
                engine.eval()(torch.ones(2, 4))
            engine.train()
        train_step(engine, engine(torch.ones(2, 4)).sum())
        timer = vars(engine).get("tput_timer")
        counts.append(None if timer is None else (timer.global_step_count, timer.micro_step_count))
    found = [*counts, engine.tput_timer.batch_size, engine.tput_timer.epoch_count]
    found.append(engine.tput_timer.avg_samples_per_sec() > 0)
    engine.destroy()
    return found


def test_throughput_is_counted_from_when_it_is_asked_for(ranks: Ranks) -> None:
    """Counts steps and micro-steps of training; before the first request nothing waits for the device."""
    expected = [None, None, (0, 1), (1, 2), (1, 3), (2, 4), 4, 1, True]
    assert ranks(1).run(with_facade, _throughput) == [expected]


def _first_line_and_private_names() -> dict[str, Any]:
    import io
    import logging

    import deepspeed
    from deepspeed.utils import logger

    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    try:
        engine = make_engine()
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


def test_the_first_line_and_what_private_names_say(ranks: Ranks) -> None:
    first, second = ranks(2).run(with_facade, _first_line_and_private_names)
    assert f"DeepSpeed info: version={compat.VERSION}, git-hash=" in first["lines"]
    assert "DeepSpeed info" not in second["lines"]
    assert first["present"] == [True] * 5
    assert not first["missing"]
    assert "get_global_grad_norm() returns the norm" in first["hints"]["_global_grad_norm"]
    assert "was_step_applied()" in first["hints"]["_step_applied"]
    assert "engine.save_checkpoint" in first["hints"]["_save_checkpoint"]
    assert "engine.config" in first["hints"]["_config"]
