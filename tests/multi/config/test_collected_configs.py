"""JSON configs of public projects (tests/data/collection): each trains two steps as a plain loop does, or is refused.

A project's config is for its own number of ranks; this test has one, so it drops a total batch size that contradicts
the other sizes, and paths of the project's machines. It fills "auto" as transformers' Trainer does.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroaccel
from tests.support.environment import ROOT
from tests.support.pool import Ranks
from zeroaccel.config import load_config
from zeroaccel.errors import ConfigError

_COLLECTION = ROOT / "tests" / "data" / "collection" / "deepspeed_configs.json"
_STEPS, _WIDTH, _MOST_SAMPLES = 2, 8, 16
_FILLED: dict[str, Any] = {
    "enabled": True,
    "lr": 1e-3,
    "betas": [0.9, 0.999],
    "eps": 1e-8,
    "weight_decay": 0.0,
    "warmup_min_lr": 0.0,
    "warmup_max_lr": 1e-3,
    "warmup_num_steps": 2,
    "total_num_steps": 10,
    "gradient_clipping": 1.0,
    "gradient_accumulation_steps": 1,
    "train_micro_batch_size_per_gpu": 2,
}
_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 5e-3}


def _collected() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(_COLLECTION.read_text())
    return entries


def _filled(settings: dict[str, Any], folder: str) -> dict[str, Any]:
    """Returns the config for a job of one rank; values that depend on the model ("auto" bucket sizes) stay "auto"."""
    config = copy.deepcopy(settings)
    config = _without_auto(config)
    sizes = [config.get(name) for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")]
    if config.get("train_batch_size") == "auto" or all(sizes) or sizes[0]:
        config.pop("train_batch_size", None)
    if config.get("train_batch_size") is None:
        config.setdefault("train_micro_batch_size_per_gpu", 2)
    if isinstance(config.get("bf16"), dict) and config["bf16"].get("enabled") and isinstance(config.get("fp16"), dict):
        config["fp16"]["enabled"] = False  # "auto" for both: Trainer's --bf16
    if "compile" in config:
        config["compile"]["backend"] = "eager"  # other backends need a compiler on the machine
    zero = config.get("zero_optimization")
    if isinstance(zero, dict):
        for name in ("offload_optimizer", "offload_param"):
            if isinstance(zero.get(name), dict) and zero[name].get("device") == "nvme":
                zero[name]["nvme_path"] = folder
        if "zero_hpz_partition_size" in zero:
            zero["zero_hpz_partition_size"] = 1
    return config


def _without_auto(section: dict[str, Any]) -> dict[str, Any]:
    filled: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, dict):
            filled[key] = _without_auto(value)
        else:
            filled[key] = _FILLED.get(key, "auto") if value == "auto" else value
    return filled


def _network() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, 4)
    )


def _batches(count: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(11)
    return [torch.randn(min(size, _MOST_SAMPLES), _WIDTH).to(dtype) for _ in range(count)]


def _loss(model: Callable[[torch.Tensor], torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
    return model(batch).float().square().mean()


class _PlainAdam:
    """Adam with decoupled decay (arXiv:1711.05101), written out; `bias_correction` as in DeepSpeed."""

    def __init__(self, parameters: list[nn.Parameter], section: dict[str, Any] | None) -> None:
        settings = {"weight_decay": 0.01} if section is None else section.get("params", {})
        self.parameters = parameters
        self.betas, self.eps = settings.get("betas", [0.9, 0.999]), settings.get("eps", 1e-8)
        decoupled = section is None or section["type"] == "AdamW"
        self.decay = settings.get("weight_decay", 0.01 if decoupled else 0.0)
        self.corrects = settings.get("bias_correction", True)
        self.moments = [(torch.zeros_like(one), torch.zeros_like(one)) for one in parameters]
        self.steps = 0

    @torch.no_grad()
    def step(self, rate: float) -> None:
        self.steps += 1
        powers = [1 - beta**self.steps for beta in self.betas] if self.corrects else [1.0, 1.0]
        for weight, (mean, square) in zip(self.parameters, self.moments, strict=True):
            assert weight.grad is not None
            mean.lerp_(weight.grad, 1 - self.betas[0])
            square.lerp_(weight.grad.square(), 1 - self.betas[1])
            weight.mul_(1 - rate * self.decay)
            weight.sub_(rate * (mean / powers[0]) / ((square / powers[1]).sqrt() + self.eps))


def _differences(entry: dict[str, Any], folder: str) -> str:
    """Trains by the config and by a plain loop; returns the differences, or the empty string."""
    config = _filled(entry["settings"], folder)
    section = config.get("optimizer")
    model, plain = _network(), _network()
    optimizer = None if section else torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = zeroaccel.initialize(
        model, optimizer, config=config, unknown_keys=entry.get("unknown_keys", "standard")
    )
    settings, loaded = engine.settings, load_config(config, unknown_keys="lenient")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[loaded.precision]
    masters = _PlainAdam(list(plain.parameters()), section)
    found = []
    for step in range(_STEPS):
        skipped = engine.skipped_steps
        for batch in _batches(settings.accumulation, settings.micro_batch_size, dtype):
            rounded = copy.deepcopy(plain).to(dtype)
            loss, expected = _loss(engine, batch), _loss(rounded, batch)
            if abs(loss.item() - expected.item()) > _TOLERANCE[dtype] * abs(expected.item()):
                found.append(f"loss {loss.item()} instead of {expected.item()} in step {step}")
            (expected / settings.accumulation).backward()
            for weight, half in zip(plain.parameters(), rounded.parameters(), strict=True):
                assert half.grad is not None
                weight.grad = half.grad.float() + (0 if weight.grad is None else weight.grad)
            engine.backward(loss)
            rate = engine.get_lr()[0]
            engine.step()
        if loaded.gradient_clipping:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), loaded.gradient_clipping)
        if engine.skipped_steps == skipped:  # the first steps of fp16 may only lower the loss scale
            masters.step(rate)
        plain.zero_grad()
    if engine.global_steps != _STEPS:
        found.append(f"{engine.global_steps} steps")
    engine.destroy()
    return "; ".join(found)


def _train(entries: list[dict[str, Any]], folder: str) -> list[str]:
    outcomes = []
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")  # torch's tracer triggers it
    for entry in entries:
        try:
            outcomes.append(_differences(entry, folder))
        except Exception as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    return outcomes


# A config with tensor parallelism needs several ranks and named layers: `test_tensor_parallel.py` trains it.
_TRAINING = [entry for entry in _collected() if "refused" not in entry and "tensor_parallel" not in entry["settings"]]


def test_configs_train_as_a_plain_loop_does(ranks: Ranks, tmp_path: Path) -> None:
    (outcomes,) = ranks(1).run(_train, _TRAINING, str(tmp_path))
    failed = {entry["source"]: text for entry, text in zip(_TRAINING, outcomes, strict=True) if text}
    assert failed == {}


@pytest.mark.parametrize("entry", [one for one in _collected() if "refused" in one], ids=lambda one: one["source"])
def test_configs_that_would_train_otherwise_are_refused_with_the_place(entry: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(_filled(entry["settings"], str(tmp_path)))
    for key in entry["refused"]:
        assert key in str(caught.value)


def test_nearly_all_that_deepspeed_trains_is_trained() -> None:
    accepted = [entry for entry in _collected() if entry["deepspeed"]["0.19.8"] == "trains"]
    trained = [entry for entry in accepted if "refused" not in entry]
    assert len(accepted) >= 60
    assert len(trained) >= 0.98 * len(accepted), [one["source"] for one in accepted if "refused" in one]


def test_the_collection_is_large_and_says_where_it_is_from() -> None:
    entries = _collected()
    assert len(entries) >= 80
    assert len({json.dumps(entry["settings"], sort_keys=True) for entry in entries}) == len(entries)
    assert len({entry["source"].partition(" ")[0] for entry in entries}) >= 20
    assert all("/" in entry["source"].partition(" ")[0] and entry["source"].endswith(".json") for entry in entries)
