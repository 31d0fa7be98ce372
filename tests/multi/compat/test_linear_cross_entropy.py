"""`deepspeed.sequence.linear_cross_entropy` has the values and gradients of torch's cross entropy of whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.multi.compat.facade_engines import with_facade
from tests.support.pool import Ranks
from zeroaccel.compat.ulysses_sp import vocab_parallel_linear_cross_entropy as linear_cross_entropy
from zeroaccel.errors import UsageError

pytestmark = pytest.mark.usefixtures("ranks_without_libraries")

_VOCAB, _WIDTH, _BATCH, _LENGTH = 37, 8, 4, 6


def _tokens() -> tuple[Tensor, Tensor]:
    """Returns ids and labels, (B, S); both halves of the sequences have labels, in different numbers."""
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(_VOCAB, (2, _BATCH, _LENGTH), generator=generator).unbind()
    labels[1, 1:4] = labels[2, :2] = labels[3, 5] = -100
    return ids, labels


def _plain(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, reduction: str) -> Tensor:
    logits = functional.linear(hidden, weight, bias).float()
    loss = functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction=reduction)
    return loss.view(labels.shape) if reduction == "none" else loss


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("chunk", [None, 1, 5, 100])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_values_and_gradients(
    reduction: str, biased: bool, chunk: int | None, dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    labels = _tokens()[1]
    factors = torch.rand(labels.shape) if reduction == "none" else torch.tensor(3.0)
    tensors = [torch.randn(*shape).to(dtype) for shape in ((_BATCH, _LENGTH, _WIDTH), (_VOCAB, _WIDTH), (_VOCAB,))]
    results = []
    for way in ("plain", "facade"):
        hidden, weight, bias = (tensor.clone().requires_grad_() for tensor in tensors)
        inputs = [hidden, weight, *([bias] if biased else [])]
        given_bias = bias if biased else None
        if way == "plain":
            loss = _plain(hidden, weight, labels, given_bias, reduction)
        else:
            loss = linear_cross_entropy(hidden, weight, labels, given_bias, reduction=reduction, chunk_size=chunk)  # type: ignore[arg-type]
        results.append((loss.detach(), *torch.autograd.grad((loss * factors).sum(), inputs)))
    for expected, found in zip(*results, strict=True):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert torch.allclose(found, expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())


def test_the_mean_of_no_labels_is_0() -> None:
    hidden, weight = torch.ones(2, 3, requires_grad=True), torch.ones(5, 3)
    loss = linear_cross_entropy(hidden, weight, torch.full((2,), 4), ignore_index=4)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss == 0
    assert not hidden.grad.any()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"reduction": "max"}, r'reduction\): expected "none", "sum" or "mean", got \'max\''),
        ({"chunk_size": 0}, r"chunk_size\): expected a positive number of tokens, got 0"),
        ({"target": torch.tensor([1, 5])}, r"target\): expected labels of 0 to 4, got 5"),
        ({"target": torch.tensor([1])}, r"shapes \(..., H\), \(V, H\) and \(...\), got .*\(2, 3\), \(5, 3\), \(1,\)"),
        ({"vocab_start_index": 5, "vocab_end_index": 10}, r"bounds of 0 and 5, got .*1 ranks, and \(5, 10\)"),
        ({"vocab_end_index": 5}, r"bounds of 0 and 5, got .*\(None, 5\)"),
    ],
)
def test_what_it_does_not_take(changed: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {"hidden": torch.ones(2, 3), "weight": torch.ones(5, 3), "target": torch.tensor([0, 1])}
    with pytest.raises(UsageError, match=words):
        linear_cross_entropy(**{**arguments, **changed})


class _Model(nn.Module):
    """A model of each token by itself, which reads its head's weight outside the head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(_VOCAB, _WIDTH)
        self.block = nn.Linear(_WIDTH, _WIDTH)
        self.head = nn.Linear(_WIDTH, _VOCAB)

    def forward(self, ids: Tensor, labels: Tensor, reduction: str, group: Any = None, plain: bool = False) -> Tensor:
        hidden = self.block(self.embed(ids)).tanh()
        if plain:
            return _plain(hidden, self.head.weight, labels, self.head.bias, reduction)
        return linear_cross_entropy(
            hidden,
            self.head.weight,
            labels,
            self.head.bias,
            sp_group=group,
            reduction=reduction,  # type: ignore[arg-type]
        )


def _whole(reduction: str, divisor: float = 1) -> tuple[list[float], list[Tensor]]:
    """Returns losses and final weights of a plain loop over whole batches."""
    model = _Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(4):
        loss = model(*_tokens(), reduction, plain=True).mean() / divisor
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [param.detach() for param in model.parameters()]


def _trained(stage: int, reduction: str, sp: int) -> tuple[list[float], list[Tensor]]:
    """Returns losses and final weights. Ranks have other samples, or other tokens of the same ones (sp 2)."""
    import deepspeed  # type: ignore[import-not-found]
    from deepspeed.runtime.sequence_parallel import parallel_state_sp as mpu

    model = _Model()
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": _BATCH, "gradient_clipping": 0.0, "zero_optimization": zero}
    group, rank = None, torch.distributed.get_rank()
    if sp > 1:
        mpu.initialize_sequence_parallel(sp)
        group = mpu.get_sequence_parallel_group()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    ids, labels = (each.chunk(2, dim=1 if sp > 1 else 0)[rank] for each in _tokens())
    losses = []
    for _ in range(4):
        loss = engine(ids, labels, reduction, group).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        weights = [param.detach().clone() for param in model.parameters()]
    engine.destroy()
    return losses, weights


@pytest.mark.parametrize(("reduction", "divisor"), [("none", 1), ("sum", 2)])  # the mean of two ranks' sums
def test_a_head_read_outside_its_module_trains_at_each_stage(ranks: Ranks, reduction: str, divisor: int) -> None:
    runs = {stage: ranks(2).run(with_facade, _trained, stage, reduction, 1) for stage in (0, 2, 3)}
    expected, weights = _whole(reduction, divisor)
    for of_ranks in runs.values():
        assert [losses for losses, _ in of_ranks] == [losses for losses, _ in runs[0]]
        mean = [sum(each) / 2 for each in zip(*(losses for losses, _ in of_ranks), strict=True)]
        assert mean == pytest.approx(expected, rel=1e-6)
        for found, weight in zip(of_ranks[0][1], weights, strict=True):
            assert torch.allclose(found, weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_of_a_sequence_have_the_mean_of_all_its_labels(ranks: Ranks, stage: int) -> None:
    expected, weights = _whole("mean")
    for losses, found in ranks(2).run(with_facade, _trained, stage, "mean", 2):
        assert losses == pytest.approx(expected, rel=1e-6)
        for own, weight in zip(found, weights, strict=True):
            assert torch.allclose(own, weight, rtol=1e-5, atol=1e-6)


def _refused() -> list[str]:
    import deepspeed
    from deepspeed.runtime.sequence_parallel import parallel_state_sp as mpu

    mpu.initialize_sequence_parallel(2)
    others = torch.distributed.new_group([0, 1])
    complaints = []
    for name in ("sp_group", "tp_group"):
        with pytest.raises(UsageError) as caught:
            linear_cross_entropy(torch.ones(2, 3), torch.ones(5, 3), torch.tensor([0, 1]), **{name: others})
        complaints.append(str(caught.value))
    with pytest.raises(AttributeError) as absent:
        deepspeed.sequence.cross_entropy.vocab_parallel_cross_entropy  # noqa: B018 - the read is the test
    return [*complaints, str(absent.value)]


def test_other_groups_are_refused(ranks: Ranks) -> None:
    for of_sp, of_tp, absent in ranks(2).run(with_facade, _refused):
        assert "sp_group): expected the group of initialize_sequence_parallel()" in of_sp
        assert "expected no group of several ranks" in of_tp
        assert "pass the whole weight" in of_tp
        assert "linear_cross_entropy" in absent
