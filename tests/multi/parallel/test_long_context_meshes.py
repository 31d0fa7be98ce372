"""Hybrids under sequence parallelism together with offload, recomputation, adapters, precision and other axes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroaccel
from tests.multi.parallel.test_long_context import SGD, _batch
from tests.support.mesh_training import NEEDS_SPLIT_LAYERS, NEEDS_STAGES
from tests.support.pool import Ranks
from tests.support.recurrent_models import recurrent_model
from tests.support.training import config, offloaded
from zeroaccel.errors import ZeroAccelError
from zeroaccel.parallel import ParallelConfig, SequenceLoader

pytest.importorskip("transformers")

AXES: dict[str, dict[str, int]] = {"tp": {"tp": 2}, "pp": {"pp": 2}, "ep": {"ep": 2}}


def _model(family: str, what: str) -> nn.Module:
    model = recurrent_model(family, vocab_size=62)
    if what == "lora":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        targets = ["in_proj_qkv", "in_proj", "q_proj", "o_proj", "down_proj"]
        known = [name for name in targets if any(one.endswith(f".{name}") for one, _ in model.named_modules())]
        adapters = LoraConfig(r=4, target_modules=known, init_lora_weights=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT reads a name that transformers 5.20 replaced
            model = get_peft_model(model, adapters)  # type: ignore[arg-type]
    return model


def _whole(family: str, what: str) -> tuple[float, float]:
    """Returns loss and norm of one process."""
    model = _model(family, what)
    model = model.bfloat16() if what == "bf16" else model
    model.train()
    loss = model(**_batch("padded")).loss
    loss.backward()
    norms = [param.grad.float().norm() for param in model.parameters() if param.grad is not None]
    return loss.item(), torch.stack(norms).norm().item()


def _composed(family: str, what: str, stage: int, folder: str) -> tuple[float, float] | str:
    """Returns the same of an engine, or its refusal."""
    axes, model = AXES.get(what, {}), _model(family, what)
    if what == "recompute":
        kind: Any = model  # the name before transformers 5.20
        (getattr(kind, "activation_checkpointing_enable", None) or kind.gradient_checkpointing_enable)()
    tiers = offloaded(Path(folder), what, what) if what in ("cpu", "nvme") else {}
    stages = axes.get("pp", 1)
    settings = config(stage, "bf16" if what == "bf16" else "fp32", stages, optimizer=SGD, **tiers)
    parallel = ParallelConfig(sp=2, **axes)
    engine: Any = None
    try:
        engine, *_ = zeroaccel.initialize(model, config=settings, parallel=parallel)
        engine.train()
        batches = list(SequenceLoader([_batch("padded")] * stages, engine.sequence_group, same_batches=True))
        if stages > 1:
            loss = engine.train_batch(iter(batches))
        else:
            labels = batches[0]["shift_labels"]
            loss = engine.sequence_group.mean_loss(engine(**batches[0], labels=labels).loss, labels)
            engine.backward(loss)
            engine.step()
        return loss.item(), float(engine.get_global_grad_norm())
    except ZeroAccelError as error:
        return str(error)
    finally:
        if engine is not None:
            engine.destroy()


def _case(family: str, what: str, stage: int, *marks: Any) -> Any:
    needs = {"tp": [NEEDS_SPLIT_LAYERS], "pp": [NEEDS_STAGES]}.get(what, [])
    return pytest.param(family, what, stage, marks=[*needs, *marks], id=f"{family}, {what}, stage {stage}")


SLOW = pytest.mark.slow
COMPOSED = [
    _case("qwen3_5", "nvme", 3),
    _case("qwen3_next", "ep", 1),
    _case("qwen3_5", "pp", 1, SLOW),
    *(_case(family, what, 3, SLOW) for family in ("qwen3_5", "mamba2", "jamba") for what in ("cpu", "lora", "bf16")),
    *(_case(family, "recompute", stage, SLOW) for family in ("bamba", "rwkv", "lfm2") for stage in (0, 2)),
    *(_case(family, what, 1, SLOW) for family in ("qwen3_next", "bamba", "lfm2") for what in ("tp", "pp")),
]


@pytest.mark.parametrize(("family", "what", "stage"), COMPOSED)
def test_hybrids_compose(ranks: Ranks, tmp_path: Path, family: str, what: str, stage: int) -> None:
    loss, norm = _whole(family, what)
    count = 2 * max([1, *(size for axis, size in AXES.get(what, {}).items() if axis != "ep")])
    for outcome in ranks(count).run(_composed, family, what, stage, str(tmp_path)):
        assert not isinstance(outcome, str), outcome
        assert outcome == pytest.approx((loss, norm), rel=2e-2 if what == "bf16" else 1e-6)
