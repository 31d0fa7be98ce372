"""Host updates that the next forward awaits unit by unit: the bits, and every call that comes in between."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zeroaccel
import zeroaccel.zero
from tests.support.checkpoint_runs import train as train_steps
from tests.support.pool import Ranks
from tests.support.refusals import message
from tests.support.training import ADAMW, SGD, Run, Toy, batches, config, differences, finished, offloaded
from zeroaccel.engine import Engine
from zeroaccel.errors import EngineStateError, OffloadError

LION = {"type": "Lion", "params": {"lr": 1e-3, "weight_decay": 0.1}}
CLIP = 21.0  # bites in some of the steps
FP16 = {"enabled": True, "initial_scale_power": 11, "loss_scale_window": 1, "hysteresis": 1}


def _settings(folder: Path, during: str, stage: int, states: str, params: str = "none", **changes: Any) -> Any:
    keys = offloaded(folder, states, params, update_during=during, pipeline_read=True)
    changes = {"gradient_clipping": CLIP, "stage3_param_persistence_threshold": 30, **keys, **changes}
    return config(stage, accumulation=changes.pop("accumulation", 1), **changes)


def _make(settings: dict[str, Any]) -> Engine:
    torch.manual_seed(7)
    return zeroaccel.initialize(Toy(), config=settings)[0]


def _train(settings: dict[str, Any], steps: int, between: Callable[[Engine], object] | None = None) -> Run:
    engine, run = _make(settings), Run()
    updates = engine.weight_update
    assert updates is not None
    waited = 0
    for batch in batches(engine.collectives.rank, steps * engine.gradient_accumulation_steps()):
        loss = engine(batch)
        engine.backward(loss)
        run.losses.append(loss.item())
        engine.step()
        waited += updates._thread.pending
        for group in engine.optimizer.param_groups:  # the update has its own rate by now
            group["lr"] *= 0.9
        run.norms.append(engine.get_global_grad_norm())
        if between is not None:
            between(engine)
    run.skipped = engine.skipped_steps
    during = settings["zero_optimization"]["offload_optimizer"]["update_during"]
    assert bool(waited) == (during == "forward"), waited
    return finished(engine, run)


def _compare(pairs: list[tuple[dict[str, Any], dict[str, Any]]], steps: int) -> list[tuple[list[str], int, list[Any]]]:
    found = []
    for expected, got in pairs:
        one, other = _train(expected, steps), _train(got, steps)
        found.append((differences(one, other), other.skipped, other.norms))
    return found


CASES = {
    "bf16 AdamW": {"bf16": {"enabled": True}, "optimizer": ADAMW},
    "fp32 SGD": {"optimizer": SGD, "accumulation": 3},
    "fp16 Lion": {"fp16": FP16, "optimizer": LION, "gradient_clipping": 21.4},
    "bf16 AdamW accumulation": {"bf16": {"enabled": True}, "optimizer": ADAMW, "accumulation": 3},
    "fp16 AdamW": {"fp16": FP16, "optimizer": ADAMW, "accumulation": 3},
    "fp32 Lion": {"optimizer": LION},
}
SHARDED = [(3, "cpu", "none"), (3, "cpu", "cpu"), (3, "nvme", "cpu")]


def _pairs(folder: Path, tiers: list[tuple[int, str, str]], case: dict[str, Any]) -> list[tuple[Any, Any]]:
    return [tuple(_settings(folder, during, *tier, **case) for during in ("step", "forward")) for tier in tiers]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_an_update_in_the_forward_gives_the_same_bits(ranks: Ranks, tmp_path: Path, world: int, name: str) -> None:
    alone = [(1, "cpu", "none"), (2, "cpu", "none"), (2, "nvme", "none")] if world == 1 else []
    tiers = [*alone, *SHARDED]
    for found in ranks(world).run(_compare, _pairs(tmp_path, tiers, CASES[name]), 5, timeout=120):
        for tier, (told, skipped, norms) in zip(tiers, found, strict=True):
            assert told == [], tier
            assert (0 < skipped < 5) == ("fp16" in name), skipped
            known = [norm for norm in norms if norm is not None]
            assert min(known) < CASES[name].get("gradient_clipping", CLIP) < max(known), known


# -- calls between a step and the next forward


def _total(values: Any) -> float:
    tensors = values.values() if isinstance(values, dict) else values
    return sum(float(value.detach().double().sum()) for value in tensors if isinstance(value, Tensor))


def _written(engine: Engine) -> float:
    weight = engine.module.layers[1].up.weight
    with zeroaccel.zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
        weight[2] += 1.0
    zeroaccel.zero.safe_set_full_fp32_param(engine.module.norm.weight, torch.full((23,), 0.75))
    master = zeroaccel.zero.safe_get_full_fp32_param(weight)
    assert master is not None
    return float(master.double().sum())


def _evaluated(engine: Engine) -> float:
    with torch.no_grad():
        return float(engine(batches(engine.collectives.rank, 1)[0]).item())


def _read_alone(engine: Engine) -> float:
    if engine.collectives.rank != engine.collectives.world_size - 1:
        return 0.0
    param = engine.module.layers[2].down.weight
    return _total([zeroaccel.zero.safe_get_local_fp32_param(param)])


def _moved(engine: Engine) -> float:
    engine.offload_states()
    engine.reload_states()
    return 0.0


def _states(engine: Engine) -> float:
    return sum(_total(state) for state in engine.optimizer.state_dict()["state"].values())


def _of_streams(engine: Engine) -> float:
    return sum(float(packet.payload.double().sum()) for packet in engine.stream_weights() if packet.payload is not None)


CALLS: dict[str, Callable[[Engine], float]] = {
    "write": _written,
    "evaluate": _evaluated,
    "read alone": _read_alone,
    "gather all": lambda engine: sum(float(value.double().sum()) for _, value in engine.iter_named_full_params()),
    "offload": _moved,
    "optimizer's state dict": _states,
    "stream": _of_streams,
    "state": lambda engine: _total([zeroaccel.zero.safe_get_full_optimizer_state(engine.module.norm.bias, "exp_avg")]),
    "zero": lambda engine: float(engine.zero_grad() is None),
    "finish": lambda engine: float(engine.finish_update() is None),
}
WHOLE: dict[str, Callable[[Engine], float]] = {  # where each rank has all weights
    "read": lambda engine: _total([engine.module.embed.weight.double()]),
    "data": lambda engine: _total([engine.module.norm.weight.data]),
    "state dict": lambda engine: _total(engine.module.state_dict()),
    "copy": lambda engine: _total(copy.deepcopy(engine.module).parameters()),
    "module": lambda engine: _total([engine.module.layers[0](torch.ones(1, 23, dtype=torch.bfloat16))]),
    "loop": lambda engine: _total(torch._foreach_norm([param.float() for param in engine.module.parameters()])),
}


def _called(settings: list[dict[str, Any]], names: list[str], folder: Path) -> list[tuple[Run, list[float]]]:
    found = []
    for each in settings:
        told: list[float] = []
        turn = iter([*names, *names, *names])

        def between(engine: Engine, told: list[float] = told, turn: Any = turn) -> None:
            told.append((CALLS | WHOLE)[next(turn)](engine))

        found.append((_train(each, len(names) + 1, between), told))
    return found


@pytest.mark.parametrize(("world", "stage", "states"), [(1, 2, "cpu"), (1, 3, "cpu"), (2, 3, "cpu"), (2, 3, "nvme")])
def test_calls_before_the_forward_see_the_new_weights(
    ranks: Ranks, tmp_path: Path, world: int, stage: int, states: str
) -> None:
    names = [*CALLS, *(WHOLE if stage == 2 else {})]
    settings = [_settings(tmp_path, during, stage, states, bf16={"enabled": True}) for during in ("step", "forward")]
    for (expected, said), (got, told) in ranks(world).run(_called, settings, names, tmp_path, timeout=120):
        assert repr(dict(zip(names, told, strict=False))) == repr(dict(zip(names, said, strict=False)))
        assert differences(expected, got) == []


def _resumed(settings: dict[str, Any], root: Path) -> tuple[list[float], list[float]]:
    engine = _make(settings)
    tokens = batches(engine.collectives.rank, 6)
    train_steps(engine, tokens[:3])
    engine.save_checkpoint(root, tag="three")
    losses = train_steps(engine, tokens[3:])
    engine.load_checkpoint(root, tag="three")
    again = train_steps(engine, tokens[3:])
    engine.destroy()
    return losses, again


@pytest.mark.parametrize(("world", "stage", "states"), [(1, 2, "cpu"), (2, 3, "nvme")])
def test_a_checkpoint_has_the_whole_update(ranks: Ranks, tmp_path: Path, world: int, stage: int, states: str) -> None:
    settings = [_settings(tmp_path, during, stage, states) for during in ("forward", "step")]
    for index, each in enumerate(settings):
        found = ranks(world).run(_resumed, each, tmp_path / f"saved {index}")
        assert all(losses == again for losses, again in found)
        settings[index] = [losses for losses, _ in found]
    assert settings[0] == settings[1]


# -- failures


def _failed(settings: dict[str, Any], root: Path, call: str) -> dict[str, Any]:
    engine = _make(settings)
    tokens = batches(engine.collectives.rank, 6)
    train_steps(engine, tokens[:2])
    engine.save_checkpoint(root, tag="two")
    expected = train_steps(engine, tokens[2:4])
    engine.finish_update()
    step_shard, fails = engine.optimizer.step_shard, [True]

    def fail(*args: Any, **kwargs: Any) -> Any:
        if fails[0]:
            raise MemoryError("no memory for a test")
        return step_shard(*args, **kwargs)

    if engine.collectives.rank == engine.collectives.world_size - 1:
        engine.optimizer.step_shard = fail
    train_steps(engine, tokens[4:5])
    calls: dict[str, Callable[[], Any]] = {
        "forward": lambda: engine(tokens[5]),
        "save": lambda: engine.save_checkpoint(root, tag="half"),
        "gather": lambda: list(engine.iter_named_full_params()),
    }
    said = message(OffloadError, calls[call])
    fails[0] = False
    then = [message(EngineStateError, engine, tokens[5]), message(EngineStateError, engine, tokens[5])]
    engine.load_checkpoint(root, tag="two")
    again = train_steps(engine, tokens[2:4])
    engine.destroy()
    return {"said": said, "then": then, "same": again == expected, "saved": sorted(p.name for p in root.glob("*"))}


@pytest.mark.parametrize("call", ["forward", "save", "gather"])
@pytest.mark.parametrize(("world", "stage"), [(1, 2), (2, 3)])
def test_an_update_that_fails_is_named_on_all_ranks(
    ranks: Ranks, tmp_path: Path, world: int, stage: int, call: str
) -> None:
    settings = _settings(tmp_path, "forward", stage, "cpu", stage3_param_persistence_threshold=0)
    for told in ranks(world).run(_failed, settings, tmp_path / "saved", call, timeout=60):
        assert "on the host: expected an update without an error, got 'MemoryError: no memory" in told["said"]
        assert ("[rank 1]" in told["said"]) == (world == 2)
        assert all("resume from the last checkpoint" in said for said in told["then"])
        assert told["same"]
        assert told["saved"] == ["latest", "two", "zero_to_fp32.py"]
