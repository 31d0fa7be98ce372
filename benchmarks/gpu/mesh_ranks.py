"""One of two ranks that share a GPU over NCCL: compares each axis of a mesh with a plain loop; see `parts.meshes`.

Models and loops are those of the tests of each axis, with their batches on the device. Prints a line `FIGURE name: D`
for each row, where D is the largest relative difference of the losses, or the error.
"""

from __future__ import annotations

import itertools
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2])]
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from tests.multi.parallel import (  # noqa: E402
    test_expert_parallel,
    test_pipeline,
    test_sequence_parallel,
    test_tensor_parallel,
)
from tests.support.mesh_training import small_llama  # noqa: E402
from tests.support.mixtures import MIXTURES, small_mixture  # noqa: E402
from tests.support.training import SGD, config  # noqa: E402
from zeroaccel.comm.topology import init_process_group  # noqa: E402
from zeroaccel.config.parallel import ParallelConfig  # noqa: E402

__all__: list[str] = []

HOST = {"device": "cpu"}
ON_HOST = {"offload_param": HOST, "offload_optimizer": HOST}
FAST_SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}  # settings of the plain loops in those tests


def on_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that its result (a model, a batch, or an iterator of batches) is on the GPU."""

    def moved(*args: Any, **kwargs: Any) -> Any:
        return _moved(function(*args, **kwargs))

    return moved


def _moved(value: Any) -> Any:
    if isinstance(value, (Tensor, nn.Module)):
        return value.cuda()
    if isinstance(value, dict):
        return {key: each.cuda() for key, each in value.items()}
    if isinstance(value, Iterator):
        return (_moved(each) for each in value)
    return value


def difference(losses: list[float], plain: list[float]) -> float:
    """Returns the largest relative difference."""
    return max(abs(one - other) / abs(other) for one, other in zip(losses, plain, strict=True))


def mean_over_ranks(values: list[float]) -> list[float]:
    """Returns the mean over ranks of values from different batches."""
    total = torch.tensor(values, dtype=torch.float64, device="cuda")
    torch.distributed.all_reduce(total)
    mean: list[float] = (total / torch.distributed.get_world_size()).tolist()
    return mean


def sequence(what: str, stage: int, **keys: Any) -> float:
    """Compares sequences divided over two ranks."""
    tests = test_sequence_parallel
    plain, _ = tests._plain("llama", "sdpa", 2, what, places=1)
    losses, _ = tests._cut("llama", "sdpa", 2, what, 2, stage, keys)
    return difference(mean_over_ranks(losses), plain)


def tensor(stage: int, **keys: Any) -> float:
    """Compares layers divided over two ranks."""
    make = on_device(small_llama)
    plain = test_tensor_parallel._plain(make, False, 1, 0.0)
    run = test_tensor_parallel._train(make(), config(stage, optimizer=FAST_SGD, **keys), ParallelConfig(tp=2))
    return difference(run.losses, plain.losses)


def stages(kind: str, stage: int, schedule: str) -> float:
    """Compares two pipeline stages."""
    tests = test_pipeline
    run = tests.staged(config(stage, optimizer=SGD, gradient_accumulation_steps=4), kind, 2, schedule=schedule)
    model: Any = tests.build(kind)
    optimizer = torch.optim.SGD(model.parameters(), **SGD["params"])
    plain, batches = [], tests.batches(kind, 0)
    for _ in range(tests.STEPS):
        losses = [model(**batch, use_cache=False).loss for batch in itertools.islice(batches, tests.MICRO_BATCHES)]
        loss = torch.stack(losses).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.append(loss.item())
    return difference(run.losses, plain)


def experts(kind: str, stage: int, implementation: str = "eager", **keys: Any) -> float:
    """Compares experts divided over two ranks, which have different batches."""
    tests, make = test_expert_parallel, on_device(small_mixture)
    plain = tests._plain(make(kind, implementation), "sgd", 2)
    settings = config(stage, optimizer=tests.SGD, gradient_clipping=0.5, **keys)
    run = tests._train(make(kind, implementation), settings, ParallelConfig(ep=2))
    return difference(mean_over_ranks(run.losses), plain.losses)


def rows() -> Iterator[tuple[str, Callable[[], float]]]:
    """Returns name and measurement of each row."""
    for stage, keys in ((2, {}), (3, {}), (3, ON_HOST)):
        where = f"stage {stage}{', both on host' if keys else ''}"
        yield f"sp 2, {where}", lambda stage=stage, keys=keys: sequence("padded", stage, **keys)
        yield f"tp 2, {where}", lambda stage=stage, keys=keys: tensor(stage, **keys)
        for kind in MIXTURES if stage == 3 and not keys else ("Mixtral",):
            yield f"ep 2, {kind}, {where}", lambda kind=kind, stage=stage, keys=keys: experts(kind, stage, **keys)
    yield "ep 2, Mixtral by grouped_mm, stage 3", lambda: experts("Mixtral", 3, "grouped_mm")
    for kind, stage, schedule in (("llama", 0, "1f1b"), ("llama-tied", 1, "1f1b"), ("gpt2", 2, "gpipe")):
        name = f"pp 2, {kind}, stage {stage}, {schedule}"
        yield name, lambda kind=kind, stage=stage, schedule=schedule: stages(kind, stage, schedule)


def main() -> int:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    init_process_group()
    for module, names in (
        (test_sequence_parallel, ("_batch", "_model")),
        (test_tensor_parallel, ("_batch",)),
        (test_pipeline, ("batches", "build")),
        (test_expert_parallel, ("_batch",)),
    ):
        for name in names:
            setattr(module, name, on_device(getattr(module, name)))
    failed = False
    for name, measured in rows():
        try:
            print(f"FIGURE {name}: {measured()!r}", flush=True)
        except Exception as error:
            failed = True
            traceback.print_exc()
            print(f"FIGURE {name}: {type(error).__name__}: {error}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
