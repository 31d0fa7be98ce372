"""A config in which everything is "auto", on real ranks: the engine uses the values that the model implies."""

from __future__ import annotations

from typing import Any

import torch

import zeroaccel
from tests.support.pool import Ranks
from tests.support.refusals import message
from tests.support.training import ADAMW, WIDTH, Run, Toy, differences, train
from zeroaccel.errors import ConfigError

SIZES = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
AUTO: dict[str, Any] = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, **dict.fromkeys(SIZES, "auto")},
    "optimizer": {**ADAMW, "params": {**ADAMW["params"], "betas": "auto", "eps": "auto"}},
}
WRITTEN: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": WIDTH**2,
        "stage3_prefetch_bucket_size": int(0.9 * WIDTH**2),
        "stage3_param_persistence_threshold": 10 * WIDTH,
    },
    "optimizer": ADAMW,
}


def _settings(tree: dict[str, Any]) -> tuple[str, int, int, list[bool]]:
    """Returns the engine's settings as text, and the values that depend on the model's width."""
    engine, *_ = zeroaccel.initialize(Toy(), config=tree)
    settings = engine.settings
    resident = [buffer.persistent for unit in engine.units for buffer in unit.buffers]
    engine.destroy()
    return str(settings), settings.rules.bucket_numel, settings.limits.prefetch_bucket_size, resident


def _train(tree: dict[str, Any]) -> Run:
    return train(tree, 3)


def _refusal(tree: dict[str, Any]) -> str:
    return message(ConfigError, zeroaccel.initialize, torch.nn.Linear(3, 3), config=tree)


def test_auto_values_equal_explicit_ones(ranks: Ranks) -> None:
    filled = ranks(2).run(_settings, AUTO)
    assert filled == ranks(2).run(_settings, WRITTEN)
    _, bucket, prefetch, resident = filled[0]
    assert (bucket, prefetch) == (WIDTH**2, int(0.9 * WIDTH**2))
    assert set(resident) == {True, False}  # the default threshold would make the whole toy persistent
    pairs = zip(ranks(2).run(_train, AUTO), ranks(2).run(_train, WRITTEN), strict=True)
    assert [differences(one, other) for one, other in pairs] == [[], []]


def test_auto_values_that_nothing_fills_are_reported_on_every_rank(ranks: Ranks) -> None:
    tree = {
        "train_micro_batch_size_per_gpu": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 0, "total_num_steps": "auto"}},
    }
    for said in ranks(2).run(_refusal, tree):
        assert said.startswith("config: 3 settings are wrong")
        for key in ("train_micro_batch_size_per_gpu", "optimizer.params.lr", "scheduler.params.total_num_steps"):
            assert f'{key}: "auto", but no value for it is known; write a number' in said
