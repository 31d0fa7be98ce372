"""Names in files are those of the plain model: without wrappers, and with every name of a shared buffer."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import zeroaccel
from tests.support.pool import Ranks
from tests.support.training import train_step
from zeroaccel import zero
from zeroaccel.checkpoint.consolidate import (
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from zeroaccel.zero import module_names

HOWS = ["plain", "whole", "inside", "recomputed", "parallel"]


def _model(how: str, seed: int = 0) -> nn.Module:
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")  # torch's tracer triggers it
    torch.manual_seed(seed)
    norm = nn.BatchNorm1d(4)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), norm, nn.Tanh(), norm)
    if how == "whole":
        model = torch.compile(model, backend="eager")
    if how == "inside":
        model[1] = torch.compile(model[1], backend="eager")
    if how == "recomputed":
        model[1] = checkpoint_wrapper(model[1])
    if how == "parallel":
        model = nn.DataParallel(model)
    return model


def _engine(how: str, stage: int, seed: int = 0) -> Any:
    zeros = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zeros}
    config |= {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    return zeroaccel.initialize(_model(how, seed), config=config)[0]


def _step(engine: Any) -> float:
    batch = torch.randn(2, 4, generator=torch.Generator().manual_seed(engine.collectives.rank))
    return train_step(engine, engine(batch).square().mean())


def _same(state: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in other)


def _plain(model: nn.Module) -> dict[str, Tensor]:
    return dict(zip(_model("plain").state_dict(), model.state_dict().values(), strict=True))


def _saved(how: str, stage: int, folder: str) -> None:
    """Saves in all forms and loads each into models with and without wrappers."""
    names = list(_model("plain").state_dict())
    engine = _engine(how, stage)
    _step(engine)
    engine.save_checkpoint(folder, tag="t")
    engine.save_16bit_model(folder, "model.safetensors")
    engine.save_16bit_model(folder, "model.bin")
    state = engine.consolidated_state_dict()
    assert set(dict(engine.iter_named_full_params())) <= set(names)
    if stage < 3:
        assert list(engine.state_dict()) == names
    after, lead = _step(engine), engine.collectives.rank == 0
    engine.destroy()
    if lead:
        assert list(state) == names
        assert _same(torch.load(f"{folder}/model.bin"), state)
        assert set(load_file(f"{folder}/model.safetensors")) == set(names) - {"4.weight", "4.bias"}  # ties
        assert _same(get_fp32_state_dict_from_zero_checkpoint(folder, "t"), state)
    state = get_fp32_state_dict_from_zero_checkpoint(folder, "t")
    for other in HOWS:
        model = load_state_dict_from_zero_checkpoint(_model(other, seed=1), folder, "t")
        assert _same(_plain(model), state)
        model = _model(other, seed=1)
        zero.load_safetensors(model, Path(folder, "model.safetensors"))
        assert _same(_plain(model), state)
        engine = _engine(other, stage, seed=1)
        engine.load_checkpoint(folder, tag="t")
        assert _step(engine) == after
        engine.load_state_dict(state)
        loaded = engine.consolidated_state_dict()
        assert loaded is None or _same(loaded, state)
        engine.destroy()


@pytest.mark.parametrize(("how", "stage"), [("whole", 3), ("inside", 2), ("recomputed", 3), ("parallel", 3)])
def test_no_wrapper_is_in_a_file(ranks: Ranks, tmp_path: Path, how: str, stage: int) -> None:
    """Regression: `_orig_mod.` was in all names, and the files fitted compiled models only."""
    ranks(2).run(_saved, how, stage, str(tmp_path))


def _older(how: str, folder: str) -> None:
    with patch.object(module_names, "_SEGMENTS", frozenset()), patch.object(module_names, "_PARALLEL", ()):
        engine = _engine(how, 3)
        _step(engine)
        engine.save_checkpoint(folder, tag="t")
        engine.save_16bit_model(folder, "model.safetensors")
        after = _step(engine)
        engine.destroy()
    for other in HOWS:
        engine = _engine(other, 3, seed=1)
        engine.load_checkpoint(folder, tag="t")
        assert _step(engine) == after
        engine.destroy()
        zero.load_safetensors(_model(other), Path(folder, "model.safetensors"))
    if how != "parallel":  # that name may be a program's own
        assert get_fp32_state_dict_from_zero_checkpoint(folder, "t").keys() == _model("plain").state_dict().keys()


@pytest.mark.parametrize("how", HOWS[1:])
def test_a_file_with_wrappers_in_its_names_fits_too(ranks: Ranks, tmp_path: Path, how: str) -> None:
    ranks(2).run(_older, how, str(tmp_path))
