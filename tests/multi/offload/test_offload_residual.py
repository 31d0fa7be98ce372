"""Masters kept as residuals of the weights: the bits of fp32 masters, on every tier, in fewer bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroaccel
import zeroaccel.zero
from tests.support.checkpoint_runs import assembled, resume, save
from tests.support.pool import Ranks
from tests.support.refusals import complaint
from tests.support.training import ADAMW, SGD, Run, Toy, batches, config, differences, offloaded, train, train_step

TIERS = [
    (stage, states, params)
    for stage in (1, 2, 3)
    for states in ("none", "cpu", "nvme")
    for params in (("none", "cpu", "nvme") if stage == 3 else ("none",))
]
RESIDUAL = {"master_weights": "residual"}


class HalfWay(Toy):
    """Weights of which many lie half way between two bf16 values, as fp16 weights often do."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            for param in self.parameters():
                bits = param.view(torch.int32)
                param.copy_((((bits >> 16) << 16) + 0x8000).view(torch.float32))


def _torch_adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def _train_all(settings: list[dict[str, Any]], steps: int) -> list[Run]:
    return [train(each, steps, make=HalfWay) for each in settings]


def _settings(
    folder: Path, stage: int, states: str, params: str, accumulation: int = 1, **changes: Any
) -> dict[str, Any]:
    return config(stage, "bf16", accumulation, **{**offloaded(folder, states, params), **changes})


@pytest.mark.parametrize(("optimizer", "accumulation"), [(ADAMW, 1), (SGD, 4)])
def test_every_tier_has_the_bits_of_fp32_masters(
    ranks: Ranks, tmp_path: Path, optimizer: dict[str, Any], accumulation: int
) -> None:
    keys: dict[str, Any] = {"optimizer": optimizer, "gradient_clipping": 0.5}
    settings = [_settings(tmp_path, stage, "none", "none", accumulation, **keys) for stage in (1, 2, 3)]
    settings += [_settings(tmp_path, *tiers, accumulation, data_types=RESIDUAL, **keys) for tiers in TIERS]
    for runs in ranks(2).run(_train_all, settings, 4):
        for (stage, *where), run in zip(TIERS, runs[3:], strict=True):
            assert differences(runs[stage - 1], run) == [], (stage, *where)


def _train_variants(folder: Path) -> list[tuple[str, list[str]]]:
    """Trains pairs of runs, one with fp32 masters and one with residuals; returns the differences."""
    told = []
    small = {"type": "AdamW", "params": {"lr": 1e-2, "moments_dtype": "bf16"}}
    adagrad = {"type": "Adagrad", "params": {"lr": 1e-2}}
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "bf16 moments": ({"optimizer": small}, {}),
        "Adagrad": ({"optimizer": adagrad}, {}),
        "torch's AdamW": ({"optimizer": None}, {"optimizer": _torch_adamw}),
        "kept in fp32": ({"data_types": {"keep_in_fp32_modules": ["norm"]}}, {}),
    }
    for name, (keys, arguments) in cases.items():
        runs = []
        for kind in ("fp32", "residual"):
            types = {**keys.get("data_types", {}), "master_weights": kind}
            settings = _settings(folder, 2, "cpu", "none", **{**keys, "data_types": types})
            runs.append(train(settings, 3, make=HalfWay, **arguments))
        told.append((name, differences(*runs)))
    for during in ("backward", "next_step"):
        runs = []
        for kind in ("fp32", "residual"):
            keys = {"bf16": {"enabled": True, "check_grad_overflow": False}, "data_types": {"master_weights": kind}}
            keys |= offloaded(folder, "cpu", "nvme", update_during=during)
            runs.append(train(config(3, "bf16", **keys), 4, make=HalfWay))
        told.append((during, differences(*runs)))
    return told


def test_other_optimizers_and_times_have_the_same_bits_too(ranks: Ranks, tmp_path: Path) -> None:
    for told in ranks(2).run(_train_variants, tmp_path):
        assert [(name, found) for name, found in told if found] == []
        assert len(told) == 6


def _bytes(settings: dict[str, Any]) -> tuple[int, int, dict[str, int], dict[str, int]]:
    engine, *_ = zeroaccel.initialize(nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)), config=settings)
    train_step(engine, engine(torch.ones(2, 256, dtype=torch.bfloat16)).float().square().mean())
    part = sum(buffer.layout.shard_numel(buffer.rank) for unit in engine.units for buffer in unit.buffers)
    found = part, len(engine.sharded_optimizer.buffers), engine.tier_nbytes(), engine.model_state_nbytes()
    engine.destroy()
    return found


@pytest.mark.parametrize("states", ["none", "cpu", "nvme"])
def test_bytes_of_a_master_are_2_and_a_bit(ranks: Ranks, tmp_path: Path, states: str) -> None:
    settings = config(2, "bf16", data_types=RESIDUAL, **offloaded(tmp_path, states))
    settings["zero_optimization"]["sub_group_size"] = 10**9
    for part, groups, tiers, memory in ranks(2).run(_bytes, settings):
        held = tiers["optimizer, nvme" if states == "nvme" else "optimizer, host"]
        formula = part * (2 + 8) + part // 8
        assert formula <= held < formula + 64 * groups
        assert memory["optimizer"] == 0


@pytest.mark.parametrize(("saved", "loaded"), [("residual", "fp32"), ("fp32", "residual"), ("residual", "residual")])
def test_checkpoints_have_plain_masters(ranks: Ranks, tmp_path: Path, saved: str, loaded: str) -> None:
    tiers = offloaded(tmp_path, "nvme", "nvme") if saved == loaded else {}
    before = ranks(2).run(save, tmp_path / "saved", 2, "bf16", data_types={"master_weights": saved})
    kept = {"data_types": {"master_weights": loaded}, **tiers}
    after = ranks(1).run(resume, tmp_path / "saved", "2-bf16", 3, "bf16", **kept)
    expected, got = assembled(before), assembled(after)
    assert expected.keys() == got.keys()
    assert [key for key in expected if not torch.equal(expected[key], got[key])] == []
    assert after[0].losses == before[0].losses


def _edited(settings: dict[str, Any], steps: int) -> tuple[list[float], list[Tensor]]:
    """Trains a run whose weights are written and read between steps."""
    torch.manual_seed(7)
    engine, *_ = zeroaccel.initialize(HalfWay(), config=settings)
    model, losses, seen = engine.module, [], []
    tokens = batches(engine.collectives.rank, steps)
    for step, batch in enumerate(tokens):
        losses.append(train_step(engine, engine(batch)))
        if step == 0:
            with zeroaccel.zero.GatheredParameters([model.layers[1].up.weight, model.head.weight], modifier_rank=0):
                if engine.collectives.rank == 0:
                    with torch.no_grad():
                        model.layers[1].up.weight[3].fill_(0.3)
        elif step == 1:
            value = torch.linspace(-1, 1, model.norm.weight.numel())
            zeroaccel.zero.safe_set_full_fp32_param(model.norm.weight, value)
        elif step == 2:
            state = {"weight": torch.full((23,), 1.1), "bias": torch.full((23,), 0.7, dtype=torch.float64)}
            model.layers[0].norm.load_state_dict(state)
        for param in (model.layers[1].up.weight, model.norm.weight, model.layers[0].norm.bias):
            seen.append(zeroaccel.zero.safe_get_full_fp32_param(param))
    engine.destroy()
    return losses, seen


def test_weights_that_people_write_have_the_same_masters(ranks: Ranks, tmp_path: Path) -> None:
    for where in ((1, "none", "none"), (3, "nvme", "nvme")):
        expected = ranks(2).run(_edited, _settings(tmp_path, *where), 4)
        got = ranks(2).run(_edited, _settings(tmp_path, *where, data_types=RESIDUAL), 4)
        for (losses, masters), (own_losses, own_masters) in zip(expected, got, strict=True):
            assert own_losses == losses, where
            assert [i for i, (a, b) in enumerate(zip(masters, own_masters, strict=True)) if not torch.equal(a, b)] == []


def _refused(cases: list[dict[str, Any]]) -> list[str]:
    return [complaint(zeroaccel.initialize, Toy(), config=case) for case in cases]


def test_unsuitable_residuals_are_refused(ranks: Ranks) -> None:
    int8 = {"type": "AdamW", "params": {"lr": 1e-2, "moments_dtype": "int8"}}
    cases = [
        (config(2, "fp16", data_types=RESIDUAL), "the precision is fp16"),
        (config(2, "fp32", data_types=RESIDUAL), "the precision is fp32"),
        (config(0, "bf16", data_types=RESIDUAL), "zero_optimization.stage is 0"),
        (config(2, "bf16", data_types=RESIDUAL, optimizer=int8), '"fp32" or "bf16" with data_types.master_weights'),
        (config(2, "bf16", data_types={"master_weights": "bf16"}), "master_weights: expected 'fp32' or 'residual'"),
    ]
    for told in ranks(1).run(_refused, [case for case, _ in cases]):
        for (_, text), message in zip(cases, told, strict=True):
            assert text in message, (text, message)
