"""Muon, LAMB and Adafactor on a transformers model: the same bits at every stage, tier and number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroaccel
from tests.support.pool import Ranks
from tests.support.training import config, offloaded, train_step
from zeroaccel.checkpoint.manifest import read_manifest
from zeroaccel.checkpoint.tensor_store import TensorStore

SECTIONS: dict[str, dict[str, Any]] = {
    "muon": {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 0.003, "weight_decay": 0.1}},
    "lamb": {"type": "Lamb", "params": {"lr": 0.02, "weight_decay": 0.01}},
    "adafactor": {"type": "torch.optim.Adafactor", "params": {"lr": 0.02}},
}
RULES = [
    "muon",
    "transformers",
    pytest.param("lamb", marks=pytest.mark.slow),
    pytest.param("adafactor", marks=pytest.mark.slow),
]


def _llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 24, "intermediate_size": 56, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    return model


def _optimizer(rule: str) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None:
    if rule != "transformers":
        return None
    from transformers.optimization import Adafactor

    return lambda params: Adafactor(params, lr=0.02, scale_parameter=True, relative_step=False)


def _tokens(rank: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(0, 97, (2, 12), generator=generator) for _ in range(count)]


def _engine(rule: str, stage: int, changes: dict[str, Any]) -> zeroaccel.Engine:
    settings = config(stage, "bf16", gradient_clipping=1.0, optimizer=SECTIONS.get(rule), **changes)
    engine, *_ = zeroaccel.initialize(_llama(), _optimizer(rule), config=settings)
    return engine


def _step(engine: zeroaccel.Engine, tokens: Tensor) -> tuple[float, float | None]:
    loss = engine(input_ids=tokens, labels=tokens).loss
    train_step(engine, loss)
    return float(loss.item()), engine.get_global_grad_norm()


def _trained(rule: str, stage: int, changes: dict[str, Any]) -> tuple[list[Any], list[list[int]]]:
    """Returns (losses and norms, the bits of the weights)."""
    engine = _engine(rule, stage, changes)
    seen = [_step(engine, tokens) for tokens in _tokens(engine.collectives.rank, 5)]
    engine.destroy()
    return seen, [param.detach().view(torch.int16).flatten().tolist() for param in engine.module.parameters()]


@pytest.mark.parametrize("rule", RULES)
def test_stages_and_tiers_give_the_same_bits(ranks: Ranks, rule: str, tmp_path: Path) -> None:
    plain = ranks(3).run(_trained, rule, 0, {})
    assert plain[0][0][0] != plain[0][0][-1], "it trains"
    for stage, tiers in [
        (1, ("none", "none")),
        (2, ("nvme", "none")),
        (3, ("none", "none")),
        (3, ("nvme", "nvme")),
        (3, ("cpu", "cpu")),
    ]:
        assert ranks(3).run(_trained, rule, stage, offloaded(tmp_path, *tiers)) == plain, (stage, tiers)


def _resumed(rule: str, folder: str, stage: int, load: str | None, save: str) -> list[float]:
    """Trains three steps after three others or after a checkpoint, and saves before them; returns their losses."""
    engine = _engine(rule, stage, {})
    tokens = _tokens(0, 6)
    if load is None:
        for batch in tokens[:3]:
            _step(engine, batch)
    else:
        engine.load_checkpoint(folder, tag=load)
    engine.save_checkpoint(folder, tag=save)
    losses = [_step(engine, batch)[0] for batch in tokens[3:]]
    engine.destroy()
    return losses


@pytest.mark.parametrize("rule", RULES)
def test_three_ranks_go_on_as_two(ranks: Ranks, rule: str, tmp_path: Path) -> None:
    folder = str(tmp_path)
    three = ranks(3).run(_resumed, rule, folder, 3, None, "three")
    two = ranks(2).run(_resumed, rule, folder, 2, "three", "two")
    one, other = _saved(tmp_path / "three"), _saved(tmp_path / "two")
    assert one.keys() == other.keys()
    assert [key for key, value in one.items() if value != other[key]] == [], "a bit of a master or a state differs"
    assert ranks(3).run(_resumed, rule, folder, 1, "two", "again") == three
    assert two[0][0] == three[0][0], "the same weights must give the first loss"


def _saved(folder: Path) -> dict[str, Any]:
    """Returns every tensor and scalar of weights and states in a checkpoint, joined from the files of its ranks."""
    manifest = read_manifest(folder)
    assert manifest.optimizer is not None
    kinds = ("master", "value", "state", "buffer")
    with TensorStore(folder, manifest) as store:
        tensors = {key: store.fetch(key).tolist() for key in manifest.tensors if key.startswith(kinds)}
    groups = [{**group, "params": sorted(group["params"])} for group in manifest.optimizer["param_groups"]]
    return {**tensors, "scalars": manifest.optimizer["scalars"], "groups": groups}


def test_groups_without_a_rate_have_rate_zero(own_job: None) -> None:
    """transformers' Adafactor with relative steps has `lr: None`; the log line of a step shows the rates."""
    from transformers.optimization import Adafactor

    model = nn.Linear(4, 4)
    optimizer = Adafactor(model.parameters(), lr=None, warmup_init=True)
    settings: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "steps_per_print": 1}
    engine, *_ = zeroaccel.initialize(model, optimizer, config=settings)
    before = model.weight.detach().clone()
    train_step(engine, engine(torch.ones(1, 4)).sum())
    assert engine.get_lr() == [0.0]
    assert not torch.equal(model.weight, before)
    engine.destroy()
