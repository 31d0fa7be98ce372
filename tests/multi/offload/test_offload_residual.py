"""Masters kept as residuals of the weights: the bits of fp32 masters, on every tier, in fewer bytes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zeroaccel
import zeroaccel.zero
from tests.support.checkpoint_runs import Snapshot, assembled, resume, save, snapshot
from tests.support.checkpoint_runs import train as train_steps
from tests.support.pool import Ranks
from tests.support.refusals import complaint
from tests.support.tensors import same_bits
from tests.support.training import ADAMW, SGD, Run, Toy, batches, config, differences, offloaded, train, train_step
from zeroaccel.checkpoint.consolidate import get_fp32_state_dict_from_zero_checkpoint
from zeroaccel.ops import Adam
from zeroaccel.ops.moments import decode, encode, random_bits
from zeroaccel.ops.residual import SplitMasters, join, split, ties_nbytes
from zeroaccel.zero.storage import swapped_masters

TIERS = [
    (stage, states, params)
    for stage in (1, 2, 3)
    for states in ("none", "cpu", "nvme")
    for params in (("none", "cpu", "nvme") if stage == 3 else ("none",))
]
RESIDUAL = {"master_weights": "residual"}
INT8 = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "moments_dtype": "int8"}}


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


@pytest.mark.parametrize(("optimizer", "accumulation"), [(ADAMW, 1), (SGD, 4), (INT8, 2)])
def test_every_tier_has_the_bits_of_fp32_masters(
    ranks: Ranks, tmp_path: Path, optimizer: dict[str, Any], accumulation: int
) -> None:
    keys: dict[str, Any] = {"optimizer": optimizer, "gradient_clipping": 0.5}
    settings = [_settings(tmp_path, stage, "none", "none", accumulation, **keys) for stage in (1, 2, 3)]
    settings += [_settings(tmp_path, *tiers, accumulation, data_types=RESIDUAL, **keys) for tiers in TIERS]
    for runs in ranks(2).run(_train_all, settings, 4):
        for (stage, *where), run in zip(TIERS, runs[3:], strict=True):
            assert differences(runs[stage - 1], run) == [], (stage, *where)


def test_int8_moments_have_their_bits_on_every_tier(ranks: Ranks, tmp_path: Path) -> None:
    """Against fp32 masters and int8 moments in memory, which know neither residuals nor state buffers."""
    places = [(1, "cpu", "none"), (2, "none", "none"), (3, "nvme", "nvme")]
    keys: dict[str, Any] = {"optimizer": INT8, "gradient_clipping": 0.5}
    settings = [_settings(tmp_path, stage, "none", "none", **keys) for stage, _, _ in places]
    settings += [_settings(tmp_path, *place, data_types=RESIDUAL, **keys) for place in places]
    settings += [_settings(tmp_path, 3, "nvme", "cpu", **keys)]
    for runs in ranks(2).run(_train_all, settings, 4):
        for one, other in ((0, 3), (1, 4), (2, 5), (2, 6)):
            assert differences(runs[one], runs[other]) == [], settings[other]
            assert len(set(runs[other].losses)) == 4


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
    for during, params in (("forward", "cpu"), ("next_step", "nvme")):
        runs = []
        for kind in ("fp32", "residual"):
            keys = {"bf16": {"enabled": True, "check_grad_overflow": False}, "data_types": {"master_weights": kind}}
            keys |= offloaded(folder, "cpu", params, update_during=during)
            runs.append(train(config(3, "bf16", **keys), 4, make=HalfWay))
        told.append((during, differences(*runs)))
    return told


def test_other_optimizers_and_times_have_the_same_bits_too(ranks: Ranks, tmp_path: Path) -> None:
    for told in ranks(2).run(_train_variants, tmp_path):
        assert [(name, found) for name, found in told if found] == []
        assert len(told) == 6


def _train_rounded(settings: list[dict[str, Any]]) -> tuple[list[Run], int]:
    """Trains models that are in bf16 already; returns the runs, and how often residuals were computed at the start."""
    splits, passes = 0, swapped_masters.split

    def counted(*arguments: Any) -> None:
        nonlocal splits
        splits += 1
        passes(*arguments)

    swapped_masters.split = counted
    try:
        zeroaccel.initialize(Toy().bfloat16(), config=settings[-1])[0].destroy()
    finally:
        swapped_masters.split = passes
    return [train(each, 3, make=lambda: Toy().bfloat16()) for each in settings], splits


def test_weights_in_bf16_need_no_pass_for_their_residuals(ranks: Ranks, tmp_path: Path) -> None:
    settings = [
        _settings(tmp_path, 3, "cpu", "cpu", data_types={"master_weights": kind}) for kind in ("fp32", "residual")
    ]
    for (exact, parts), splits in ranks(2).run(_train_rounded, settings):
        assert differences(exact, parts) == []
        assert splits == 0


def _adam_in_blocks(x: Tensor, moments: list[Tensor], grad: Tensor, step: int) -> tuple[Tensor, list[Tensor], Tensor]:
    """The definition: AdamW in fp32 on decoded moments, then rounded into blocks; and the new bf16 weights."""
    lr, decay, beta1, beta2, eps = 1e-2, 0.1, 0.9, 0.999, 1e-8
    key = (step * 0x9E3779B9 + 0x7F4A7C15) & 0xFFFFFFFF
    rate, root = [np.float32(value).item() for value in (-lr / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step))]
    m = decode(moments[0], moments[1], signed=True)
    v = decode(moments[2], moments[3], signed=False)
    d = grad.float()
    m = m + (d - m) * np.float32(1 - beta1).item()
    v = v * np.float32(beta2).item() + d * np.float32(1 - beta2).item() * d
    divisor = (
        torch.from_numpy(np.sqrt(v.numpy())) * root + np.float32(eps).item()
    )  # some builds of torch round roots twice
    new = x * np.float32(1 - lr * decay).item() + m * rate / divisor
    random = random_bits(x, m, key)
    rounded = [*encode(m, signed=True, random=random), *encode(v, signed=False, random=random >> 16)]
    return new, rounded, new.to(torch.bfloat16)


def test_a_step_of_residual_masters_and_int8_moments_is_its_definition() -> None:
    numel = 3 * 65536 + 1000  # several tiles, and a last one that ends within a block
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(numel, generator=generator)
    x.view(torch.int32)[::5] = (x.view(torch.int32)[::5] >> 16 << 16) + 0x8000  # ties
    moments = [*encode(torch.zeros(numel), signed=True), *encode(torch.zeros(numel), signed=False)]
    weights, ties = x.to(torch.bfloat16), torch.zeros(ties_nbytes(numel), dtype=torch.uint8)
    residuals = torch.zeros(numel, dtype=torch.int16)
    split(x, residuals, ties)
    stored = torch.nn.Parameter(torch.full((), torch.nan).expand(numel))
    optimizer = Adam([stored], lr=1e-2, weight_decay=0.1, moments_dtype="int8")
    names = ("exp_avg", "exp_avg_exponents", "exp_avg_sq", "exp_avg_sq_exponents")
    for step in range(1, 4):
        grad = torch.randn(numel, generator=generator).to(torch.bfloat16)
        x, moments, rounded = _adam_in_blocks(x, moments, grad, step)
        parts = SplitMasters(weights, residuals, ties)
        optimizer.step_shard(optimizer.param_groups[0], stored, grad, grad_scale=1.0, out=weights, parts=parts)
        assert same_bits(weights.view(torch.int16), rounded.view(torch.int16)), step
        masters = torch.empty(numel)
        join(weights, residuals, ties, masters)
        assert same_bits(masters, x), step
        for name, expected in zip(names, moments, strict=True):
            assert torch.equal(optimizer.state[stored][name], expected), (step, name)


def _bytes(settings: dict[str, Any]) -> tuple[int, int, dict[str, int], dict[str, int]]:
    engine, *_ = zeroaccel.initialize(nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)), config=settings)
    train_step(engine, engine(torch.ones(2, 256, dtype=torch.bfloat16)).float().square().mean())
    part = sum(buffer.layout.shard_numel(buffer.rank) for unit in engine.units for buffer in unit.buffers)
    found = part, len(engine.sharded_optimizer.buffers), engine.tier_nbytes(), engine.model_state_nbytes()
    engine.destroy()
    return found


@pytest.mark.parametrize(("states", "optimizer"), [("none", ADAMW), ("cpu", INT8), ("nvme", ADAMW), ("nvme", INT8)])
def test_bytes_of_a_master_are_2_and_a_bit(
    ranks: Ranks, tmp_path: Path, states: str, optimizer: dict[str, Any]
) -> None:
    settings = config(2, "bf16", data_types=RESIDUAL, optimizer=optimizer, **offloaded(tmp_path, states))
    settings["zero_optimization"]["sub_group_size"] = 10**9
    moments = 2 + 2 / 32 if optimizer is INT8 else 8
    for part, groups, tiers, memory in ranks(2).run(_bytes, settings):
        held = tiers["optimizer, nvme" if states == "nvme" else "optimizer, host"]
        formula = part * (2 + 1 / 8 + moments)
        assert formula <= held < formula + 5 * 64 * groups
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


def _resume_int8(folder: Path, tag: str, stage: int, keys: dict[str, Any], saves: bool) -> Snapshot:
    torch.manual_seed(7 if saves else 11)
    engine, *_ = zeroaccel.initialize(Toy(), config=config(stage, "bf16", **keys))
    if saves:
        train_steps(engine, batches(0, 3))
        engine.save_checkpoint(folder, tag=tag)
    else:
        engine.load_checkpoint(folder, tag=tag)
    return snapshot(engine, {})


def test_int8_moments_of_residual_masters_are_saved_resharded_and_consolidated(ranks: Ranks, tmp_path: Path) -> None:
    """Saved from files by two ranks; resumed by one and two ranks, in memory with fp32 masters and in files."""
    files = {"optimizer": INT8, "data_types": RESIDUAL, **offloaded(tmp_path, "nvme", "nvme")}
    plain = {"optimizer": INT8, "data_types": {"master_weights": "fp32"}}
    before = ranks(2).run(_resume_int8, tmp_path / "saved", "files", 3, files, True)
    expected = assembled(before)
    assert {value.dtype for key, value in expected.items() if key.startswith("state/")} == {torch.bfloat16}
    host = {"optimizer": INT8, "data_types": RESIDUAL, **offloaded(tmp_path, "cpu")}
    for count, stage, keys in ((1, 2, plain), (2, 3, files), (1, 1, host)):
        after = ranks(count).run(_resume_int8, tmp_path / "saved", "files", stage, keys, False)
        got = assembled(after)
        assert expected.keys() == got.keys()
        assert [key for key in expected if not torch.equal(expected[key], got[key])] == [], (count, keys)
        assert after[0].losses == before[0].losses, (count, keys)
    wide = {"optimizer": ADAMW, "data_types": RESIDUAL, **offloaded(tmp_path, "nvme")}
    got = assembled(ranks(2).run(_resume_int8, tmp_path / "saved", "files", 2, wide, False))
    assert [key for key in expected if not torch.equal(expected[key].float(), got[key].float())] == []
    masters = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "saved", "files")
    for name, value in masters.items():
        assert torch.equal(value.flatten(), expected.get(f"master/{name}", value.flatten())), name
    assert sum(f"master/{name}" in expected for name in masters) > 10


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
    cases = [
        (config(2, "fp16", data_types=RESIDUAL), "the precision is fp16"),
        (config(2, "fp32", data_types=RESIDUAL), "the precision is fp32"),
        (config(0, "bf16", data_types=RESIDUAL), "zero_optimization.stage is 0"),
        (config(2, "bf16", data_types={"master_weights": "bf16"}), "master_weights: expected 'fp32' or 'residual'"),
    ]
    for told in ranks(1).run(_refused, [case for case, _ in cases]):
        for (_, text), message in zip(cases, told, strict=True):
            assert text in message, (text, message)
