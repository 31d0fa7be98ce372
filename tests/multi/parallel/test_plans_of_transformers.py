"""Tensor parallelism by transformers' own plans: each model family at tp 2 against one process, or refused.

python -m pytest -m slow tests/multi/parallel/test_plans_of_transformers.py --sweep-report build/plans.jsonl
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import zeroaccel
from tests.support.mesh_training import NEEDS_SPLIT_LAYERS
from tests.support.pool import Pool, RankFailure, Ranks
from tests.support.sweeps import Case, Sweep, table
from tests.support.training import Run, config, train_step
from zeroaccel.config.parallel import ParallelConfig
from zeroaccel.errors import ZeroAccelError

pytest.importorskip("transformers")

from tests.multi.zero import zoo

HEADS = ("causal LM", "image-text to text", "seq2seq")
STEPS, SECONDS = 2, 60.0
SGD = {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}}


def _family(kind: str, name: str, seed: int, changes: Mapping[str, str | None] | None = None) -> tuple[str, str]:
    """Returns (outcome, detail) of a family, without dropout, because split layers would draw other random numbers.

    Args:
        changes: styles that replace those in the model's plan; None removes one.
    """
    try:
        model, batch = zoo.build(kind, name, seed)
    except zoo.NotBuilt as error:
        return "not built", str(error)
    if not getattr(model, "_tp_plan", None):
        return "without a plan", ""
    plain, found = copy.deepcopy(model.eval()), Run()
    optimizer = torch.optim.SGD(plain.parameters(), **SGD["params"])  # type: ignore[arg-type]
    expected = Run()
    for step in range(STEPS):
        zoo.seed_all(seed + step)
        loss = zoo.loss_of(plain(**batch))
        loss.backward()
        expected.losses.append(loss.item())
        expected.norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 1e9).item())
        optimizer.step()
        optimizer.zero_grad()
    plan: Any = "auto"
    if changes is not None:
        plan = {key: style for key, style in ({**model._tp_plan, **changes}).items() if style}  # type: ignore[dict-item]
    parallel = ParallelConfig(tp=2, tp_plan=plan)
    try:
        engine, *_ = zeroaccel.initialize(model, config=config(3, optimizer=SGD), parallel=parallel)
    except ZeroAccelError as error:
        return "refused", str(error)
    engine.eval()
    for step in range(STEPS):
        zoo.seed_all(seed + step)
        found.losses.append(train_step(engine, zoo.loss_of(engine(**batch))))
        found.norms.append(engine.get_global_grad_norm())
    engine.destroy()
    is_close = found.losses == pytest.approx(expected.losses, rel=2e-6)
    is_close &= found.norms == pytest.approx(expected.norms, rel=2e-5)
    return ("equal" if is_close else "different"), f"{found.losses} {expected.losses} {found.norms} {expected.norms}"


def _look(pool: Pool, head: str, kind: str, name: str, seed: int) -> Case:
    try:
        answers = pool.run(_family, kind, name, seed, timeout=SECONDS)
    except RankFailure as failure:
        return Case("plans", name, head, "failed", str(failure)[-2000:])
    return Case("plans", name, head, *answers[0])


@NEEDS_SPLIT_LAYERS
@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_plan_gives_the_numbers_of_one_process(ranks: Ranks, sweep: Sweep) -> None:
    families = {kind: (head, kind, name) for head, kind, name in reversed(zoo.classes()) if head in HEADS}
    chosen = list(families.values())[: sweep.count or None]
    cases = [sweep.add(_look(ranks(2), *each, sweep.seed)) for each in chosen]
    print(f"\n--sweep-seed {sweep.seed}\n{table(cases)}")
    outcomes = Counter(case.outcome for case in cases)
    assert outcomes["different"] == 0, [case for case in cases if case.outcome == "different"]
    assert sweep.count or outcomes["equal"] >= 135, outcomes


_INKLING = "inkling_text", "InklingForCausalLM"
# Its plan splits gate and up, which are stored in sequence, as one layer. The embedding has a norm, and no layer is
# dense.
_APART: dict[str, str | None] = {
    "model.layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    **{f"model.layers.*.mlp.{name}_proj": None for name in ("gate", "up", "down")},
    "model.embed_tokens": None,
}


@NEEDS_SPLIT_LAYERS
@pytest.mark.slow  # test_tensor_parallel.py has `moe_tp_experts`, which is the same code
@pytest.mark.parametrize("changes", [None, _APART])
def test_shared_experts_in_one_module_are_summed(ranks: Ranks, changes: dict[str, str | None] | None) -> None:
    for outcome, detail in ranks(2).run(_family, *_INKLING, 0, changes):
        assert outcome == ("refused" if changes is None else "equal"), detail
        assert changes is not None or "model.layers.0.mlp (InklingMoE): expected a relative difference" in detail
