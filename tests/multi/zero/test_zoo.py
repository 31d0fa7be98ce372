"""The zoo: transformers' model classes, shrunk by one script, train at stage 3 as at stage 0 and in plain torch.

Each class is built and trained for three steps by a plain loop and at both stages, on two ranks with different data and
random states; every bit of weights, buffers, losses and norms is compared.

    python -m pytest -m slow tests/multi/zero/test_zoo.py --sweep-seed 1 --sweep-report build/zoo.jsonl

`--sweep-count N` takes N classes of each head, drawn from the seed.
"""

from __future__ import annotations

import copy
import random
import re
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroaccel
from tests.support.pool import Pool, RankFailure, Ranks
from tests.support.sweeps import Case, Sweep, table, wrong_sums
from tests.support.training import Run, config, differences, train_step
from zeroaccel.errors import CollectiveError, ZeroAccelError

transformers = pytest.importorskip("transformers")

from tests.multi.zero import zoo  # noqa: E402 - it imports transformers

STEPS = 3
SGD = {"type": "SGD", "params": {"lr": 0.005, "momentum": 0.9}}
ADAM = {"type": "Adam", "params": {"lr": 0.01, "eps": 1e-4}}  # with a small eps, rounding errors give full steps
TOLERANCE = 1e-4  # to the plain loop, whose optimizers round differently: relative to a tensor's change
SHARDED = {
    "reduce_bucket_size": 300,
    "allgather_bucket_size": 200,
    "sub_group_size": 512,
    "stage3_prefetch_bucket_size": 500,
    "stage3_max_reuse_distance": 0,
}
SECONDS = 60.0  # for one class on an idle machine


def _batches(batch: dict[str, Tensor], seed: int) -> list[dict[str, Tensor]]:
    rank = torch.distributed.get_rank()
    return [zoo.varied(batch, seed + 100 * rank + step) for step in range(STEPS)]


def _cast(batch: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}


def _states(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in [*model.named_parameters(), *model.named_buffers()]}


def _plain(model: nn.Module, batches: list[dict[str, Tensor]], draws: int, optimizer: dict[str, Any]) -> Run:
    """Runs data-parallel training in plain torch."""
    trainable = [param for param in model.parameters() if param.requires_grad]
    own = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam}[optimizer["type"]](trainable, **optimizer["params"])
    run = Run()
    zoo.seed_all(draws)
    for each in batches:
        loss = zoo.loss_of(model(**each))
        loss.backward()
        for param in trainable:  # as in the engine, an unused parameter has a gradient of zero
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad.contiguous()
            torch.distributed.all_reduce(param.grad)
            param.grad /= torch.distributed.get_world_size()
        own.step()
        own.zero_grad()
        run.losses.append(loss.item())
    run.weights = _states(model)
    return run


def _engine(model: nn.Module, batches: list[dict[str, Tensor]], draws: int, settings: dict[str, Any]) -> Run:
    engine, *_ = zeroaccel.initialize(model, config=settings)
    dtype = torch.bfloat16 if "bf16" in settings else torch.float32
    run = Run()
    zoo.seed_all(draws)
    for each in batches:
        run.losses.append(train_step(engine, zoo.loss_of(engine(**_cast(each, dtype)))))
        run.norms.append(engine.get_global_grad_norm())
    engine.destroy()
    run.weights = _states(model)
    return run


def _far(plain: Run, run: Run, start: nn.Module, *nudged: Run) -> list[str]:
    """Returns weights that differ from the plain loop's by more than rounding and the `nudged` runs explain."""
    found, loses_bits = [], False
    before = _states(start)
    for name, weight in plain.weights.items():
        if not weight.is_floating_point() or not weight.numel():
            continue
        start_value = before[name] if before[name].shape == weight.shape else 0 * weight  # a table that has grown
        moved, error, *grown = (
            (weight - other).abs().max().item()
            for other in (start_value, run.weights[name], *(each.weights[name] for each in nudged))
        )
        # If a last bit decides a tenth of the change, as in batch norms of two values, no two loops agree.
        loses_bits = loses_bits or any(each > 0.1 * moved > 1e-3 for each in grown)
        if not error <= max(1e-6 + TOLERANCE * moved, *(10 * each for each in grown), 0.0):
            found.append(f"{name} by {error:.1e} of {moved:.1e}, nudged {grown}")
    return [] if loses_bits else found


def _nudged(model: nn.Module) -> nn.Module:
    """Returns a copy in which every weight is changed in its last bit."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1 + torch.finfo(param.dtype).eps)
    return model


def _train(
    kind: str, name: str, seed: int, optimizer: dict[str, Any], planted: bool = False, alike: bool = False
) -> tuple[str, str]:
    """Trains a class; returns (outcome, detail). `planted` breaks stage 3, `alike` gives ranks one random state."""
    draws = seed + (0 if alike else torch.distributed.get_rank())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        try:
            model, batch = zoo.build(kind, name, seed)
        except zoo.NotBuilt as error:
            return "not built", str(error)
        for tensor in [*model.parameters(), *model.buffers()]:  # some classes leave memory uninitialized
            torch.distributed.broadcast(tensor.data, 0)
        batches = _batches(batch, seed)
        alone = zoo.failure(copy.deepcopy(model).to(torch.bfloat16), _cast(batch, torch.bfloat16))
        wrong: list[str] = []
        for precision in ("fp32",) if alone else ("fp32", "bf16"):
            runs = [] if precision == "bf16" else [_plain(copy.deepcopy(model), batches, draws, optimizer)]
            for stage in (0, 3):
                settings = config(stage, precision, optimizer=optimizer, **(SHARDED if stage else {}))
                try:
                    with wrong_sums() if planted and stage == 3 else nullcontext():
                        runs.append(_engine(copy.deepcopy(model), batches, draws, settings))
                except ZeroAccelError as error:
                    if isinstance(error, CollectiveError):
                        raise
                    return "refused", f"{precision}, stage {stage}: {type(error).__name__}: {error}"
            *plain, whole, sharded = runs
            wrong += [f"{precision}: {each}" for each in differences(whole, sharded)]
            if plain and _far(plain[0], whole, model):  # rounding may grow as the change of a weight's last bit does
                plain.append(_plain(_nudged(model), batches, draws, optimizer))
            wrong += [f"plain: {each}" for each in (_far(plain[0], whole, model, *plain[1:]) if plain else [])]
    if wrong:
        return "different", f"{list(batch)}: {len(wrong)}: {wrong[:6]}"
    return ("equal in fp32" if alone else "equal"), f"{list(batch)}{': plain torch in bf16: ' * bool(alone)}{alone}"


def _look(pool: Pool, head: str, kind: str, name: str, seed: int, **how: Any) -> Case:
    """Trains a class; if ranks diverge, e.g. by layers dropped at random, again with one random state on all."""
    case = _case(pool, head, kind, name, seed, how)
    if case.outcome == "failed" and "CollectiveError" in case.detail:
        again = _case(pool, head, kind, name, seed, {**how, "alike": True})
        if again.outcome.startswith("equal"):
            case.outcome = f"{again.outcome} with one random state"
    return case


def _case(pool: Pool, head: str, kind: str, name: str, seed: int, how: dict[str, Any]) -> Case:
    try:
        answers = pool.run(_train, kind, name, seed, timeout=SECONDS, **{"optimizer": SGD, **how})
    except RankFailure as failure:  # the pool has ended its ranks; the next class gets new ones
        said = re.findall(r"^(?:[\w.]+Error|---|RankTimeout).*", str(failure), re.MULTILINE)
        return Case("zoo", name, head, "failed", f"{said}: {str(failure)[-2000:]}")
    order = ["different", "refused", "not built", "equal in fp32", "equal"]
    outcome, detail = min(answers, key=lambda answer: order.index(answer[0]))
    if outcome == "refused":
        pool.close()
    return Case("zoo", name, head, outcome, detail)


def _walk(ranks: Ranks, chosen: list[tuple[str, str, str]], sweep: Sweep) -> list[Case]:
    """Trains every tenth class with Adam, the others with momentum SGD, which reveals the scale of gradients."""
    return [
        sweep.add(_look(ranks(2), *each, sweep.seed, optimizer=ADAM if index % 10 == 9 else SGD))
        for index, each in enumerate(chosen)
    ]


SAMPLE = (
    "MixtralForCausalLM",
    "ResNetForImageClassification",
    "WhisperForConditionalGeneration",
)


def _sample(*names: str) -> list[tuple[str, str, str]]:
    return [each for each in zoo.classes() if each[2] in names]


def test_a_few_classes_train_alike(ranks: Ranks) -> None:
    cases = _walk(ranks, _sample(*SAMPLE), Sweep())
    assert {case.name: case.outcome for case in cases} == dict.fromkeys(SAMPLE, "equal"), cases


def test_a_wrong_sum_at_stage_3_is_found(ranks: Ranks) -> None:
    for optimizer in (SGD, ADAM):
        case = _look(ranks(2), *_sample("BertForMaskedLM")[0], 0, optimizer=optimizer, planted=True)
        assert case.outcome == "different", case


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("head", zoo.HEADS)
def test_every_class_trains_alike(ranks: Ranks, head: str, sweep: Sweep) -> None:
    chosen = [each for each in zoo.classes() if each[0] == head]
    if sweep.count:
        chosen = random.Random(sweep.seed).sample(chosen, min(sweep.count, len(chosen)))
    cases = _walk(ranks, chosen, sweep)
    print(f"\n--sweep-seed {sweep.seed}\n{table(cases)}")
    assert not [case for case in cases if not case.is_right]
