"""A share of masters and states on the device of an engine that offloads the others: the bits, and which share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zeroaccel
from tests.support.pool import Ranks
from tests.support.training import ADAMW, SGD, Run, Toy, batches, config, differences, finished, offloaded
from zeroaccel.checkpoint.consolidate import get_fp32_state_dict_from_zero_checkpoint
from zeroaccel.engine import Engine
from zeroaccel.zero import safe_get_full_fp32_param, safe_get_full_optimizer_state

LION = {"type": "Lion", "params": {"lr": 1e-3, "weight_decay": 0.1}}
FP16 = {"enabled": True, "initial_scale_power": 11, "loss_scale_window": 1, "hysteresis": 1}
CLIP = 21.0  # bites in some of the steps
STATES = {"AdamW": ("exp_avg", "exp_avg_sq"), "Lion": ("exp_avg",), "SGD": ("momentum_buffer",)}
CASES: dict[str, dict[str, Any]] = {
    "bf16 AdamW": {"bf16": {"enabled": True}, "optimizer": ADAMW},
    "fp32 SGD": {"optimizer": SGD, "accumulation": 3},
    "fp16 Lion": {"fp16": FP16, "optimizer": LION},
    "bf16 SGD": {"bf16": {"enabled": True}, "optimizer": SGD, "accumulation": 3},
    "fp16 AdamW": {"fp16": FP16, "optimizer": ADAMW, "accumulation": 3},
    "fp32 AdamW": {"optimizer": ADAMW},
    "fp32 Lion": {"optimizer": LION},
}
SHARES: list[dict[str, Any]] = [{"ratio": 0}, {"ratio": 0.25}, {"ratio": 0.5}, {"device_budget": "40kB"}]


def _settings(folder: Path, stage: int, case: dict[str, Any], states: str = "cpu", **keys: Any) -> dict[str, Any]:
    changes = {"gradient_clipping": CLIP, "stage3_param_persistence_threshold": 30, **case}
    param = keys.pop("param", "none")
    changes |= offloaded(folder, states, param, pipeline_read=True, **keys)
    return config(stage, accumulation=changes.pop("accumulation", 1), **changes)


def _make(settings: dict[str, Any]) -> Engine:
    torch.manual_seed(7)
    return zeroaccel.initialize(Toy(), config=settings)[0]


def _resident(engine: Engine) -> list[str]:
    return [buffer.key for unit in engine.units for buffer in unit.buffers if buffer.masters.is_resident]


def _advance(engine: Engine, run: Run, steps: int, begin: int = 0) -> None:
    accumulation = engine.gradient_accumulation_steps()
    tokens = batches(engine.collectives.rank, (begin + steps) * accumulation)[begin * accumulation :]
    for index, batch in enumerate(tokens, start=1):
        loss = engine(batch)
        engine.backward(loss)
        run.losses.append(loss.item())
        engine.step()
        for group in engine.optimizer.param_groups:
            group["lr"] *= 0.9
        if index % accumulation == 0:
            run.norms.append(engine.get_global_grad_norm())
    run.skipped = engine.skipped_steps


def _with_states(engine: Engine, run: Run, names: tuple[str, ...]) -> Run:
    engine.finish_update()
    masters = {}
    for fqn, param in engine.module.named_parameters():
        if param.requires_grad and fqn not in ("nothing", "unused"):
            masters[f"{fqn} master"] = safe_get_full_fp32_param(param)
            masters |= {f"{fqn} {name}": safe_get_full_optimizer_state(param, name) for name in names}
    finished(engine, run)
    run.weights |= {name: value.clone() for name, value in masters.items() if value is not None}
    return run


def _train(settings: dict[str, Any], steps: int) -> tuple[Run, list[str]]:
    engine, run = _make(settings), Run()
    _advance(engine, run, steps)
    resident = _resident(engine)
    return _with_states(engine, run, STATES[settings["optimizer"]["type"]]), resident


def _compare(wholes: list[Any], shares: list[list[Any]], steps: int) -> list[tuple[list[str], list[str], Run]]:
    found = []
    for whole, of_share in zip(wholes, shares, strict=True):
        expected, none = _train(whole, steps)
        assert none == []
        for each in of_share:
            run, resident = _train(each, steps)
            found.append((differences(expected, run), resident, run))
    return found


_TIERS = [(1, 2, "cpu"), (2, 3, "cpu"), (1, 3, "cpu"), (2, 1, "cpu"), (2, 2, "cpu"), (2, 3, "nvme"), (2, 1, "nvme")]
_QUICK = {(1, 2, "cpu", "bf16 AdamW"), (2, 3, "cpu", "fp16 Lion"), (2, 3, "nvme", "fp32 SGD")}
_ALL = [(*tier, name) for tier in _TIERS for name in CASES]
_MARKED = [pytest.param(*each, marks=[] if each in _QUICK else [pytest.mark.slow]) for each in _ALL]


@pytest.mark.parametrize(("world", "stage", "states", "name"), _MARKED)
def test_a_share_on_the_device_gives_the_same_bits(
    ranks: Ranks, tmp_path: Path, world: int, stage: int, states: str, name: str
) -> None:
    times = {"step": SHARES, "forward": SHARES[2:3], "next_step": SHARES[2:]}
    if states == "cpu":
        times["backward"] = SHARES[2:3]
    wholes = [_settings(tmp_path, stage, CASES[name], states, update_during=during) for during in times]
    shares = [
        [_settings(tmp_path, stage, CASES[name], states, update_during=during, **share) for share in of_time]
        for during, of_time in times.items()
    ]
    for found in ranks(world).run(_compare, wholes, shares, 5, timeout=120):
        for told, _, run in found:
            assert told == []
            assert (0 < run.skipped < 5) == ("fp16" in name)
            known = [norm for norm in run.norms if norm is not None]
            assert min(known) < CLIP < max(known)
        # Nothing is offloaded with ratio 0; then 1, 3 and 2 of the 4 trained units stay on the device.
        units = [[key for key in resident if "persistent" not in key] for _, resident, _ in found[:3]]
        assert units == [[], ["root/0", "layers.0/0", "layers.1/0"], ["root/0", "layers.0/0"]]


def _counted(settings: dict[str, Any]) -> tuple[int, int, int]:
    engine = _make(settings)
    _advance(engine, Run(), 1)
    optimizer = engine.sharded_optimizer
    assert optimizer is not None
    engine.finish_update()
    resident, total = optimizer.nbytes(resident_only=True), optimizer.nbytes()
    in_files = engine.tier_nbytes().get("optimizer, nvme", 0)
    engine.destroy()
    return resident, total, in_files


def test_a_budget_bounds_the_bytes_on_the_device(ranks: Ranks, tmp_path: Path) -> None:
    block, root = 12 * 1120, 11136  # a rank's masters and moments of one of three blocks, and of the others
    expected = {100: 0, "12kB": root, root + block - 1: root, f"{root + block}": root + block, "1GiB": root + 3 * block}
    for budget, nbytes in expected.items():
        settings = _settings(tmp_path, 3, {"bf16": {"enabled": True}}, "nvme", device_budget=budget)
        for resident, total, in_files in ranks(2).run(_counted, settings):
            assert (resident, total, in_files) == (nbytes, nbytes, root + 3 * block - nbytes)


# -- checkpoints


def _continued(saving: dict[str, Any], loading: dict[str, Any], root: Path) -> tuple[list[str], list[str], list[str]]:
    engine, run = _make(saving), Run()
    _advance(engine, run, 2)
    engine.save_checkpoint(root, tag="two")
    first = _resident(engine)
    _advance(engine, run, 2, 2)
    _with_states(engine, run, STATES["AdamW"])
    other, again = _make(loading), Run(losses=run.losses[:2], norms=run.norms[:2])
    other.load_checkpoint(root, tag="two")
    other.offload_states()
    other.reload_states()
    _advance(other, again, 2, 2)
    resident = _resident(other)
    return differences(run, _with_states(other, again, STATES["AdamW"])), first, resident


_SHARES_OF_CHECKPOINTS = [
    (2, "cpu", {"ratio": 0.25}, {}, [True, False]),
    (2, "nvme", {}, {"ratio": 0.5}, [False, True]),
    (1, "cpu", {"ratio": 0}, {"device_budget": "40kB"}, [False, True]),
    (2, "cpu", {"device_budget": "1GB"}, {"ratio": 0.5, "update_during": "step"}, [True, True]),
]
_MARKED_CHECKPOINTS = [
    pytest.param(*each, marks=[pytest.mark.slow] if index > 1 else [])
    for index, each in enumerate(_SHARES_OF_CHECKPOINTS)
]


@pytest.mark.parametrize(("world", "states", "saving", "loading", "stays"), _MARKED_CHECKPOINTS)
def test_a_checkpoint_continues_with_another_share(
    ranks: Ranks,
    tmp_path: Path,
    world: int,
    states: str,
    saving: dict[str, Any],
    loading: dict[str, Any],
    stays: list[bool],
) -> None:
    bf16 = {"bf16": {"enabled": True}}
    settings = [_settings(tmp_path, 3, bf16, states, **keys) for keys in (saving, loading)]
    for told, *resident in ranks(world).run(_continued, *settings, tmp_path / "saved", timeout=60):
        assert told == []
        assert [bool(keys) for keys in resident] == stays


def _saved(settings: dict[str, Any], root: Path) -> dict[str, torch.Tensor]:
    engine, run = _make(settings), Run()
    _advance(engine, run, 3)
    engine.save_checkpoint(root, tag="three")  # completes the update that the next forward would await
    engine.save_16bit_model(root, "whole.safetensors")
    return _with_states(engine, run, STATES["AdamW"]).weights


@pytest.mark.parametrize(("stage", "states"), [(3, "cpu"), (2, "nvme"), (1, "cpu")])
def test_a_checkpoint_of_a_share_is_consolidated(ranks: Ranks, tmp_path: Path, stage: int, states: str) -> None:
    found = []
    for name, keys in (("whole", {}), ("share", {"ratio": 0.5, "update_during": "forward"})):
        settings = _settings(tmp_path, stage, {"bf16": {"enabled": True}}, states, **keys)
        weights, _ = ranks(2).run(_saved, settings, tmp_path / name)
        masters = get_fp32_state_dict_from_zero_checkpoint(tmp_path / name, "three")
        known = {fqn: weights[f"{fqn} master"] for fqn in masters if f"{fqn} master" in weights}
        assert len(known) > 10
        assert [fqn for fqn, value in known.items() if not torch.equal(masters[fqn], value)] == []
        thin = load_file(tmp_path / name / "whole.safetensors")
        assert [fqn for fqn in weights.keys() & thin.keys() if not torch.equal(thin[fqn], weights[fqn])] == []
        assert len(weights.keys() & thin.keys()) > 10
        found.append((masters, thin))
    for whole, share in zip(*found, strict=True):
        assert whole.keys() == share.keys()
        assert [fqn for fqn, value in whole.items() if not torch.equal(value, share[fqn])] == []
