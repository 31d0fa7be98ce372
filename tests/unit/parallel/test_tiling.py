"""Tiled losses and modules: results equal to untiled ones, and intermediate tensors no larger than a tile."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import zeroaccel
from tests.support.training import train_step
from zeroaccel.compat import ulysses_sp
from zeroaccel.errors import UsageError
from zeroaccel.parallel import DeferredLogits, TiledLoss, TiledModules, tiled_cross_entropy

transformers = pytest.importorskip("transformers")

VOCAB, HIDDEN, INNER, TOKENS = 50, 16, 400, 24
SIZES = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4}


class LargestTensor(TorchDispatchMode):
    """Largest number of rows in the results of operations whose last dim is `width`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.rows = width, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(one, Tensor) and one.ndim > 1 and one.shape[-1] == self.width:
                self.rows = max(self.rows, one.numel() // self.width)
        return result


def _llama(**more: Any) -> nn.Module:
    torch.manual_seed(1)
    model: nn.Module = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(intermediate_size=INNER, use_cache=False, **SIZES, **more)
    )
    return model


def _gpt2() -> nn.Module:
    torch.manual_seed(1)
    sizes = {"n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, "use_cache": False}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model: nn.Module = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_positions=64, **sizes, **no_dropout))
    return model


def _batch() -> dict[str, Tensor]:
    ids = torch.randint(VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, :5] = -100
    return {"input_ids": ids, "labels": labels}


def _gradients(model: nn.Module, **kwargs: Any) -> tuple[float, dict[str, Tensor]]:
    loss = model(**_batch(), **kwargs).loss
    loss.backward()
    return loss.item(), {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def _blocks(model: Any) -> list[nn.Module]:
    return [block.mlp for block in (model.model.layers if hasattr(model, "model") else model.transformer.h)]


@pytest.mark.parametrize(
    ("make", "tiles", "kwargs"),
    [
        (_llama, 1, {}),
        (_llama, 5, {"num_items_in_batch": 100}),
        (_llama, 100, {"num_items_in_batch": torch.tensor(7)}),
        (lambda: _llama(tie_word_embeddings=True), 5, {}),
        (_gpt2, 5, {}),
        (_gpt2, 100, {"num_items_in_batch": 100}),
    ],
)
def test_loss_and_gradients_are_those_of_the_whole(
    make: Callable[[], nn.Module], tiles: int, kwargs: dict[str, Any]
) -> None:
    expected_loss, expected = _gradients(make(), **kwargs)
    model = make()
    tilings = (TiledLoss(model, tiles), TiledModules(_blocks(model), tiles))
    loss, gradients = _gradients(model, **kwargs)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=2e-7, msg=name)
    for tiling in tilings:
        tiling.undo()
    model.zero_grad()
    again, _ = _gradients(model, **kwargs)
    assert again == expected_loss
    assert isinstance(model(**_batch()).logits, Tensor)


def test_a_forward_that_a_module_has_of_its_own_comes_back() -> None:
    layer = nn.Linear(2, 2)
    layer.forward = doubled = lambda tokens: 2 * tokens  # type: ignore[method-assign]
    tiling = TiledModules([layer], tiles=2)
    assert torch.equal(layer(torch.ones(1, 4, 2)), torch.full((1, 4, 2), 2.0))
    tiling.undo()
    assert layer.forward is doubled


def test_no_more_than_a_tile_is_held() -> None:
    model = _llama()
    with LargestTensor(VOCAB) as logits, LargestTensor(INNER) as inner:
        _gradients(model)
    assert (logits.rows, inner.rows) == (2 * TOKENS, 2 * TOKENS)
    TiledLoss(model, tiles=6)
    TiledModules(_blocks(model), tiles=4)
    with LargestTensor(VOCAB) as logits, LargestTensor(INNER) as inner:
        _gradients(model)
    # The head's weight is (V, H), and backward computes its gradient as (H, V).
    assert (logits.rows, inner.rows) == (max(2 * TOKENS // 6, HIDDEN), max(2 * TOKENS // 4, HIDDEN))


def test_without_gradients_logits_are_computed() -> None:
    model = _llama()
    whole = model(**_batch())
    TiledLoss(model, tiles=3)
    with torch.no_grad():
        same = model(**_batch())
    assert torch.equal(same.logits, whole.logits)
    assert torch.equal(same.loss, whole.loss)
    deferred = model(**_batch()).logits
    assert isinstance(deferred, DeferredLogits)
    with torch.no_grad():
        assert torch.equal(deferred.compute(), whole.logits)
    with pytest.raises(UsageError, match=r"logits.argmax: .*evaluate under torch.no_grad\(\), or call logits.compute"):
        deferred.argmax(-1)


@pytest.mark.parametrize("optimizer", [{"type": "AdamW"}, {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}])
def test_training_at_every_stage(own_job: None, optimizer: dict[str, Any]) -> None:
    def train(stage: int, *, tiled: bool, before: bool = False) -> list[float]:
        model = _llama()
        if tiled and before:
            TiledLoss(model, 4)
        config = {"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer, "zero_optimization": {"stage": stage}}
        engine, *_ = zeroaccel.initialize(model, config=config)
        if tiled and not before:
            TiledLoss(engine, 4)
            TiledModules(_blocks(model), 4)
        losses = [train_step(engine, engine(**_batch()).loss) for _ in range(3)]
        engine.destroy()
        return losses

    whole = train(0, tiled=False)
    runs = [train(stage, tiled=True) for stage in (0, 2, 3)]
    assert runs[0] == runs[1] == runs[2]
    assert runs[0] == pytest.approx(whole, rel=1e-5)
    assert train(3, tiled=True, before=True) == pytest.approx(whole, rel=1e-5)


def test_gradients_in_fp16_do_not_vanish_with_the_number_of_tokens() -> None:
    """A token's share of a mean over a million tokens is below fp16's range; its share of the sum is not."""
    torch.manual_seed(0)
    head, hidden = nn.Linear(HIDDEN, VOCAB).half(), torch.randn(64, HIDDEN).half().requires_grad_()
    labels = torch.randint(VOCAB, (64,))
    whole = copy.deepcopy(head).float()
    wide = hidden.detach().float().requires_grad_()
    scale, num_items = 2.0**16, 1_000_000
    (tiled_cross_entropy(hidden, head, head.parameters(), labels, tiles=4, num_items=num_items) * scale).backward()
    loss = functional.cross_entropy(whole(wide), labels, reduction="sum") / num_items
    (loss * scale).backward()
    for narrow, exact in ((hidden.grad, wide.grad), (head.weight.grad, whole.weight.grad)):
        assert narrow is not None
        assert exact is not None
        assert narrow.dtype == torch.float16
        torch.testing.assert_close(narrow.float(), exact, rtol=2e-2, atol=2e-4)


def test_models_that_cannot_be_tiled_are_refused_by_name() -> None:
    sizes = {**SIZES, "intermediate_size": 32, "num_key_value_heads": 2, "head_dim": 8}
    capped = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes))
    TiledLoss(capped, 2)
    with pytest.raises(UsageError, match=r"logits.arithmetic: expected a forward without TiledLoss"):
        capped(**_batch())
    with pytest.raises(UsageError, match=r"TiledLoss\(Linear\): expected a model of transformers with an output head"):
        TiledLoss(nn.Linear(2, 2), 2)
    with pytest.raises(UsageError, match=r"a head with its original forward"):
        TiledLoss(capped, 2)
    with pytest.raises(UsageError, match=r"tiled_cross_entropy\(tiles\): expected a positive number of tiles, got 0"):
        tiled_cross_entropy(torch.ones(2, 2), nn.Identity(), [], torch.ones(2, dtype=torch.long), tiles=0)
    with pytest.raises(UsageError, match=r"TiledModules\(tiles\): expected a positive number of tiles, got 0"):
        TiledModules([], 0)
    own = _llama()
    own.loss_function = lambda logits, labels, **_: logits.sum()  # type: ignore[assignment]
    with pytest.raises(UsageError, match=r"transformers' loss for causal language models, got '<lambda>'"):
        TiledLoss(own, 2)


def test_the_calls_of_deepspeed() -> None:
    torch.manual_seed(0)
    mlp, tokens = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)), torch.randn(2, 10, 8)
    labels, mask = torch.randint(8, (2, 10)), torch.ones(2, 10)

    def loss_of(self: nn.Module, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        return functional.cross_entropy(self(x).flatten(0, 1), y.flatten())

    def run(result: Callable[[Tensor], Tensor]) -> list[Tensor]:
        own = tokens.clone().requires_grad_()
        mlp.zero_grad()
        value = result(own)
        value.backward()
        assert own.grad is not None
        return [value.detach(), own.grad, *(param.grad.clone() for param in mlp.parameters() if param.grad is not None)]

    params = [*mlp.parameters()]
    keys: tuple[Any, ...] = (["x"], ["scale"], "x", params, 1, None)
    for whole, *tiled in (
        (
            lambda x: mlp(x).square().sum(),
            lambda x: ulysses_sp.TiledMLP.apply(lambda self, x: self(x), mlp, x, 3, params).square().sum(),
            lambda x: (
                ulysses_sp.SequenceTiledCompute.apply(lambda x, scale: scale * mlp(x), 10, 3, *keys, x, 1.0)
                .square()
                .sum()
            ),
        ),
        (
            lambda x: loss_of(mlp, x, labels),
            lambda x: ulysses_sp.TiledFusedLogitsLoss.apply(loss_of, mlp, x, labels, None, 2, params, "mean"),
            lambda x: ulysses_sp.TiledFusedLogitsLoss.apply(loss_of, mlp, x, labels, mask, 5, params, "sum") / 5,
            lambda x: ulysses_sp.sequence_tiled_compute(
                lambda x, y: loss_of(mlp, x, y), 10, 5, {"x": x, "y": labels}, {}, "x", params, 0
            ),
        ),
    ):
        expected = run(whole)
        for one in tiled:
            for mine, theirs in zip(run(one), expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    with pytest.raises(UsageError, match=r"shards\): expected a positive number, got 0"):
        ulysses_sp.sequence_tiled_compute(mlp, 10, 0, {"input": tokens}, {}, "input")
    with pytest.raises(UsageError, match=r"output_reduction"):
        ulysses_sp.sequence_tiled_compute(mlp, 10, 2, {"input": tokens}, {}, "input", None, 1, "max")  # type: ignore[arg-type]
