"""Random combinations of settings that decide where tensors are and when they move: none may change a bit.

Each step draws a model, an optimizer, a precision and such settings from a seed, and compares the run with the simplest
one that has the same arithmetic: stage 0, except with the codes of ZeRO++, and with accumulation, where stages 2 and 3
sum over the ranks first. A failure prints the draw and the seed that reproduces it.

    python -m pytest -m slow tests/multi/zero/test_random_walk.py --sweep-seed 1000 --sweep-count 500
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroaccel
from tests.multi.zero.test_hook_traps import Adapted, MixtureOfExperts, Recomputed, Shared
from tests.support.pool import RankFailure, Ranks
from tests.support.sweeps import Case, Sweep, table, wrong_sums
from tests.support.training import ADAMW, SGD, Run, Toy, batches, config, differences, finished
from zeroaccel import zero

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": SGD,
    "adamw": ADAMW,
    "torch adamw": {**ADAMW, "params": {**ADAMW["params"], "torch_adam": True}},
    "int8 moments": {**ADAMW, "params": {**ADAMW["params"], "moments_dtype": "int8"}},
    "adam": {"type": "Adam", "params": {"lr": 1e-2}},
    "lion": {"type": "Lion", "params": {"lr": 1e-3, "weight_decay": 0.1}},
    "adagrad": {"type": "Adagrad", "params": {"lr": 1e-2}},
}


def _partly_frozen() -> nn.Module:
    model = Toy()
    model.layers[1].requires_grad_(False)
    model.embed.requires_grad_(False)  # and so the tied head
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "toy": Toy,
    "wide": lambda: Toy(2, 37),
    "adapters": Adapted,
    "experts": MixtureOfExperts,
    "shared": Shared,
    "recomputed": lambda: Recomputed(reentrant=False),
    "recomputed adapters": lambda: Adapted(recompute=False),
    "partly frozen": _partly_frozen,
}


def draw(rng: random.Random, world_size: int) -> dict[str, Any]:
    """Draws the settings of two runs that must give equal bits: "plain", and "moved", with other places and times."""
    precision = rng.choice(["fp32", "bf16", "fp16"])
    accumulation = rng.choice([1, 1, 3])
    stage = rng.choice([1, 2, 3, 3, 3, 3, 3])
    top: dict[str, Any] = {
        "optimizer": OPTIMIZERS[rng.choice(list(OPTIMIZERS))],
        "gradient_clipping": rng.choice([0.0, 0.3]),
    }
    arithmetic: dict[str, Any] = {}
    moved: dict[str, Any] = {}
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    if stage == 3:
        if rng.random() < 0.3:
            arithmetic["zero_quantized_weights"] = True
        if rng.random() < 0.2:
            arithmetic["zero_quantized_nontrainable_weights"] = True
        if rng.random() < 0.3:
            arithmetic["zero_quantized_gradients"] = True
            arithmetic["zeropp"] = {
                "node_size": rng.choice(divisors),
                "quantize_gradients_on_one_node": rng.random() < 0.5,
            }
        if rng.random() < 0.4:
            moved["zero_hpz_partition_size"] = rng.choice(divisors)
        if not arithmetic and rng.random() < 0.4:
            moved["mics_shard_size"] = rng.choice(divisors)
            if "zero_hpz_partition_size" in moved and moved["mics_shard_size"] % moved["zero_hpz_partition_size"]:
                del moved["zero_hpz_partition_size"]
        if rng.random() < 0.3:
            threshold = rng.choice([30, 10**6])
            (arithmetic if arithmetic else moved)["stage3_param_persistence_threshold"] = threshold
        moved["stage3_max_reuse_distance"] = rng.choice([0, 10**9])
        moved["stage3_prefetch_bucket_size"] = rng.choice([0, 2500, 10**7])
        moved["stage3_max_live_parameters"] = rng.choice([3000, 10**9])
        param = rng.choice(["none", "cpu", "nvme"])
        if param != "none" and "zero_quantized_nontrainable_weights" not in arithmetic:
            moved["offload_param"] = {
                "device": param,
                "nvme_path": "FOLDER",
                "max_in_cpu": rng.choice([0, 3000, 10**9]),
            }
    offload = rng.choice(["none", "cpu", "nvme"])
    if offload != "none":
        moved["offload_optimizer"] = {
            "device": offload,
            "nvme_path": "FOLDER",
            "pipeline_read": rng.random() < 0.5,
            "pipeline_write": rng.random() < 0.5,
            **({"ratio": rng.choice([1.0, 0.5])} if stage == 3 else {}),
        }
    moved["sub_group_size"] = rng.choice([100, 512, 10**9])
    moved["reduce_bucket_size"] = rng.choice([300, 10**8])
    moved["allgather_bucket_size"] = rng.choice([200, 10**8])
    moved["overlap_comm"] = rng.random() < 0.5
    init = rng.choice(["none", "none", "device", "cpu", "nvme"])
    plain_stage = 3 if arithmetic else 0 if accumulation == 1 or stage < 2 else 2
    return {
        "model": rng.choice(list(MODELS)),
        "plain": {"stage": plain_stage, "precision": precision, "accumulation": accumulation, **top, **arithmetic},
        "moved": {"stage": stage, "precision": precision, "accumulation": accumulation, **top, **arithmetic, **moved},
        "init": init,
        "mesh": rng.random() < 0.3,
        "evals": rng.random() < 0.3,
    }


def _train(settings: dict[str, Any], model_kind: str, init: str, mesh: bool, evals: bool, folder: str) -> Run:
    """Trains four steps, with evaluations in between if `evals` is set."""
    text = json.dumps(config(**settings)).replace("FOLDER", folder)
    torch.manual_seed(7 + (torch.distributed.get_rank() if init != "none" else 0))
    if init == "none":
        model = MODELS[model_kind]()
    else:
        with zero.Init(remote_device=None if init == "device" else init, nvme_path=folder):  # type: ignore[arg-type]
            model = MODELS[model_kind]()
    arguments: dict[str, Any] = {}
    if mesh:
        from torch.distributed.device_mesh import init_device_mesh

        shard = settings.get("mics_shard_size", 0)
        world = torch.distributed.get_world_size()
        arguments["mesh"] = init_device_mesh("cpu", (world // shard, shard) if shard else (world,))
    engine, *_ = zeroaccel.initialize(model, config=json.loads(text), **arguments)
    run = Run()
    for index, batch in enumerate(batches(engine.collectives.rank, 4 * engine.gradient_accumulation_steps())):
        loss = engine(batch)
        engine.backward(loss)
        boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        run.losses.append(loss.item())
        if boundary:
            run.norms.append(engine.get_global_grad_norm())
        if evals and index % 2:
            with torch.no_grad():
                run.losses.append(engine(batch).item())
    run.skipped = engine.skipped_steps
    return finished(engine, run)


def _train_wrongly(*arguments: Any) -> Run:
    with wrong_sums():
        return _train(*arguments)


def _walk(ranks: Ranks, seeds: Iterable[int], folder: Path, sweep: Sweep, train: Callable[..., Run] = _train) -> str:
    """Returns the differences, with the draws that reproduce them."""
    cases = []
    for seed in seeds:
        rng = random.Random(seed)
        world_size = rng.choice([2, 3, 4])
        drawn = draw(rng, world_size)
        kind, evals = drawn["model"], drawn["evals"]
        pool = ranks(world_size)
        case = Case("settings", f"seed {seed}", f"{world_size} ranks", "equal", json.dumps(drawn))
        try:
            plain = pool.run(_train, drawn["plain"], kind, "none", False, evals, str(folder))
            moved = pool.run(train, drawn["moved"], kind, drawn["init"], drawn["mesh"], evals, str(folder))
        except RankFailure as failure:
            case.outcome, case.detail = "failed", f"{case.detail}: {failure}"
        else:
            wrong = [differences(one, other) for one, other in zip(plain, moved, strict=True)]
            if any(wrong):
                case.outcome, case.detail = "different", f"{case.detail}: {wrong}"
        cases.append(sweep.add(case))
    print(f"\n--sweep-seed {sweep.seed}\n{table(cases)}")
    return "\n".join(f"{case.name}, {case.group}: {case.detail}" for case in cases if not case.is_right)


def test_a_short_walk(ranks: Ranks, tmp_path: Path) -> None:
    assert _walk(ranks, range(5), tmp_path, Sweep()) == ""


def test_a_wrong_sum_is_found(ranks: Ranks, tmp_path: Path) -> None:
    for seed in range(3):
        assert f"seed {seed}" in _walk(ranks, [seed], tmp_path, Sweep(), _train_wrongly)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_long_walk(ranks: Ranks, tmp_path: Path, sweep: Sweep) -> None:
    first = sweep.seed or 5
    assert _walk(ranks, range(first, first + (sweep.count or 80)), tmp_path, sweep) == ""
