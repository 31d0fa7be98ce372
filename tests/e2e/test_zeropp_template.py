"""The ZeRO++ template in a job of 4 processes that count as 2 nodes of 2."""

from __future__ import annotations

import json
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from tests.support.job import run_command

SCRIPT = """
import json, sys
import torch
from torch import nn
import zeroaccel
from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.recording import RecordingCollectives
from zeroaccel.comm.topology import current_topology, init_process_group

torch.set_num_threads(1)
torch.manual_seed(0)
init_process_group()
model = nn.Sequential(*(nn.Linear(96, 96) for _ in range(3)))
counting = RecordingCollectives(Collectives(current_topology()))
engine, *_ = zeroaccel.initialize(model, config=sys.argv[1], collectives=counting)
losses = []
for _ in range(8):
    engine.collectives.reset()
    torch.manual_seed(engine.collectives.rank)
    x = torch.randn(4, 96).bfloat16()
    loss = (engine(x).float() - x.float().flip(1)).square().mean()
    losses.append(loss.item())
    engine.backward(loss)
    engine.step()
sent = {f"{s.op}, {s.link}": s.nbytes for s in engine.collectives.traffic() if s.purpose in ("unshard", "reduce")}
if engine.collectives.rank == 0:
    print(json.dumps({"losses": losses, "sent": sent}))
engine.destroy()
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_the_template_as_two_pretended_nodes(tmp_path: Path) -> None:
    settings = json.loads(files("zeroaccel.templates").joinpath("zero_stage3_zeropp_bf16.json").read_text())
    settings |= {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0}
    settings["optimizer"]["params"] |= {"lr": 1e-3, "weight_decay": 0.01}
    settings["scheduler"]["params"] |= {"warmup_max_lr": 5e-3, "warmup_num_steps": 1, "total_num_steps": 100}
    zero = settings["zero_optimization"]
    assert zero["zero_quantized_weights"]
    assert zero["zero_quantized_gradients"]
    zero |= {"zero_hpz_partition_size": 2, "zeropp": {"node_size": 2}, "stage3_max_reuse_distance": 0}
    zero |= {"stage3_param_persistence_threshold": 0}
    (tmp_path / "ds_config.json").write_text(json.dumps(settings))
    (tmp_path / "train.py").write_text(SCRIPT)
    launch = [sys.executable, "-m", "zeroaccel.cli", "launch", "--num_processes", "4", "--cpu"]
    result = run_command([*launch, tmp_path / "train.py", tmp_path / "ds_config.json"], timeout=90.0)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["losses"][-1] < 0.9 * found["losses"][0]
    ops = {"all_gather int8, across", "all_gather int8, inside", "all_gather secondary, inside"}
    ops |= {"reduce_scatter int4, across", "reduce_scatter int4, inside"}
    assert set(found["sent"]) == ops
    numel = 3 * (96 * 96 + 96)
    across = found["sent"]["all_gather int8, across"] + found["sent"]["reduce_scatter int4, across"]
    assert across < 0.75 * 1.03 * 2 * numel / 2
