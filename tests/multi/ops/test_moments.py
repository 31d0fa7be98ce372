"""Moments in fewer bits: configured in the engine, saved, resharded, and resumed in another format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zeroaccel
from tests.support.checkpoint_runs import assembled, snapshot, train
from tests.support.pool import Ranks
from tests.support.refusals import message
from tests.support.training import Toy, batches, config, differences
from tests.support.training import train as train_toy
from zeroaccel.engine import Engine
from zeroaccel.errors import ConfigError, UsageError
from zeroaccel.zero.access.safe_get_set import safe_get_full_optimizer_state


def _engine(stage: int, moments: str, seed: int = 7) -> Engine:
    torch.manual_seed(seed)
    section = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "moments_dtype": moments}}
    engine, *_ = zeroaccel.initialize(Toy(), config=config(stage, "bf16", optimizer=section))
    return engine


def _save(folder: Path, stage: int, moments: str) -> Any:
    engine = _engine(stage, moments)
    train(engine, batches(0, 3))
    engine.save_checkpoint(folder, tag=moments)
    return snapshot(engine, {})


def _resume(folder: Path, tag: str, stage: int, moments: str) -> Any:
    engine = _engine(stage, moments, seed=11)
    engine.load_checkpoint(folder, tag=tag)
    return snapshot(engine, {})


@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_moments_are_resharded_bit_by_bit_and_load_into_float32(ranks: Ranks, tmp_path: Path, moments: str) -> None:
    saved = ranks(2).run(_save, tmp_path, 2, moments)
    for world_size, stage in ((1, 0), (2, 3)):
        resumed = ranks(world_size).run(_resume, tmp_path, moments, stage, moments)
        assert resumed[0].losses == saved[0].losses, (world_size, stage)
        expected, got = assembled(saved), assembled(resumed)
        assert [key for key in expected if not torch.equal(expected[key], got[key])] == [], (world_size, stage)
        assert all(torch.equal(resumed[0].weights[name], weight) for name, weight in saved[0].weights.items())
    plain = assembled(ranks(1).run(_resume, tmp_path, moments, 0, "fp32"))
    expected = assembled(saved)
    kinds = {key: value.dtype for key, value in plain.items() if key.startswith("state/")}
    assert set(kinds.values()) == {torch.float32}
    assert [key for key in kinds if not torch.equal(plain[key], expected[key].float())] == []


def _in_files(folder: Path, moments: str) -> tuple[list[str], list[str]]:
    """Returns the differences between states in memory and in files, and between continuing and resuming."""
    section = {"type": "AdamW", "params": {"lr": 1e-2, "moments_dtype": moments}}
    files = {"device": "nvme", "nvme_path": str(folder)}
    plain = config(3, "bf16", optimizer=section)
    tiered = config(3, "bf16", optimizer=section, offload_optimizer=files)
    kept = differences(train_toy(plain, 6), train_toy(tiered, 6))
    torch.manual_seed(7)
    engine, *_ = zeroaccel.initialize(Toy(), config=tiered)
    train(engine, batches(0, 3))
    engine.save_checkpoint(folder / "saved", tag="nvme")
    went_on = train(engine, batches(0, 6)[3:])
    engine.destroy()
    resumed = []
    for settings in (plain, tiered):
        torch.manual_seed(11)
        engine, *_ = zeroaccel.initialize(Toy(), config=settings)
        engine.load_checkpoint(folder / "saved", tag="nvme")
        resumed.append(train(engine, batches(0, 6)[3:]))
        engine.destroy()
    return kept, [f"{went_on} {losses}" for losses in resumed if losses != went_on]


@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_small_moments_in_files_have_the_bits_of_those_in_memory(ranks: Ranks, tmp_path: Path, moments: str) -> None:
    for kept, resumed in ranks(2).run(_in_files, tmp_path, moments):
        assert kept == []
        assert resumed == []


def _dtypes(settings: dict[str, Any]) -> set[torch.dtype]:
    engine, *_ = zeroaccel.initialize(Toy(), config=settings)
    train(engine, batches(0, 1))
    states = engine.optimizer.state.values()
    found = {value.dtype for state in states for value in state.values() if isinstance(value, Tensor)}
    engine.destroy()
    return found


def _refusal(settings: dict[str, Any], optimizer: Any = None) -> str:
    return message(ConfigError, zeroaccel.initialize, Toy(), config=settings, optimizer=optimizer)


def test_deepspeeds_keys_for_16_bit_states(ranks: Ranks) -> None:
    by_precision = config(2, bf16={"enabled": True, "bf16_optimizer_states": True})
    adam = {"type": "Adam", "params": {"lr": 1e-2, "fp32_optimizer_states": False}}
    for settings in (by_precision, config(2, "bf16", optimizer=adam)):
        assert ranks(2).run(_dtypes, settings) == [{torch.bfloat16}] * 2
    assert ranks(2).run(_dtypes, config(2, "bf16")) == [{torch.float32}] * 2


def _in_blocks(settings: dict[str, Any]) -> str:
    engine, *_ = zeroaccel.initialize(Toy(), config=settings)
    train(engine, batches(0, 1))
    said = message(UsageError, safe_get_full_optimizer_state, engine.module.layers[0].up.weight, "exp_avg")
    engine.destroy()
    return said


def test_blocks_are_refused_where_a_number_per_element_is_asked_for(ranks: Ranks, tmp_path: Path) -> None:
    section = {"type": "AdamW", "params": {"lr": 1e-2, "moments_dtype": "int8"}}
    assert "8-bit blocks" in ranks(2).run(_in_blocks, config(3, "bf16", optimizer=section))[0]
    files = {"device": "nvme", "nvme_path": str(tmp_path)}
    told = ranks(2).run(_in_blocks, config(3, "bf16", optimizer=section, offload_optimizer=files))
    assert "8-bit blocks" in told[0]


def test_optimizers_without_such_moments_refuse_the_setting(ranks: Ranks) -> None:
    flag = {"enabled": True, "bf16_optimizer_states": True}
    sgd = ranks(1).run(_refusal, config(2, bf16=flag, optimizer={"type": "SGD", "params": {"lr": 0.1}}))[0]
    assert "optimizer.params.moments_dtype: expected a setting of SGD" in sgd
    both = {"type": "Adam", "params": {"fp32_optimizer_states": False, "moments_dtype": "fp32"}}
    assert 'expected "bf16" with "fp32_optimizer_states": false' in ranks(1).run(_refusal, config(2, optimizer=both))[0]
    own = config(2, bf16=flag)
    del own["optimizer"]
    given = ranks(1).run(_refusal, own, torch.optim.SGD)[0]
    assert "bf16.bf16_optimizer_states: expected an optimizer section" in given
    lion = {"type": "Lion", "params": {"moments_dtype": "int8"}}
    assert 'moments_dtype: expected "fp32" or "bf16"' in ranks(1).run(_refusal, config(2, optimizer=lion))[0]
