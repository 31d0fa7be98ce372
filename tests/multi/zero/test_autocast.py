"""`torch_autocast` of the config: the bits of a plain loop under torch.autocast, with every kind of sharding."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroaccel
from tests.support.pool import Ranks
from tests.support.training import ADAMW, SGD, Run, batches, config, differences, offloaded, train, train_step
from zeroaccel.errors import ConfigError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ALL_FP32 = {"lower_precision_safe_modules": []}


class Mixed(nn.Module):
    """Layers that autocast runs in 16 bits, in fp32 and in the input's dtype; two of them share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 61, bias=False)  # its name comes first
        self.embed = nn.Embedding(61, 16)
        self.embed.weight = self.head.weight
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 33), nn.Linear(33, 16)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2) * self.scale
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())


def _config(stage: int, dtype: str, autocast: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return config(stage, **changes) | {"torch_autocast": {"enabled": True, "dtype": dtype, **(autocast or {})}}


def _plain(dtype: str, optimizer: dict[str, Any], steps: int) -> Run:
    torch.manual_seed(7)
    model = Mixed()
    rule = getattr(torch.optim, optimizer["type"])(model.parameters(), **optimizer["params"])
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == "fp16")
    run = Run()
    for batch in batches(0, steps):
        with torch.autocast("cpu", dtype=DTYPES[dtype]):
            loss = model(batch)
        scaler.scale(loss).backward()
        scaler.step(rule)
        scaler.update()
        rule.zero_grad()
        run.losses.append(loss.item())
    return run


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=lambda one: one["type"])
def test_autocast_has_the_bits_of_a_plain_loop(optimizer: dict[str, Any], dtype: str, own_job: None) -> None:
    plain = _plain(dtype, optimizer, steps=6)
    expected = None if optimizer is ADAMW else plain.losses
    for stage, modules in ((0, None), (3, None), (3, ALL_FP32)):
        run = train(_config(stage, dtype, modules, optimizer=optimizer), steps=6, make=Mixed)
        expected = expected or run.losses
        assert run.losses == expected, (stage, modules)
    # torch's AdamW uses a vectorized square root, which some CPUs do not round to the nearest float.
    assert plain.losses == pytest.approx(expected, rel=1e-4)


def _runs(folder: str) -> dict[str, list[str]]:
    """Returns the differences from stage 0, by stage, tier and parallelism."""
    plans = {
        **{f"stage {stage}": _config(stage, "bf16") for stage in (1, 2, 3)},
        "cpu": _config(3, "bf16", **offloaded(Path(folder), "cpu", "cpu")),
        "nvme": _config(3, "bf16", **offloaded(Path(folder), "nvme", "nvme")),
        "fp16": _config(3, "fp16", **offloaded(Path(folder), "cpu")),
    }
    first = {dtype: train(_config(0, dtype), steps=4, make=Mixed) for dtype in DTYPES}
    return {
        name: differences(first[plan["torch_autocast"]["dtype"]], train(plan, steps=4, make=Mixed))
        for name, plan in plans.items()
    }


def test_the_placement_of_tensors_changes_no_bit(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks(2).run(_runs, str(tmp_path)):
        assert found == {name: [] for name in ("stage 1", "stage 2", "stage 3", "cpu", "nvme", "fp16")}


def _checkpoint_and_wrap(folder: str) -> dict[str, bool]:
    from zeroaccel.activations import checkpoint

    class Recomputing(Mixed):
        def forward(self, tokens: Tensor) -> Tensor:
            return checkpoint(super().forward, tokens)

    whole, again = (train(_config(3, "bf16"), steps=3, make=make) for make in (Mixed, Recomputing))
    torch.manual_seed(7)
    engine, *_ = zeroaccel.initialize(Mixed(), config=_config(3, "bf16"))
    batch = batches(engine.collectives.rank, 1)[0]
    train_step(engine, engine(batch))
    engine.save_checkpoint(folder, tag="one")
    engine.eval()
    with torch.no_grad():
        expected = engine(batch)
    other, *_ = zeroaccel.initialize(Mixed(), config=_config(1, "bf16", ALL_FP32))
    other.load_checkpoint(folder, tag="one")
    other.eval()
    with torch.no_grad():
        return {
            "recomputation": not differences(whole, again),
            "another stage, all parameters in fp32": torch.equal(other(batch), expected),
        }


def test_recomputation_and_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks(2).run(_checkpoint_and_wrap, str(tmp_path)):
        assert all(found.values()), found


def _pipeline(pp: int) -> tuple[list[float], list[torch.dtype]]:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))
    engine, *_ = zeroaccel.initialize(
        layers,
        config=_config(1, "bf16", gradient_accumulation_steps=2),
        parallel=zeroaccel.ParallelConfig(pp=pp),
        pipeline=zeroaccel.PipelineConfig(loss=nn.functional.mse_loss),
    )
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(2, 8, generator=generator), torch.randn(2, 2, generator=generator)) for _ in range(8)]
    losses = [float(engine.train_batch(iter(data[2 * step : 2 * step + 2]))) for step in range(4)]
    engine.destroy()
    return losses, [param.dtype for param in layers.parameters()]


def test_stages_of_a_pipeline_run_under_autocast(ranks: Ranks, own_job: None) -> None:
    one = _pipeline(1)
    two = ranks(2).run(_pipeline, 2)
    assert two[0][0] == two[1][0] == one[0]


def test_the_inner_model_runs_under_autocast_until_destroy(own_job: None) -> None:
    torch.manual_seed(7)
    model = Mixed()
    batch = batches(0, 1)[0]
    plain = model(batch)
    engine, *_ = zeroaccel.initialize(model, config=_config(0, "bf16"))
    assert {name for name, param in model.named_parameters() if param.dtype is torch.float32} == {
        "head.weight",  # also the embedding's weight
        "norm.weight",
        "norm.bias",
        "scale",
    }
    assert torch.equal(model(batch), engine(batch))
    assert not torch.equal(model(batch), plain)
    alike = copy.deepcopy(model.up)
    assert alike.weight.dtype is torch.bfloat16
    engine.destroy()
    assert "forward" not in vars(model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lower_precision_safe_modules": ["Linear"]}, "modules: expected the full name of a module class"),
        ({"lower_precision_safe_modules": ["torch.nn.Liner"]}, "got 'torch.nn.Liner'; correct it"),
        ({"lower_precision_safe_modules": ["os.system"]}, "got 'os.system'"),
    ],
)
def test_names_that_are_no_module_class_are_refused(settings: dict[str, Any], message: str, own_job: None) -> None:
    with pytest.raises(ConfigError, match=r"torch_autocast\.lower_precision_safe_") as caught:
        zeroaccel.initialize(Mixed(), config=_config(1, "bf16", settings))
    assert message in str(caught.value)
