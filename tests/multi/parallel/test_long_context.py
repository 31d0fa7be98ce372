"""Sequence parallelism of models that carry a state or a window along the sequence, and of any number of heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroaccel
from tests.support.mesh_training import small_llama
from tests.support.pool import Ranks
from tests.support.recurrent_models import FAMILIES, VOCAB, recurrent_model
from tests.support.training import config
from zeroaccel.parallel import ParallelConfig, SequenceLoader, UlyssesAttention

transformers = pytest.importorskip("transformers")

BATCH, LENGTH = 2, 32
# Large enough that differences of weights show gradients to 1e-6.
SGD = {"type": "SGD", "params": {"lr": 1.0}}


def _batch(what: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=generator)
    labels = ids.clone()
    labels[:, :5] = -100
    batch = {"input_ids": ids, "labels": labels}
    if what == "padded":
        mask = torch.ones_like(ids)
        mask[0, 21:], mask[1, :9] = 0, 0
        batch |= {"attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}
    if what == "packed":
        batch["position_ids"] = torch.cat([torch.arange(11), torch.arange(14), torch.arange(7)]).expand(BATCH, -1)
    return batch


def _plain(model: nn.Module, what: str) -> tuple[float, float, dict[str, Tensor]]:
    """Returns (loss, norm of the gradient, gradients) of one process without an engine."""
    model.train()
    loss = model(**_batch(what)).loss
    loss.backward()
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return loss.item(), torch.stack([grad.norm() for grad in grads.values()]).norm().item(), grads


def _family(family: str) -> nn.Module:
    return recurrent_model(family)


def _llama(heads: int, key_heads: int, attention: str, kind: str = "Llama") -> nn.Module:
    window = {} if kind == "Llama" else {"sliding_window": 6}
    sizes = {"num_attention_heads": heads, "num_key_value_heads": key_heads, "hidden_size": 4 * heads}
    return small_llama(kind, vocab_size=VOCAB, attn_implementation=attention, head_dim=4, **sizes, **window)


def _cut(
    make: str, args: tuple[Any, ...], what: str, sp: int, stage: int, keys: dict[str, Any]
) -> tuple[float, float, dict[str, Tensor]]:
    """Returns the same of an engine on cut sequences."""
    model = {"family": _family, "llama": _llama}[make](*args)
    if keys.get("recompute"):
        # The name before transformers 5.20.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()  # type: ignore[operator]
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    engine, *_ = zeroaccel.initialize(
        model, config=config(stage, "fp32", optimizer=SGD), parallel=ParallelConfig(sp=sp)
    )
    engine.train()
    (batch,) = SequenceLoader([_batch(what)], engine.sequence_group, same_batches=True)
    labels = batch["shift_labels"]
    loss = engine.sequence_group.mean_loss(engine(**batch, labels=labels).loss, labels)
    engine.backward(loss)
    engine.step()
    norm = engine.get_global_grad_norm()
    engine.destroy()
    assert UlyssesAttention.of(model) is None
    grads = {name: before[name] - param.detach() for name, param in model.named_parameters()}
    return loss.item(), float(norm), grads


def _compare(
    ranks: Ranks, make: str, args: tuple[Any, ...], what: str, sp: int, stage: int, keys: dict[str, Any], size: int = 0
) -> None:
    model = {"family": _family, "llama": _llama}[make](*args)
    loss, norm, grads = _plain(model, what)
    for own_loss, own_norm, own in ranks(size or sp).run(_cut, make, args, what, sp, stage, keys):
        assert own_loss == pytest.approx(loss, rel=1e-6)
        assert own_norm == pytest.approx(norm, rel=1e-6)
        for name, grad in grads.items():
            assert torch.allclose(own[name], grad, rtol=1e-5, atol=1e-5), name


WORKS = sorted(set(FAMILIES) - {"minimax"})
HEADS = [
    # heads, heads of keys, attention, model, batch, sp, stage, further keys
    (7, 1, "sdpa", "Llama", "packed", 2, 3, {}),
    (14, 2, "eager", "Llama", "padded", 4, 1, {"recompute": True}),
    (2, 1, "sdpa", "Mistral", "packed", 4, 3, {"recompute": True}),  # more ranks than heads
    (2, 2, "sdpa", "Llama", "plain", 8, 1, {}),
]
SWEPT = [
    (heads, keys, attention, kind, what, sp, stage, {})
    for heads, keys in ((7, 7), (12, 3), (14, 7), (28, 4), (2, 1))
    for sp, stage in ((2, 3), (4, 1), (8, 3))
    for attention, kind, what in (("sdpa", "Llama", "padded"), ("eager", "Mistral", "packed"))
]


@pytest.mark.parametrize(
    ("heads", "key_heads", "attention", "kind", "what", "sp", "stage", "keys"),
    [*HEADS, *(pytest.param(*case, marks=pytest.mark.slow) for case in SWEPT)],
)
def test_any_number_of_heads_trains_as_in_one_process(
    ranks: Ranks,
    heads: int,
    key_heads: int,
    attention: str,
    kind: str,
    what: str,
    sp: int,
    stage: int,
    keys: dict[str, Any],
) -> None:
    _compare(ranks, "llama", (heads, key_heads, attention, kind), what, sp, stage, keys)


QUICK = [("qwen3_next", "padded", 2, 3), ("bamba", "packed", 4, 1), ("jamba", "plain", 2, 1), ("rwkv", "plain", 4, 3)]


@pytest.mark.parametrize(("family", "what", "sp", "stage"), QUICK)
def test_families_train_as_in_one_process(ranks: Ranks, family: str, what: str, sp: int, stage: int) -> None:
    _compare(ranks, "family", (family,), what, sp, stage, {"recompute": what == "packed"})


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("sp", [2, 4])
@pytest.mark.parametrize("what", ["plain", "padded", "packed"])
@pytest.mark.parametrize("family", WORKS)
def test_all_families_train_as_in_one_process(ranks: Ranks, family: str, what: str, sp: int, stage: int) -> None:
    _compare(ranks, "family", (family,), what, sp, stage, {})
