"""Host updates that do not wait for `step()`: one step late."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroaccel
import zeroaccel.zero
from tests.support.pool import Ranks
from tests.support.refusals import complaint, message
from tests.support.training import Run, Toy, batches, config, differences, finished, offloaded
from zeroaccel.engine import Engine
from zeroaccel.errors import EngineStateError
from zeroaccel.ops.elementwise import Adam

RESIDUAL = {"data_types": {"master_weights": "residual"}}
PRECISIONS = {"fp32": {}, "bf16": {"bf16": {"enabled": True, "check_grad_overflow": False}}}


def _settings(
    folder: Path, during: str, stage: int, states: str, params: str = "none", precision: str = "bf16", **changes: Any
) -> dict[str, Any]:
    keys = offloaded(folder, states, params, update_during=during, pipeline_read=True)
    return config(stage, accumulation=changes.pop("accumulation", 1), **{**PRECISIONS[precision], **keys, **changes})


def _make(settings: dict[str, Any], make: Callable[[], nn.Module] = Toy, seed: int = 7) -> Engine:
    torch.manual_seed(seed)
    return zeroaccel.initialize(make(), config=settings)[0]


def _backward(engine: Engine, batch: Tensor) -> Tensor:
    loss: Tensor = engine(batch)
    engine.backward(loss)
    return loss


def _step(engine: Engine, batch: Tensor) -> float:
    loss = _backward(engine, batch)
    engine.step()
    return float(loss.item())


def _train(settings: dict[str, Any], steps: int) -> Run:
    engine = _make(settings)
    run = Run()
    for batch in batches(engine.collectives.rank, steps * engine.gradient_accumulation_steps()):
        run.losses.append(_step(engine, batch))
        run.norms.append(engine.get_global_grad_norm())
    run.skipped = engine.skipped_steps
    return finished(engine, run)


def _refused(cases: list[dict[str, Any]]) -> list[str]:
    told = []
    for case in cases:
        client = torch.optim.AdamW if case.pop("client", False) else None
        if client is not None:
            case.pop("optimizer")
        told.append(complaint(zeroaccel.initialize, Toy(), client, config=case))
    return told


def test_settings_without_an_update_at_that_time_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    cases = [
        (_settings(tmp_path, "backward", 2, "nvme"), 'masters in memory, but offload_optimizer.device is "nvme"'),
        (_settings(tmp_path, "backward", 2, "none", offload_optimizer={"update_during": "backward"}), "on the host"),
        ({**_settings(tmp_path, "backward", 2, "cpu"), **RESIDUAL}, 'data_types.master_weights is "residual"'),
        ({**_settings(tmp_path, "backward", 2, "cpu"), "client": True}, '"backward": AdamW updates in step() only'),
        (
            _settings(tmp_path, "next_step", 2, "none", offload_optimizer={"update_during": "next_step"}),
            "updates on the host",
        ),
        (_settings(tmp_path, "now", 2, "cpu"), "'backward' or 'next_step', got 'now'"),
        ({**_settings(tmp_path, "next_step", 2, "cpu"), "client": True}, '"next_step": AdamW updates in step() only'),
    ]
    for told in ranks(2).run(_refused, [case for case, _ in cases]):
        for (_, text), said in zip(cases, told, strict=True):
            assert text in said, (text, said)
            assert "update_during" in said


# -- one step late


def _late_by_hand(steps: int, dtype: torch.dtype, lrs: list[float]) -> tuple[list[float], dict[str, Tensor]]:
    """Trains in a plain loop that computes each gradient at weights without the latest update."""
    torch.manual_seed(7)
    model = Toy()
    masters = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters() if p.requires_grad}
    optimizer = Adam(masters.values(), lr=1e-2, weight_decay=0.1)
    model.to(dtype)
    losses, waiting = [], None
    for batch, lr in zip(batches(0, steps), lrs, strict=True):
        loss = model(batch)
        loss.backward()
        losses.append(loss.item())
        if waiting is not None:
            _put(model, waiting)
        optimizer.param_groups[0]["lr"] = lr
        for name, param in model.named_parameters():
            if name in masters:
                masters[name].grad = torch.zeros_like(masters[name]) if param.grad is None else param.grad.float()
            param.grad = None
        optimizer.step()
        waiting = {name: master.detach().clone() for name, master in masters.items()}
    assert waiting is not None
    _put(model, waiting)
    return losses, {name: param.detach() for name, param in model.named_parameters()}


def _put(model: nn.Module, weights: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name in weights:
                param.copy_(weights[name])


def _late(settings: dict[str, Any], lrs: list[float]) -> tuple[list[float], dict[str, Tensor]]:
    engine = _make(settings)
    losses = []
    for batch, lr in zip(batches(0, len(lrs)), lrs, strict=True):
        loss = _backward(engine, batch)
        engine.optimizer.param_groups[0]["lr"] = lr
        engine.step()
        engine.optimizer.param_groups[0]["lr"] = 99.0  # the running update uses the rate from its step
        losses.append(loss.item())
    engine.destroy()
    return losses, {name: param.detach().clone() for name, param in engine.module.named_parameters()}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_step_late_equals_a_plain_loop_with_late_updates(ranks: Ranks, tmp_path: Path, precision: str) -> None:
    lrs = [1e-2, 2e-2, 3e-2, 1e-2, 5e-3]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    losses, weights = ranks(1).run(_late_by_hand, len(lrs), dtype, lrs)[0]
    for stage, states in ((1, "cpu"), (3, "nvme")):
        got = ranks(1).run(_late, _settings(tmp_path, "next_step", stage, states, precision=precision), lrs)[0]
        assert got[0] == losses
        assert [name for name in weights if not torch.equal(weights[name], got[1][name])] == []


def _late_all(settings: list[dict[str, Any]]) -> list[Run]:
    return [_train(each, 6) for each in settings]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_one_step_late_is_the_same_on_every_tier(ranks: Ranks, tmp_path: Path, precision: str) -> None:
    """With clipping, and in fp16 with steps that overflow, which finish the previous update and start none."""
    changes: dict[str, Any] = {"gradient_clipping": 0.5}
    if precision == "fp16":
        changes |= {
            "precision": "fp32",
            "fp16": {"enabled": True, "initial_scale_power": 11, "loss_scale_window": 1, "hysteresis": 1},
        }
    tiers = [(1, "cpu", "none"), (2, "nvme", "none"), (3, "cpu", "none"), (3, "cpu", "nvme"), (3, "nvme", "cpu")]
    settings = [_settings(tmp_path, "next_step", *where, **copy.deepcopy(changes)) for where in tiers]
    settings.append(_settings(tmp_path, "step", 2, "cpu", **copy.deepcopy(changes)))
    for runs in ranks(2).run(_late_all, settings):
        for run in runs[1:-1]:
            assert differences(runs[0], run) == []
        assert runs[0].losses[0] == runs[-1].losses[0]
        assert differences(runs[0], runs[-1]) != []
        assert (0 < runs[0].skipped < 4) == (precision == "fp16")


def _resumed(settings: dict[str, Any], root: Path) -> tuple[list[float], list[float], bool]:
    engine = _make(settings)
    tokens = batches(engine.collectives.rank, 8)
    for batch in tokens[:3]:
        _step(engine, batch)
    engine.save_checkpoint(root, tag="three")
    assert engine.weight_update is not None
    engine.weight_update.require_settled("a save")
    losses = [_step(engine, batch) for batch in tokens[3:6]]
    said = message(EngineStateError, zeroaccel.zero.safe_get_full_fp32_param, engine.module.norm.weight)
    told = "call engine.finish_update() on every rank first" in said
    engine.finish_update()
    assert zeroaccel.zero.safe_get_full_fp32_param(engine.module.norm.weight) is not None
    engine.destroy()
    other = _make(settings, seed=9)
    _step(other, tokens[7])
    other.load_checkpoint(root, tag="three")
    again = [_step(other, batch) for batch in tokens[3:6]]
    other.destroy()
    return losses, again, told


@pytest.mark.parametrize(("stage", "states"), [(2, "cpu"), (3, "nvme")])
def test_a_checkpoint_finishes_the_update_and_resumes_with_the_same_bits(
    ranks: Ranks, tmp_path: Path, stage: int, states: str
) -> None:
    settings = _settings(tmp_path, "next_step", stage, states, gradient_clipping=0.5)
    for losses, again, told in ranks(2).run(_resumed, settings, tmp_path / "saved"):
        assert losses == again
        assert told
