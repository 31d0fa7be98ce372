"""Random meshes: training on pipelines, replicas, shards, sequence and tensor parallelism against one process.

Each step draws sizes of axes, a model, a stage and an optimizer from a seed, and compares the run with a plain loop in
one process. A failure prints the draw and the seed that reproduces it.

    python -m pytest -m slow tests/multi/parallel/test_mesh_walk.py --sweep-seed 100 --sweep-count 40
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from tests.multi.parallel.test_mesh_axes import ADAMW, SGD, alone, on_mesh, settings_of
from tests.support.mesh_training import NEEDS_SPLIT_LAYERS, NEEDS_STAGES
from tests.support.pool import RankFailure, Ranks
from tests.support.sweeps import Case, Sweep, table, wrong_sums
from tests.support.training import Run
from zeroaccel.config.parallel import ParallelConfig

pytestmark = [NEEDS_SPLIT_LAYERS, NEEDS_STAGES]

# For weights of about 1 after three steps in fp32; Adam divides a rounding error by a possibly small gradient.
TOLERANCE = {"SGD": 1e-6, "AdamW": 3e-6}
LARGEST = 8  # ranks


def draw(rng: random.Random) -> dict[str, Any]:
    """Draws a mesh of 2 to 8 ranks, and a model and settings to train on it."""
    while True:
        axes = {name: rng.choice([1, 2]) for name in ("pp", "dp_replicate", "dp_shard", "sp", "tp")}
        world_size = 1
        for size in axes.values():
            world_size *= size
        if 1 < world_size <= LARGEST:
            break
    zero = {
        "reduce_bucket_size": rng.choice([300, 10**8]),
        "stage3_max_reuse_distance": rng.choice([0, 10**9]),
        **({"offload_optimizer": {"device": "cpu"}} if rng.random() < 0.3 else {}),
    }
    return {
        "axes": axes,
        "world_size": world_size,
        "kind": rng.choice(["llama", "llama-tied", "gpt2", "Qwen3"]),
        "stage": rng.choice([0, 1, 2] if axes["pp"] > 1 else [0, 1, 2, 3, 3]),
        "optimizer": rng.choice([SGD, ADAMW]),
        "zero": zero,
    }


def _on_mesh(kind: str, settings: dict[str, Any], mesh: ParallelConfig, planted: bool) -> Run:
    if planted:
        with wrong_sums():
            return on_mesh(kind, [settings], mesh)[0]
    return on_mesh(kind, [settings], mesh)[0]


def _compare(ranks: Ranks, seed: int, planted: bool) -> Case:
    drawn = draw(random.Random(seed))
    mesh = ParallelConfig(**drawn["axes"], **({"tp_plan": "auto"} if drawn["axes"]["tp"] > 1 else {}))
    case = Case("meshes", f"seed {seed}", f"{drawn['world_size']} ranks", "equal", json.dumps(drawn))
    zero = drawn["zero"] if drawn["stage"] else {}
    settings = settings_of(drawn["stage"], drawn["optimizer"], **zero)
    try:
        runs = ranks(drawn["world_size"]).run(_on_mesh, drawn["kind"], settings, mesh, planted, timeout=120)
    except RankFailure as failure:
        case.outcome, case.detail = "failed", f"{case.detail}: {failure}"
        return case
    plain = alone(drawn["kind"], drawn["optimizer"], mesh.resolve(drawn["world_size"]).data_parallel_size)
    weights = max(
        ((runs[0].weights[name] - weight).abs() / weight.abs().clamp(min=1)).max().item()
        for name, weight in plain.weights.items()
    )
    losses = torch.tensor([run.losses for run in runs]).mean(0)
    loss = (losses / torch.tensor(plain.losses) - 1).abs().max().item()
    norm = max(abs(one / other - 1) for run in runs for one, other in zip(run.norms, plain.norms, strict=True))
    case.detail = f"weights {weights:.0e}, losses {loss:.0e}, norms {norm:.0e}: {case.detail}"
    limit = TOLERANCE[drawn["optimizer"]["type"]]
    if not (weights <= limit and loss <= limit and norm <= 2 * limit):
        case.outcome = "different"
    return case


def _walk(ranks: Ranks, seeds: Iterable[int], sweep: Sweep, planted: bool = False) -> str:
    """Returns the differences, with the draws that reproduce them."""
    cases = [sweep.add(_compare(ranks, seed, planted)) for seed in seeds]
    print(f"\n--sweep-seed {sweep.seed}\n{table(cases)}")
    return "\n".join(f"{case.name}, {case.group}: {case.detail}" for case in cases if not case.is_right)


SAMPLE = [2, 24]  # on 2 ranks: sequence parallelism, and a pipeline of a tied model


def test_a_short_walk(ranks: Ranks) -> None:
    assert _walk(ranks, SAMPLE, Sweep()) == ""


def test_a_wrong_sum_is_found(ranks: Ranks) -> None:
    assert "norms" in _walk(ranks, SAMPLE, Sweep(), planted=True)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_long_walk(ranks: Ranks, sweep: Sweep) -> None:
    first = sweep.seed or 1
    assert _walk(ranks, range(first, first + (sweep.count or 24)), sweep) == ""
