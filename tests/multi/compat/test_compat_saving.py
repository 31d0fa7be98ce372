"""Checkpoints and configs under DeepSpeed's names, on real ranks, and the calls of Lightning.

docs/deepspeed_names.md lists where the facade differs from DeepSpeed.
"""

from __future__ import annotations

import argparse
import enum
import math
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import TestCase

import numpy as np
import pytest
import torch

from tests.multi.compat.facade_engines import CONFIG, loss_of, make_engine, small_model, with_facade
from tests.support.pool import Ranks
from tests.support.training import train_step
from zeroaccel.errors import UsageError

pytestmark = pytest.mark.usefixtures("ranks_without_libraries")


def _saved_and_converted(folder: str) -> list[Any]:
    from deepspeed.utils.zero_to_fp32 import (
        convert_zero_checkpoint_to_fp32_state_dict,
        get_fp32_state_dict_from_zero_checkpoint,
    )

    engine = make_engine(3)
    for _ in range(2):
        train_step(engine, loss_of(engine))
    engine.save_checkpoint(folder, tag="epoch/1", client_state={"epoch": 1})
    with pytest.raises(UsageError, match="custom_load_fn"):
        engine.load_checkpoint(folder, None, True, True, True, False, lambda src, dst: None)
    path, state = engine.load_checkpoint(folder)
    engine.load_module_state_dict(
        {"module": {name: torch.zeros_like(w) for name, w in small_model().state_dict().items()}}
    )
    weights = engine.consolidated_state_dict()
    zeros = weights is None or all(not value.any() for value in weights.values())
    engine.empty_partition_cache()
    engine.destroy()
    torch.distributed.barrier()
    found: list[Any] = [str(path).removeprefix(folder), state, zeros]
    if torch.distributed.get_rank() == 0:
        convert_zero_checkpoint_to_fp32_state_dict(folder, f"{folder}/whole")
        loaded = torch.load(f"{folder}/whole/pytorch_model.bin", weights_only=True)
        same = get_fp32_state_dict_from_zero_checkpoint(folder, lazy_mode=True)
        found.append(all(torch.equal(loaded[name], same[name]) for name in same))
    torch.distributed.barrier()
    return found


def test_checkpoints_with_deepspeeds_arguments_and_file_names(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks(2).run(with_facade, _saved_and_converted, str(tmp_path))
    assert results == [["/epoch/1", {"epoch": 1}, True, True], ["/epoch/1", {"epoch": 1}, True]]


def _save_by_the_clock(folder: str) -> list[Any]:
    engine = make_engine(2)
    for _ in range(2):
        train_step(engine, engine(torch.ones(2, 4)).sum())
    rank = torch.distributed.get_rank()
    engine.save_checkpoint(f"{folder}/run-at-{rank}", client_state={"step": 1})
    loaded = engine.load_checkpoint(f"{folder}/run-at-0")[1]
    engine.destroy()
    return [sorted(os.listdir(folder)), loaded]


def test_a_folder_that_each_rank_names_for_itself_is_rank_0s(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(with_facade, _save_by_the_clock, str(tmp_path)) == [[["run-at-0"], {"step": 1}]] * 2


class _Mode(enum.Enum):
    FAST = "fast"


@dataclass
class _Options:
    path: Path
    mode: _Mode = _Mode.FAST


def _as_lightning_does(folder: str) -> list[Any]:
    import deepspeed
    from deepspeed.utils.zero_to_fp32 import get_model_state_file, get_optim_files

    model = small_model()
    config = {**CONFIG, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 3}}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    # Lightning's summary of a model, and Fabric's test whether an object has its own step.
    own = sum(param.partition_numel() for param in model.parameters())
    assert all(hasattr(engine, name) for name in ("step", "param_groups", "defaults", "state", "load_state_dict"))
    assert engine.param_groups is engine.optimizer.param_groups
    for _ in range(3):  # the epoch ends inside an accumulation
        train_step(engine, loss_of(engine))
    state = {"hyper": argparse.Namespace(options=_Options(Path("x"))), "epoch": np.int64(1), "lock": [threading.Lock()]}
    with TestCase().assertLogs("zeroaccel") as said:
        engine.save_checkpoint(folder, tag="end", client_state=state)
    assert any("omits the gradients of 1 micro-steps" in line for line in said.output)
    assert any("omits client_state['lock'][0], since a _thread.lock" in line for line in said.output)
    stage = torch.load(get_optim_files(f"{folder}/end")[0])["optimizer_state_dict"]["zero_stage"]
    read = torch.load(get_model_state_file(f"{folder}/end", stage), weights_only=False)
    train_step(engine, loss_of(engine))
    # validate: the same model again, without an optimizer, while the first engine is not destroyed.
    with TestCase().assertLogs("zeroaccel") as said:
        inference, *_ = deepspeed.initialize(model=model, model_parameters=[], config={**config, "optimizer": None})
    assert any("destroys an earlier engine of this model" in line for line in said.output)
    inference.eval()
    with torch.no_grad():
        loss = loss_of(inference).item()
    again, *_ = deepspeed.initialize(model=model, config=config)
    _, loaded = again.load_checkpoint(folder)
    assert again.micro_steps == 2
    assert again.global_steps == 1
    assert loaded["hyper"] == argparse.Namespace(options=argparse.Namespace(path=Path("x"), mode="fast"))
    again.optimizer.offload_states()  # as OpenRLHF calls it
    again.optimizer.reload_states()
    again.backward(loss_of(again))
    with pytest.raises(UsageError, match=r"expected a parameter without an engine, got 'a parameter of another"):
        deepspeed.initialize(model=model, config=config)  # gradients are pending in it
    again.destroy()
    return [own, stage, read["epoch"], read["lock"], read["global_steps"], math.isfinite(loss)]


def test_lightnings_calls(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks(2).run(with_facade, _as_lightning_does, str(tmp_path))
    assert [result[1:] for result in results] == [[3, 1, [], 1, True]] * 2
    assert sum(result[0] for result in results) == sum(param.numel() for param in small_model().parameters())


def _with_enumerations(folder: str) -> list[str]:
    import deepspeed
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

    section = {"stage": ZeroStageEnum.gradients, "offload_optimizer": {"device": OffloadDeviceEnum.cpu}}
    engine, *_ = deepspeed.initialize(
        model=small_model(), config={**CONFIG, "zero_optimization": section, "log_level": "ERROR"}
    )
    engine.save_checkpoint(folder)  # the checkpoint includes the config
    found = [type(engine.config["zero_optimization"]["offload_optimizer"]["device"]).__name__, engine.log_level()]
    engine.destroy()
    return found


def test_members_of_enumerations_in_a_config(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(1).run(with_facade, _with_enumerations, str(tmp_path)) == [["str", "ERROR"]]
