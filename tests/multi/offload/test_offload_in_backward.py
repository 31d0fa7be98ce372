"""Host updates during the last backward, before the norm is known: the bits, and everything that drops them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroaccel
import zeroaccel.zero
from tests.support.checkpoint_runs import train as train_steps
from tests.support.pool import Ranks
from tests.support.refusals import message
from tests.support.training import ADAMW, SGD, Run, Toy, batches, config, differences, finished, offloaded
from zeroaccel.engine import Engine
from zeroaccel.errors import ConfigError
from zeroaccel.logs import logger
from zeroaccel.zero.early_update import WINDOW, EarlyUpdate
from zeroaccel.zero.storage import placement

CLIP = 21.0  # bites in some of the steps
FP16 = {"enabled": True, "initial_scale_power": 11, "loss_scale_window": 1, "hysteresis": 1}
BF16 = {"bf16": {"enabled": True}}
LION = {"type": "Lion", "params": {"lr": 1e-3, "weight_decay": 0.1}}
CASES: dict[str, dict[str, Any]] = {
    "bf16 AdamW": {**BF16, "optimizer": ADAMW},
    "fp32 SGD": {"optimizer": SGD, "accumulation": 3},
    "fp16 Lion": {"fp16": FP16, "optimizer": LION},
    "fp16 AdamW": {"fp16": FP16, "optimizer": ADAMW, "accumulation": 3},
    "bf16 SGD without momentum": {**BF16, "optimizer": {"type": "SGD", "params": {"lr": 0.05}}},
    "fp32 RMSprop": {"optimizer": {"type": "RMSprop", "params": {"lr": 1e-3, "momentum": 0.9, "centered": True}}},
    "bf16 Adagrad": {**BF16, "optimizer": {"type": "Adagrad", "params": {"lr": 1e-2}}},
    "bf16 AdamW int8": {**BF16, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "moments_dtype": "int8"}}},
}


def _settings(folder: Path, during: str, stage: int, param: str = "none", **changes: Any) -> dict[str, Any]:
    spare = {"spare_budget": changes.pop("spare_budget")} if "spare_budget" in changes else {}
    keys = offloaded(folder, "cpu", param, update_during=during, **(spare if during == "backward" else {}))
    changes = {"gradient_clipping": CLIP, "stage3_param_persistence_threshold": 30, **keys, **changes}
    return config(stage, accumulation=changes.pop("accumulation", 1), **changes)


def _make(settings: dict[str, Any]) -> Engine:
    torch.manual_seed(7)
    return zeroaccel.initialize(Toy(), config=settings)[0]


Between = Callable[[Engine, int], object]


def _nothing(engine: Engine, step: int) -> None:
    return None


def _train(settings: dict[str, Any], steps: int, between: Between = _nothing) -> tuple[Run, list[float]]:
    """Trains; `between` is called between the last backward of a step and `step()`.

    Returns:
        The run, and the share of the elements that each step's early updates kept.
    """
    engine, run, shares = _make(settings), Run(), []
    optimizer = engine.sharded_optimizer
    assert optimizer is not None
    for number, batch in enumerate(batches(engine.collectives.rank, steps * engine.gradient_accumulation_steps())):
        loss = engine(batch)
        engine.backward(loss)
        run.losses.append(loss.item())
        before, is_boundary = optimizer.kept_numel, engine.is_gradient_accumulation_boundary()
        if is_boundary:
            between(engine, number)
        engine.step()
        if optimizer.early_numel and is_boundary:
            shares.append((optimizer.kept_numel - before) / sum(buffer.own.numel for buffer in optimizer.buffers))
        run.norms.append(engine.get_global_grad_norm())
    run.skipped = engine.skipped_steps
    return finished(engine, run), shares


def _compare(pairs: list[tuple[Any, Any]], steps: int, between: Between = _nothing) -> list[tuple[Any, ...]]:
    found = []
    for expected, got in pairs:
        (one, none), (other, shares) = _train(expected, steps, between), _train(got, steps, between)
        assert none == []
        found.append((differences(one, other), shares, other.skipped))
    return found


def _pairs(folder: Path, tiers: list[tuple[int, str]], **case: Any) -> list[tuple[Any, Any]]:
    return [tuple(_settings(folder, during, *tier, **case) for during in ("step", "backward")) for tier in tiers]


QUICK = [("bf16 AdamW", 1), ("fp32 SGD", 2), ("fp16 Lion", 1), ("fp16 AdamW", 2)]


@pytest.mark.parametrize(
    ("name", "world"),
    [*QUICK, *(pytest.param(n, w, marks=pytest.mark.slow) for n in CASES for w in (1, 2, 3) if (n, w) not in QUICK)],
)
def test_an_update_in_the_backward_gives_the_same_bits(ranks: Ranks, tmp_path: Path, name: str, world: int) -> None:
    tiers = [(1, "none"), (2, "none"), (3, "none"), (3, "cpu")]
    for found in ranks(world).run(_compare, _pairs(tmp_path, tiers, **CASES[name]), 6, timeout=120):
        for tier, (told, shares, skipped) in zip(tiers, found, strict=True):
            assert told == [], tier
            assert (0 < skipped < 6) == ("fp16" in name), skipped
            assert set(shares) <= {0.0, 1.0}, shares
            assert len(set(shares)) == 2 or (name, world) not in QUICK  # some steps clip, others do not


def _swapped_before_the_norm(pair: tuple[Any, Any]) -> tuple[list[str], list[float], int]:
    judge = EarlyUpdate.judge
    EarlyUpdate.judge = lambda early, factor, gradients: judge(early, early._factor, gradients)  # type: ignore[method-assign]
    try:
        return _compare([pair], 4)[0]  # type: ignore[return-value]
    finally:
        EarlyUpdate.judge = judge  # type: ignore[method-assign]


def test_spare_memory_that_is_exchanged_whatever_the_norm_is_found(ranks: Ranks, tmp_path: Path) -> None:
    (pair,) = _pairs(tmp_path, [(2, "none")], **BF16, optimizer=SGD)
    told, shares, _ = ranks(1).run(_swapped_before_the_norm, pair)[0]
    assert "losses" in told
    assert set(shares) == {1.0}


# -- between the backward and the step


def _set_rate(engine: Engine) -> None:
    engine.optimizer.param_groups[0]["lr"] *= 0.5


def _set_betas(engine: Engine) -> None:
    engine.optimizer.param_groups[0]["betas"] = (0.8, 0.99)


def _write_master(engine: Engine) -> None:
    zeroaccel.zero.safe_set_full_fp32_param(engine.module.layers[1].up.weight, torch.full((47, 23), 0.25))


def _write_state(engine: Engine) -> None:
    zeroaccel.zero.safe_set_full_optimizer_state(
        engine.module.layers[1].up.weight, torch.full((47, 23), 0.25), "exp_avg"
    )


def _write_tensor(engine: Engine) -> None:
    for state in engine.optimizer.state.values():
        state["exp_avg_sq"].mul_(2.0)


def _count_again(engine: Engine) -> None:
    for state in engine.optimizer.state.values():
        state["step"] += 5


def _write_weight(engine: Engine) -> None:
    weight = engine.module.layers[2].down.weight
    with zeroaccel.zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
        weight[2] += 1.0


def _again(engine: Engine) -> None:
    engine.backward(engine(batches(engine.collectives.rank + 7, 1)[0]))


def _start_again(engine: Engine) -> None:
    engine.zero_grad()
    _again(engine)


def _clip_values(engine: Engine) -> None:
    engine.clip_grad_value_(0.01)


def _scale(engine: Engine) -> None:
    engine.scale_gradients(0.5)


def _load_states(engine: Engine) -> None:
    engine.optimizer.load_state_dict(copy.deepcopy(engine.optimizer.state_dict()))


def _read(engine: Engine) -> None:
    master = zeroaccel.zero.safe_get_full_fp32_param(engine.module.norm.weight)
    state = zeroaccel.zero.safe_get_full_optimizer_state(engine.module.norm.weight, "exp_avg")
    assert master is not None
    assert state is not None
    READ.append((master.tolist(), state.tolist(), engine.gradient_norm()))


READ: list[Any] = []
CHANGES: dict[str, tuple[Callable[[Engine], None], str]] = {
    "nothing": (lambda engine: None, "all"),
    "rate": (_set_rate, "none"),
    "betas": (_set_betas, "none"),
    "master": (_write_master, "some"),
    "read": (_read, "all"),
    "state": (_write_state, "some"),
    "tensors of states": (_write_tensor, "none"),
    "counter": (_count_again, "none"),
    "weight": (_write_weight, "some"),
    "backward again": (_again, "all"),
    "zero_grad": (_start_again, "all"),
    "values": (_clip_values, "none"),
    "scale": (_scale, "none"),
    "load": (_load_states, "none"),
    "last": (lambda engine: None, "all"),
}


def _changed(pair: tuple[dict[str, Any], dict[str, Any]]) -> tuple[list[str], list[float], bool]:
    changes = [change for change, _ in CHANGES.values()]
    READ.clear()
    told, shares, _ = _compare([pair], len(changes), lambda engine, step: changes[step](engine))[0]
    return told, shares, READ[0] == READ[1]


@pytest.mark.parametrize(("world", "stage", "precision"), [(1, 2, "bf16"), (1, 1, "fp32"), (2, 3, "bf16")])
def test_changes_after_the_backward_count(ranks: Ranks, tmp_path: Path, world: int, stage: int, precision: str) -> None:
    """The early update is dropped where it has read other values."""
    (pair,) = _pairs(tmp_path, [(stage, "none")], gradient_clipping=0.0, **(BF16 if precision == "bf16" else {}))
    for told, shares, same_reads in ranks(world).run(_changed, pair, timeout=120):
        assert told == []
        assert same_reads
        kinds = ["all" if share == 1.0 else "some" if share else "none" for share in shares]
        for (name, (_, kind)), found in zip(CHANGES.items(), kinds, strict=True):
            assert found in ((kind, "all") if kind == "some" and world > 1 else (kind,)), name  # on the other rank


def _loaded(settings: dict[str, Any], root: Path) -> list[list[float]]:
    engine = _make(settings)
    tokens = batches(engine.collectives.rank, 8)
    losses = [train_steps(engine, tokens[:3])]
    engine.save_checkpoint(root, tag="three")
    losses.append(train_steps(engine, tokens[3:6]))
    engine.backward(engine(tokens[7]))
    engine.load_checkpoint(root, tag="three")
    losses.append(train_steps(engine, tokens[3:6]))
    engine.backward(engine(tokens[7]))
    engine.destroy()
    return losses


@pytest.mark.parametrize(("world", "stage"), [(1, 2), (2, 3)])
def test_a_load_and_the_end_drop_an_early_update(ranks: Ranks, tmp_path: Path, world: int, stage: int) -> None:
    found = [
        ranks(world).run(_loaded, _settings(tmp_path, during, stage, gradient_clipping=0.0), tmp_path / during)
        for during in ("step", "backward")
    ]
    assert found[0] == found[1]
    for _, first, again in found[0]:
        assert first == again


# -- failures and limits


def _failed(settings: dict[str, Any]) -> tuple[list[float], int, int]:
    engine = _make(settings)
    optimizer = engine.sharded_optimizer
    assert optimizer is not None
    step_shard, last = engine.optimizer.step_shard, engine.collectives.rank == engine.collectives.world_size - 1

    def fail(*args: Any, sources: Any = None, **kwargs: Any) -> Any:
        if sources is not None:
            raise MemoryError("no memory for a test")
        return step_shard(*args, **kwargs)

    if last:
        engine.optimizer.step_shard = fail  # type: ignore[method-assign]
    losses = train_steps(engine, batches(engine.collectives.rank, 4))
    kept, early_numel = optimizer.kept_numel, optimizer.early_numel
    engine.destroy()
    return losses, early_numel, kept


@pytest.mark.parametrize("world", [1, 2])
def test_an_early_update_that_fails_on_one_rank_is_done_in_the_step(ranks: Ranks, tmp_path: Path, world: int) -> None:
    settings = [_settings(tmp_path, during, 2, gradient_clipping=0.0) for during in ("step", "backward")]
    expected = ranks(world).run(_failed, settings[0])
    found = ranks(world).run(_failed, settings[1])
    assert [losses for losses, _, _ in found] == [losses for losses, _, _ in expected]
    assert found[-1][1] > 0 == found[-1][2]


def _dropped_often(settings: dict[str, Any], steps: int) -> tuple[list[float], list[str], int, bool]:
    engine, said = _make(settings), []
    optimizer = engine.sharded_optimizer
    assert optimizer is not None
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        losses = train_steps(engine, batches(engine.collectives.rank, steps))
        early, nbytes = optimizer.early_numel, optimizer.spare_nbytes
        engine.settings = replace(engine.settings, clipping=1e9)
        losses += train_steps(engine, batches(engine.collectives.rank, steps))
    finally:
        logger.removeHandler(handler)
    continued = optimizer.kept_numel > 0
    engine.destroy()
    assert nbytes == 0
    early //= sum(buffer.own.numel for buffer in optimizer.buffers)
    return losses, [text for text in said if "update_during" in text], early, continued


def test_early_updates_pause_while_most_steps_clip(ranks: Ranks, tmp_path: Path) -> None:
    settings = [_settings(tmp_path, during, 2, gradient_clipping=1e-3) for during in ("step", "backward")]
    found = [ranks(1).run(_dropped_often, each, WINDOW + 4)[0] for each in settings]
    (expected, none, *_), (losses, said, early, continued) = found
    assert losses == expected
    assert none == []
    assert early == WINDOW
    assert continued
    (text,) = said
    assert f'"backward" pause, and the next forward updates, since {WINDOW} of the last {WINDOW} steps clipped' in text


def test_the_budget_limits_the_spare_memory(ranks: Ranks, tmp_path: Path) -> None:
    cases = {"auto": 1.0, 0: 0.0, 60_000: 0.5}
    settings = [
        _settings(tmp_path, "backward", 2, gradient_clipping=0.0, spare_budget=budget, **BF16) for budget in cases
    ]
    expected, _ = ranks(1).run(_train, _settings(tmp_path, "step", 2, gradient_clipping=0.0, **BF16), 3)[0]
    for (budget, share), each in zip(cases.items(), settings, strict=True):
        run, shares = ranks(1).run(_train, each, 3)[0]
        assert differences(expected, run) == []
        assert shares == [] if budget == 0 else abs(shares[-1] - share) < 0.4, (budget, shares)
        assert budget == "auto" or all(each < 1.0 for each in shares)


def _spared(settings: dict[str, Any], nbytes_of_element: int) -> float:
    """Returns the share of the buffers with spare memory, if this much memory is free for each element."""
    found: list[float] = []
    free, choose = placement.free_nbytes, placement.TierSet._choose_spares
    numel = sum(param.numel() for param in Toy().parameters())

    def choose_and_note(tiers: placement.TierSet, needs: Any) -> None:
        choose(tiers, needs)
        found.append(len(tiers.spares) / len(tiers._spare_plan.sizes))

    placement.free_nbytes, placement.TierSet._choose_spares = lambda: numel * nbytes_of_element, choose_and_note
    try:
        zeroaccel.initialize(Toy(), config=settings)[0].destroy()
    finally:
        placement.free_nbytes, placement.TierSet._choose_spares = free, choose
    return found[0]


def test_spare_memory_leaves_room_for_gradients_and_weights(ranks: Ranks, tmp_path: Path) -> None:
    settings = _settings(tmp_path, "backward", 3, spare_budget="auto", **BF16)
    settings["zero_optimization"]["offload_param"] = {"device": "cpu"}
    # Masters and moments 12, their spares with new weights 14, gradients 2, weights 2; alignment adds to these.
    assert ranks(1).run(_spared, settings, 32)[0] == 1.0
    assert ranks(1).run(_spared, settings, 28)[0] < 1.0


def test_a_budget_beyond_the_free_memory_is_refused_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    settings = _settings(tmp_path, "backward", 2, spare_budget=10**15)
    for said in ranks(2).run(_refused_with_little_memory, settings):
        assert "offload_optimizer.spare_budget: expected" in said
        assert "free memory on" in said
        assert "bytes too few for each rank" in said


def _refused_with_little_memory(settings: dict[str, Any]) -> str:
    before, placement.free_nbytes = placement.free_nbytes, lambda: 1000
    try:
        return message(ConfigError, zeroaccel.initialize, Toy(), config=settings)
    finally:
        placement.free_nbytes = before
