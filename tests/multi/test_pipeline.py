"""Pipelines: the number of stages changes no bit of losses, norms and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroaccel
from tests.multi.pool import Pool
from tests.multi.training import ADAMW, SGD, Run, config, differences
from zeroaccel.config.parallel import ParallelConfig, PipelineConfig

transformers = pytest.importorskip("transformers")

Ranks = Callable[[int], Pool]

VOCABULARY, BATCH, LENGTH, MICRO_BATCHES, STEPS = 61, 2, 8, 4, 3


def causal(kind: str, tied: bool = False) -> nn.Module:
    """A model of four blocks, the same on every rank."""
    torch.manual_seed(3)
    if kind == "gpt2":  # its head is its embedding
        settings = transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=4,
            n_head=4,
            n_positions=32,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        return transformers.GPT2LMHeadModel(settings)
    settings = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(settings)


def layers() -> nn.Sequential:
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(nn.Linear(7, 12), *blocks, nn.LayerNorm(12), nn.Linear(12, 5))


def batches(kind: str, place: int, count: int = STEPS * MICRO_BATCHES) -> Iterator[Any]:
    """Those of data-parallel rank `place`."""
    generator = torch.Generator().manual_seed(100 + place)
    for _ in range(count):
        if kind == "layers":
            yield torch.randn(BATCH, 7, generator=generator), torch.randn(BATCH, 5, generator=generator)
        else:
            ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
            mask = torch.ones_like(ids)
            mask[0, 6:] = 0
            yield {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def build(kind: str) -> nn.Module:
    return layers() if kind == "layers" else causal(kind.removesuffix("-tied"), kind.endswith("-tied"))


def plain(settings: Mapping[str, Any], kind: str) -> Run:
    """Without stages: an ordinary loop over an ordinary engine."""
    model = build(kind)
    engine, *_ = zeroaccel.initialize(model, config=dict(settings))
    run, losses = Run(), []
    for batch in batches(kind, engine.collectives.rank):
        if kind == "layers":
            loss = nn.functional.mse_loss(engine(batch[0]), batch[1])
        else:
            loss = engine(**batch, use_cache=False).loss
        engine.backward(loss)
        at_boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        losses.append(loss.item())
        if at_boundary:
            total = torch.tensor([torch.tensor(losses, dtype=torch.float64).mean()]) / engine.collectives.world_size
            engine.collectives.all_reduce(total, "sum", "loss of the test")
            run.losses.append(total.float().item())
            run.norms.append(engine.get_global_grad_norm())
            losses.clear()
    run.skipped = engine.skipped_steps
    engine.destroy()
    run.weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    return run


def staged(settings: Mapping[str, Any], kind: str, pp: int, **cutting: Any) -> Run:
    model = build(kind)
    if kind == "layers":
        cutting["loss"] = nn.functional.mse_loss
    pipeline = PipelineConfig(**cutting)
    engine, *_ = zeroaccel.initialize(model, config=dict(settings), parallel=ParallelConfig(pp=pp), pipeline=pipeline)
    run, data = Run(), batches(kind, engine.collectives.rank)
    for _ in range(STEPS):
        run.losses.append(engine.train_batch(data).item())
        run.norms.append(engine.get_global_grad_norm())
    run.skipped = engine.skipped_steps
    engine.destroy()
    run.weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    return run


def require_same(runs: list[Run], whole: Run) -> None:
    """All stages together are the whole run."""
    weights: dict[str, Tensor] = {}
    for run in runs:
        assert (run.losses, run.norms, run.skipped) == (whole.losses, whole.norms, whole.skipped)
        for name, weight in run.weights.items():
            assert torch.equal(weights.setdefault(name, weight), weight), name
    together = Run(whole.losses, whole.norms, weights, whole.skipped)
    assert weights.keys() == whole.weights.keys()
    assert differences(whole, together) == []


CASES = [
    # model, pp, dp, stage, precision, optimizer, cutting
    ("llama", 2, 1, 0, "fp32", SGD, {}),
    ("llama", 3, 1, 1, "bf16", ADAMW, {"schedule": "gpipe"}),
    ("llama", 2, 2, 2, "bf16", SGD, {}),
    ("gpt2", 2, 1, 1, "fp32", ADAMW, {}),
    ("gpt2", 2, 2, 2, "bf16", SGD, {"schedule": "gpipe"}),
    ("gpt2", 3, 1, 0, "fp16", SGD, {"split": (1, 1, 2)}),
    ("llama-tied", 4, 1, 1, "bf16", SGD, {"split": "uniform"}),
    ("layers", 3, 1, 2, "fp32", SGD, {"split": "parameters"}),
    ("layers", 2, 2, 1, "fp32", ADAMW, {}),
    ("gpt2", 2, 2, 3, "fp32", SGD, {}),
    ("llama", 2, 2, 3, "bf16", ADAMW, {"schedule": "gpipe"}),
]


@pytest.mark.parametrize(("kind", "pp", "dp", "stage", "precision", "optimizer", "cutting"), CASES)
def test_stages_change_no_bit(
    ranks: Ranks,
    kind: str,
    pp: int,
    dp: int,
    stage: int,
    precision: str,
    optimizer: dict[str, Any],
    cutting: dict[str, Any],
) -> None:
    settings = config(stage, precision, MICRO_BATCHES, optimizer=optimizer, gradient_clipping=0.5)
    whole = ranks(dp).run(plain, settings, kind)[0]
    require_same(ranks(pp * dp).run(staged, settings, kind, pp, **cutting), whole)
