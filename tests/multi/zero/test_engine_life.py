"""The life of an engine: several in one process, idle, for inference, with recomputation, and after `destroy`."""

from __future__ import annotations

import copy
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

import zeroaccel
from tests.multi.zero.test_engine_passes import drive, plain
from tests.support.pool import Ranks
from tests.support.training import Run, Toy, batches, config, differences, finished, offloaded, recording, train_step
from zeroaccel.errors import EngineStateError


def _same(one: list[Run], other: list[Run]) -> list[list[str]]:
    return [differences(a, b) for a, b in zip(one, other, strict=True)]


# -- several engines, and destroyed engines


def _alternate(stages: tuple[int, int], together: bool) -> list[Run]:
    engines = []
    for index, stage in enumerate(stages):
        torch.manual_seed(7 + index)
        engines.append(zeroaccel.initialize(Toy(layers=2 + index), config=config(stage, "bf16"))[0])
    runs = [Run(), Run()]
    data = batches(engines[0].collectives.rank, 3)
    for index, batch in [(i, b) for b in data for i in (0, 1)] if together else [(i, b) for i in (0, 1) for b in data]:
        runs[index].losses.append(plain(engines[index], batch).item())
    return list(map(finished, engines, runs))


@pytest.mark.parametrize("stages", [(3, 3), (1, 3)])
def test_two_engines_do_not_disturb_each_other(ranks: Ranks, stages: tuple[int, int]) -> None:
    apart, together = (ranks(2).run(_alternate, stages, order) for order in (False, True))
    for rank in range(2):
        assert _same(apart[rank], together[rank]) == [[], []]


def _destroy(stage: int) -> tuple[list[str], float]:
    torch.manual_seed(7)
    model = Toy()
    engine, *_ = zeroaccel.initialize(model, config=config(stage))
    batch = batches(engine.collectives.rank, 1)[0]
    before = plain(engine, batch).item()
    engine.destroy()
    engine.destroy()
    left = []
    for name, param in model.named_parameters():
        if not torch.isfinite(param).all():
            left.append(f"{name} is not whole")
        if param.untyped_storage().nbytes() != param.numel() * param.itemsize:
            left.append(f"{name} is a view of something larger")
        if param._post_accumulate_grad_hooks:
            left.append(f"{name} has a hook")
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks or type(module._parameters) is not dict:
            left.append(f"{name} has a hook")
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()
    loss = model(batch)
    loss.backward()
    assert loss.item() != before
    assert model.layers[0].up.weight.grad is not None
    with pytest.raises(EngineStateError, match="destroy"):
        engine(batch)
    return left, loss.item()


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_destroy_gives_an_ordinary_model_back(ranks: Ranks, stage: int) -> None:
    for left, _ in ranks(2).run(_destroy, stage):
        assert left == []


def _live_nbytes() -> int:
    # An earlier job of the pool may leave fake tensors, which take no memory and on torch 2.15 have no pointer.
    kinds = ((found, type(found)) for found in gc.get_objects())
    tensors = [found for found, kind in kinds if issubclass(kind, Tensor) and not issubclass(kind, FakeTensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _memory_after_destroy(settings: dict[str, Any]) -> tuple[float, float]:
    """Returns bytes per parameter before and after `destroy`, while the engine and its optimizer are referenced."""
    gc.collect()
    gc.disable()
    try:
        before = _live_nbytes()
        model = Toy(layers=4, width=64)
        numel = sum(param.numel() for param in model.parameters())
        engine, optimizer, *_ = zeroaccel.initialize(model, config=settings)
        for batch in batches(engine.collectives.rank, 2):
            train_step(engine, engine(batch))
        trained = (_live_nbytes() - before) / numel
        engine.destroy()
        assert not optimizer.state
        return trained, (_live_nbytes() - before) / numel
    finally:
        gc.enable()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_destroy_gives_the_memory_back(ranks: Ranks, stage: int) -> None:
    """Immediately, and not when Python's cyclic garbage collector runs."""
    trained, left = ranks(1).run(_memory_after_destroy, config(stage, "bf16"))[0]
    assert trained > 13  # weights, masters and two moments
    assert left < 2.1  # the model's own weights


def _drop(settings: dict[str, Any], folder: Path) -> list[str]:
    """Drops engines without `destroy` and returns what is left of them."""
    references: list[weakref.ref[Any]] = []
    threads = set(threading.enumerate())
    for _ in range(2):
        model = Toy()
        engine = zeroaccel.initialize(model, config=settings)[0]
        train_step(engine, engine(batches(engine.collectives.rank, 1)[0]))
        references += map(weakref.ref, (model, engine, engine.sharded_optimizer))
        del model, engine
        for _ in range(100):  # a thread that has told its result may still return from the call
            gc.collect()
            if all(reference() is None for reference in references):
                break
            time.sleep(0.01)
    open_files = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    left = [type(found).__name__ for reference in references if (found := reference()) is not None]
    left += [thread.name for thread in threading.enumerate() if thread not in threads]
    return left + [name for name in open_files if name.startswith(str(folder))]


@pytest.mark.parametrize("stage", [1, 3])
def test_an_engine_without_destroy_is_collected_with_its_threads_and_files(
    ranks: Ranks, tmp_path: Path, stage: int
) -> None:
    settings = config(stage, "bf16", **offloaded(tmp_path, "nvme"))
    settings["csv_monitor"] = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    assert ranks(1).run(_drop, settings, tmp_path) == [[]]


def test_parameters_smaller_than_the_world(ranks: Ranks) -> None:
    expected = ranks(4).run(drive, config(0), "plain", steps=3)
    for stage in (2, 3):
        assert _same(expected, ranks(4).run(drive, config(stage), "plain", steps=3)) == [[]] * 4


# -- inference


def _infer(stage: int, precision: str, with_gradients: bool) -> tuple[list[float], int]:
    torch.manual_seed(7)
    settings = config(stage, precision, optimizer=None)
    engine, optimizer, loader, scheduler = zeroaccel.initialize(Toy(), config=settings)
    assert (optimizer, loader, scheduler) == (None, None, None)
    with torch.set_grad_enabled(with_gradients):
        losses = [engine(batch).item() for batch in batches(0, 5)]
    assert engine.model_state_nbytes()["optimizer"] == engine.model_state_nbytes()["gradients"] == 0
    with pytest.raises(EngineStateError, match="optimizer"):
        engine.backward(torch.ones((), requires_grad=True))
    with pytest.raises(EngineStateError, match="optimizer"):
        engine.step()
    remembered = len(engine.trace.actions)
    engine.destroy()
    return losses, remembered


@pytest.mark.parametrize("with_gradients", [False, True])
def test_an_engine_for_inference_at_every_stage(ranks: Ranks, with_gradients: bool) -> None:
    answers = [ranks(2).run(_infer, stage, "bf16", with_gradients)[0] for stage in range(4)]
    assert all(losses == answers[0][0] for losses, _ in answers)
    # Five forwards of five units: the engine's records of a pass do not accumulate.
    assert answers[3][1] < 20


# -- recomputation


class Recomputed(Toy):
    reentrant = False

    def run_layers(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class RecomputedReentrant(Recomputed):
    reentrant = True


def _destroy_alone(stage: int) -> dict[str, list[float]]:
    """Rank 0 destroys each engine before rank 1 does; then all ranks use the weights, each time in another way."""

    def sums(params: Any) -> list[float]:
        return [float(param.detach().double().sum()) for param in params]

    found: dict[str, list[float]] = {}
    for use in ("read", "data", "copy", "state", "gathered", "write", "initialize"):
        torch.manual_seed(7)
        model = Toy()
        engine, *_ = zeroaccel.initialize(model, config=config(stage))
        ranks = engine.collectives
        plain(engine, batches(ranks.rank, 1)[0])
        if ranks.rank == 0:
            engine.destroy()
        ranks.barrier("rank 0 has destroyed its engine")
        if ranks.rank:
            engine.destroy()
        assert not ranks.flight_recorder.phase  # a hang report then knows that the model's passes are over
        if use == "initialize":
            engine, *_ = zeroaccel.initialize(model, config=config(stage))
            engine.destroy()
        if use == "write":
            with torch.no_grad():
                model.layers[0].up.weight.mul_(1)
        if use == "data":
            found[use] = [float(param.data.double().sum()) for param in model.parameters()]
        elif use == "copy":
            found[use] = sums(copy.deepcopy(model).parameters())
        elif use == "state":
            state = model.state_dict()
            found[use] = sums(state[name] for name, _ in model.named_parameters())
        elif use == "gathered":
            with zeroaccel.zero.GatheredParameters(list(model.parameters())):
                found[use] = sums(model.parameters()) if ranks.rank == 0 else []  # no other rank reads
            found[use] = found[use] or sums(model.parameters())
        else:
            found[use] = sums(model.parameters())
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_one_rank_destroys_alone_and_later_uses_find_the_weights(ranks: Ranks, stage: int) -> None:
    found = ranks(2).run(_destroy_alone, stage)
    assert found[0] == found[1]
    assert len({tuple(sums) for sums in found[0].values()}) == 1


def _count_gathers(make: Callable[[], nn.Module]) -> int:
    counted = recording()
    settings = config(3, "bf16", stage3_max_reuse_distance=0)
    engine, *_ = zeroaccel.initialize(make(), config=settings, collectives=counted)
    data = batches(engine.collectives.rank, 2)
    plain(engine, data[0])
    counted.reset()
    plain(engine, data[1])
    engine.destroy()
    return sum(call.op == "all_gather" and call.label.startswith("unshard layers") for call in counted.calls)


@pytest.mark.parametrize("make", [Toy, Recomputed, RecomputedReentrant])
def test_recomputation_gathers_nothing_again(ranks: Ranks, make: type[nn.Module]) -> None:
    # Three blocks, gathered for forward and for backward; `destroy` gathers nothing.
    assert ranks(2).run(_count_gathers, make) == [6, 6]
